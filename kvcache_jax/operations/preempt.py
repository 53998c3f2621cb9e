"""Preemption when blocks run short: rows are selected by a policy, and freed or cut down to a level.

Only the blocks that a row alone holds come free with it, so only these count.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import first_true, get_at, num_true, quotient
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool, sink_blocks
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.layer_kinds.span import ceil_div
from kvcache_jax.core.registry import Registry
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.streaming import Streaming, require_streaming
from kvcache_jax.operations.drop import drop_rows
from kvcache_jax.operations.free import free_rows

_MAX = jnp.iinfo(jnp.int32).max


class RowMetadata(NamedTuple):
    """The rows as a row policy sees them, one entry per row; entries of idle rows mean nothing.

    Attributes:
      idle: i32[max_seqs], ticks of the cache's clock since the row was used.
      num_uses: i32[max_seqs], calls that used the row.
      num_freed: i32[max_seqs], blocks that come free with the row: those that it alone holds.
      priority: i32[max_seqs].
      context_len: i32[max_seqs], tokens held.
    """

    idle: jax.Array
    num_uses: jax.Array
    num_freed: jax.Array
    priority: jax.Array
    context_len: jax.Array


RowKey = Callable[[RowMetadata], jax.Array]
_row_policies = Registry[RowKey]("a row policy", "row_policy", RowMetadata)


def row_policy(name: str) -> Callable[[RowKey], RowKey]:
    """Registers a function from `RowMetadata` to i32[max_seqs] keys as a policy of preemption.

    The row with the lowest key is preempted first, of equal ones the one that was used longest ago. The
    function is traced once per program.

    Args:
      name: For `select_rows_to_preempt` and `preempt_to_utilization`.

    Returns:
      The decorator; it passes the function through unchanged.

    Raises:
      ValueError, TypeError: the name is taken or no str.

    Example:
      >>> import kvcache_jax as kv
      >>> @kv.row_policy("shortest")
      ... def shortest(rows: kv.RowMetadata):
      ...     return rows.context_len
    """
    return _row_policies.decorate(name)


@row_policy("lru")
def _least_recently_used(rows: RowMetadata) -> jax.Array:
    return jnp.zeros_like(rows.idle)


@row_policy("lfu")
def _least_frequently_used(rows: RowMetadata) -> jax.Array:
    return rows.num_uses


@row_policy("longest")
def _most_blocks(rows: RowMetadata) -> jax.Array:
    return -rows.num_freed


@row_policy("priority")
def _lowest_priority(rows: RowMetadata) -> jax.Array:
    return rows.priority


@takes_one
def select_rows_to_preempt(cache: Cache, policy: str, n: int) -> jax.Array:
    """Selects the rows to preempt first; changes nothing.

    Args:
      cache: Not changed.
      policy: "lru" (used longest ago), "lfu" (used by the fewest calls), "longest" (frees the most blocks)
        "priority" (lowest), or a name registered with `row_policy`. Of equal rows the one used longest ago.
      n: Most rows to select.

    Returns:
      i32[n] rows, the first to go first. Rows that free nothing, because others hold all their blocks too,
      are left out; `max_seqs` stands where there are no more.

    Raises:
      ValueError: there is no such policy.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=4, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0, 1, 2], [20, 60, 1])
      >>> kv.select_rows_to_preempt(cache, "longest", 2).tolist()
      [1, 0]
    """
    _row_policies.find(policy, "policy")
    n = static_count("n", n, most=cache.max_seqs, most_name="max_seqs")
    return _select(cache.control, policy=policy)[:n]


@takes_one
def preempt_to_utilization(
    cache: Cache,
    target: ArrayLike,
    policy: str | None = None,
    *,
    strategy: str = "free",
    streaming: Streaming | None = None,
) -> tuple[Cache, jax.Array]:
    """Frees rows, or drops some of their tokens, row by row until `utilization` is at most `target`.

    Published blocks of these rows stay cached. The call stops early when no row is left that frees a block on
    its own in a layer group that is above the target.

    Args:
      cache: Not changed.
      target: f32[], share of referenced blocks, 0 to 1.
      policy: As in `select_rows_to_preempt`, by the blocks that the strategy frees; asked again after each
        row, for what rows share changes. Default: "lru", and "longest" of the strategy "streaming".
      strategy: "free" ends rows. "streaming" lets them go on: they drop whole blocks behind their sinks, or
        behind what they dropped before, oldest tokens first, no more than are needed (see `drop`).
      streaming: The tokens that rows keep by the strategy "streaming". Default: `Streaming()`.

    Returns:
      The cache and i32[max_seqs], the rows that gave blocks back, in that order, then `max_seqs`.

    Raises:
      ValueError, TypeError: there is no such policy or strategy, `target` is not from 0 to 1 (unless it is
        traced), or the cache's rows cannot drop tokens.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=4, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0, 1, 2], [20, 60, 1])
      >>> cache, dropped = kv.preempt_to_utilization(cache, 0.5, "longest")
      >>> dropped.tolist(), float(kv.utilization(cache))
      ([1, 4, 4, 4], 0.375)
    """
    if strategy not in _STRATEGIES:
        names = ", ".join(map(repr, _STRATEGIES))
        raise ValueError(f"strategy is {strategy!r}, expected one of {names}")
    policy = _STRATEGIES[strategy] if policy is None else policy
    _row_policies.find(policy, "policy")
    kept = None
    if strategy == "streaming":
        kept = Streaming() if streaming is None else streaming
        require_streaming("preempt_to_utilization", kept, cache.config)
    elif streaming is not None:
        raise ValueError(
            f"streaming is given and strategy is {strategy!r}, expected the strategy 'streaming' with it"
        )
    target = arguments.fraction("target", target)
    control, rows = _preempt_rows(cache.control, target, policy=policy, kept=kept, config=cache.config)
    return dataclasses.replace(cache, control=control), rows


_STRATEGIES = {"free": "lru", "streaming": "longest"}
"""How rows give blocks back, and the policy that selects them unless one is given."""


@functools.partial(jax.jit, static_argnames="policy")
def _select(control: Control, policy: str) -> jax.Array:
    return _in_order(control, _num_freed(control, [jnp.bool_(True)] * len(control.block_pools)), policy)


@functools.partial(jax.jit, static_argnames=("policy", "kept", "config"))
def _preempt_rows(
    control: Control, target: jax.Array, policy: str, kept: Streaming | None, config: CacheConfig
) -> tuple[Control, jax.Array]:
    control, target = as_varied((control, target))

    def next_row(control: Control) -> tuple[jax.Array, ...]:
        """Selects the row that gives blocks back now, or `max_seqs`; which tokens of it would be dropped."""
        is_above = [block_pool.utilization(pool) > target for pool in control.block_pools]
        start = length = control.context_len
        if kept is None:
            num_freed = _num_freed(control, is_above)
        else:
            num_freed, start, length = _droppable(control, is_above, target, kept, config)
        row = _in_order(control, num_freed, policy)[:1]
        return row, get_at(start, row, 0), get_at(length, row, 0)

    def preempt_one(state):
        control, rows, num_rows, (row, start, length) = state
        if kept is None:
            control, _ = free_rows(control, row, config=config)
        else:
            control, _ = drop_rows(control, row, start, length, config=config)
        return control, rows.at[num_rows].set(row[0]), num_rows + 1, next_row(control)

    # Made of the rows' lengths: inside shard_map a constant would differ from what the loop makes of it.
    rows = jnp.maximum(control.context_len & 0, control.max_seqs)
    state = control, rows, num_true(rows < 0), next_row(control)
    state = lax.while_loop(lambda state: state[3][0][0] < rows.shape[0], preempt_one, state)
    return state[:2]


def _droppable(
    control: Control, is_above: list[jax.Array], target: jax.Array, kept: Streaming, config: CacheConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the tokens of each row that lie in whole blocks behind its sinks, and as few of them as will do.

    Returns:
      i32[max_seqs], blocks of groups above the target that come free if all of these tokens go.
      i32[max_seqs], the first of them in the text.
      i32[max_seqs], how many go: up to the first block with which all groups are at the target, or all.
    """
    assert control.holes is not None
    holes, unit = control.holes, config.drop_unit
    start = jnp.where(holes.is_plain, ceil_div(kept.num_sink_tokens, unit) * unit, holes.start)
    first = quotient(start + unit - 1, unit)  # in units, like the following
    end = jnp.maximum(quotient(control.context_len - kept.window, unit), first)
    num_units = ceil_div(config.max_seq_len, unit)
    units = jnp.arange(num_units, dtype=jnp.int32)[None]
    is_droppable = (units >= first[:, None]) & (units < end[:, None])
    num_freed, is_enough = jnp.zeros_like(start), jnp.ones_like(is_droppable)
    for pool, group, counts in zip(control.block_pools, config.groups, is_above, strict=True):
        if group.holds_sources:
            continue
        per_unit = unit // group.block_size
        is_own = jnp.pad(_is_own(pool), ((0, 0), (0, num_units * per_unit - pool.max_blocks_per_seq)))
        num_own = is_own.reshape(-1, num_units, per_unit).sum(axis=2, dtype=jnp.int32)
        freed = jnp.cumsum(jnp.where(is_droppable, num_own, 0), axis=1)
        num_freed += jnp.where(counts, freed[:, -1], 0)
        is_enough &= block_pool.utilization(pool, freed) <= target
    end = jnp.minimum(jnp.where(is_enough.any(axis=1), first_true(is_enough) + 1, end), end) * unit
    start = jnp.maximum(start, holes.kept_until)
    return num_freed, start, jnp.maximum(end + holes.num_dropped - start, 0)


