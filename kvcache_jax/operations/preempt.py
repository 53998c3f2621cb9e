"""Which rows to give up when blocks run short: selection by a policy, and dropping down to a level.

Only the blocks that a row alone holds come free with it, so only these count.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import num_true
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.operations import rows

_ROW_POLICIES = ("lru", "lfu", "longest", "priority")


@takes_one
def select_victim_rows(cache: Cache, policy: str, n: int) -> jax.Array:
    """The rows to preempt first; changes nothing.

    Args:
      cache: Not changed.
      policy: "lru" (used longest ago), "lfu" (used by the fewest calls), "longest" (frees the most blocks)
        or "priority" (lowest). Of equal rows that used longest ago.
      n: How many at most.

    Returns:
      i32[n] rows, the first to go first. Rows that free nothing, because others hold all their blocks too,
      are left out; `max_seqs` stands where there are no more.

    Raises:
      ValueError: there is no such policy.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=4, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0, 1, 2], [20, 60, 1])
      >>> kv.select_victim_rows(cache, "longest", 2).tolist()
      [1, 0]
    """
    _check_policy(policy)
    n = static_count("n", n, most=cache.max_seqs, most_name="max_seqs")
    return _select(cache.control, policy=policy)[:n]


@takes_one
def evict_to_utilization(cache: Cache, target: ArrayLike, policy: str = "lru") -> tuple[Cache, jax.Array]:
    """Frees whole rows, one after the other, until `utilization` is at most `target`.

    Their published blocks stay cached. It stops early when no row is left that frees a block, in a layer
    group that is above the target, on its own.

    Args:
      cache: Not changed.
      target: f32[], share of referenced blocks, 0 to 1.
      policy: As in `select_victim_rows`; asked again after each row, for what rows share changes.

    Returns:
      The cache and i32[max_seqs], the rows that were freed, in that order, then `max_seqs`.

    Raises:
      ValueError, TypeError: there is no such policy, or `target` is not from 0 to 1 (unless it is traced).

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=4, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0, 1, 2], [20, 60, 1])
      >>> cache, dropped = kv.evict_to_utilization(cache, 0.5, "longest")
      >>> dropped.tolist(), float(kv.utilization(cache))
      ([1, 4, 4, 4], 0.375)
    """
    _check_policy(policy)
    target = arguments.fraction("target", target)
    control, dropped = _evict_rows(cache.control, target, policy=policy, config=cache.config)
    return dataclasses.replace(cache, control=control), dropped


def _check_policy(policy: str) -> None:
    if policy not in _ROW_POLICIES:
        raise ValueError(f"policy is {policy!r}, expected one of {', '.join(map(repr, _ROW_POLICIES))}")


@functools.partial(jax.jit, static_argnames="policy")
def _select(control: Control, policy: str) -> jax.Array:
    return _in_order(control, _num_freed(control, [jnp.bool_(True)] * len(control.block_pools)), policy)


@functools.partial(jax.jit, static_argnames=("policy", "config"))
def _evict_rows(
    control: Control, target: jax.Array, policy: str, config: CacheConfig
) -> tuple[Control, jax.Array]:
    control, target = as_varied((control, target))

    def next_row(control: Control) -> jax.Array:
        """The row to free now, or `max_seqs`."""
        is_above = [block_pool.utilization(pool) > target for pool in control.block_pools]
        num_freed = _num_freed(control, is_above)
        return _in_order(control, num_freed, policy)[0]

    def free_one(state):
        control, dropped, num_dropped, row = state
        control, _ = rows.free_row(control, row, config=config)
        return control, dropped.at[num_dropped].set(row), num_dropped + 1, next_row(control)

    # Made of the rows' lengths: inside shard_map a constant would differ from what the loop makes of it.
    dropped = jnp.maximum(control.context_len & 0, control.max_seqs)
    state = control, dropped, num_true(dropped < 0), next_row(control)
    control, dropped, _, _ = lax.while_loop(lambda state: state[3] < dropped.shape[0], free_one, state)
    return control, dropped


def _num_freed(control: Control, counts: list[jax.Array]) -> jax.Array:
    """i32[max_seqs], blocks that each row alone holds, in the groups for which `counts` is true."""
    num_freed = jnp.zeros_like(control.context_len)
    for pool, is_counted in zip(control.block_pools, counts, strict=True):
        is_own = block_pool.ref_counts(pool, pool.block_table) == 1
        num_freed += jnp.where(is_counted, jnp.sum(is_own, axis=1, dtype=jnp.int32), 0)
    return num_freed


def _in_order(control: Control, num_freed: jax.Array, policy: str) -> jax.Array:
    """i32[max_seqs], the rows that free something, the least valuable first, then `max_seqs`."""
    # The clock wraps around; the time since it was used does not.
    idle = control.clock - control.last_used
    keys = {
        "lru": jnp.zeros_like(num_freed),
        "lfu": control.num_uses,
        "longest": -num_freed,
        "priority": control.priority,
    }
    ids = jnp.arange(control.max_seqs, dtype=jnp.int32)
    is_spared = num_freed == 0
    *_, order = lax.sort((is_spared, keys[policy], ~idle, ids), num_keys=3, is_stable=True)
    return jnp.where(ids < num_true(~is_spared), order, control.max_seqs)
