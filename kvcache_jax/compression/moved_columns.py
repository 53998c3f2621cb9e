"""The columns of rows that `compress` writes anew: which blocks are written again, and which are released."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.state import BlockPool
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange


class MovedColumns(NamedTuple):
    """The columns of rows of one layer group, `[n, C]`.

    Attributes:
      exchange: Blocks that the row takes and releases.
      reused: i32, the row's own blocks that get moved tokens, in their new columns, or nowhere.
    """

    exchange: Exchange
    reused: jax.Array


def find(
    pool: BlockPool,
    group: LayerGroup,
    seq_ids: jax.Array,
    first: jax.Array,
    context_len: jax.Array,
    new_len: jax.Array,
    same_len: jax.Array,
) -> MovedColumns:
    """Finds the columns that are written, and the blocks that may be.

    Args:
      pool: Of the group.
      group: The layer group.
      seq_ids: i32[n].
      first: i32[n], first place with a token afterwards.
      context_len: i32[n], tokens before.
      new_len: i32[n], places afterwards.
      same_len: i32[n], first tokens, whose blocks stay.
    """
    entries = get_at(pool.block_table, seq_ids, pool.num_blocks)
    num_before, num_after = group.num_columns(context_len), group.num_columns(new_len)
    columns, order = (lax.broadcasted_iota(jnp.int32, entries.shape, axis) for axis in (1, 0))
    num_same = quotient(same_len, group.block_size)
    first_written = jnp.maximum(num_same, quotient(first, group.block_size))
    num_same, num_before, num_after = (x[:, None] for x in (num_same, num_before, num_after))
    is_replaced = (columns >= num_same) & (columns < num_before)
    is_own = (block_pool.ref_counts(pool, entries) == 1) & ~block_pool.is_published(pool, entries)
    is_own &= is_replaced
    is_written = (columns >= first_written[:, None]) & (columns < num_after)

    nowhere, nth_own, nth_written = pool.num_blocks, _ranked(is_own), _ranked(is_written)
    own = set_at(jnp.full_like(entries, nowhere), (order, nth_own), entries)  # one after the other
    reused = jnp.where(is_written, get_at(own, (order, nth_written), nowhere), nowhere)
    num_written = jnp.sum(is_written, axis=1, dtype=jnp.int32)[:, None]
    # Blocks reserved after the tokens stay the row's.
    reserved = get_at(entries, (order, columns + num_before - num_after), nowhere)

    def table(new: jax.Array) -> jax.Array:
        written = jnp.where(columns < num_after, jnp.minimum(reused, new), reserved)
        return jnp.where(columns < num_same, entries, written)

    exchange = Exchange(
        entries,
        is_taken=is_written & (reused == nowhere),
        is_released=is_replaced & ~(is_own & (nth_own < num_written)),
        table=table,
    )
    return MovedColumns(exchange, reused)


def _ranked(mask: jax.Array) -> jax.Array:
    """Counts the true entries before each true one in its row, i32 like `mask`; past the end for others."""
    before = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    return jnp.where(mask, before, mask.shape[1])
