"""The format "int4": integers from -8 to 7, two per byte, with a scale and a zero per token and head.

A byte holds `n + 8` of two integers, the first in its lower half.
"""

import jax.numpy as jnp

from kvcache_jax.quantised.format import Format
from kvcache_jax.quantised.steps import STEP_PARTS, scale_and_offset, to_steps


def _parts(head_dim):
    if head_dim % 2:
        raise ValueError(
            f"head_dim is {head_dim} with format 'int4', expected an even number, for two numbers share a "
            "byte: take 'int8'"
        )
    return {"": (head_dim // 2, jnp.uint8), **STEP_PARTS}


def _encode(x):
    numbers, parts = to_steps(x, num_bits=4)
    halves = (numbers + 8).astype(jnp.uint8)
    return {"": halves[..., 0::2] | (halves[..., 1::2] << 4), **parts}


def _decode(parts, dtype):
    packed = parts[""]
    halves = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return halves.astype(dtype) - 8, *scale_and_offset(parts)


INT4 = Format(_parts, _encode, _decode)
