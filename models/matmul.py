"""Matrix products whose gradient is as fast as they are on a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def matmul(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies `x[..., i] @ kernel[i, o]` in `dtype`; the result `[..., o]` has the dtype of `x`.

    The gradient (reverse mode) is written out because of XLA's CPU compiler. Left to itself it moves the
    transposition of a cotangent into the element-wise work before it, which then walks memory in strides: a
    fifth of a training step. With bfloat16 products, on a CPU that has instructions for them, the step takes
    half the time.
    """
    return _matmul(x.astype(dtype), kernel.astype(dtype)).astype(x.dtype)


@jax.custom_vjp
def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ kernel, (x, kernel)


def _backward(operands: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = operands
    dy, transposed = lax.optimization_barrier((dy, kernel.T))
    token_axes = tuple(range(x.ndim - 1))
    return dy @ transposed, jnp.tensordot(x, dy, axes=(token_axes, token_axes))


_matmul.defvjp(_forward, _backward)
