"""The operation `compose`: chunks are put into rows, at any position."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, min_at, num_true, quotient, remainder, set_at
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.blocks.span_moves import SpanMoves, move_spans
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.chunks import Chunks, require_chunks
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.key_rotation import Rotate
from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.state import BlockCopies, BlockPool, Cache, Control, mark_used
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.operations.extend import copy_tokens
from kvcache_jax.operations.rows import check_ids, fitting_rows, num_blocks_for
from kvcache_jax.prefix import eviction


@takes_one
@jax.named_scope("kvcache.compose")
def compose(
    cache: Cache, seq_ids: IntRows, chunk_ids: Any, starts: Any, *, rotate: Rotate | None
) -> tuple[Cache, jax.Array]:
    """Puts chunks into rows behind the tokens they hold, with the keys rotated to their new positions.

    A key is rotated once, from the original one of the chunk, by its new position less the one it was
    computed for; a key that does not move keeps its bits, and so do all values. Afterwards a row ends with
    its last chunk, and `rewrite` computes again what the caller chooses: a chunk's tokens were computed
    without the row's tokens in front of them. Places between chunks hold zeros, which stand for no token:
    compute them before anything behind them is.

    The row writes into blocks of its own: those that `allocate` reserved, then others. The blocks of chunks
    do not change. Such a row publishes no more than the tokens in front of its first chunk. Scarce blocks go
    in entry order. Call it inside a donated jit: called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated; built with `CacheConfig(num_chunks=, max_chunk_len=)`.
      seq_ids: i32[n], active rows, each at most once.
      chunk_ids: i32[n, K], chunks of the row's namespace, which may repeat; `num_chunks` for none. A row
        with none is left alone, even an idle one.
      starts: i32[n, K], the place of each chunk's first token.
      rotate: `rotate(keys f32[..., heads, head_dim], distance i32[...])` returns the keys rotated by so many
        positions, such as a `key_rotation`; the same function again is the same program. None for a model
        whose keys know no position.

    Returns:
      The cache and status i32[n]: BAD_CHUNK_ID, BAD_LENGTH (chunks overlap, or begin before the row's end, or
      the row dropped tokens), TOO_LONG, OUT_OF_BLOCKS, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, a `rotate` that is no function or returns
        another shape, or shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> sizes = dict(num_blocks=8, max_seqs=2, max_seq_len=64, num_chunks=3, max_chunk_len=40)
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes))
      >>> cache, _ = kv.allocate(cache, [0, 1], [30, 1])
      >>> cache, _ = kv.extend(cache, [30, 1], max_new=30)
      >>> cache, stored = kv.store_chunk(cache, [0], [0], [30], [range(30)])
      >>> rotate = kv.key_rotation([1.0, 0.1, 0.01, 0.001], max_distance=64)
      >>> cache, status = kv.compose(cache, [1], [[0, 0]], [[31, 1]], rotate=rotate)
      >>> status.tolist(), cache.context_len.tolist()
      ([0], [30, 61])

    References:
      Cache-Craft (Agarwal et al.; arXiv:2502.15734) and CacheBlend (Yao et al.; arXiv:2405.16444).
    """
    require_chunks("compose", cache.control.chunks)
    if rotate is not None and not callable(rotate):
        raise TypeError(f"rotate is {rotate!r}, expected a function of keys and distances, or None")
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    chunk_ids = arguments.saturated("chunk_ids", chunk_ids)
    starts = arguments.saturated("starts", starts)
    for name, values in ("chunk_ids", chunk_ids), ("starts", starts):
        if values.ndim != 2 or values.shape != (seq_ids.shape[0], chunk_ids.shape[1]):
            raise ValueError(
                f"{name} has shape {values.shape}, expected ({seq_ids.shape[0]}, K), a line of chunks per row"
            )
    return _compose(cache, seq_ids, chunk_ids, starts, rotate=rotate)


class _Placed(NamedTuple):
    """Chunks and their places in rows, `[n, K]`.

    Attributes:
      chunk_ids: i32, nowhere for none.
      starts: i32, first place.
      ends: i32, one past the last place; 0 for none.
      distance: i32, positions that the keys move by.
      context_len: i32[n], tokens in front of all of them.
      new_len: i32[n], places of the row afterwards.
    """

    chunk_ids: jax.Array
    starts: jax.Array
    ends: jax.Array
    distance: jax.Array
    context_len: jax.Array
    new_len: jax.Array


@functools.partial(jax.jit, static_argnames="rotate")
def _compose(
    cache: Cache, seq_ids: jax.Array, chunk_ids: jax.Array, starts: jax.Array, rotate: Rotate | None
) -> tuple[Cache, jax.Array]:
    config = cache.config
    control, (seq_ids, chunk_ids, starts) = as_varied((cache.control, (seq_ids, chunk_ids, starts)))
    chunks = control.chunks
    assert chunks is not None
    placed = _placed(control, chunks, seq_ids, chunk_ids, starts)
    status = _checked(control, chunks, seq_ids, chunk_ids, placed, config)
    wants = (status == Status.OK) & (placed.chunk_ids < chunks.num_chunks).any(axis=1)
    found = [
        _columns(pool, group, seq_ids, placed)
        for pool, group in zip(control.block_pools, config.groups, strict=True)
    ]
    needs = jnp.stack([jnp.sum(columns.is_taken, axis=1, dtype=jnp.int32) for columns in found])
    available = jnp.stack([block_pool.num_available(pool) for pool in control.block_pools])
    ok = fitting_rows(available, jnp.where(wants, needs, 0), wants)
    status = jnp.where(wants & ~ok, jnp.int32(Status.OUT_OF_BLOCKS), status)
    rows = jnp.where(ok, seq_ids, control.max_seqs)
    if control.prefix_index is not None:
        num_new = [num_true(columns.is_taken & ok[:, None]) for columns in found]
        control = eviction.make_room(control, num_new, config)
    pools = []
    for g, (pool, group, columns) in enumerate(zip(control.block_pools, config.groups, found, strict=True)):
        pool, destination = _replace(pool, rows, columns)
        pools.append(pool)
        if g == config.indexed_group:
            control = _keep_recorded(control, columns, destination)
        if cache.pools:
            moves = _moves(chunks.block_ids[g], chunks, group, columns, placed, destination, pool.num_blocks)
            cache = storage.with_pool(cache, g, move_spans(cache.pools[g], group, moves, rotate))
    control = dataclasses.replace(control, block_pools=tuple(pools))
    control = _note(control, seq_ids, rows, placed, config)
    return dataclasses.replace(cache, control=control), status


def _placed(
    control: Control, chunks: Chunks, seq_ids: jax.Array, chunk_ids: jax.Array, starts: jax.Array
) -> _Placed:
    """Finds the places of chunks in rows; sums that would overflow are cut, for they are refused anyhow."""
    is_chunk = get_at(chunks.length, chunk_ids, 0) > 0
    chunk_ids = jnp.where(is_chunk, chunk_ids, chunks.num_chunks)
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
        is_bad |= ~control.holes.of_rows(seq_ids).is_plain
    asks = asks.any(axis=1)
    return first_failure(
        *check_ids(control, seq_ids, mask=asks),
        (asks & ~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (is_bad_id.any(axis=1), Status.BAD_CHUNK_ID),
        (asks & is_bad, Status.BAD_LENGTH),
        (placed.new_len > config.max_seq_len, Status.TOO_LONG),
    )


class _Columns(NamedTuple):
    """The columns of rows of one layer group that get tokens, `[n, C]`.

    Attributes:
      entries: i32, the row's blocks before.
      is_written: bool.
      is_taken: bool, it needs another block: it has none, or one that others hold or that is published.
    """

    entries: jax.Array
    is_written: jax.Array
    is_taken: jax.Array


def _columns(pool: BlockPool, group: LayerGroup, seq_ids: jax.Array, placed: _Placed) -> _Columns:
    """Finds the columns from the row's last token on, and the blocks that may be written there."""
    entries = get_at(pool.block_table, seq_ids, pool.num_blocks)
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)[None]
    is_written = columns >= quotient(placed.context_len, group.block_size)[:, None]
    is_written &= columns < num_blocks_for(placed.new_len, group.block_size)[:, None]
    is_own = (block_pool.ref_counts(pool, entries) == 1) & ~block_pool.is_published(pool, entries)
    return _Columns(entries, is_written, is_written & ~is_own)


