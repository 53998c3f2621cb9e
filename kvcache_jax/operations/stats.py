"""Read-only operations: figures of a cache, counts of blocks, idle and active rows."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at, num_true
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import one_program, takes_one
from kvcache_jax.core.counter import Counter
from kvcache_jax.core.state import BlockPool, Cache
from kvcache_jax.operations.rows import needs_of


@pytree_dataclass()
class Stats:
    """Figures of a cache at one moment, summed over layer groups; see `Counter` for the events.

    Attributes:
      num_active_seqs: i32[], rows that hold a sequence.
      num_blocks_total: i32[].
      num_blocks_free: i32[], neither referenced nor cached.
      num_blocks_cached: i32[], published and without owner.
      num_blocks_used: i32[], referenced by at least one row.
      num_blocks_shared: i32[], referenced by two rows or more.
      num_blocks_published: i32[], findable by content.
      num_refs: i32[], references of all rows.
      peak_used: i32[], sum of each group's highest number of referenced blocks.
      num_allocations: u32[], rows started by allocate.
      num_forks: u32[], rows started by fork.
      num_frees: u32[], rows ended.
      num_copies: u32[], blocks copied on write.
      num_evictions: u32[], cached blocks whose contents were given up; see `Counter.EVICTIONS`.
      num_adoptions: u32[], blocks released because their contents were already published.
      num_request_queries, num_request_hits: u32[], rows that looked for a cached prefix; that found one.
      num_block_queries, num_block_hits: u32[], full blocks of their prompts; those reused.
      num_token_queries, num_token_hits: u32[], tokens of their prompts; those in reused blocks.
      num_tokens_without_state: u32[], tokens of prompts whose keys are cached, and not the states after them.
      bytes_used: f32[], keys and values of referenced blocks.
      bytes_cached: f32[], of cached blocks.
      bytes_total: f32[], of all blocks.
    """

    num_active_seqs: jax.Array
    num_blocks_total: jax.Array
    num_blocks_free: jax.Array
    num_blocks_cached: jax.Array
    num_blocks_used: jax.Array
    num_blocks_shared: jax.Array
    num_blocks_published: jax.Array
    num_refs: jax.Array
    peak_used: jax.Array
    num_allocations: jax.Array
    num_forks: jax.Array
    num_frees: jax.Array
    num_copies: jax.Array
    num_evictions: jax.Array
    num_adoptions: jax.Array
    num_request_queries: jax.Array
    num_request_hits: jax.Array
    num_block_queries: jax.Array
    num_block_hits: jax.Array
    num_token_queries: jax.Array
    num_token_hits: jax.Array
    num_tokens_without_state: jax.Array
    bytes_used: jax.Array
    bytes_cached: jax.Array
    bytes_total: jax.Array


@one_program
def stats(cache: Cache) -> Stats:
    """Computes the cache's figures as a pytree of scalars; usable inside jit.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [20])
      >>> figures = kv.stats(cache)
      >>> int(figures.num_blocks_used), int(figures.num_blocks_free)
      (2, 2)
    """
    pools, counters = cache.control.block_pools, cache.control.counters

    def total(count: Callable[[BlockPool], jax.Array | int]) -> jax.Array:
        return sum((jnp.int32(count(pool)) for pool in pools), start=jnp.int32(0))

    def num_bytes(count: Callable[[BlockPool], jax.Array | int]) -> jax.Array:
        sizes = [group.block_bytes for group in cache.config.groups]
        parts = [jnp.float32(count(pool)) * size for pool, size in zip(pools, sizes, strict=True)]
        return sum(parts, start=jnp.float32(0))

    def num_cached(pool: BlockPool) -> jax.Array | int:
        return 0 if pool.cached is None else pool.cached.num_cached

    def num_published(pool: BlockPool) -> jax.Array | int:
        return 0 if pool.cached is None else num_true(pool.cached.is_published)

    return Stats(
        num_active_seqs=num_true(cache.control.is_active),
        num_blocks_total=total(lambda pool: pool.num_blocks),
        num_blocks_free=total(lambda pool: pool.num_free),
        num_blocks_cached=total(num_cached),
        num_blocks_used=total(block_pool.num_used),
        num_blocks_shared=total(lambda pool: num_true(pool.ref_count > 1)),
        num_blocks_published=total(num_published),
        num_refs=total(lambda pool: jnp.sum(pool.ref_count, dtype=jnp.int32)),
        peak_used=total(lambda pool: pool.peak_used),
        **{f"num_{counter.name.lower()}": counters[counter] for counter in Counter},
        bytes_used=num_bytes(block_pool.num_used),
        bytes_cached=num_bytes(num_cached),
        bytes_total=num_bytes(lambda pool: pool.num_blocks),
    )


@one_program
def utilization(cache: Cache) -> jax.Array:
    """Computes referenced / total blocks of the fullest layer group, f32[]."""
    return functools.reduce(jnp.maximum, map(block_pool.utilization, cache.control.block_pools))


@takes_one
def num_available_blocks(cache: Cache, *, group: int | None = None) -> jax.Array:
    """Counts the blocks that can be handed out, i32[]: of one layer group or (None) of all together."""
    return _num_available(cache, tuple(arguments.group_ids(cache.config, group)))


@functools.partial(jax.jit, static_argnames="group_ids")
def _num_available(cache: Cache, group_ids: tuple[int, ...]) -> jax.Array:
    pools = [cache.control.block_pools[g] for g in group_ids]
    return sum((block_pool.num_available(pool) for pool in pools), start=jnp.int32(0))


@takes_one
def num_blocks_needed(
    cache: Cache, num_new: IntRows, seq_ids: IntRows | None = None, *, group: int | None = None
) -> jax.Array:
    """Counts the blocks that `extend` would take for each row alone, a copied last block included.

    Args:
      cache: Not changed.
      num_new: i32[n], new tokens per row.
      seq_ids: i32[n]. Default: all rows.
      group: A layer group, or None for the sum over all. Each group must have room for itself.

    Returns:
      i32[n]; 0 for idle rows and ids that name no row.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [20])
      >>> kv.num_blocks_needed(cache, [40, 40]).tolist()
      [1, 0]
    """
    if seq_ids is None:
        seq_ids = np.arange(cache.max_seqs, dtype=np.int32)
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_new = arguments.int_column("num_new", num_new, seq_ids.shape[0])
    return _num_blocks_needed(cache, num_new, seq_ids, tuple(arguments.group_ids(cache.config, group)))


@functools.partial(jax.jit, static_argnames="group_ids")
def _num_blocks_needed(
    cache: Cache, num_new: jax.Array, seq_ids: jax.Array, group_ids: tuple[int, ...]
) -> jax.Array:
    is_row = get_at(cache.is_active, seq_ids, False)
    context_len = get_at(cache.context_len, seq_ids)
    num_new = jnp.where(is_row, jnp.clip(num_new, 0, cache.config.max_seq_len), 0)
    needed = jnp.zeros_like(num_new)
    for g, group in cache.config.row_groups.items():
        if g in group_ids:
            pool = cache.control.block_pools[g]
            entries = get_at(pool.block_table, seq_ids)
            needed += needs_of(pool, group, entries, context_len, num_new, pool.ref_count).num_blocks
    return needed
