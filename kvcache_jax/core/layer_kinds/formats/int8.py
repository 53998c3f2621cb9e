"""The format "int8": integers from -127 to 127 and a scale per token and head."""

import jax.numpy as jnp

from kvcache_jax.core.layer_kinds.formats.base import Format, finite_or_zero

_MOST, _LEAST_SCALE = 127, 1e-8


def _parts(head_dim):
    return {"": (head_dim, jnp.int8), "scale": (None, jnp.float32)}


def _encode(x):
    x, nan = finite_or_zero(x)
    scale = jnp.maximum(jnp.abs(x).max(axis=-1) / _MOST, _LEAST_SCALE)
    rounded = jnp.round(x / scale[..., None])
    return {"": jnp.clip(rounded, -_MOST, _MOST).astype(jnp.int8), "scale": scale + nan}


def _decode(parts, dtype):
    return parts[""].astype(dtype), parts["scale"]


INT8 = Format(_parts, _encode, _decode)
