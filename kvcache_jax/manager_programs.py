"""The compiled programs of `CacheManager`: the pure functions, in the few shapes that it calls them in.

Those that move no keys or values take the cache without its pools; the manager attaches them again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax import block_pool, prefix_cache
from kvcache_jax import cache as operations
from kvcache_jax.block_pool import num_true
from kvcache_jax.companions import usable_prefix
from kvcache_jax.prefix_index import find_prefix
from kvcache_jax.rows import num_blocks_for
from kvcache_jax.state import Admission, Cache, Step
from kvcache_jax.stats import Stats, num_blocks_needed, stats, utilization
from kvcache_jax.status import Status


class Prompt(NamedTuple):
    """A request to be: arrays, of numpy outside of jit.

    Attributes:
      tokens: i32[max_seq_len].
      num_tokens: i32[].
      namespace: u32[4].
      priority: i32[].
      reuse: bool[].
    """

    tokens: Any
    num_tokens: Any
    namespace: Any
    priority: Any
    reuse: Any


@jax.jit
def admit(
    cache: Cache, seq_id: jax.Array, prompt: Prompt, is_replaced: jax.Array
) -> tuple[Cache, tuple[Admission, jax.Array, jax.Array]]:
    """`allocate` for one row, which is freed first if it is replaced; also i32[] blocks that it then holds.

    The last result is i32[] rows that could not be freed.
    """
    freed = jnp.where(is_replaced, seq_id, cache.max_seqs)
    cache, status = operations.free(cache, freed[None])
    cache, admission = operations.allocate(
        cache,
        seq_id[None],
        prompt.num_tokens[None],
        tokens=prompt.tokens[None],
        namespace=prompt.namespace[None],
        priority=prompt.priority[None],
        reuse=prompt.reuse,
    )
    held = [num_true(pool.block_table[seq_id] < pool.num_blocks) for pool in cache.control.block_pools]
    return cache, (admission, sum(held, start=jnp.int32(0)), num_true(~_is_fine(status)))


@jax.jit
def shortage(
    cache: Cache, seq_id: jax.Array, prompt: Prompt, is_replaced: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Blocks that an admission takes out of those available, cached ones too; and those. i32[groups] both."""
    freed = jnp.where(is_replaced, seq_id, cache.max_seqs)
    cache, _ = operations.free(cache, freed[None])
    control, num_cached = cache.control, jnp.int32(0)
    hits = [jnp.full(pool.max_blocks_per_seq, pool.num_blocks, jnp.int32) for pool in control.block_pools]
    if control.prefix_index is not None:
        found = find_prefix(control.prefix_index, control.hash_key, *prompt[:3])
        pool = control.block_pools[cache.config.indexed_group]
        found = jnp.where(prompt.reuse, found, pool.num_blocks)[: pool.max_blocks_per_seq]
        no_items = jnp.zeros((0, 2), jnp.int32)
        hits, num_cached = usable_prefix(control, found, no_items, cache.config)
    needed, available = [], []
    for ids, group, pool in zip(hits, cache.config.groups, control.block_pools, strict=True):
        is_hit = ids < pool.num_blocks
        num_new = num_blocks_for(prompt.num_tokens, group.block_size) - num_cached // group.block_size
        num_new = jnp.minimum(num_new, group.max_held_blocks - num_true(is_hit))
        needed.append(num_new + num_true(is_hit & (block_pool.ref_counts(pool, ids) == 0)))
        available.append(block_pool.num_available(pool))
    return jnp.stack(needed), jnp.stack(available)


@functools.partial(jax.jit, donate_argnums=0)
def append(
    cache: Cache, seq_ids: jax.Array, num_new: jax.Array, tokens: jax.Array
) -> tuple[Cache, tuple[Step, jax.Array]]:
    """`extend` for all rows or, if one fails, for none; also i32[n], how each row alone fares."""
    bare, width = without_pools(cache), tokens.shape[1]
    _, trial = operations.extend(bare, num_new, max_new=width, seq_ids=seq_ids, tokens=tokens)
    num_new = jnp.where(_is_fine(trial.status).all(), num_new, 0)
    cache, step = operations.extend(cache, num_new, max_new=width, seq_ids=seq_ids, tokens=tokens)
    return cache, (step, trial.status)


@jax.jit
def append_needs(
    cache: Cache, seq_ids: jax.Array, num_new: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks that `append` asks for and those available, i32[groups]; and the rows' lengths i32[n]."""
    groups = range(len(cache.config.groups))
    needed = [num_blocks_needed(cache, num_new, seq_ids, group=g).sum(dtype=jnp.int32) for g in groups]
    available = [block_pool.num_available(pool) for pool in cache.control.block_pools]
    length = cache.context_len.at[seq_ids].get(mode="fill", fill_value=0)
    return jnp.stack(needed), jnp.stack(available), length


@jax.jit
def commit(cache: Cache, seq_ids: jax.Array, final_len: jax.Array) -> tuple[Cache, jax.Array]:
    """`kvcache_jax.commit`."""
    return prefix_cache.commit(cache, seq_ids, final_len=final_len)


fork = jax.jit(operations.fork)
truncate = jax.jit(operations.truncate)
free = jax.jit(operations.free)
evict = jax.jit(prefix_cache.evict)
reset_prefix_cache = jax.jit(prefix_cache.reset_prefix_cache)


@jax.jit
def figures(cache: Cache) -> tuple[Stats, jax.Array]:
    """`stats`, and f32[] `utilization`."""
    return stats(cache), utilization(cache)


def without_pools(cache: Cache) -> Cache:
    """The control state alone: what a jitted function does not take, it does not copy."""
    return Cache(control=cache.control, pools=(), config=cache.config)


def _is_fine(status: jax.Array) -> jax.Array:
    return (status == Status.OK) | (status == Status.SKIPPED)
