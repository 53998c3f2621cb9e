"""NaN in every slot that no row may read, so that one stray read shows in the results."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.core.arguments import pool_of
from kvcache_jax.core.cache_checks import one_program
from kvcache_jax.core.state import Cache, KVPool
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.operations.scrub import num_tokens_held


@one_program
def poison(cache: Cache) -> Cache:
    """Writes NaN into every slot that no row may read: free blocks, reserved ones, unfilled tails.

    Arrays of integers get their lowest number, of unsigned ones their greatest.

    Published blocks keep all their slots, which later prompts may read: blocks without owner, and blocks of
    which a truncated row holds only a part.

    Args:
      cache: Not changed, unless donated. Built with `storage=True`.
    """
    cache = cache.config.keeper.settle(cache)
    pools = []
    for g, group in enumerate(cache.config.groups):
        num_tokens = num_tokens_held(cache.control, g, cache.config)
        is_kept = jnp.arange(group.block_size, dtype=jnp.int32)[None] < num_tokens[:, None]
        pool = pool_of(cache, g)
        pools.append(
            KVPool(arrays={name: _spoilt(pool.arrays[name], array, is_kept) for name, array in group.arrays})
        )
    return dataclasses.replace(cache, pools=tuple(pools))


def _spoilt(values: jax.Array, array: BlockArray, is_kept: jax.Array) -> jax.Array:
    """Keeps the slots bool[num_blocks, block_size] of all layers, and spoils the others."""
    if array.token_axis is None:  # one entry of all tokens
        is_kept = is_kept.all(axis=1, keepdims=True)
    per_axis = [1] * (2 + len(array.shape))
    per_axis[1], per_axis[2 + (array.token_axis or 0)] = is_kept.shape
    layers = values.reshape(-1, is_kept.shape[0], *values.shape[1:])
    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    worst = jnp.nan if is_float else jnp.iinfo(values.dtype).min or jnp.iinfo(values.dtype).max
    return jnp.where(is_kept.reshape(per_axis), layers, jnp.full_like(layers, worst)).reshape(values.shape)
