"""Keys and values of 8 bits: what is stored of them, and the numbers that are meant.

A number of a pool stands for `scale * number + offset`, with a scale and an offset of its own for each token
and head. The pool's dtype says how it holds numbers: int8, or uint8 for the bits of a float8_e4m3fn.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NUMBERS = ("int8", "uint8")
"""Dtypes of pools."""
WIDENED = "bfloat16"
"""What the kernels multiply such numbers in: it holds each of them exactly."""
_SCALE_SHIFT = 15


class Scaling(NamedTuple):
    """What lies beside two pools, `[num_layers * num_blocks, num_kv_heads, block_size]` each.

    Attributes:
      k_scale: Of keys, float32, or uint16: the bits of a positive float32 but for its sign and its lowest 15.
      v_scale: Of values, in the same dtype.
      k_offset: float32, or None for 0.
      v_offset: Likewise, None if `k_offset` is.
    """

    k_scale: jax.Array
    v_scale: jax.Array
    k_offset: jax.Array | None = None
    v_offset: jax.Array | None = None

    def of_keys(self) -> tuple[jax.Array, ...]:
        """Lists what keys have."""
        return (self.k_scale,) if self.k_offset is None else (self.k_scale, self.k_offset)

    def of_values(self) -> tuple[jax.Array, ...]:
        """Lists what values have."""
        return (self.v_scale,) if self.v_offset is None else (self.v_scale, self.v_offset)


def check_scaling(pool: jax.Array, scaling: Scaling | None) -> None:
    """Raises unless there is a scaling beside pools of 8 bits alone, of their shape."""
    if (pool.dtype.name in NUMBERS) != (scaling is not None):
        raise ValueError(
            f"the pools are {pool.dtype} and scaling is {'None' if scaling is None else 'given'}, expected "
            f"one beside pools of {' or '.join(NUMBERS)} alone"
        )
    if scaling is None:
        return
    if (scaling.k_offset is None) != (scaling.v_offset is None):
        raise ValueError("one of k_offset and v_offset is None, expected both or neither")
    dtypes = [scaling.k_scale.dtype, jnp.dtype(jnp.float32)]
    if dtypes[0] not in (jnp.uint16, jnp.float32):
        raise ValueError(f"k_scale is {dtypes[0]}, expected float32 or uint16")
    for arrays in (scaling.of_keys(), scaling.of_values()):
        for array, dtype in zip(arrays, dtypes, strict=False):
            if array.shape != pool.shape[:3] or array.dtype != dtype:
                raise ValueError(
                    f"scaling has {array.dtype}{array.shape}, expected {dtype}{pool.shape[:3]} like the pools"
                )


def widened(numbers: jax.Array, dtype: Any) -> jax.Array:
    """Reads numbers of pools in a dtype of 16 bits or more."""
    if numbers.dtype != jnp.uint8:
        return numbers.astype(dtype)
    # By way of float32: not every GPU converts these floats to bfloat16.
    return lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn).astype(jnp.float32).astype(dtype)


def in_float32(scale: jax.Array) -> jax.Array:
    """Reads scales, or offsets."""
    if scale.dtype != jnp.uint16:
        return scale
    return lax.bitcast_convert_type(scale.astype(jnp.uint32) << _SCALE_SHIFT, jnp.float32)


def meant(numbers: jax.Array, scale: jax.Array, offset: jax.Array | None = None) -> jax.Array:
    """Computes the keys, or the values, of a pool: f32 like it."""
    scaled = widened(numbers, jnp.float32) * in_float32(scale)[..., None]
    return scaled if offset is None else scaled + offset[..., None]
