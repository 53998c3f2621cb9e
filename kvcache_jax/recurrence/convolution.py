"""Short causal convolutions: a token's own input and a few before it, per channel."""

import jax
import jax.numpy as jnp
from jax import lax


def convolve(past: jax.Array, new: jax.Array, weights: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes for each new token a weighted sum of its input and the `kernel - 1` before it.

    Args:
      past: `[kernel - 1, channels]`, the inputs before the new tokens, the last one last; 0 for none.
      new: `[T, channels]`.
      weights: `[kernel, channels]`, the last of them for a token's own input.
      bias: `[channels]`; None for 0.

    Returns:
      f32[T, channels].
    """
    inputs = jnp.concatenate([past.astype(jnp.float32), new.astype(jnp.float32)])
    weights = weights.astype(jnp.float32)
    terms = (weights[i][None] * inputs[i : i + len(new)] for i in range(len(weights)))
    return sum(terms, jnp.float32(0) if bias is None else bias.astype(jnp.float32)[None])


def last_of(past: jax.Array, new: jax.Array, count: jax.Array | int) -> jax.Array:
    """Takes the last of `past` and `count` of `new`, both `[tokens, ...]`: as many as `past` has."""
    both = jnp.concatenate([past, new.astype(past.dtype)])
    return lax.dynamic_slice_in_dim(both, count, len(past))
