"""The operation `compose`: puts chunks into rows after the tokens they hold, at any position."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import any_of, get_at, min_at, num_true, quotient, remainder, set_at
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.blocks.key_rotation import Rotate, rotations_of_groups
from kvcache_jax.blocks.moves import SpanMoves, move_spans
from kvcache_jax.chunks.chunk_store import Chunks, chunks_of, require_chunks, with_chunks
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockCopies, BlockPool, Cache, Control, mark_used
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange, carry_out, decide
from kvcache_jax.operations.extend import copy_tokens
from kvcache_jax.operations.rows import check_ids, num_blocks_for


@takes_one
@jax.named_scope("kvcache.compose")
def compose(
    cache: Cache,
    seq_ids: IntRows,
    chunk_ids: Any,
    starts: Any,
    *,
    rotate: Rotate | Sequence[Rotate | None] | None,
) -> tuple[Cache, jax.Array]:
    """Puts chunks into rows after the tokens they hold, with the keys rotated to their new positions.

    A key is rotated once, from the original one of the chunk, by its new position less the one it was
    computed for; a key that does not move keeps its bits, and so do all values. Afterwards a row ends with
    its last chunk, and `rewrite` computes again the tokens that the caller chooses: a chunk's tokens were
    computed without the row's tokens before them. Places between chunks hold zeros and no token: compute them
    before anything after them is.

    The row writes into blocks of its own: first blocks that `allocate` reserved, then others. The blocks of
    chunks do not change. A window layer holds the tokens of the row that it would hold after an `extend` of
    its last `max_query_len` places, as far as chunks have it; places out of reach take no block, and theirs
    are released. Such a row publishes no more than the tokens before its first chunk. Scarce blocks are
    assigned in entry order. Call it inside a donated jit: called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated; built with `CacheConfig(extras=[Store(...)])`.
      seq_ids: i32[n], active rows, each at most once.
      chunk_ids: i32[n, K], chunks of the row's namespace, which may repeat; `num_chunks` for none. A row
        with none is left alone, even an idle one.
      starts: i32[n, K], the place of each chunk's first token.
      rotate: `rotate(keys f32[..., heads, head_dim], distance i32[...])` returns the keys rotated by so many
        positions, such as a `key_rotation`; the same function again is the same program. Of a latent it gets
        the key part alone. None for keys that know no position. Where layers rotate by different
        frequencies, a list with one of these per layer.

    Returns:
      The cache and status i32[n]: BAD_CHUNK_ID, BAD_LENGTH (chunks overlap, or begin before the row's end, or
      the row dropped tokens), TOO_LONG, WINDOW_LOST (the next token would read tokens in a window that a
      chunk had lost when it was stored), OUT_OF_BLOCKS, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED,
      BAD_SEQ_ID.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, a `rotate` that is no function, returns
        another shape or differs within a layer group, or shapes or dtypes that do not fit.
      NotImplementedError: a gradient through a `rotate` that is not linear in the keys. Others take the
        memory that the gradient of `compress` takes.

    Example:
      >>> import kvcache_jax as kv
      >>> sizes = dict(num_blocks=8, max_seqs=2, max_seq_len=64, extras=[kv.chunks.Store(3, 40)])
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes))
      >>> cache, _ = kv.allocate(cache, [0, 1], [30, 1])
      >>> cache, _ = kv.extend(cache, [30, 1], max_new=30)
      >>> cache, stored = kv.chunks.store(cache, [0], [0], [30], [range(30)])
      >>> rotate = kv.chunks.key_rotation([1.0, 0.1, 0.01, 0.001], max_distance=64)
      >>> cache, status = kv.chunks.compose(cache, [1], [[0, 0]], [[31, 1]], rotate=rotate)
      >>> status.tolist(), cache.context_len.tolist()
      ([0], [30, 61])
      >>> chunks = kv.chunks.metadata(cache, [[0, 0]], [[31, 1]])
      >>> kv.chunks.select_tokens("first", chunks, [3], max_select=4).tolist()  # to compute again
      [[1, 2, 31, 64]]

    References:
      Cache-Craft (Agarwal et al.; arXiv:2502.15734) and CacheBlend (Yao et al.; arXiv:2405.16444).
    """
    require_chunks("compose", cache)
    rotations = rotations_of_groups(rotate, cache.config)
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    chunk_ids = arguments.saturated("chunk_ids", chunk_ids)
    starts = arguments.saturated("starts", starts)
    for name, values in ("chunk_ids", chunk_ids), ("starts", starts):
        if values.ndim != 2 or values.shape != (seq_ids.shape[0], chunk_ids.shape[1]):
            raise ValueError(
                f"{name} has shape {values.shape}, expected ({seq_ids.shape[0]}, K), a line of chunks per row"
            )
    return _compose(cache, seq_ids, chunk_ids, starts, rotations=rotations)


class _Placed(NamedTuple):
    """Chunks and their places in rows, `[n, K]`."""

    chunk_ids: jax.Array  # i32, nowhere for none
    starts: jax.Array  # i32, first place
    ends: jax.Array  # i32, one past the last place; 0 for none
    distance: jax.Array  # i32, positions that the keys move by
    context_len: jax.Array  # i32[n], tokens before all of them
    new_len: jax.Array  # i32[n], places of the row afterwards


class _Sources(NamedTuple):
    """The origin of the token at each place of rows, `[n, C * s]`: the row's block, a chunk, or nowhere."""

    blocks: jax.Array  # i32, nowhere where there is no token
    offsets: jax.Array  # i32, its place in that block
    distance: jax.Array  # i32, positions that its key moves by
    is_missing: jax.Array  # bool, the row or a chunk has a token there, whose block its window released


