"""The format "int8": integers from -128 to 127, with a scale and a zero per token and head."""

import jax.numpy as jnp

from kvcache_jax.quantised.format import Format
from kvcache_jax.quantised.steps import STEP_PARTS, scale_and_offset, to_steps


def _parts(head_dim):
    return {"": (head_dim, jnp.int8), **STEP_PARTS}


def _encode(x):
    numbers, parts = to_steps(x, num_bits=8)
    return {"": numbers.astype(jnp.int8), **parts}


def _decode(parts, dtype):
    return parts[""].astype(dtype), *scale_and_offset(parts)


INT8 = Format(_parts, _encode, _decode)
