"""The parts that layers with a matrix per head and a short convolution before it have in common."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.recurrent import Arrays
from kvcache_jax.recurrence import matrix_state
from kvcache_jax.recurrence.convolution import convolve, last_of


def point_arrays(
    state_shape: tuple[int, int, int], inputs_shape: tuple[int, int], dtype: Any
) -> dict[str, BlockArray]:
    """Returns the arrays of a point: "state" and "inputs", the last ones of the convolution.

    Args:
      state_shape: Heads, width of values, width of keys.
      inputs_shape: Inputs before a token's own, channels.
      dtype: Of the inputs; the state is in float32.
    """
    return {
        "state": BlockArray(state_shape, jnp.float32, head_axis=0, token_axis=None),
        "inputs": BlockArray(inputs_shape, dtype, head_axis=None, token_axis=None),
    }


def convolved(
    point: Arrays, held: Arrays, count: jax.Array, new: jax.Array, weights: Mapping[str, jax.Array]
) -> jax.Array:
    """Computes silu of the convolution of new inputs `[T, channels]`, f32; arguments as of `advance`."""
    past = last_of(point["inputs"], held["inputs"], count)
    return jax.nn.silu(convolve(past, new, weights["conv"], weights.get("bias")))


def folded(point: Arrays, inputs: jax.Array, entries: matrix_state.Entries) -> dict[str, jax.Array]:
    """Computes the point after a full block, of its inputs `[W, channels]` and its entries."""
    state = matrix_state.fold(point["state"], entries)
    return {"state": state, "inputs": last_of(point["inputs"], inputs, len(inputs))}
