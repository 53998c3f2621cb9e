"""The compiled programs of `CacheManager`: the pure functions, in the few shapes that it calls them in.

Programs that move no keys or values take the cache without its pools; the manager attaches the pools again.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import num_true
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.cache_checks import require_prefix_index
from kvcache_jax.core.state import Admission, Cache, Step
from kvcache_jax.core.status import Status
from kvcache_jax.operations.allocate import Prompts, allocate, find_hits
from kvcache_jax.operations.allocate import required_blocks as blocks_for_prompts
from kvcache_jax.operations.commit import commit_rows
from kvcache_jax.operations.evict import evict as evict_blocks
from kvcache_jax.operations.evict import reset_prefix_cache as forget_blocks
from kvcache_jax.operations.extend import extend
from kvcache_jax.operations.extend_plan import padded_tokens, propose, required_blocks
from kvcache_jax.operations.fork import fork as fork_rows
from kvcache_jax.operations.free import free as free_rows
from kvcache_jax.operations.reserve import num_available
from kvcache_jax.operations.stats import Stats, stats, utilization
from kvcache_jax.operations.truncate import truncate as truncate_rows


@jax.jit
def admit(
    cache: Cache, seq_id: jax.Array, prompts: Prompts, is_replaced: jax.Array
) -> tuple[Cache, tuple[Admission, jax.Array]]:
    """Allocates one row, which is freed first if it is replaced; returns also its blocks, i32[]."""
    freed = jnp.where(is_replaced, seq_id, cache.max_seqs)
    cache, _ = free_rows(cache, freed[None])
    cache, admission = allocate(cache, seq_id[None], **prompts._asdict())
    held = [num_true(pool.block_table[seq_id] < pool.num_blocks) for pool in cache.control.block_pools]
    return cache, (admission, sum(held, start=jnp.int32(0)))


@explicit_transfers
@jax.jit
def shortage(
    cache: Cache, seq_id: jax.Array, prompts: Prompts, is_replaced: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Counts the blocks that `admit` requires and those available, cached ones too; i32[groups] both."""
    freed = jnp.where(is_replaced, seq_id, cache.max_seqs)
    control = free_rows(cache, freed[None])[0].control
    hits = find_hits(control, prompts, cache.config)
    required = blocks_for_prompts(control, prompts, hits, cache.config)
    return jnp.concatenate(required), num_available(control)


@explicit_transfers
@functools.partial(jax.jit, donate_argnums=0)
def append(
    cache: Cache, seq_ids: jax.Array, num_new: jax.Array, tokens: jax.Array
) -> tuple[Cache, tuple[jax.Array, Step, jax.Array]]:
    """Extends all rows or, if one fails, none; returns also `tokens`, and how each row fares, i32[n]."""
    bare, width = without_pools(cache), tokens.shape[1]
    _, trial = extend(bare, num_new, max_new=width, seq_ids=seq_ids, tokens=tokens)
    num_new = jnp.where(_is_fine(trial.status).all(), num_new, 0)
    cache, step = extend(cache, num_new, max_new=width, seq_ids=seq_ids, tokens=tokens)
    return cache, (tokens, step, trial.status)


@explicit_transfers
@jax.jit
def append_needs(
    cache: Cache, seq_ids: jax.Array, num_new: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Counts blocks as `shortage`, for `append`; returns also the rows' lengths, i32[n]."""
    control, config, width = cache.control, cache.config, cache.config.query_len_limit
    tokens = padded_tokens(num_new.shape[0], width)
    control, plan = propose(control, seq_ids, num_new, tokens, width, config)
    return required_blocks(plan), num_available(control), plan.context_len


@jax.jit
def commit(
    cache: Cache, seq_ids: jax.Array, final_len: jax.Array, is_end: jax.Array
) -> tuple[Cache, jax.Array]:
    """Publishes as `kvcache_jax.commit`; `is_end` bool[] is data, so that there is one program."""
    require_prefix_index("commit", cache)
    control, status = commit_rows(cache.control, seq_ids, final_len, config=cache.config, is_end=is_end)
    return dataclasses.replace(cache, control=control), status


fork = jax.jit(fork_rows)
truncate = jax.jit(truncate_rows)
free = jax.jit(free_rows)
evict = jax.jit(evict_blocks)
reset_prefix_cache = jax.jit(forget_blocks)


@jax.jit
def figures(cache: Cache) -> tuple[Stats, jax.Array]:
    """Computes `stats`, and f32[] `utilization`."""
    return stats(cache), utilization(cache)


def without_pools(cache: Cache) -> Cache:
    """Returns the control state alone: a jitted function copies nothing that it does not take."""
    return Cache(control=cache.control, pools=(), config=cache.config)


def _is_fine(status: jax.Array) -> jax.Array:
    return (status == Status.OK) | (status == Status.SKIPPED)
