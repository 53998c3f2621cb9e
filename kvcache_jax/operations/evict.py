"""Cached blocks that are given up: `evict`, `eviction_candidates` and `reset_prefix_cache`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import get_at, num_true
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import refuse_donated, takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.empty_state import empty_index
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


@takes_one
@jax.named_scope("kvcache.eviction_candidates")
def eviction_candidates(cache: Cache, n: int) -> jax.Array:
    """Returns the blocks that `evict(cache, n)` would give up; changes nothing.

    Export them first (`export_blocks`) to keep their contents elsewhere.

    Args:
      cache: Not changed.
      n: How many, at most.

    Returns:
      i32[n] block ids of the group that prefixes are found by, those released longest ago first; `num_blocks`
      where fewer blocks are cached.

    Example:
      >>> import numpy as np, kvcache_jax as kv
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, block_size=2, max_seqs=1,
      ...                         max_seq_len=8, enable_prefix_caching=True)
      >>> cache, tokens = kv.init(config), np.arange(5)[None]
      >>> cache, _ = kv.allocate(cache, [0], [5], tokens=tokens)
      >>> cache, _ = kv.extend(cache, [5], max_new=5, tokens=tokens)
      >>> cache, _ = kv.free(kv.commit(cache)[0], [0])
      >>> kv.tiers.eviction_candidates(cache, 3).tolist()  # a block before its predecessor
      [1, 0, 4]
    """
    config = cache.config
    num_blocks = config.groups[config.indexed_group].num_blocks
    n = static_count("n", n, most=num_blocks, most_name="num_blocks")
    if cache.control.prefix_index is None:
        refuse_donated("eviction_candidates", cache)
        return jnp.asarray(np.full(n, num_blocks, np.int32))
    return _candidates(cache.control, n=n, config=config)


@functools.partial(jax.jit, static_argnames=("n", "config"))
def _candidates(control: Control, n: int, config: CacheConfig) -> jax.Array:
    control = as_varied(control)
    before = control.block_pools[config.indexed_group].cached
    assert before is not None
    evicted = eviction.evict(control, config.indexed_group, jnp.minimum(n, before.num_cached), config)
    after = evicted.block_pools[config.indexed_group].cached
    assert after is not None
    goes = before.is_published & ~after.is_published
    num_blocks = goes.shape[0]
    # Entries of the queue since its head: in the order of release.
    age = jnp.where(goes, before.queued_at - before.head, jnp.uint32(0xFFFFFFFF))
    order = jnp.argsort(age).astype(jnp.int32)[:n]
    return jnp.where(get_at(goes, order), order, num_blocks)


@takes_one
@jax.named_scope("kvcache.reset_prefix_cache")
def reset_prefix_cache(cache: Cache) -> tuple[Cache, jax.Array]:
    """Forgets all published contents; active rows keep their blocks and can publish them again.

    When the weights change, free the rows first: their keys were computed with the old ones. Or give new
    rows another `namespace(weights=)`.

    Args:
      cache: Not changed.

    Returns:
      The cache and i32[], how many blocks of all layer groups were published; 0 without prefix caching.
    """
    if cache.control.prefix_index is None:
        refuse_donated("reset_prefix_cache", cache)
        return cache, jnp.int32(0)
    control, num_dropped = _reset_index(cache.control, config=cache.config)
    return dataclasses.replace(cache, control=control), num_dropped


@functools.partial(jax.jit, static_argnames="config")
def _reset_index(control: Control, config: CacheConfig) -> tuple[Control, jax.Array]:
    num_dropped = jnp.int32(0)
    pools = []
    for pool in control.block_pools:
        cached = pool.cached
        assert cached is not None
        num_dropped += num_true(cached.is_published)
        block_ids = jnp.where(
            cached.is_published, jnp.arange(pool.num_blocks, dtype=jnp.int32), pool.num_blocks
        )
        pools.append(block_pool.withdraw(pool, block_ids))
    index = control.prefix_index
    assert index is not None
    empty = dataclasses.replace(empty_index(config), block_tokens=index.block_tokens)
    return dataclasses.replace(
        config.keeper.forget_contents(control, config),
        num_published=jnp.zeros_like(control.num_published),
        # Unspecified entries of an empty index stay as they are.
        prefix_index=jax.tree.map(lambda x, new: jnp.where(num_dropped > 0, new, x), index, empty),
        block_pools=tuple(pools),
    ), num_dropped