def _replace(pool: BlockPool, rows: jax.Array, columns: _Columns) -> tuple[BlockPool, jax.Array]:
    """Takes the blocks of `rows`, and releases those that they leave.

    Returns:
      The pool; and i32[n, C], the blocks that get tokens, or nowhere.
    """
    nowhere, is_row = pool.num_blocks, (rows < pool.block_table.shape[0])[:, None]
    pool, new = block_pool.take(pool, columns.is_taken & is_row)
    table = jnp.where(columns.is_taken, new, columns.entries)
    pool = block_pool.release(pool, jnp.where(columns.is_taken & is_row, columns.entries, nowhere)[:, ::-1])
    destination = jnp.where(columns.is_written & is_row, table, nowhere)
    return dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, table)), destination


def _keep_recorded(control: Control, columns: _Columns, destination: jax.Array) -> Control:
    """Notes that blocks in place of others hold the tokens that those held."""
    if (index := control.prefix_index) is None:
        return control
    nowhere = index.parent.shape[0]
    new = jnp.where(columns.is_taken & (columns.entries < nowhere), destination, nowhere)
    copied = BlockCopies(columns.entries.reshape(-1), new.reshape(-1), num_true(new < nowhere))
    index = dataclasses.replace(index, block_tokens=copy_tokens(index.block_tokens, copied))
    return dataclasses.replace(control, prefix_index=index)


