"""Equal steps over the range of a vector: what the formats of integers share.

An integer `n` of `b` bits stands for `scale * (n + zero)`. The scale is one of `2**b - 1` steps from the
least number of the vector to the greatest, whether 0 is between them or not. Scale and zero take 16 bits
each. The scale is rounded up, by 1/256 at most. The zero is an integer, so that a 0 is read as 0; so that it
fits, no scale is below 1/32000 of the largest number: of numbers that are close to each other and far from 0.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.quantised.format import LEAST_SCALE, finite_or_zero

STEP_PARTS = {"scale": (None, jnp.uint16), "zero": (None, jnp.int16)}
"""What is stored of a step, beside the integers."""
_MOST_ZERO = 32000
_CUT_BITS = 15  # of a float32: with the sign, which is 0, it leaves 16


def to_steps(x: jax.Array, num_bits: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Rounds vectors `[..., n]` to signed integers f32[..., n]; returns these, and `STEP_PARTS` by name."""
    x, nan = finite_or_zero(x)
    most, half = 2**num_bits - 1, 2 ** (num_bits - 1)
    low, high = x.min(axis=-1), x.max(axis=-1)
    # Divided first: the difference of two large numbers may be infinite.
    scale = jnp.maximum(high / most - low / most, jnp.maximum(high, -low) / _MOST_ZERO)
    bits = lax.bitcast_convert_type(jnp.maximum(scale, LEAST_SCALE) + nan, jnp.uint32)
    bits = ((bits + (2**_CUT_BITS - 1)) >> _CUT_BITS).astype(jnp.uint16)
    steps = jnp.round(x / jnp.nan_to_num(_scale(bits), nan=1)[..., None])
    zero = jnp.ceil((steps.min(axis=-1) + steps.max(axis=-1)) / 2)
    numbers = jnp.clip(steps - zero[..., None], -half, half - 1)
    return numbers, {"scale": bits, "zero": zero.astype(jnp.int16)}


def scale_and_offset(parts: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Reads `STEP_PARTS`: what integers are multiplied by, and what is then added."""
    scale = _scale(parts["scale"])
    return scale, scale * parts["zero"].astype(jnp.float32)


def _scale(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << _CUT_BITS, jnp.float32)
