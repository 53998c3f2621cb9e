"""The operation `evict`: frees cached blocks, the least valuable first."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import refuse_donated, takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.prefix import eviction


@takes_one
@jax.named_scope("kvcache.evict")
def evict(cache: Cache, num_blocks: ArrayLike) -> tuple[Cache, jax.Array]:
    """Gives up the contents of cached blocks, the least valuable first, and makes them free.

    Args:
      cache: Not changed.
      num_blocks: i32[], how many blocks of the group that prefixes are found by.

    Returns:
      The cache and i32[], the number of blocks evicted: the smaller of `num_blocks` and the cached blocks; 0
      without prefix caching.
    """
    num_blocks = arguments.int_scalar("num_blocks", num_blocks)
    if cache.control.prefix_index is None:
        refuse_donated("evict", cache)
        return cache, jnp.zeros_like(num_blocks)
    control, num_evicted = _evict(cache.control, num_blocks, config=cache.config)
    return dataclasses.replace(cache, control=control), num_evicted


@functools.partial(jax.jit, static_argnames="config")
def _evict(control: Control, num_blocks: jax.Array, config: CacheConfig) -> tuple[Control, jax.Array]:
    control, num_blocks = as_varied((control, num_blocks))
    group_id = config.indexed_group
    cached = control.block_pools[group_id].cached
    assert cached is not None
    num_evicted = jnp.clip(num_blocks, 0, cached.num_cached)
    return eviction.evict(control, group_id, num_evicted, config), num_evicted
