"""What quantised keys and values are read as: the oracle's own words, a vector at a time."""

import jax
import jax.numpy as jnp
import numpy as np


def int8(x):
    return of_steps(x, 255)


def int4(x):
    return of_steps(x, 15)


def of_steps(x, num_steps):
    """Multiples of one of so many steps from the least number to the greatest; of 9 bits, rounded up."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    fraction, exponent = jnp.frexp(jnp.maximum((high - low) / num_steps, 2.0**-100))
    step = jnp.ldexp(jnp.ceil(fraction * 512) / 512, exponent)
    middle = low + (num_steps + 1) // 2 * step
    return jnp.round((x - middle) / step) * step + middle


def fp8(x):
    scale = max_abs(x) / 448
    return (x / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


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
