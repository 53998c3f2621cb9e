"""Preemption when blocks run short: rows are selected by a policy, and freed down to a level.

Only the blocks that a row alone holds become free with it, so only these count.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import num_true
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.registry import Registry
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.operations.free import free_rows

_MAX = jnp.iinfo(jnp.int32).max


class RowMetadata(NamedTuple):
    """The rows as a row policy sees them, one entry per row; entries of idle rows mean nothing.

    Attributes:
      idle: i32[max_seqs], ticks of the cache's clock since the row was used.
      num_uses: i32[max_seqs], calls that used the row.
      num_freed: i32[max_seqs], blocks that become free with the row, because it alone holds them.
      priority: i32[max_seqs].
      context_len: i32[max_seqs], tokens held.
    """

    idle: jax.Array
    num_uses: jax.Array
    num_freed: jax.Array
    priority: jax.Array
    context_len: jax.Array


RowKey = Callable[[RowMetadata], jax.Array]
row_policies = Registry[RowKey]("a row policy", "policies.row_policy", "policy", RowMetadata)


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
      >>> @kv.policies.row_policy("shortest")
      ... def shortest(rows: kv.policies.RowMetadata):
      ...     return rows.context_len
    """
    return row_policies.decorate(name)


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
      i32[n] rows, the first to be preempted first. Rows that free nothing, because others hold all their
      blocks too, are left out; `max_seqs` fills the rest.

    Raises:
      ValueError: there is no such policy.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=4, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0, 1, 2], [20, 60, 1])
      >>> kv.select_rows_to_preempt(cache, "longest", 2).tolist()
      [1, 0]
    """
    row_policies.find(policy)
    n = static_count("n", n, most=cache.max_seqs, most_name="max_seqs")
    return _select(cache.control, policy=policy, config=cache.config)[:n]


@takes_one
def preempt_to_utilization(cache: Cache, target: ArrayLike, policy: str = "lru") -> tuple[Cache, jax.Array]:
    """Frees rows one by one until `utilization` is at most `target`.

    Published blocks of these rows stay cached. The call stops early when no row is left that frees a block on
    its own in a layer group that is above the target.

    Args:
      cache: Not changed.
      target: f32[], share of referenced blocks, 0 to 1.
      policy: As in `select_rows_to_preempt`; asked again after each row, for shared blocks change.

    Returns:
      The cache and i32[max_seqs], the rows that were freed, in that order, then `max_seqs`.

    Raises:
      ValueError, TypeError: there is no such policy, or `target` is not from 0 to 1 (unless it is traced).

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=4, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0, 1, 2], [20, 60, 1])
      >>> cache, freed = kv.preempt_to_utilization(cache, 0.5, "longest")
      >>> freed.tolist(), float(kv.utilization(cache))
      ([1, 4, 4, 4], 0.375)
    """
    row_policies.find(policy)
    target = arguments.fraction("target", target)
    control, rows = _free_rows(cache.control, target, policy=policy, config=cache.config)
    return dataclasses.replace(cache, control=control), rows


@functools.partial(jax.jit, static_argnames=("policy", "config"))
def _select(control: Control, policy: str, config: CacheConfig) -> jax.Array:
    is_counted = [jnp.bool_(True)] * len(control.block_pools)
    return rows_in_order(control, num_freed_by(control, is_counted, config), policy)


@functools.partial(jax.jit, static_argnames=("policy", "config"))
def _free_rows(
    control: Control, target: jax.Array, policy: str, config: CacheConfig
) -> tuple[Control, jax.Array]:
    def next_row(control: Control) -> tuple[jax.Array]:
        num_freed = num_freed_by(control, groups_above(control, target), config)
        return (rows_in_order(control, num_freed, policy)[:1],)

    def free_row(control: Control, row: jax.Array) -> Control:
        return free_rows(control, row, config=config)[0]

    control, target = as_varied((control, target))
    return one_by_one(control, next_row, free_row)


def groups_above(control: Control, target: jax.Array) -> list[jax.Array]:
    """Masks the layer groups that are above a utilization, bool[] each."""
    return [block_pool.utilization(pool) > target for pool in control.block_pools]


def one_by_one(
    control: Control,
    next_row: Callable[[Control], tuple[jax.Array, ...]],
    take_back: Callable[..., Control],
) -> tuple[Control, jax.Array]:
    """Takes blocks back from rows, one after the other, while `next_row` names one.

    `next_row` returns i32[1], `max_seqs` for no row, and further arguments of `take_back`. The rows are
    returned in that order, i32[max_seqs], then `max_seqs`.
    """

    def preempt_one(state):
        control, rows, num_rows, (row, *more) = state
        control = take_back(control, row, *more)
        return control, rows.at[num_rows].set(row[0]), num_rows + 1, next_row(control)

    # Made of the rows' lengths: inside shard_map a constant would differ in type from the loop's result.
    rows = jnp.maximum(control.context_len & 0, control.max_seqs)
    state = control, rows, num_true(rows < 0), next_row(control)
    state = lax.while_loop(lambda state: state[3][0][0] < rows.shape[0], preempt_one, state)
    return state[:2]


def num_freed_by(control: Control, counts: list[jax.Array], config: CacheConfig) -> jax.Array:
    """Counts the blocks that each row alone holds, i32[max_seqs], in the groups where `counts` is true."""
    num_freed = jnp.zeros_like(control.context_len)
    for g, (pool, is_counted) in enumerate(zip(control.block_pools, counts, strict=True)):
        is_own = block_pool.ref_counts(pool, config.hooks.blocks_of_rows(control, g)) == 1
        num_freed += jnp.where(is_counted, jnp.sum(is_own, axis=1, dtype=jnp.int32), 0)
    return num_freed


def rows_in_order(control: Control, num_freed: jax.Array, policy: str) -> jax.Array:
    """Sorts the rows that free something, i32[max_seqs], the least valuable first, then `max_seqs`."""
    # The clock wraps around; the time since a row was used does not.
    idle = jnp.minimum(control.clock - control.last_used, jnp.uint32(_MAX)).astype(jnp.int32)
    num_uses = jnp.minimum(control.num_uses, jnp.uint32(_MAX)).astype(jnp.int32)
    rows = RowMetadata(idle, num_uses, num_freed, control.priority, control.context_len)
    keys = row_policies.call(policy, rows, num_freed.shape, dtype=jnp.int32)
    ids = jnp.arange(control.max_seqs, dtype=jnp.int32)
    is_spared = num_freed == 0
    *_, order = lax.sort((is_spared, keys, ~idle, ids), num_keys=3, is_stable=True)
    return jnp.where(ids < num_true(~is_spared), order, control.max_seqs)
