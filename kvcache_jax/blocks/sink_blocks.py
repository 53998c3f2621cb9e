"""Blocks with the original keys of sinks that moved along: who holds them, and what is made of them.

A row whose sinks moved reads rotated keys, in blocks of its table. The original ones stay in blocks that it
holds beside these, column for column. Forks share both; the next drop of either row takes a block of its own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, remainder, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.blocks.span_moves import SpanMoves
from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.state import BlockPool, Control


def have_moved(control: Control, seq_ids: jax.Array) -> jax.Array:
    """Tells which rows read sinks whose keys moved, bool[n]."""
    moved = jnp.zeros_like(seq_ids, bool)
    for pool in control.block_pools:
        if pool.sink_blocks is not None:
            moved |= (get_at(pool.sink_blocks, seq_ids, pool.num_blocks) < pool.num_blocks).any(axis=1)
    return moved


def all_entries(pool: BlockPool) -> jax.Array:
    """Lists the blocks that each row holds, i32[max_seqs, any]: those of its table and its original sinks."""
    if pool.sink_blocks is None:
        return pool.block_table
    return jnp.concatenate([pool.block_table, pool.sink_blocks], axis=1)


def forget(pool: BlockPool, rows: jax.Array) -> BlockPool:
    """Releases the original blocks of `rows` i32[n], which differ; nowhere is skipped."""
    return keep_first(pool, rows, jnp.zeros_like(rows))


def keep_first(pool: BlockPool, rows: jax.Array, num_columns: jax.Array) -> BlockPool:
    """Releases the original blocks of `rows` i32[n] but the first `num_columns` i32[n]."""
    assert pool.sink_blocks is not None
    held = get_at(pool.sink_blocks, rows, pool.num_blocks)
    goes = jnp.arange(held.shape[1], dtype=jnp.int32)[None] >= num_columns[:, None]
    kept = set_at(pool.sink_blocks, rows, jnp.where(goes, pool.num_blocks, held))
    pool = block_pool.release(pool, jnp.where(goes, held, pool.num_blocks)[:, ::-1])
    return dataclasses.replace(pool, sink_blocks=kept)


def inherit(pool: BlockPool, rows: jax.Array, parent_ids: jax.Array) -> BlockPool:
    """Lets `rows` i32[n] share the original blocks of their parents, in place of their own."""
    assert pool.sink_blocks is not None
    new = get_at(pool.sink_blocks, parent_ids, pool.num_blocks)
    new = jnp.where((rows < pool.block_table.shape[0])[:, None], new, pool.num_blocks)
    held = set_at(pool.sink_blocks, rows, new)
    return dataclasses.replace(forget(block_pool.share(pool, new), rows), sink_blocks=held)


def put_back(pool: BlockPool, rows: jax.Array) -> BlockPool:
    """Puts the original blocks of `rows` i32[n] back into their tables, and releases the rotated ones."""
    assert pool.sink_blocks is not None
    columns = jnp.arange(pool.sink_blocks.shape[1], dtype=jnp.int32)[None]
    original = get_at(pool.sink_blocks, rows, pool.num_blocks)
    rotated = get_at(pool.block_table, (rows[:, None], columns), pool.num_blocks)
    is_back = original < pool.num_blocks
    table = set_at(pool.block_table, (rows[:, None], columns), jnp.where(is_back, original, rotated))
    kept = set_at(pool.sink_blocks, rows, pool.num_blocks)
    pool = block_pool.release(pool, jnp.where(is_back, rotated, pool.num_blocks)[:, ::-1])
    return dataclasses.replace(pool, block_table=table, sink_blocks=kept)


class SinkColumns(NamedTuple):
    """The columns of rows of one layer group that hold sinks, `[n, C]`.

    Attributes:
      read: i32, the blocks that the row reads.
      original: i32, those with the original keys, which the row may read so far.
      is_first: bool, the sinks there move for the first time.
      is_taken: bool, the rotated keys need a block.
    """

    read: jax.Array
    original: jax.Array
    is_first: jax.Array
    is_taken: jax.Array


def find(pool: BlockPool, group: LayerGroup, seq_ids: jax.Array, num_sinks: jax.Array) -> SinkColumns:
    """Finds the columns of the first `num_sinks` tokens of rows, i32[n] both."""
    assert pool.sink_blocks is not None
    columns = jnp.arange(pool.sink_blocks.shape[1], dtype=jnp.int32)[None]
    read = get_at(pool.block_table, (seq_ids[:, None], columns), pool.num_blocks)
    kept = get_at(pool.sink_blocks, seq_ids, pool.num_blocks)
    is_sink = (columns * group.block_size < num_sinks[:, None]) & (read < pool.num_blocks)
    is_first = is_sink & (kept == pool.num_blocks)
    is_taken = is_first | (is_sink & (block_pool.ref_counts(pool, read) != 1))
    return SinkColumns(
        read=jnp.where(is_sink, read, pool.num_blocks),
        original=jnp.where(is_first, read, jnp.where(is_sink, kept, pool.num_blocks)),
        is_first=is_first,
        is_taken=is_taken,
    )


def replace(
    pool: BlockPool,
    group: LayerGroup,
    rows: jax.Array,
    found: SinkColumns,
    num_sinks: jax.Array,
    num_tokens: jax.Array,
    distance: jax.Array,
) -> tuple[BlockPool, SpanMoves]:
    """Gives rows blocks of their own for sinks that move, for each of which there are enough.

    Args:
      pool: Of the group.
      group: The layer group.
      rows: i32[n], which differ; `max_seqs` for none.
      found: Of these rows, or others where there is none.
      num_sinks: i32[n], first tokens of the rows, whose keys move.
      num_tokens: i32[n], all tokens of the rows, of which some may lie behind the sinks in the same block.
      distance: i32[n], positions that the keys move by, from where they were computed.

    Returns:
      The pool, and what is to be written.
    """
    assert pool.sink_blocks is not None
    nowhere, is_row = pool.num_blocks, (rows < pool.block_table.shape[0])[:, None]
    columns = jnp.arange(found.read.shape[1], dtype=jnp.int32)[None]
    pool, taken = block_pool.take(pool, found.is_taken & is_row)
    destination = jnp.where(is_row, jnp.where(found.is_taken, taken, found.read), nowhere)
    left = is_row & found.is_taken & ~found.is_first  # blocks that others read; original ones are held on
    pool = block_pool.release(pool, jnp.where(left, found.read, nowhere)[:, ::-1])
    assert pool.sink_blocks is not None
    is_sink = found.original < nowhere
    table_rows = jnp.where(is_sink & is_row, rows[:, None], pool.block_table.shape[0])
    pool = dataclasses.replace(
        pool,
        block_table=set_at(pool.block_table, (table_rows, columns), destination),
        sink_blocks=set_at(pool.sink_blocks, (table_rows, columns), found.original),
    )

    places = jnp.arange(found.read.shape[1] * group.block_size, dtype=jnp.int32)[None]
    moves = places < num_sinks[:, None]
    original, read = (jnp.repeat(ids, group.block_size, axis=1) for ids in (found.original, found.read))
    blocks = jnp.where(moves, original, jnp.where(places < num_tokens[:, None], read, nowhere))
    offsets = jnp.broadcast_to(remainder(places, group.block_size), blocks.shape)
    return pool, SpanMoves(blocks, offsets, jnp.where(moves, distance[:, None], 0), destination)