def _num_freed(control: Control, counts: list[jax.Array]) -> jax.Array:
    """Counts the blocks that each row alone holds, i32[max_seqs], in the groups where `counts` is true."""
    num_freed = jnp.zeros_like(control.context_len)
    for pool, is_counted in zip(control.block_pools, counts, strict=True):
        is_own = block_pool.ref_counts(pool, sink_blocks.all_entries(pool)) == 1
        num_freed += jnp.where(is_counted, jnp.sum(is_own, axis=1, dtype=jnp.int32), 0)
    return num_freed


def _is_own(pool: BlockPool) -> jax.Array:
    """Tells which entries of the table are blocks that their row alone holds, bool like the table."""
    return block_pool.ref_counts(pool, pool.block_table) == 1


def _in_order(control: Control, num_freed: jax.Array, policy: str) -> jax.Array:
    """Sorts the rows that free something, i32[max_seqs], the least valuable first, then `max_seqs`."""
    # The clock wraps around; the time since a row was used does not.
    idle = jnp.minimum(control.clock - control.last_used, jnp.uint32(_MAX)).astype(jnp.int32)
    num_uses = jnp.minimum(control.num_uses, jnp.uint32(_MAX)).astype(jnp.int32)
    rows = RowMetadata(idle, num_uses, num_freed, control.priority, control.context_len)
    keys = jnp.asarray(_row_policies.find(policy, "policy").function(rows))
    if keys.shape != num_freed.shape or not jnp.issubdtype(keys.dtype, jnp.signedinteger):
        raise TypeError(
            f"row policy {policy!r} returned {keys.dtype}{list(keys.shape)}, expected "
            f"int32{list(num_freed.shape)}: a key per row"
        )
    ids = jnp.arange(control.max_seqs, dtype=jnp.int32)
    is_spared = num_freed == 0
    *_, order = lax.sort((is_spared, keys.astype(jnp.int32), ~idle, ids), num_keys=3, is_stable=True)
    return jnp.where(ids < num_true(~is_spared), order, control.max_seqs)
