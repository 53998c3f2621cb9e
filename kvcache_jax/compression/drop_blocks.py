"""The operation `drop_to_utilization`: drops old tokens of rows until enough blocks are free."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import first_true, get_at, quotient
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.compression.drop_tokens import drop_rows
from kvcache_jax.compression.streaming import Streaming, require_streaming
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.layers.span import ceil_div
from kvcache_jax.operations.preempt import groups_above, one_by_one, row_policies, rows_in_order


@takes_one
def drop_to_utilization(
    cache: Cache, target: ArrayLike, policy: str = "longest", *, streaming: Streaming | None = None
) -> tuple[Cache, jax.Array]:
    """Drops tokens of rows, one row after the other, until `utilization` is at most `target`.

    Rows go on: each drops whole blocks after its sinks, or after the tokens that it dropped before, oldest
    tokens first, no more than are needed (see `drop`). The call stops early when no row is left that frees a
    block on its own in a layer group that is above the target.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Dropping()])`, without prefix caching.
      target: f32[], share of referenced blocks, 0 to 1.
      policy: As in `select_rows_to_preempt`, by the blocks that dropping frees; asked again after each row.
      streaming: The tokens that rows keep. Default: `Streaming()`.

    Returns:
      The cache and i32[max_seqs], the rows that dropped tokens, in that order, then `max_seqs`.

    Raises:
      ValueError, TypeError: there is no such policy, `target` is not from 0 to 1 (unless it is traced), or
        the cache's rows cannot drop tokens.

    Example:
      >>> import kvcache_jax as kv
      >>> sizes = dict(num_blocks=8, max_seqs=4, max_seq_len=64, extras=[kv.compression.Dropping()])
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes))
      >>> cache, _ = kv.allocate(cache, [0, 1], [1, 60])
      >>> cache, _ = kv.extend(cache, [1, 60, 0, 0], max_new=60)
      >>> streaming = kv.compression.Streaming(window=4, num_sink_tokens=2)
      >>> cache, rows = kv.compression.drop_to_utilization(cache, 0.5, streaming=streaming)
      >>> rows.tolist(), float(kv.utilization(cache))
      ([1, 4, 4, 4], 0.5)
    """
    row_policies.find(policy)
    streaming = Streaming() if streaming is None else streaming
    require_streaming("drop_to_utilization", streaming, cache.config)
    target = arguments.fraction("target", target)
    control, rows = _drop(cache.control, target, policy=policy, streaming=streaming, config=cache.config)
    return dataclasses.replace(cache, control=control), rows


@functools.partial(jax.jit, static_argnames=("policy", "streaming", "config"))
def _drop(
    control: Control, target: jax.Array, policy: str, streaming: Streaming, config: CacheConfig
) -> tuple[Control, jax.Array]:
    def next_row(control: Control) -> tuple[jax.Array, jax.Array, jax.Array]:
        num_freed, start, length = _droppable(control, target, streaming, config)
        row = rows_in_order(control, num_freed, policy)[:1]
        return row, get_at(start, row, 0), get_at(length, row, 0)

    def drop_of(control: Control, row: jax.Array, start: jax.Array, length: jax.Array) -> Control:
        return drop_rows(control, row, start, length, config=config)[0]

    control, target = as_varied((control, target))
    return one_by_one(control, next_row, drop_of)


def _droppable(
    control: Control, target: jax.Array, streaming: Streaming, config: CacheConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the tokens of each row that lie in whole blocks after its sinks, and as few of them as will do.

    Counts the blocks of groups above the target that become free if all of these tokens are dropped; then the
    first of them in the text; then how many to drop, up to the first block with which all groups are at the
    target, or all. All are i32[max_seqs].
    """
    assert control.holes is not None
    holes, unit = control.holes, config.drop_unit
    start = jnp.where(holes.is_plain, ceil_div(streaming.num_sink_tokens, unit) * unit, holes.start)
    first = quotient(start + unit - 1, unit)  # in units, like the following
    end = jnp.maximum(quotient(control.context_len - streaming.window, unit), first)
    num_units = ceil_div(config.max_seq_len, unit)
    units = jnp.arange(num_units, dtype=jnp.int32)[None]
    is_droppable = (units >= first[:, None]) & (units < end[:, None])
    num_freed, is_enough = jnp.zeros_like(start), jnp.ones_like(is_droppable)
    is_above = groups_above(control, target)
    for g, group in config.row_groups.items():
        pool = control.block_pools[g]
        per_unit = unit // group.block_size
        is_own = block_pool.ref_counts(pool, pool.block_table) == 1
        is_own = jnp.pad(is_own, ((0, 0), (0, num_units * per_unit - pool.max_blocks_per_seq)))
        num_own = is_own.reshape(-1, num_units, per_unit).sum(axis=2, dtype=jnp.int32)
        freed = jnp.cumsum(jnp.where(is_droppable, num_own, 0), axis=1)
        num_freed += jnp.where(is_above[g], freed[:, -1], 0)
        is_enough &= block_pool.utilization(pool, freed) <= target
    end = jnp.minimum(jnp.where(is_enough.any(axis=1), first_true(is_enough) + 1, end), end) * unit
    start = jnp.maximum(start, holes.kept_until)
    return num_freed, start, jnp.maximum(end + holes.num_dropped - start, 0)
