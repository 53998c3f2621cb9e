"""Logits to the base 2, of which the kernels take weights."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.decode_rows import DecodeOptions

MASKED = -1e30
LOG2_E = math.log2(math.e)
_SMALL = 0.04


def scaled(options: DecodeOptions, logits: jax.Array) -> jax.Array:
    """Scales and caps logits, and brings them to the base 2."""
    if options.soft_cap is None:
        return logits * (options.scale * LOG2_E)
    # The hardware's tanh is 5e-4 off, which the cap multiplies; its exp2 is 2e-7 off, and inf is fine.
    # Near 0, where that is much beside the result, two terms of the series are 4e-7 of it off.
    x = logits * (options.scale / options.soft_cap)
    tanh = 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))
    tanh = jnp.where(jnp.abs(x) < _SMALL, x - x * x * x * (1 / 3), tanh)
    return tanh * (options.soft_cap * LOG2_E)