class _ComposedColumns(NamedTuple):
    """The columns of rows of one layer group, `[n, C]`."""

    # Columns that are written need another block where they have none, or one that others hold or that is
    # published; others leave the window.
    exchange: Exchange
    is_written: jax.Array  # bool, they get tokens
    need: jax.Array  # i32[n], blocks that the row takes, less the leaving blocks that become free
    is_lost: jax.Array  # bool[n], the next token would read tokens that a window released
    sources: _Sources


@functools.partial(jax.jit, static_argnames="rotations")
def _compose(
    cache: Cache,
    seq_ids: jax.Array,
    chunk_ids: jax.Array,
    starts: jax.Array,
    rotations: tuple[Rotate | None, ...],
) -> tuple[Cache, jax.Array]:
    config = cache.config
    control, (seq_ids, chunk_ids, starts) = as_varied((cache.control, (seq_ids, chunk_ids, starts)))
    chunks = chunks_of(control)
    placed = _placed(control, chunks, seq_ids, chunk_ids, starts)
    groups = list(zip(control.block_pools, config.groups, chunks.block_ids, strict=True))
    found = [
        _columns_of(pool, group, chunks, block_ids, seq_ids, placed, config.query_len_limit)
        for pool, group, block_ids in groups
    ]
    status = _checked(control, chunks, seq_ids, chunk_ids, placed, found, config)
    wants = (status == Status.OK) & (placed.chunk_ids < chunks.num_chunks).any(axis=1)
    ok, status = decide(control, {g: columns.need for g, columns in enumerate(found)}, wants, status)
    rows = jnp.where(ok, seq_ids, control.max_seqs)
    exchanges = {g: columns.exchange for g, columns in enumerate(found)}
    control, new = carry_out(control, rows, exchanges, config)
    cache = config.keeper.settle(dataclasses.replace(cache, control=control))
    control = cache.control
    indexed_group = config.indexed_group
    control = _keep_recorded(control, exchanges[indexed_group].entries, new[indexed_group])
    for g, (group, columns) in enumerate(zip(config.groups, found, strict=True)):
        if cache.pools:
            moves = _moves(new[g], columns, ok, group.num_blocks)
            cache = storage.with_pool(cache, g, move_spans(cache.pools[g], group, moves, rotations[g]))
    control = _note(control, seq_ids, rows, placed, config)
    return dataclasses.replace(cache, control=control), status


def _placed(
    control: Control, chunks: Chunks, seq_ids: jax.Array, chunk_ids: jax.Array, starts: jax.Array
) -> _Placed:
    """Finds the places of chunks in rows; starts that would overflow are clipped."""
    # An id without a chunk covers no place here; `_checked` refuses it by the ids that were asked for.
    is_chunk = get_at(chunks.length, chunk_ids, 0) > 0
    chunk_ids = jnp.where(is_chunk, chunk_ids, chunks.num_chunks)
    # A clipped start is refused like the one asked for: it is before or past every row.
    starts = jnp.where(is_chunk, jnp.clip(starts, -1, jnp.int32(2**30)), 0)
    ends = starts + get_at(chunks.length, chunk_ids, 0)
    context_len = get_at(control.context_len, seq_ids, 0)
    new_len = jnp.maximum(jnp.max(ends, axis=1), context_len)
    distance = starts - get_at(chunks.start, chunk_ids, 0)
    return _Placed(chunk_ids, starts, ends, distance, context_len, new_len)


