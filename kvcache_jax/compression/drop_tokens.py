"""The operation `drop`: drops tokens from within rows, which go on with the others."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient, read_first, remainder, set_at
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.blocks.key_rotation import Rotate, rotations_of_groups
from kvcache_jax.blocks.moves import SpanMoves, move_spans
from kvcache_jax.compression.dropping import (
    keep_first,
    original_sinks,
    reads_rotated,
    require_dropping,
    with_original_sinks,
)
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange, carry_out, decide
from kvcache_jax.operations.rows import check_ids, num_blocks_for, on_rows

TEXT, CACHE = "text", "cache"


@takes_one
@jax.named_scope("kvcache.drop")
def drop(
    cache: Cache,
    seq_ids: IntRows,
    start: IntRows,
    length: IntRows,
    *,
    positions: str = TEXT,
    rotate: Rotate | Sequence[Rotate | None] | None = None,
) -> tuple[Cache, jax.Array]:
    """Drops tokens from within rows: releases blocks that hold no others, and hides the rest.

    No query sees a dropped token again, and the others stay as they are in the text: positions go on from it,
    and windows are as far as they are there. A row has one run of dropped tokens, which grows: drop all but
    the first and the last ones again and again, and an endless text passes through fixed memory
    (StreamingLLM). Once a row dropped tokens, `max_seq_len` bounds the tokens that it holds. Other rows
    keep the blocks they share with it.

    With `positions="text"` no key moves. With "cache" queries find the tokens before the run, the sinks,
    as near as if there had never been a run: their keys are rotated by the tokens dropped, each time from the
    original ones. The row keeps these in blocks beside its own; `truncate` into the sinks puts them back.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Dropping()])`.
      seq_ids: i32[n], active rows, each at most once.
      start: i32[n], position in the text of the first token to drop.
      length: i32[n], positions from there on, of which some may be dropped already; 0 changes nothing.
      positions: "text" or "cache", the places that queries find sinks at. Rows whose sinks "cache" has
        rotated go on by it. Call "cache" inside a donated jit: called eagerly it copies the pools.
      rotate: With "cache", a function that returns keys f32`[..., heads, head_dim]` rotated by distances
        i32`[...]`, such as a `key_rotation`, or a list with one per layer.

    Returns:
      The cache and status i32[n]: BAD_LENGTH (the run ends outside of the row, begins among the sinks of a
      layer kind, leaves tokens between it and those dropped before, or, in a row with tokens that `compress`
      kept, begins in the text that these and dropped ones are from; with "text" also: of a row whose sinks
      "cache" has rotated; with "cache": more than `max_sink_len` tokens before it, or some that `compress`
      kept),
      OUT_OF_BLOCKS ("cache": no block for the sinks beside the original ones), SEQ_NOT_ACTIVE,
      DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError, TypeError: the cache has no `Dropping`, or has prefix caching; "cache" without a
        `max_sink_len` or a function `rotate`.

    Example:
      >>> import kvcache_jax as kv
      >>> layers, sizes = [kv.FullAttention(1, 8)], dict(num_blocks=8, max_seqs=2, max_seq_len=64)
      >>> cache = kv.init(kv.CacheConfig(layers, extras=[kv.compression.Dropping()], **sizes))
      >>> cache, _ = kv.allocate(cache, [0], [60])
      >>> cache, _ = kv.extend(cache, [60, 0], max_new=60)
      >>> cache, status = kv.compression.drop(cache, [0], [4], [40])  # of which 16 to 31 are a whole block
      >>> status.tolist(), cache.context_len.tolist(), kv.stats(cache).num_blocks_free.tolist()
      ([0], [44, 0], 5)

    References:
      Efficient Streaming Language Models with Attention Sinks (Xiao et al.; arXiv:2309.17453).
    """
    dropping = require_dropping("drop", cache.config)
    if cache.config.enable_prefix_caching:
        raise ValueError(
            "drop got a cache with enable_prefix_caching=True, expected False: what a row holds after "
            "dropped tokens cannot be found by its tokens"
        )
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    start = arguments.int_column("start", start, seq_ids.shape[0])
    length = arguments.int_column("length", length, seq_ids.shape[0])
    if not isinstance(positions, str) or positions not in (TEXT, CACHE):
        raise ValueError(f'positions is {positions!r}, expected "text" or "cache"')
    if positions == TEXT:
        if rotate is not None:
            raise ValueError(
                'rotate is given with positions="text", expected positions="cache": no key moves'
            )
        return on_rows(drop_rows, cache, seq_ids, start, length)
    if dropping.max_sink_len is None:
        raise ValueError(
            'drop got positions="cache" and a cache without blocks for original sinks, expected '
            "CacheConfig(extras=[kv.compression.Dropping(max_sink_len=...)])"
        )
    if rotate is None:
        raise TypeError('rotate is None with positions="cache", expected a function, such as a key_rotation')
    rotations = rotations_of_groups(rotate, cache.config)
    return _drop_and_rotate(
        cache, seq_ids, start, length, rotations=rotations, max_sink_len=dropping.max_sink_len
    )


def drop_rows(
    control: Control, seq_ids: jax.Array, start: jax.Array, length: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Drops the tokens at `start` to `start + length` of the text of rows `seq_ids`, i32[n] all."""
    is_moved = reads_rotated(control, seq_ids)
    plan = _plan(control, seq_ids, start, length, is_moved, config)
    return _without_tokens(control, plan, config), plan.status


class _SinkColumns(NamedTuple):
    """The columns of rows of one layer group that hold sinks, `[n, C]`."""

    read: jax.Array  # i32, the blocks that the row reads
    original: jax.Array  # i32, blocks with the original keys, which the row may read so far
    # The rotated keys need a block where the sinks move for the first time, or where others read theirs,
    # which the row then releases; original blocks are held on.
    exchange: Exchange


class _DropPlan(NamedTuple):
    """Rows and the tokens that they drop, i32[n]."""

    status: jax.Array
    rows: jax.Array  # rows that drop something, else `max_seqs`
    holes: Holes  # of the rows afterwards
    context_len: jax.Array  # before
    first_gone: jax.Array  # first place whose block is released
    num_gone: jax.Array  # places of blocks that are released


def _plan(
    control: Control,
    seq_ids: jax.Array,
    start: jax.Array,
    length: jax.Array,
    is_refused: jax.Array | bool,
    config: CacheConfig,
) -> _DropPlan:
    """Decides which tokens rows drop, of i32[n] all; rows that are refused, bool[n], drop none."""
    assert control.holes is not None
    before = control.holes.of_rows(seq_ids)
    context_len = get_at(control.context_len, seq_ids, 0)
    text_len = context_len + before.num_dropped
    first, end = before.start, before.end + before.num_dropped  # in the text
    is_plain = before.is_plain
    # A row has one run: `Holes` has no room for a second, so a new one must touch the old.
    is_apart = ~is_plain & ((start > end) | (start + length < first))
    # Kept tokens have no known position in the text, so no position among them can be dropped.
    is_kept = start < before.kept_until
    # By difference: the sum of start and length could overflow.
    is_outside = (length < 0) | (start < 0) | (length > text_len - start)
    num_sinks = max(group.span.num_sink_tokens for group in config.groups)
    status = first_failure(
        *check_ids(control, seq_ids),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (is_outside, Status.BAD_LENGTH),
        ((length > 0) & ((start < num_sinks) | is_apart | is_kept | is_refused), Status.BAD_LENGTH),
    )
    rows = jnp.where((status == Status.OK) & (length > 0), seq_ids, control.max_seqs)
    first = jnp.where(is_plain, start, jnp.minimum(first, start))
    # From here on `end` is a place again: the tokens dropped before have none.
    end = jnp.where(is_plain, start + length, jnp.maximum(end, start + length)) - before.num_dropped

    # Only blocks dropped whole in every group are released, so that places stay the same in all of them.
    unit = config.drop_unit
    first_gone = quotient(first + unit - 1, unit) * unit
    num_gone = jnp.maximum(quotient(end, unit) * unit - first_gone, 0)
    holes = dataclasses.replace(
        before, start=first, num_hidden=end - first - num_gone, num_dropped=before.num_dropped + num_gone
    )
    return _DropPlan(status, rows, holes, context_len, first_gone, num_gone)


def _without_tokens(control: Control, plan: _DropPlan, config: CacheConfig) -> Control:
    """Carries a plan out: releases its blocks, and records the tokens that rows dropped."""
    assert control.holes is not None
    pools = list(control.block_pools)
    for g, group in config.row_groups.items():
        pools[g] = _without_columns(pools[g], group, plan.rows, plan.first_gone, plan.num_gone)
    control = dataclasses.replace(
        control,
        context_len=set_at(control.context_len, plan.rows, plan.context_len - plan.num_gone),
        holes=control.holes.with_rows(plan.rows, plan.holes),
        block_pools=tuple(pools),
    )
    # Columns after the run's first place hold no sinks, so their originals are released.
    num_columns = [num_blocks_for(plan.holes.start, group.block_size) for group in config.groups]
    control = keep_first(control, plan.rows, num_columns)
    return config.hooks.move(control, plan.rows, plan.holes.prefix_len)


@functools.partial(jax.jit, static_argnames=("rotations", "max_sink_len"))
def _drop_and_rotate(
    cache: Cache,
    seq_ids: jax.Array,
    start: jax.Array,
    length: jax.Array,
    rotations: tuple[Rotate | None, ...],
    max_sink_len: int,
) -> tuple[Cache, jax.Array]:
    """Drops tokens, and rotates the sinks before them."""
    config = cache.config
    control, (seq_ids, start, length) = as_varied((cache.control, (seq_ids, start, length)))
    plan = _plan(control, seq_ids, start, length, False, config)
    num_sinks = plan.holes.start
    wants = plan.rows < control.max_seqs
    is_bad = wants & ((num_sinks > max_sink_len) | (plan.holes.num_kept > 0))
    wants &= ~is_bad
    sinks, groups = original_sinks(control), config.row_groups
    assert sinks is not None
    block_ids = list(sinks.block_ids)
    columns = {
        g: _sink_columns(control.block_pools[g], block_ids[g], group, seq_ids, num_sinks)
        for g, group in groups.items()
    }
    exchanges = {g: found.exchange for g, found in columns.items()}
    status = jnp.where(is_bad, jnp.int32(Status.BAD_LENGTH), plan.status)
    needs = {g: exchange.need for g, exchange in exchanges.items()}
    ok, status = decide(control, needs, wants, status)
    plan = plan._replace(status=status, rows=jnp.where(ok, plan.rows, control.max_seqs))

    control, new = carry_out(control, plan.rows, exchanges, config)
    cache = config.keeper.settle(dataclasses.replace(cache, control=control))
    control = cache.control
    distance = plan.holes.num_hidden + plan.holes.num_dropped
    lens = num_sinks, plan.context_len, distance
    for g, group in groups.items():
        block_ids[g], moves = _rotate_sinks(block_ids[g], group, plan.rows, columns[g], new[g], *lens)
        if cache.pools:
            cache = storage.with_pool(cache, g, move_spans(cache.pools[g], group, moves, rotations[g]))
    control = with_original_sinks(control, control.block_pools, tuple(block_ids))
    return dataclasses.replace(cache, control=_without_tokens(control, plan, config)), plan.status


def _without_columns(
    pool: BlockPool, group: LayerGroup, rows: jax.Array, first: jax.Array, length: jax.Array
) -> BlockPool:
    """Releases the blocks of places `[first, first + length)` i32[n]; the columns after them move up."""
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)[None]
    first = quotient(first, group.block_size)[:, None]
    length = quotient(length, group.block_size)[:, None]
    source = columns + jnp.where(columns >= first, length, 0)
    entries = get_at(pool.block_table, rows, pool.num_blocks)
    kept = get_at(pool.block_table, (rows[:, None], source), pool.num_blocks)
    is_gone = (columns >= first) & (columns < first + length)
    pool = block_pool.release(pool, jnp.where(is_gone, entries, pool.num_blocks)[:, ::-1])
    # Read as a whole before it is written: XLA would shift rows in place, over columns it has yet to read.
    kept, table = read_first(kept, pool.block_table)
    return dataclasses.replace(pool, block_table=set_at(table, rows, kept))


def _sink_columns(
    pool: BlockPool, block_ids: jax.Array, group: LayerGroup, seq_ids: jax.Array, num_sinks: jax.Array
) -> _SinkColumns:
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
    return _SinkColumns(
        read=jnp.where(is_sink, read, pool.num_blocks),
        original=jnp.where(is_first, read, jnp.where(is_sink, kept, pool.num_blocks)),
        exchange=Exchange(entries, is_taken, is_released=is_taken & ~is_first),
    )


def _rotate_sinks(
    block_ids: jax.Array,
    group: LayerGroup,
    rows: jax.Array,
    found: _SinkColumns,
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
