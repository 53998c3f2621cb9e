"""The format "int4": integers from 0 to 15, two per byte, with a scale and a zero per token and head.

A number `u` stands for `scale * (u - zero)`. The range always holds 0, so that the zero is one of 0 to 15.
"""

import jax.numpy as jnp

from kvcache_jax.core.layer_kinds.formats.base import Format, finite_or_zero

_MOST, _LEAST_SCALE = 15, 1e-6


def _parts(head_dim):
    if head_dim % 2:
        raise ValueError(
            f"head_dim is {head_dim} with format 'int4', expected an even number, for two numbers share a "
            "byte: take 'int8'"
        )
    return {"": (head_dim // 2, jnp.uint8), "scale": (None, jnp.float32), "zero": (None, jnp.uint8)}


def _encode(x):
    x, nan = finite_or_zero(x)
    low, high = jnp.minimum(x.min(axis=-1), 0), jnp.maximum(x.max(axis=-1), 0)
    # Divided first: the difference of two large numbers may be infinite.
    scale = jnp.maximum(high / _MOST - low / _MOST, _LEAST_SCALE)
    zero = jnp.clip(jnp.round(-low / scale), 0, _MOST)
    numbers = jnp.clip(jnp.round(x / scale[..., None] + zero[..., None]), 0, _MOST).astype(jnp.uint8)
    packed = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
    return {"": packed, "scale": scale + nan, "zero": zero.astype(jnp.uint8)}


def _decode(parts, dtype):
    packed = parts[""]
    numbers = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return numbers.astype(dtype) - parts["zero"][..., None].astype(dtype), parts["scale"]


INT4 = Format(_parts, _encode, _decode)
