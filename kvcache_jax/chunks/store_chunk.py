"""Chunks that are stored from spans of rows, and found by their tokens."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import any_of, get_at, num_true, quotient, rank_true, remainder, set_at
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.blocks.moves import SpanMoves, move_spans
from kvcache_jax.chunks.chunk_store import Chunks, StoredChunks, chunks_of, require_chunks, with_chunks
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import fitting_rows
from kvcache_jax.operations.rows import prefix_len
from kvcache_jax.prefix import eviction


@takes_one
@jax.named_scope("kvcache.store_chunk")
def store_chunk(
    cache: Cache, seq_ids: IntRows, start: IntRows, length: IntRows, tokens: ArrayLike
) -> tuple[Cache, StoredChunks]:
    """Keeps spans of rows as chunks, in the rows' namespaces, under the names of their tokens.

    Blocks that lie within a span are shared with the row; where a span begins or ends inside a block, its
    tokens are copied. With prefix caching every block is copied, because a published block must follow its
    parent and a chunk has none. In a window layer the chunk keeps the tokens the row still holds. Rows do not
    change, and may be freed; a row that writes into a shared block copies it first. A chunk that is stored
    already stays as it is. Scarce blocks and places for chunks are assigned in entry order; of equal chunks
    of a call the first is stored, and the others have its outcome. Call it inside a donated jit: called
    eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated; built with `CacheConfig(extras=[Store(...)])`.
      seq_ids: i32[n], active rows, which may repeat; their keys and values of the spans are written.
      start: i32[n], first place of each span.
      length: i32[n], its tokens.
      tokens: i32[n, P], the tokens of the spans, at most `max_chunk_len`; padded at the end.

    Returns:
      The cache and `chunks.Stored` with `status`: BAD_LENGTH (no token, more than `max_chunk_len` or `tokens`
      have, outside the row, or after tokens that were composed or dropped, whose keys are not the original
      ones), WINDOW_LOST (a window released tokens of it that the token after the span reads), OUT_OF_CHUNKS,
      OUT_OF_BLOCKS, SEQ_NOT_ACTIVE, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> sizes = dict(num_blocks=8, max_seqs=2, max_seq_len=64, extras=[kv.chunks.Store(3, 40)])
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes))
      >>> cache, _ = kv.allocate(cache, [0], [60])
      >>> cache, _ = kv.extend(cache, [60, 0], max_new=60)
      >>> cache, stored = kv.chunks.store(cache, [0], [10], [30], [range(30)])
      >>> stored.chunk_ids.tolist(), int(kv.stats(cache).num_blocks_shared)
      ([0], 1)
      >>> cache, _ = kv.chunks.store(cache, [0], [0], [8], [range(8)])
      >>> cache, num_evicted = kv.chunks.evict(cache, 2)  # one place of three is empty
      >>> int(num_evicted), kv.chunks.find(cache, [range(30)], [30]).tolist()
      (1, [3])

    References:
      Cache-Craft (Agarwal et al.; arXiv:2502.15734), for chunks that are kept to be used at any position.
    """
    chunks = require_chunks("store_chunk", cache)
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    start = arguments.int_column("start", start, seq_ids.shape[0])
    length = arguments.int_column("length", length, seq_ids.shape[0])
    tokens = token_arguments.token_ids(tokens, seq_ids.shape[0], None)
    name = padded_name(tokens, chunks)
    return _store(cache, seq_ids, start, length, name, max_len=tokens.shape[1])


def padded_name(tokens: arguments.Array, chunks: Chunks) -> jax.Array:
    """Gives tokens i32[n, P] the width of the store."""
    num_more = chunks.tokens.shape[1] - tokens.shape[1]
    if num_more < 0:
        raise ValueError(
            f"tokens has {tokens.shape[1]} columns, expected at most max_chunk_len = {chunks.tokens.shape[1]}"
        )
    return jnp.pad(tokens, [(0, 0), (0, num_more)], constant_values=0)


class _StorePlan(NamedTuple):
    """The entries of a call."""

    stored: StoredChunks
    new_ids: jax.Array  # i32[n], chunks to store, else nowhere
    tokens: jax.Array  # i32[n, max_chunk_len], the names
    namespace: jax.Array  # u32[n, 4]
    columns: list["_Columns"]  # of each group


class _Columns(NamedTuple):
    """The blocks of spans in one layer group."""

    first: jax.Array  # i32[n], the row's first column with a token of the span
    entries: jax.Array  # i32[n, C], the row's blocks from there on
    is_shared: jax.Array  # bool[n, C], the chunk holds the row's block
    is_copied: jax.Array  # bool[n, C], it holds a block of its own with the tokens of the span
    is_lost: jax.Array  # bool[n], a window released tokens of it that the token after the span reads


@functools.partial(jax.jit, static_argnames="max_len")
def _store(
    cache: Cache,
    seq_ids: jax.Array,
    start: jax.Array,
    length: jax.Array,
    tokens: jax.Array,
    max_len: int,
) -> tuple[Cache, StoredChunks]:
    config = cache.config
    control, columns = as_varied((cache.control, (seq_ids, start, length, tokens)))
    seq_ids, start, length, tokens = columns
    plan = _plan(control, seq_ids, start, length, tokens, max_len, config)
    chunks = chunks_of(control)
    is_new = plan.new_ids < chunks.num_chunks
    needs = {g: num_true(columns.is_copied & is_new[:, None]) for g, columns in enumerate(plan.columns)}
    control = eviction.make_room(control, needs, config)
    cache = config.keeper.settle(dataclasses.replace(cache, control=control))
    control = cache.control
    pools, block_ids = [], []
    for g, (pool, group, columns) in enumerate(
        zip(control.block_pools, config.groups, plan.columns, strict=True)
    ):
        pool, copies = block_pool.take(pool, columns.is_copied & is_new[:, None])
        shared = jnp.where(columns.is_shared & is_new[:, None], columns.entries, pool.num_blocks)
        pools.append(block_pool.share(pool, shared))
        # One of the two is nowhere, which is greater than any id.
        block_ids.append(jnp.minimum(shared, copies))
        if cache.pools:
            moves = _moves(pool, group, columns, start, length, copies)
            cache = storage.with_pool(cache, g, move_spans(cache.pools[g], group, moves))
    chunks = dataclasses.replace(
        chunks,
        tokens=set_at(chunks.tokens, plan.new_ids, plan.tokens),
        length=set_at(chunks.length, plan.new_ids, length),
        start=set_at(chunks.start, plan.new_ids, start),
        namespace=set_at(chunks.namespace, plan.new_ids, plan.namespace),
        block_ids=tuple(
            set_at(old, plan.new_ids, new) for old, new in zip(chunks.block_ids, block_ids, strict=True)
        ),
        last_used=set_at(chunks.last_used, plan.new_ids, control.clock),
    )
    control = with_chunks(control, chunks, block_pools=tuple(pools))
    return dataclasses.replace(cache, control=control), plan.stored


def _plan(
    control: Control,
    seq_ids: jax.Array,
    start: jax.Array,
    length: jax.Array,
    tokens: jax.Array,
    max_len: int,
    config: CacheConfig,
) -> _StorePlan:
    """Decides which chunks are stored, in entry order where blocks or places are scarce."""
    chunks = chunks_of(control)
    columns = [
        _columns(pool, group, ids.shape[1], seq_ids, start, length, config)
        for pool, group, ids in zip(control.block_pools, config.groups, chunks.block_ids, strict=True)
    ]
    is_lost = any_of([of_group.is_lost for of_group in columns])
    status = _checked(control, seq_ids, start, length, is_lost, max_len, config)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # A name ends at `length`: equal passages have one name however the caller pads them.
    tokens = jnp.where(places[None] < length[:, None], tokens, 0)
    namespace = get_at(control.namespace, seq_ids)
    found = chunks.find(tokens, length, namespace)
    # A chunk that is stored already takes no block and no place, so scarcity cannot fail its entry.
    is_new = (status == Status.OK) & (found == chunks.num_chunks)

    # Of equal new chunks the first entry is stored; the others get its id, or its failure.
    is_same = is_new[None] & (length[:, None] == length[None])
    is_same &= (tokens[:, None] == tokens[None]).all(axis=-1)
    is_same &= (namespace[:, None] == namespace[None]).all(axis=-1)
    order = jnp.arange(length.shape[0], dtype=jnp.int32)
    leader = jnp.min(jnp.where(is_same, order[None], order.size), axis=1)
    wants = is_new & (leader == order)

    needs = [jnp.sum(of_group.is_copied, axis=1, dtype=jnp.int32) for of_group in columns]
    # A place in the store counts like a block of one more group: both are assigned in one entry order.
    needs = jnp.where(wants, jnp.stack([*needs, jnp.ones_like(length)]), 0)
    rank, num_empty = rank_true(chunks.length == 0)
    available = jnp.stack([*(block_pool.num_available(pool) for pool in control.block_pools), num_empty])
    ok = fitting_rows(available, needs, wants)

    # A failed entry for which a place was left lacked blocks.
    nth = rank_true(ok)[0]
    failure = jnp.where(nth < num_empty, jnp.int32(Status.OUT_OF_BLOCKS), jnp.int32(Status.OUT_OF_CHUNKS))
    ids = jnp.arange(chunks.num_chunks, dtype=jnp.int32)
    empty_ids = jnp.full_like(ids, chunks.num_chunks)
    empty_ids = set_at(empty_ids, jnp.where(chunks.length == 0, rank, chunks.num_chunks), ids)
    new_ids = jnp.where(ok, get_at(empty_ids, nth, chunks.num_chunks), chunks.num_chunks)
    outcome = jnp.where(ok, jnp.int32(Status.OK), failure)
    status = jnp.where(is_new, get_at(outcome, leader), status)
    chunk_ids = jnp.where(is_new, get_at(new_ids, leader), found)
    chunk_ids = jnp.where(status == Status.OK, chunk_ids, chunks.num_chunks)
    return _StorePlan(StoredChunks(status=status, chunk_ids=chunk_ids), new_ids, tokens, namespace, columns)


def _checked(
    control: Control,
    seq_ids: jax.Array,
    start: jax.Array,
    length: jax.Array,
    is_lost: jax.Array,
    max_len: int,
    config: CacheConfig,
) -> jax.Array:
    """Computes the status of each entry as far as blocks do not matter, i32[n]."""
    most = get_at(control.context_len, seq_ids, 0)
    most = prefix_len(control, seq_ids, most, config)
    is_length = (start >= 0) & (length > 0) & (length <= max_len) & (start <= most - length)
    return first_failure(
        ((seq_ids < 0) | (seq_ids > control.max_seqs), Status.BAD_SEQ_ID),
        (seq_ids == control.max_seqs, Status.SKIPPED),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (~is_length, Status.BAD_LENGTH),
        (is_lost, Status.WINDOW_LOST),
    )


def _columns(
    pool: BlockPool,
    group: LayerGroup,
    num_columns: int,
    seq_ids: jax.Array,
    start: jax.Array,
    length: jax.Array,
    config: CacheConfig,
) -> _Columns:
    """Finds the blocks of spans, and which of them a chunk can share."""
    start = jnp.maximum(start, 0)
    first, end = quotient(start, group.block_size), start + length
    columns = first[:, None] + jnp.arange(num_columns, dtype=jnp.int32)[None]
    entries = get_at(pool.block_table, (seq_ids[:, None], columns), pool.num_blocks)
    is_in = columns * group.block_size < end[:, None]
    is_lost = jnp.zeros_like(is_in)
    if group.window is not None:
        # A released block fails the entry only where the token after the span reads it. Elsewhere the chunk
        # lacks it, as the row does.
        is_read = is_in & ((columns + 1) * group.block_size > end[:, None] + 1 - group.window)
        is_lost = is_read & (entries == pool.num_blocks)
        is_in &= entries < pool.num_blocks
    is_whole = (columns * group.block_size >= start[:, None]) & (
        (columns + 1) * group.block_size <= end[:, None]
    )
    is_shared = is_in & is_whole & (not config.enable_prefix_caching)
    return _Columns(first, entries, is_shared, is_in & ~is_shared, is_lost.any(axis=1))


def _moves(
    pool: BlockPool,
    group: LayerGroup,
    columns: _Columns,
    start: jax.Array,
    length: jax.Array,
    copies: jax.Array,
) -> SpanMoves:
    """Lists the tokens of spans that are copied, each to its own place in a block of the chunk."""
    num_places = columns.entries.shape[1] * group.block_size
    places = jnp.arange(num_places, dtype=jnp.int32)
    in_row = columns.first[:, None] * group.block_size + places[None]
    is_in = (in_row >= start[:, None]) & (in_row < (start + length)[:, None])
    blocks = jnp.repeat(columns.entries, group.block_size, axis=1)
    offsets = jnp.broadcast_to(remainder(places, group.block_size)[None], blocks.shape)
    return SpanMoves(jnp.where(is_in, blocks, pool.num_blocks), offsets, None, copies)


@takes_one
@jax.named_scope("kvcache.find_chunks")
def find_chunks(
    cache: Cache, tokens: ArrayLike, num_tokens: IntRows, namespace: ArrayLike | None = None
) -> jax.Array:
    """Finds the chunks with exactly these tokens in a namespace; changes nothing.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      tokens: i32[n, P], the passages, padded at the end; P is at most `max_chunk_len`.
      num_tokens: i32[n], their lengths.
      namespace: u32[4] or u32[n, 4]. Default: all zero.

    Returns:
      i32[n], ids for `compose`; `num_chunks` where no such chunk is stored.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or shapes or dtypes that do not fit.
    """
    chunks = require_chunks("find_chunks", cache)
    num_tokens = arguments.int_column("num_tokens", num_tokens)
    tokens = token_arguments.token_ids(tokens, num_tokens.shape[0], None)
    namespaces = arguments.namespace_words(namespace, num_tokens.shape[0])
    most = np.int32(tokens.shape[1])
    return _find(chunks, padded_name(tokens, chunks), num_tokens, most, namespaces)


@jax.jit
def _find(
    chunks: Chunks, tokens: jax.Array, num_tokens: jax.Array, most: jax.Array, namespaces: jax.Array
) -> jax.Array:
    # Padding to the width of the store is no token that a caller named.
    num_tokens = jnp.where(num_tokens <= most, num_tokens, 0)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    named = jnp.where(places[None] < num_tokens[:, None], tokens, 0)
    return chunks.find(named, num_tokens, jnp.asarray(namespaces))
