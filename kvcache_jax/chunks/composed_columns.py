"""The columns of rows that `compose` fills: where their tokens come from, and which blocks they need."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder
from kvcache_jax.blocks import block_pool
from kvcache_jax.blocks.moves import SpanMoves
from kvcache_jax.chunks.stored_chunks import Chunks
from kvcache_jax.core.state import BlockPool
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange
from kvcache_jax.operations.rows import num_blocks_for


class Placed(NamedTuple):
    """Chunks and their places in rows, `[n, K]`."""

    chunk_ids: jax.Array  # i32, nowhere for none
    starts: jax.Array  # i32, first place
    ends: jax.Array  # i32, one past the last place; 0 for none
    distance: jax.Array  # i32, positions that the keys move by
    context_len: jax.Array  # i32[n], tokens before all of them
    new_len: jax.Array  # i32[n], places of the row afterwards


class Sources(NamedTuple):
    """The origin of the token at each place of rows, `[n, C * s]`: the row's block, a chunk, or nowhere."""

    blocks: jax.Array  # i32, nowhere where there is no token
    offsets: jax.Array  # i32, its place in that block
    distance: jax.Array  # i32, positions that its key moves by
    is_missing: jax.Array  # bool, the row or a chunk has a token there, whose block its window released


class ComposedColumns(NamedTuple):
    """The columns of rows of one layer group, `[n, C]`."""

    # Columns that are written need another block where they have none, or one that others hold or that is
    # published; others leave the window.
    exchange: Exchange
    is_written: jax.Array  # bool, they get tokens
    need: jax.Array  # i32[n], blocks that the row takes, less the leaving blocks that become free
    is_lost: jax.Array  # bool[n], the next token would read tokens that a window released
    sources: Sources


def find(
    pool: BlockPool,
    group: LayerGroup,
    chunks: Chunks,
    block_ids: jax.Array,
    seq_ids: jax.Array,
    placed: Placed,
    max_query_len: int,
) -> ComposedColumns:
    """Finds the columns from the row's last token on, and the blocks that may be written there.

    A window group holds the tokens that it would hold after an `extend` of the last `max_query_len` places,
    as far as there are tokens: columns before them need no block. `block_ids` i32[num_chunks, columns] are
    the group's blocks of chunks.
    """
    entries = get_at(pool.block_table, seq_ids, pool.num_blocks)
    sources = _sources(entries, block_ids, chunks, group, placed, pool.num_blocks)
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)[None]
    is_written = columns >= quotient(placed.context_len, group.block_size)[:, None]
    is_written &= columns < num_blocks_for(placed.new_len, group.block_size)[:, None]
    is_last_owner = block_pool.ref_counts(pool, entries) == 1
    is_left, is_lost, num_back = None, jnp.zeros_like(seq_ids, bool), 0
    if not group.span.keeps_all:
        first, is_lost = _first_kept(group, sources, placed, max_query_len)
        is_kept = (columns >= first[:, None]) | (columns < group.num_sink_blocks)
        is_left = ~is_kept & (entries < pool.num_blocks)
        is_written &= is_kept
        num_back = jnp.sum(is_left & is_last_owner, axis=1, dtype=jnp.int32)
    is_taken = is_written & ~(is_last_owner & ~block_pool.is_published(pool, entries))
    exchange = Exchange(entries, is_taken, is_released=is_taken, is_left=is_left)
    return ComposedColumns(exchange, is_written, exchange.need - num_back, is_lost, sources)


def _first_kept(
    group: LayerGroup, sources: Sources, placed: Placed, max_query_len: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the first column after the sinks that rows hold, i32[n], and masks rows that lack tokens."""
    num_rows = placed.new_len.shape[0]
    lacks = sources.is_missing.reshape(num_rows, -1, group.block_size).any(axis=-1)
    columns = jnp.arange(lacks.shape[1], dtype=jnp.int32)[None]
    before = jnp.maximum(placed.context_len, placed.new_len - max_query_len)
    first = group.first_column(before, group.max_rollback)
    # A window holds a contiguous run up to the row's end: tokens before a missing one are of no use.
    first = jnp.maximum(first, jnp.max(jnp.where(lacks, columns + 1, 0), axis=1))
    # WINDOW_LOST: the token after the row would read a sink, or a token in reach, that is missing.
    lacks_sinks = (lacks & (columns < group.num_sink_blocks)).any(axis=1)
    return first, lacks_sinks | (first > group.first_column(placed.new_len))


def _sources(
    entries: jax.Array,
    block_ids: jax.Array,
    chunks: Chunks,
    group: LayerGroup,
    placed: Placed,
    nowhere: int,
) -> Sources:
    places = jnp.arange(entries.shape[1] * group.block_size, dtype=jnp.int32)[None]
    covers = (places[..., None] >= placed.starts[:, None]) & (places[..., None] < placed.ends[:, None])

    def of_chunk(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(covers, values[:, None], 0), axis=-1, dtype=jnp.int32)

    # Chunks that overlap are refused, so at most one covers a place, and the sums pick its values.
    is_composed = covers.any(axis=-1)
    chunk_ids = jnp.where(is_composed, of_chunk(placed.chunk_ids), chunks.num_chunks)
    # A chunk keeps the offsets that its tokens had in their row, so its first block may begin within.
    first = get_at(chunks.start, chunk_ids, 0)
    in_chunk = remainder(first, group.block_size) + places - of_chunk(placed.starts)
    in_chunk = jnp.where(is_composed, in_chunk, 0)
    from_chunk = get_at(block_ids, (chunk_ids, quotient(in_chunk, group.block_size)), nowhere)
    is_own = places < placed.context_len[:, None]
    own = jnp.where(is_own, jnp.repeat(entries, group.block_size, axis=1), jnp.int32(nowhere))
    own_offsets = jnp.broadcast_to(remainder(places, group.block_size), own.shape)
    blocks = jnp.where(is_composed, from_chunk, own)
    return Sources(
        blocks=blocks,
        offsets=jnp.where(is_composed, remainder(in_chunk, group.block_size), own_offsets),
        distance=of_chunk(placed.distance),
        is_missing=(is_composed | is_own) & (blocks == nowhere),
    )


def moves_to(new: jax.Array, columns: ComposedColumns, ok: jax.Array, nowhere: int) -> SpanMoves:
    """Lists the tokens that are moved into blocks of the rows bool[n], `new` i32[n, C] or their own."""
    sources, exchange = columns.sources, columns.exchange
    destination = jnp.where(exchange.is_taken, new, exchange.entries)
    destination = jnp.where(columns.is_written & ok[:, None], destination, nowhere)
    return SpanMoves(sources.blocks, sources.offsets, sources.distance, destination)
