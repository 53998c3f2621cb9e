"""The operation `drop`: rows let tokens go from anywhere, and go on with the others."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient, read_first, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.operations.rows import check_ids, cut_composed, on_rows


@takes_one
@jax.named_scope("kvcache.drop")
def drop(cache: Cache, seq_ids: IntRows, start: IntRows, length: IntRows) -> tuple[Cache, jax.Array]:
    """Drops tokens from within rows: blocks that hold no others go back, and the rest is hidden.

    No query sees a dropped token again; no key moves, and the others stay as they are in the text: positions
    go on from it, and windows are as far as they are there. A row has one run of dropped tokens, which grows:
    drop all but the first and the last ones again and again, and an endless text passes through fixed memory
    (StreamingLLM). Once a row dropped tokens, `max_seq_len` bounds those that it holds. Whoever shares a
    block keeps it.

    Args:
      cache: Not changed; built with `CacheConfig(enable_drop=True)`.
      seq_ids: i32[n], active rows, each at most once.
      start: i32[n], position in the text of the first token to drop.
      length: i32[n], positions from there on, of which some may be dropped already; 0 changes nothing.

    Returns:
      The cache and status i32[n]: BAD_LENGTH (the run ends outside of the row, begins among the sinks of a
      layer kind or among what `compress` kept, or leaves tokens between it and those dropped before),
      SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError: the cache has no `enable_drop`, or has prefix caching.

    Example:
      >>> import kvcache_jax as kv
      >>> layers, sizes = [kv.FullAttention(1, 8)], dict(num_blocks=8, max_seqs=2, max_seq_len=64)
      >>> cache = kv.init(kv.CacheConfig(layers, enable_drop=True, **sizes))
      >>> cache, _ = kv.allocate(cache, [0], [60])
      >>> cache, _ = kv.extend(cache, [60, 0], max_new=60)
      >>> cache, status = kv.drop(cache, [0], [4], [40])  # of which 16 to 31 are a whole block
      >>> status.tolist(), cache.context_len.tolist(), kv.stats(cache).num_blocks_free.tolist()
      ([0], [44, 0], 5)

    References:
      Efficient Streaming Language Models with Attention Sinks (Xiao et al.; arXiv:2309.17453).
    """
    if not cache.config.enable_drop:
        raise ValueError(
            "drop needs a cache that may have dropped tokens, expected CacheConfig(enable_drop=True)"
        )
    if cache.config.enable_prefix_caching:
        raise ValueError(
            "drop got a cache with enable_prefix_caching=True, expected False: what a row holds behind "
            "dropped tokens cannot be found by its tokens"
        )
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    start = arguments.int_column("start", start, seq_ids.shape[0])
    length = arguments.int_column("length", length, seq_ids.shape[0])
    return on_rows(drop_rows, cache, seq_ids, start, length)


def drop_rows(
    control: Control, seq_ids: jax.Array, start: jax.Array, length: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Drops the tokens at `start` to `start + length` of the text of rows `seq_ids`, i32[n] all."""
    assert control.holes is not None
    before = control.holes.of_rows(seq_ids)
    context_len = get_at(control.context_len, seq_ids, 0)
    text_len = context_len + before.num_dropped
    first, end = before.start, before.end + before.num_dropped  # in the text
    is_plain = first == end
    is_apart = ~is_plain & ((start > end) | (start + length < first))
    is_kept = (before.num_kept > 0) & (start < before.start)
    is_outside = (length < 0) | (start < 0) | (length > text_len - start)
    num_sinks = max(group.span.num_sink_tokens for group in config.groups)
    status = first_failure(
        *check_ids(control, seq_ids),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (is_outside, Status.BAD_LENGTH),
        ((length > 0) & ((start < num_sinks) | is_apart | is_kept), Status.BAD_LENGTH),
    )
    rows = jnp.where((status == Status.OK) & (length > 0), seq_ids, control.max_seqs)
    first = jnp.where(is_plain, start, jnp.minimum(first, start))
    end = jnp.where(is_plain, start + length, jnp.maximum(end, start + length)) - before.num_dropped

    # Blocks go that are dropped whole in every group, so that places stay the same in all of them.
    unit = config.drop_unit
    first_gone = quotient(first + unit - 1, unit) * unit
    num_gone = jnp.maximum(quotient(end, unit) * unit - first_gone, 0)
    holes = dataclasses.replace(
        before, start=first, num_hidden=end - first - num_gone, num_dropped=before.num_dropped + num_gone
    )
    pools = tuple(
        pool if group.holds_sources else _without_columns(pool, group, rows, first_gone, num_gone)
        for pool, group in zip(control.block_pools, config.groups, strict=True)
    )
    return dataclasses.replace(
        control,
        context_len=set_at(control.context_len, rows, context_len - num_gone),
        holes=control.holes.with_rows(rows, holes),
        first_composed=cut_composed(control, rows, holes.plain_len),
        block_pools=pools,
    ), status


def _without_columns(
    pool: BlockPool, group: LayerGroup, rows: jax.Array, first: jax.Array, length: jax.Array
) -> BlockPool:
    """Releases the blocks of places `[first, first + length)` i32[n]; what is behind moves up to them."""
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)[None]
    first = quotient(first, group.block_size)[:, None]
    length = quotient(length, group.block_size)[:, None]
    source = columns + jnp.where(columns >= first, length, 0)
    entries = get_at(pool.block_table, rows, pool.num_blocks)
    kept = get_at(pool.block_table, (rows[:, None], source), pool.num_blocks)
    is_gone = (columns >= first) & (columns < first + length)
    pool = block_pool.release(pool, jnp.where(is_gone, entries, pool.num_blocks)[:, ::-1])
    # Read as a whole before it is written: XLA would shift the rows in place, over what it has yet to read.
    kept, table = read_first(kept, pool.block_table)
    return dataclasses.replace(pool, block_table=set_at(table, rows, kept))