def _moves(
    block_ids: jax.Array,
    chunks: Chunks,
    group: LayerGroup,
    columns: _Columns,
    placed: _Placed,
    destination: jax.Array,
    nowhere: int,
) -> SpanMoves:
    """Lists where the token at each place of rows comes from: the row's own block, a chunk, or nowhere."""
    num_places = destination.shape[1] * group.block_size
    places = jnp.arange(num_places, dtype=jnp.int32)[None]
    covers = (places[..., None] >= placed.starts[:, None]) & (places[..., None] < placed.ends[:, None])

    def of_chunk(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(covers, values[:, None], 0), axis=-1, dtype=jnp.int32)

    is_composed = covers.any(axis=-1)
    chunk_ids = jnp.where(is_composed, of_chunk(placed.chunk_ids), chunks.num_chunks)
    first = get_at(chunks.start, chunk_ids, 0)
    in_chunk = remainder(first, group.block_size) + places - of_chunk(placed.starts)
    in_chunk = jnp.where(is_composed, in_chunk, 0)
    from_chunk = get_at(block_ids, (chunk_ids, quotient(in_chunk, group.block_size)), nowhere)
    own = jnp.where(
        places < placed.context_len[:, None],
        jnp.repeat(columns.entries, group.block_size, axis=1),
        jnp.int32(nowhere),
    )
    own_offsets = jnp.broadcast_to(remainder(places, group.block_size), own.shape)
    return SpanMoves(
        blocks=jnp.where(is_composed, from_chunk, own),
        offsets=jnp.where(is_composed, remainder(in_chunk, group.block_size), own_offsets),
        distance=of_chunk(placed.distance),
        destination=destination,
    )


def _note(
    control: Control, seq_ids: jax.Array, rows: jax.Array, placed: _Placed, config: CacheConfig
) -> Control:
    """Notes the lengths of rows, and that what follows is no prefix."""
    assert control.first_composed is not None
    first = get_at(control.first_composed, seq_ids, 0)
    first = jnp.where(first > 0, first, placed.context_len + 1)
    num_full = quotient(placed.context_len, config.groups[config.indexed_group].block_size)
    control = mark_used(control, rows, context_len=placed.new_len, first_composed=first)
    is_row = (rows < control.max_seqs)[:, None]
    chunks = control.chunks
    assert chunks is not None
    return dataclasses.replace(
        control,
        num_published=min_at(control.num_published, rows, num_full),
        chunks=chunks.used(jnp.where(is_row, placed.chunk_ids, chunks.num_chunks), control.clock),
    )
