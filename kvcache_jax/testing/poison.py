"""NaN in every slot that nobody may read, so that one stray read shows in what is computed."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.core.arguments import pool_of
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, KVPool
from kvcache_jax.operations.scrub import num_tokens_held


@takes_one
@jax.jit
def poison(cache: Cache) -> Cache:
    """Puts NaN into every slot that nobody may read: free blocks, reserved ones, unfilled tails.

    Published blocks keep all their slots, which later prompts may read: those without owner, and those of
    which a truncated row holds only a part.

    Args:
      cache: Not changed, unless donated. Built with `storage=True`.
    """
    pools = []
    for g, (group, block_pool) in enumerate(zip(cache.config.groups, cache.control.block_pools, strict=True)):
        pool = pool_of(cache, g)
        num_tokens = num_tokens_held(cache.control, block_pool, group.block_size)
        is_kept = jnp.arange(group.block_size, dtype=jnp.int32)[None] < num_tokens[:, None]
        mask = is_kept[None, :, None, :, None]

        def spoil(values: jax.Array, mask: jax.Array = mask) -> jax.Array:
            layers = values.reshape(-1, mask.shape[1], *values.shape[1:])
            return jnp.where(mask, layers, jnp.full_like(layers, jnp.nan)).reshape(values.shape)

        pools.append(KVPool(k=spoil(pool.k), v=spoil(pool.v)))
    return dataclasses.replace(cache, pools=tuple(pools))
