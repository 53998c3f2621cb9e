"""The columns of rows that `compress` writes anew: which blocks are written again, and which are released."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.state import BlockPool
from kvcache_jax.layers.layer_group import LayerGroup


class MovedColumns(NamedTuple):
    """The columns of rows of one layer group, before and after.

    Attributes:
      entries: i32[n, C], the rows' blocks.
      num_same: i32[n], first columns, which stay as they are.
      is_own: bool[n, C], the block may be written anew.
      is_written: bool[n, C], columns that tokens are moved into.
      num_before: i32[n], columns with tokens before.
      num_after: i32[n], columns with tokens after.
      need: i32[n], blocks that the row must take.
    """

    entries: jax.Array
    num_same: jax.Array
    is_own: jax.Array
    is_written: jax.Array
    num_before: jax.Array
    num_after: jax.Array
    need: jax.Array


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
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)[None]
    num_same = quotient(same_len, group.block_size)
    first_written = jnp.maximum(num_same, quotient(first, group.block_size))
    is_own = (block_pool.ref_counts(pool, entries) == 1) & ~block_pool.is_published(pool, entries)
    is_own &= (columns >= num_same[:, None]) & (columns < num_before[:, None])
    is_written = (columns >= first_written[:, None]) & (columns < num_after[:, None])
    num_own, num_written = (jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in (is_own, is_written))
    need = jnp.maximum(num_written - num_own, 0)
    return MovedColumns(entries, num_same, is_own, is_written, num_before, num_after, need)


def replace(pool: BlockPool, rows: jax.Array, found: MovedColumns) -> tuple[BlockPool, jax.Array]:
    """Exchanges the blocks of `rows`, for each of which there are enough.

    Returns:
      The pool; and i32[n, C], the blocks that tokens are moved into, or nowhere.
    """
    nowhere, entries = pool.num_blocks, found.entries
    is_row = (rows < pool.block_table.shape[0])[:, None]
    columns = lax.broadcasted_iota(jnp.int32, entries.shape, 1)
    order = lax.broadcasted_iota(jnp.int32, entries.shape, 0)
    # The row's own blocks are used first: a row whose blocks are all its own and unpublished takes none.
    nth_own, nth_written = (_ranked(mask) for mask in (found.is_own, found.is_written))
    own = set_at(jnp.full_like(entries, nowhere), (order, nth_own), entries)  # one after the other
    reused = jnp.where(found.is_written, get_at(own, (order, nth_written), nowhere), nowhere)
    # Taken before others are released: those are still sources of moves in this call.
    pool, fresh = block_pool.take(pool, is_row & found.is_written & (reused == nowhere))
    destination = jnp.where(is_row, jnp.minimum(reused, fresh), nowhere)

    num_written = jnp.sum(found.is_written, axis=1, dtype=jnp.int32)[:, None]
    num_same, num_before, num_after = (
        x[:, None] for x in (found.num_same, found.num_before, found.num_after)
    )
    is_replaced = is_row & (columns >= num_same) & (columns < num_before)
    # Released are blocks that others still need, and own ones that no moved token goes into.
    goes = is_replaced & ~(found.is_own & (nth_own < num_written))
    pool = block_pool.release(pool, jnp.where(goes, entries, nowhere)[:, ::-1])
    # Blocks reserved after the tokens stay the row's: `allocate` promised them.
    reserved = get_at(entries, (order, columns + num_before - num_after), nowhere)
    table = jnp.where(columns < num_after, destination, reserved)
    table = jnp.where(columns < num_same, entries, table)
    return dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, table)), destination


def _ranked(mask: jax.Array) -> jax.Array:
    """Counts the true entries before each true one in its row, i32 like `mask`; past the end for others."""
    before = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    return jnp.where(mask, before, mask.shape[1])
