"""States of recurrent layers in both tiers, and windows beside them: one order of value, one limit.

The device demotes its least when it is full. The least of both is forgotten when both are: that is the state
which one larger pool would evict.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.state import Control
from kvcache_jax.prefix import eviction
from kvcache_jax.tiers.hosted import capacity, host_config, tier_of, with_tier


def num_free(control: Control, group_id: int, num_blocks: int, config: CacheConfig) -> jax.Array:
    """Counts the free blocks for states of both tiers; see `Keeper.num_free`."""
    cached = tier_of(control).control.block_pools[group_id].cached
    assert cached is not None
    # Where a prefix took its states along, the host has more than are to stay there, and the device less.
    return control.block_pools[group_id].num_free + capacity(config, num_blocks)[group_id] - cached.num_cached


def forget_state(
    control: Control, group_id: int, block_id: jax.Array, is_due: jax.Array, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Forgets the host's state of the least value; see `Keeper.forget_state`."""
    tier, index = tier_of(control), control.prefix_index
    pool, cached = tier.control.block_pools[group_id], control.block_pools[group_id].cached
    assert index is not None and cached is not None and pool.cached is not None
    links, hosted = index.group_links[group_id], tier.index.group_links[group_id]
    moments = tier.released_at[group_id]
    assert links is not None and hosted is not None and moments is not None

    def cost(is_wanted: jax.Array | None, released_at: jax.Array | None) -> jax.Array:
        assert is_wanted is not None and released_at is not None and cached.num_released is not None
        age = jnp.minimum(cached.num_released - released_at, jnp.uint32(2**31 - 1))  # at least 1
        return jnp.where(is_wanted, age, age + jnp.uint32(2**31))

    is_candidate = pool.cached.is_published & (pool.ref_count == 0)
    costs = jnp.where(is_candidate, cost(hosted.is_wanted, moments), 0)
    least = jnp.argmax(costs).astype(jnp.int32)
    of_device = get_at(cost(links.is_wanted, cached.released_at), block_id, 0)
    is_forgotten = is_due & (get_at(costs, least) > of_device)
    ids = jnp.where(is_forgotten, least, pool.num_blocks)[None]
    tier_control = eviction.unpublish(tier.control, group_id, ids, pool, host_config(config))
    counters = count_events(tier_control.counters, {Counter.EVICTIONS: is_forgotten.astype(jnp.int32)})
    tier_control = dataclasses.replace(tier_control, counters=counters)
    return with_tier(control, dataclasses.replace(tier, control=tier_control)), is_forgotten
