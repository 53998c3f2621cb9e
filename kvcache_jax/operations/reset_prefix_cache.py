"""The operation `reset_prefix_cache`: forgets all published contents."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import num_true
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.cache_checks import refuse_donated, takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.empty_state import empty_index
from kvcache_jax.core.state import Cache, Control


@takes_one
@jax.named_scope("kvcache.reset_prefix_cache")
def reset_prefix_cache(cache: Cache) -> tuple[Cache, jax.Array]:
    """Forgets all published contents; active rows keep their blocks and can publish them again.

    When the weights change, free the rows first: what they hold was computed with the old ones. Or give new
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
        control,
        num_published=jnp.zeros_like(control.num_published),
        # What is unspecified in an index without entries stays as it is.
        prefix_index=jax.tree.map(lambda x, new: jnp.where(num_dropped > 0, new, x), index, empty),
        block_pools=tuple(pools),
    ), num_dropped
