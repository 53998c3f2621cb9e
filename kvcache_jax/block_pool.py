"""Blocks change hands: take, share, release. Pure functions on one group's `BlockPool`.

A block is free (on the stack, `ref_count` 0) or referenced; it is in exactly one of the two states.
The block table itself is edited by the callers, in the same step as the counts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.state import BlockPool


def num_true(mask: jax.Array) -> jax.Array:
    """i32[], true entries; stays 32-bit when x64 is enabled."""
    return jnp.sum(mask, dtype=jnp.int32)


def rank_true(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[n], how many true entries of bool[n] come before each, and i32[], how many there are."""
    up_to = jnp.cumsum(mask, dtype=jnp.int32)
    return up_to - mask.astype(jnp.int32), up_to[-1]


def read_first(values: jax.Array, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`values`, read from `array`, and `array`, to be written only after the read.

    Without the fence XLA may plan the write first and keep a copy of the whole array for the read.
    """
    return lax.optimization_barrier((values, array))


def num_available(pool: BlockPool) -> jax.Array:
    """i32[], blocks that can be handed out."""
    return pool.num_free


def ref_counts(pool: BlockPool, block_ids: jax.Array) -> jax.Array:
    """i32 like `block_ids`: owners of each block, 0 for nowhere."""
    return pool.ref_count.at[block_ids].get(mode="fill", fill_value=0)


def take(pool: BlockPool, mask: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Hands out one block per true entry, each with one owner.

    Args:
      pool: Holds at least as many free blocks; the caller has checked.
      mask: bool[n], where a block is wanted.

    Returns:
      The pool, and i32[n] block ids, nowhere where `mask` is false.
    """
    rank, num_taken = rank_true(mask)
    top = pool.num_free - 1 - rank
    ids = jnp.where(mask, pool.free_stack.at[top].get(mode="clip"), pool.num_blocks)
    num_free = pool.num_free - num_taken
    return dataclasses.replace(
        pool,
        ref_count=pool.ref_count.at[ids].set(1, mode="drop"),
        num_free=num_free,
        peak_used=jnp.maximum(pool.peak_used, pool.num_blocks - num_free),
    ), ids


def share(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Adds one owner to each block of `block_ids` (any shape, nowhere is skipped)."""
    return dataclasses.replace(pool, ref_count=pool.ref_count.at[block_ids].add(1, mode="drop"))


def release(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Takes one owner from each block of `block_ids`; blocks without owner are free again.

    Args:
      pool: Counts at least one owner per occurrence.
      block_ids: i32[n], nowhere is skipped. Ids must differ; see `release_repeated`.
    """
    ref_count = pool.ref_count.at[block_ids].add(-1, mode="drop")
    is_last = (block_ids < pool.num_blocks) & (ref_count.at[block_ids].get(mode="clip") == 0)
    return _push(dataclasses.replace(pool, ref_count=ref_count), block_ids, is_last)


def release_repeated(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """`release` for i32[...] ids that may repeat, as when several rows drop a shared block."""
    block_ids = block_ids.reshape(-1)
    num_ids = block_ids.shape[0]
    ref_count = pool.ref_count.at[block_ids].add(-1, mode="drop")
    is_last = (block_ids < pool.num_blocks) & (ref_count.at[block_ids].get(mode="clip") == 0)
    # Counts of ownerless blocks serve as scratch: the first occurrence leaves the lowest mark.
    mark = jnp.arange(num_ids, dtype=jnp.int32) - num_ids
    marked = ref_count.at[jnp.where(is_last, block_ids, pool.num_blocks)].min(mark, mode="drop")
    is_first = is_last & (marked.at[block_ids].get(mode="clip") == mark)
    ref_count = marked.at[jnp.where(is_first, block_ids, pool.num_blocks)].set(0, mode="drop")
    return _push(dataclasses.replace(pool, ref_count=ref_count), block_ids, is_first)


def _push(pool: BlockPool, block_ids: jax.Array, mask: jax.Array) -> BlockPool:
    """Puts the masked ids, which differ, on the free stack."""
    rank, num_freed = rank_true(mask)
    place = jnp.where(mask, pool.num_free + rank, pool.num_blocks)
    free_stack = pool.free_stack.at[place].set(block_ids, mode="drop")
    return dataclasses.replace(pool, free_stack=free_stack, num_free=pool.num_free + num_freed)