def _checked(
    control: Control,
    chunks: Chunks,
    seq_ids: jax.Array,
    asked_ids: jax.Array,
    placed: _Placed,
    found: list[_ComposedColumns],
    config: CacheConfig,
) -> jax.Array:
    """Computes the status of each entry as far as blocks do not matter, i32[n]."""
    asks = asked_ids != chunks.num_chunks
    is_chunk = placed.chunk_ids < chunks.num_chunks
    is_bad_id = asks & ~(is_chunk & chunks.owned_by(placed.chunk_ids, get_at(control.namespace, seq_ids)))
    starts, ends = placed.starts, placed.ends
    order = jnp.arange(starts.shape[1], dtype=jnp.int32)
    overlaps = (starts[:, :, None] < ends[:, None]) & (starts[:, None] < ends[:, :, None])
    overlaps &= is_chunk[:, :, None] & is_chunk[:, None] & (order[:, None] < order[None])[None]
    is_bad = overlaps.any(axis=(1, 2)) | (is_chunk & (starts < placed.context_len[:, None])).any(axis=1)
    if control.holes is not None:
        # Keys are rotated by places, which in a row with holes are no positions in the text.
        is_bad |= ~control.holes.of_rows(seq_ids).is_plain
    asks = asks.any(axis=1)
    return first_failure(
        *check_ids(control, seq_ids, mask=asks),
        (asks & ~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (is_bad_id.any(axis=1), Status.BAD_CHUNK_ID),
        (asks & is_bad, Status.BAD_LENGTH),
        (placed.new_len > config.max_seq_len, Status.TOO_LONG),
        (asks & any_of([columns.is_lost for columns in found]), Status.WINDOW_LOST),
    )


def _keep_recorded(control: Control, entries: jax.Array, new: jax.Array) -> Control:
    """Records that blocks in place of others hold the tokens that the others held."""
    if (index := control.prefix_index) is None:
        return control
    nowhere = index.parent.shape[0]
    new = jnp.where(entries < nowhere, new, nowhere)
    copied = BlockCopies(entries.reshape(-1), new.reshape(-1), num_true(new < nowhere))
    index = dataclasses.replace(index, block_tokens=copy_tokens(index.block_tokens, copied))
    return dataclasses.replace(control, prefix_index=index)


def _note(
    control: Control, seq_ids: jax.Array, rows: jax.Array, placed: _Placed, config: CacheConfig
) -> Control:
    """Records the lengths of rows, and that the tokens from there on are no prefix."""
    chunks = chunks_of(control)
    first = get_at(chunks.first_composed, seq_ids, 0)
    # Nothing after the first composed token is a prefix, so a later `compose` does not move this place.
    first = jnp.where(first > 0, first, placed.context_len + 1)
    # A published last block that was partly filled has been exchanged: the row no longer holds it.
    num_full = quotient(placed.context_len, config.groups[config.indexed_group].block_size)
    control = mark_used(control, rows, context_len=placed.new_len)
    is_row = (rows < control.max_seqs)[:, None]
    chunks = chunks.used(jnp.where(is_row, placed.chunk_ids, chunks.num_chunks), control.clock)
    chunks = dataclasses.replace(chunks, first_composed=set_at(chunks.first_composed, rows, first))
    return with_chunks(control, chunks, num_published=min_at(control.num_published, rows, num_full))


def _columns_of(
    pool: BlockPool,
    group: LayerGroup,
    chunks: Chunks,
    block_ids: jax.Array,
    seq_ids: jax.Array,
    placed: _Placed,
    max_query_len: int,
) -> _ComposedColumns:
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
    return _ComposedColumns(exchange, is_written, exchange.need - num_back, is_lost, sources)


def _first_kept(
    group: LayerGroup, sources: _Sources, placed: _Placed, max_query_len: int
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
    placed: _Placed,
    nowhere: int,
) -> _Sources:
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
    return _Sources(
        blocks=blocks,
        offsets=jnp.where(is_composed, remainder(in_chunk, group.block_size), own_offsets),
        distance=of_chunk(placed.distance),
        is_missing=(is_composed | is_own) & (blocks == nowhere),
    )


def _moves(new: jax.Array, columns: _ComposedColumns, ok: jax.Array, nowhere: int) -> SpanMoves:
    """Lists the tokens that are moved into blocks of the rows bool[n], `new` i32[n, C] or their own."""
    sources, exchange = columns.sources, columns.exchange
    destination = jnp.where(exchange.is_taken, new, exchange.entries)
    destination = jnp.where(columns.is_written & ok[:, None], destination, nowhere)
    return SpanMoves(sources.blocks, sources.offsets, sources.distance, destination)
