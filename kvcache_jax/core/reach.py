"""What a window reaches: the columns of a row's block table that its next token reads."""

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import quotient
from kvcache_jax.core.config import LayerGroup


def first_column(group: LayerGroup, length: jax.Array, rollback: int = 0) -> jax.Array:
    """First column behind the sinks that is read after `length` tokens, or after up to `rollback` fewer."""
    if group.window is None:
        return jnp.zeros_like(length)
    first_position = jnp.maximum(length + 1 - group.window - rollback, 0)
    return jnp.maximum(quotient(first_position, group.block_size), group.num_sink_blocks)


def num_columns(num_sink_blocks: int, first: jax.Array, end: jax.Array) -> jax.Array:
    """Columns read in all: the sinks' and `[first, end)`; fewer sinks where the row ends among them."""
    return jnp.minimum(num_sink_blocks, end) + jnp.maximum(end - first, 0)
