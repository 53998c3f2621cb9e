"""The columns of rows that hold sinks, and the blocks of their rotated keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, remainder, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.blocks.moves import SpanMoves
from kvcache_jax.core.state import BlockPool
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange


class SinkColumns(NamedTuple):
    """The columns of rows of one layer group that hold sinks, `[n, C]`."""

    read: jax.Array  # i32, the blocks that the row reads
    original: jax.Array  # i32, blocks with the original keys, which the row may read so far
    # The rotated keys need a block where the sinks move for the first time, or where others read theirs,
    # which the row then releases; original blocks are held on.
    exchange: Exchange


def sink_columns(
    pool: BlockPool, block_ids: jax.Array, group: LayerGroup, seq_ids: jax.Array, num_sinks: jax.Array
) -> SinkColumns:
    """Finds the columns of the first `num_sinks` tokens of rows, i32[n] both.

    `block_ids` i32[max_seqs, C] are the original blocks of the group.
    """
    columns = jnp.arange(block_ids.shape[1], dtype=jnp.int32)[None]
    entries = read = get_at(pool.block_table, (seq_ids[:, None], columns), pool.num_blocks)
    kept = get_at(block_ids, seq_ids, pool.num_blocks)
    is_sink = (columns * group.block_size < num_sinks[:, None]) & (read < pool.num_blocks)
    # The first move keeps the row's block as the original, and writes into another. Later moves overwrite
    # the rotated copy, unless a fork reads it too.
    is_first = is_sink & (kept == pool.num_blocks)
    is_taken = is_first | (is_sink & (block_pool.ref_counts(pool, read) != 1))
    return SinkColumns(
        read=jnp.where(is_sink, read, pool.num_blocks),
        original=jnp.where(is_first, read, jnp.where(is_sink, kept, pool.num_blocks)),
        exchange=Exchange(entries, is_taken, is_released=is_taken & ~is_first),
    )


def rotate_sinks(
    block_ids: jax.Array,
    group: LayerGroup,
    rows: jax.Array,
    found: SinkColumns,
    new: jax.Array,
    num_sinks: jax.Array,
    num_tokens: jax.Array,
    distance: jax.Array,
) -> tuple[jax.Array, SpanMoves]:
    """Lists the keys of sinks that move into blocks of the rows' own; returns the original blocks, too.

    The keys of the first `num_sinks` i32[n] of `num_tokens` i32[n] tokens move by `distance` i32[n] positions
    from where they were computed, some into blocks `new` i32[n, C] that `rows` took. An entry without row has
    `max_seqs` there, and anything in `found`.
    """
    nowhere, is_row = group.num_blocks, (rows < block_ids.shape[0])[:, None]
    columns = jnp.arange(found.read.shape[1], dtype=jnp.int32)[None]
    destination = jnp.where(is_row, jnp.where(found.exchange.is_taken, new, found.read), nowhere)
    sink_rows = jnp.where(found.original < nowhere, rows[:, None], block_ids.shape[0])
    block_ids = set_at(block_ids, (sink_rows, columns), found.original)

    # Each move starts from the original keys, so rounding does not add up. Tokens of the same block after the
    # sinks are copied from the block that the row reads: the original may lack those that came later.
    places = jnp.arange(found.read.shape[1] * group.block_size, dtype=jnp.int32)[None]
    moves = places < num_sinks[:, None]
    original, read = (jnp.repeat(ids, group.block_size, axis=1) for ids in (found.original, found.read))
    blocks = jnp.where(moves, original, jnp.where(places < num_tokens[:, None], read, nowhere))
    offsets = jnp.broadcast_to(remainder(places, group.block_size), blocks.shape)
    return block_ids, SpanMoves(blocks, offsets, jnp.where(moves, distance[:, None], 0), destination)
