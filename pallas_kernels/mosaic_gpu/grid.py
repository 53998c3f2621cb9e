"""Grids of one axis: along the others CUDA starts no more than 65,535 CTAs, along the first one 2^31 - 1."""

import jax
import jax.numpy as jnp
from jax import lax


def unflatten(program: jax.Array, num_middle: int, num_last: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three indices of a program; the last one runs fastest.

    Args:
      program: i32[].
      num_middle: Values of the second index.
      num_last: Values of the third.
    """
    rest, last = lax.div(program, jnp.int32(num_last)), lax.rem(program, jnp.int32(num_last))
    return lax.div(rest, jnp.int32(num_middle)), lax.rem(rest, jnp.int32(num_middle)), last
