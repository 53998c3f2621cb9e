"""The operation `compose`: puts chunks into rows after the tokens they hold, at any position."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import any_of, get_at, min_at, num_true, quotient, set_at
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import storage
from kvcache_jax.blocks.key_rotation import Rotate, rotations_of_groups
from kvcache_jax.blocks.moves import move_spans
from kvcache_jax.chunks import composed_columns
from kvcache_jax.chunks.composed_columns import ComposedColumns, Placed
from kvcache_jax.chunks.stored_chunks import Chunks, chunks_of, require_chunks, with_chunks
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockCopies, Cache, Control, mark_used
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.operations.exchange import carry_out, decide
from kvcache_jax.operations.extend import copy_tokens
from kvcache_jax.operations.rows import check_ids


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
    its last chunk, and `rewrite` computes again what the caller chooses: a chunk's tokens were computed
    without the row's tokens before them. Places between chunks hold zeros and no token: compute them before
    anything after them is.

    The row writes into blocks of its own: first blocks that `allocate` reserved, then others. The blocks of
    chunks do not change. A window layer holds of the row what it would after an `extend` of its last
    `max_query_len` places, as far as chunks have it; places out of reach take no block, and theirs are
    released. Such a row publishes no more than the tokens before its first chunk. Scarce blocks are assigned
    in entry order. Call it inside a donated jit: called eagerly it copies the pools.

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
      the row dropped tokens), TOO_LONG, WINDOW_LOST (the next token would read in a window what a chunk had
      lost when it was stored), OUT_OF_BLOCKS, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.

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
        composed_columns.find(pool, group, chunks, block_ids, seq_ids, placed, config.query_len_limit)
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
            moves = composed_columns.moves_to(new[g], columns, ok, group.num_blocks)
            cache = storage.with_pool(cache, g, move_spans(cache.pools[g], group, moves, rotations[g]))
    control = _note(control, seq_ids, rows, placed, config)
    return dataclasses.replace(cache, control=control), status


def _placed(
    control: Control, chunks: Chunks, seq_ids: jax.Array, chunk_ids: jax.Array, starts: jax.Array
) -> Placed:
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
    return Placed(chunk_ids, starts, ends, distance, context_len, new_len)


def _checked(
    control: Control,
    chunks: Chunks,
    seq_ids: jax.Array,
    asked_ids: jax.Array,
    placed: Placed,
    found: list[ComposedColumns],
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
    control: Control, seq_ids: jax.Array, rows: jax.Array, placed: Placed, config: CacheConfig
) -> Control:
    """Records the lengths of rows, and that what follows is no prefix."""
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
