"""The format of quantised numbers: what is stored of a vector, and how it is read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Format(NamedTuple):
    """A format in which the numbers of one token and head are stored.

    Whatever is stored follows from that vector alone, bit for bit: sums and products of several numbers would
    depend on how a compiler orders them. A vector with a NaN or an infinite number is read as NaN.

    Attributes:
      parts: `(head_dim) -> {part: (width, dtype)}`: what is stored per token and head. The part "" is the
        numbers; others, such as "scale", have width None for a single number.
      encode: `(x f32[..., head_dim]) -> {part: [..., width]}`, or `[...]` for a single number.
      decode: `({part: array}, dtype) -> (values [..., head_dim], scale f32[...], offset f32[...] or None)`:
        numbers that the dtype holds exactly, what they are multiplied by, and what is then added to each.
    """

    parts: Callable[[int], Mapping[str, tuple[int | None, Any]]]
    encode: Callable[[jax.Array], Mapping[str, jax.Array]]
    decode: Callable[[Mapping[str, jax.Array], Any], tuple[jax.Array, jax.Array, jax.Array | None]]


LEAST_SCALE = 2.0**-100
"""Of numbers too near to each other, or to 0, for a step of their own."""


def finite_or_zero(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns vectors `[..., n]` with zeros in place of those that hold a NaN or infinity, and NaN for these.

    Returns:
      The vectors; and f32[...], 0, or NaN where a vector was not finite, to add to its scale.
    """
    is_finite = jnp.isfinite(x).all(axis=-1)
    return jnp.where(is_finite[..., None], x, 0), jnp.where(is_finite, 0, jnp.nan).astype(jnp.float32)
