"""What quantised keys and values are read as: the oracle's own words, a vector at a time."""

import jax
import jax.numpy as jnp
import numpy as np


def int8(x):
    scale = max_abs(x) / 127
    return jnp.round(x / scale) * scale


def fp8(x):
    scale = max_abs(x) / 448
    return (x / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def int4(x):
    """Sixteen steps from the least to the greatest number, one of which is 0."""
    low, high = jnp.minimum(x.min(-1, keepdims=True), 0), jnp.maximum(x.max(-1, keepdims=True), 0)
    step = (high - low) / 15
    zero = jnp.round(-low / step)
    return (jnp.clip(jnp.round(x / step + zero), 0, 15) - zero) * step


def rotated(round_numbers):
    """Rounds what a Hadamard matrix, made by its definition, turns vectors into, and turns that back."""

    def turned(x):
        n = x.shape[-1]
        signs = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
        matrix = jnp.asarray(np.array(signs, np.float32) / np.sqrt(np.float32(n)))
        product = jax.lax.Precision.HIGHEST
        rounded = round_numbers(jnp.matmul(x, matrix, precision=product))
        return jnp.matmul(rounded, matrix, precision=product)

    return turned


def max_abs(x):
    return jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-6)


def attending(oracle, round_numbers):
    """The oracle of attention to rounded keys and values."""

    def attend(q, k, v, **reach):
        return oracle(q, round_numbers(k), round_numbers(v), **reach)

    return attend
