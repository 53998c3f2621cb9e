"""Formats in which `Quantised` layers store numbers.

Whatever is stored of a vector, the numbers of one token and head, follows from it alone, bit for bit: sums
and products of several numbers would depend on how a compiler orders them. A vector with a NaN or an infinite
number is read as NaN.

Integers of `b` bits divide the range of the vector's own numbers, whether it holds 0 or not: `n` encodes
`scale * n + offset`, where the scale is one of `2**b - 1` steps from the least number to the greatest,
rounded up to 16 bits (by 1/256 at most), and the offset, a float32, is the middle of the range.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Format(NamedTuple):
    """A format in which the numbers of one token and head are stored."""

    # `(head_dim) -> {part: (width, dtype)}`: numbers stored per token and head. The part "" is the numbers;
    # others, such as "scale", have width None for a single number.
    parts: Callable[[int], Mapping[str, tuple[int | None, Any]]]
    # `(x f32[..., head_dim]) -> {part: [..., width]}`, or `[...]` for a single number.
    encode: Callable[[jax.Array], Mapping[str, jax.Array]]
    # `({part: array}, dtype) -> (values [..., head_dim], scale f32[...], offset f32[...] or None)`: numbers
    # that the dtype holds exactly, the factor, and the summand.
    decode: Callable[[Mapping[str, jax.Array], Any], tuple[jax.Array, jax.Array, jax.Array | None]]


_LEAST_SCALE = 2.0**-100  # of numbers that are too near to each other, or to 0, for a step of their own
_CUT_BITS = 15  # of a scale in float32: with the sign, which is 0, it leaves 16
_MOST_FP8 = 448


def _finite_or_zero(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replaces vectors `[..., n]` that are not finite by zeros.

    Returns also f32[...] to add to their scales: NaN where a vector was not finite, else 0.
    """
    is_finite = jnp.isfinite(x).all(axis=-1)
    return jnp.where(is_finite[..., None], x, 0), jnp.where(is_finite, 0, jnp.nan).astype(jnp.float32)


def _to_steps(x: jax.Array, num_bits: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Rounds vectors `[..., n]` to signed integers f32[..., n]; returns these, and the other parts."""
    x, nan = _finite_or_zero(x)
    half = 2 ** (num_bits - 1)
    low, high = x.min(axis=-1), x.max(axis=-1)
    # Halved first: sums and differences of two large numbers may be infinite.
    scale = (high * 0.5 - low * 0.5) / (half - 0.5)
    bits = lax.bitcast_convert_type(jnp.maximum(scale, _LEAST_SCALE) + nan, jnp.uint32)
    bits = ((bits + (2**_CUT_BITS - 1)) >> _CUT_BITS).astype(jnp.uint16)
    scale = jnp.nan_to_num(_scale(bits), nan=1)
    offset = (low * 0.5 + half * 0.5 * scale) * 2
    numbers = jnp.clip(jnp.round((x - offset[..., None]) / scale[..., None]), -half, half - 1)
    return numbers, {"scale": bits, "offset": offset.astype(jnp.float32)}


def _scale(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << _CUT_BITS, jnp.float32)


_STEPS = {"scale": (None, jnp.uint16), "offset": (None, jnp.float32)}


def _parts_int8(head_dim):
    return {"": (head_dim, jnp.int8), **_STEPS}


def _encode_int8(x):
    numbers, parts = _to_steps(x, num_bits=8)
    return {"": numbers.astype(jnp.int8), **parts}


def _decode_int8(parts, dtype):
    return parts[""].astype(dtype), _scale(parts["scale"]), parts["offset"]


def _parts_int4(head_dim):
    if head_dim % 2:
        raise ValueError(
            f"head_dim is {head_dim} with format 'int4', expected an even number, for two numbers share a "
            "byte: take 'int8'"
        )
    return {"": (head_dim // 2, jnp.uint8), **_STEPS}


def _encode_int4(x):
    numbers, parts = _to_steps(x, num_bits=4)
    # A byte holds `n + 8` of two integers, the first in its lower half.
    halves = (numbers + 8).astype(jnp.uint8)
    return {"": halves[..., 0::2] | (halves[..., 1::2] << 4), **parts}


def _decode_int4(parts, dtype):
    packed = parts[""]
    halves = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return halves.astype(dtype) - 8, _scale(parts["scale"]), parts["offset"]


# 8-bit floats of 4 bits of exponent (e4m3), widened to the dtype of products on every device, so that chips
# without such floats convert them too. They are stored as bytes: where XLA has no such floats, it writes to
# an array of them by converting all of it.
def _parts_fp8(head_dim):
    return {"": (head_dim, jnp.uint8), "scale": (None, jnp.float32)}


def _encode_fp8(x):
    x, nan = _finite_or_zero(x)
    scale = jnp.maximum(jnp.abs(x).max(axis=-1) / _MOST_FP8, _LEAST_SCALE)
    # Beyond the largest number of e4m3 there is nothing but NaN.
    numbers = jnp.clip(x / scale[..., None], -_MOST_FP8, _MOST_FP8).astype(jnp.float8_e4m3fn)
    return {"": lax.bitcast_convert_type(numbers, jnp.uint8), "scale": scale + nan}


def _decode_fp8(parts, dtype):
    return lax.bitcast_convert_type(parts[""], jnp.float8_e4m3fn).astype(dtype), parts["scale"], None


FORMATS: dict[str, Format] = {
    "int8": Format(_parts_int8, _encode_int8, _decode_int8),
    "fp8": Format(_parts_fp8, _encode_fp8, _decode_fp8),
    "int4": Format(_parts_int4, _encode_int4, _decode_int4),
}
"""Formats by the names that `Quantised(format=)` takes."""
