"""The format "fp8": 8-bit floats of 4 bits of exponent (e4m3) and a scale per token and head.

They are widened to the dtype of products on every device, so that chips without such floats convert them too.
They are stored as bytes: where XLA has no such floats, it writes to an array of them by converting all of it.
"""

import jax.numpy as jnp
from jax import lax

from kvcache_jax.quantised.format import LEAST_SCALE, Format, finite_or_zero

_DTYPE = jnp.float8_e4m3fn
_MOST = 448


def _parts(head_dim):
    return {"": (head_dim, jnp.uint8), "scale": (None, jnp.float32)}


def _encode(x):
    x, nan = finite_or_zero(x)
    scale = jnp.maximum(jnp.abs(x).max(axis=-1) / _MOST, LEAST_SCALE)
    # Beyond the largest number of e4m3 there is nothing but NaN.
    numbers = jnp.clip(x / scale[..., None], -_MOST, _MOST).astype(_DTYPE)
    return {"": lax.bitcast_convert_type(numbers, jnp.uint8), "scale": scale + nan}


def _decode(parts, dtype):
    return lax.bitcast_convert_type(parts[""], _DTYPE).astype(dtype), parts["scale"], None


FP8 = Format(_parts, _encode, _decode)
