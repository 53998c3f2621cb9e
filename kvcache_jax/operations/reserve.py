"""The two halves of `extend`, for a loop whose ordinary step must not wait for the host.

`reserve` has all the loops: shortage, eviction, copies. `extend_reserved` has none: it takes free blocks, and
serves rows whose last block is their own. An ordinary step calls the second alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import min_at, quotient
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockCopies, Cache, Control, Step
from kvcache_jax.operations.extend import copy_tokens, grow, record_tokens, take_blocks
from kvcache_jax.operations.extend_plan import (
    ExtendPlan,
    packed_tokens,
    padded_tokens,
    propose,
    required_blocks,
)
from kvcache_jax.operations.rows import RowNeeds, needs_of


def needs(
    control: Control,
    num_new: jax.Array,  # i32[max_seqs], at most as many as `max_seq_len` leaves
    config: CacheConfig,
    ref_counts: tuple[jax.Array, ...] | None = None,  # owners of the blocks per group; None: the state's
) -> RowNeeds:
    """Counts the blocks that each row lacks for its new tokens, `[groups, max_seqs]`."""
    if ref_counts is None:
        ref_counts = tuple(pool.ref_count for pool in control.block_pools)
    found = [
        needs_of(pool, group, pool.block_table, control.context_len, num_new, owners)
        for pool, group, owners in zip(control.block_pools, config.groups, ref_counts, strict=True)
    ]
    return RowNeeds(*(jnp.stack(column) for column in zip(*found, strict=True)))


def required_for(control: Control, row: jax.Array, num_new: jax.Array, config: CacheConfig) -> jax.Array:
    """Counts the blocks that must be available for a row i32[1] to get `num_new` i32[1] tokens, i32[groups].

    Unlike `needs` it counts on the blocks that the row then gives back.
    """
    tokens = padded_tokens(1, config.max_seq_len)
    return required_blocks(propose(control, row, num_new, tokens, config.max_seq_len, config)[1])


def num_free(control: Control, config: CacheConfig) -> jax.Array:
    """Counts the blocks of each group, i32[groups], that can be taken and nothing is evicted or forgotten."""
    free = [pool.num_free for pool in control.block_pools]
    for g in config.snapshot_groups:
        free[g] = jnp.minimum(free[g], config.keeper.num_free(control, g, config))
    return jnp.stack(free)


def num_available(control: Control) -> jax.Array:
    """Counts the free and the cached blocks of each group, i32[groups]."""
    return jnp.stack([block_pool.num_available(pool) for pool in control.block_pools])


def lacks(cache: Cache, num_new: jax.Array) -> jax.Array:
    """Tests whether rows lack free blocks, or must copy, for `num_new` i32[max_seqs] tokens, bool[]."""
    need, free = needs(cache.control, num_new, cache.config), num_free(cache.control, cache.config)
    return (need.of_all_rows > free).any() | need.copies.any()


def reserve(cache: Cache, num_new: jax.Array, max_new: int, kept_len: jax.Array | None = None) -> Cache:
    """Takes the blocks for an `extend_reserved` of `num_new` i32[max_seqs] tokens, at most `max_new` each.

    Blocks are evicted and taken, and last blocks that are shared or published are copied. Nothing is done
    where blocks do not suffice for all: the caller chooses the rows. Lengths stay. For `kept_len` see
    `propose`.
    """
    config, control = cache.config, cache.control
    tokens = padded_tokens(control.max_seqs, max_new)
    control, plan = propose(control, None, num_new, tokens, max_new, config, kept_len=kept_len)
    fits = (required_blocks(plan) <= num_available(control)).all()
    groups = tuple(group._replace(copies_tail=group.copies_tail & fits) for group in plan.groups)
    plan = dataclasses.replace(plan, grows=plan.grows & fits, groups=groups)
    control, copies = take_blocks(control, plan, config)
    if control.prefix_index is not None:
        control = _note_copies(control, plan, copies[config.indexed_group], config)
    return storage.copy_all(dataclasses.replace(cache, control=control), copies)


def _note_copies(control: Control, plan: ExtendPlan, copied: BlockCopies, config: CacheConfig) -> Control:
    """Records that copies hold the tokens of the originals and are not published."""
    index = control.prefix_index
    assert index is not None
    num_full = quotient(control.context_len, config.groups[config.indexed_group].block_size)
    copiers = jnp.where(plan.groups[config.indexed_group].copies_tail, plan.seq_ids, control.max_seqs)
    return dataclasses.replace(
        control,
        num_published=min_at(control.num_published, copiers, num_full),
        prefix_index=dataclasses.replace(index, block_tokens=copy_tokens(index.block_tokens, copied)),
    )


def extend_reserved(
    cache: Cache,
    num_new: jax.Array,
    tokens: jax.Array,
    seq_ids: jax.Array | None = None,
    kept_len: jax.Array | None = None,
) -> tuple[Cache, Step]:
    """Extends rows like `extend`, without a loop, where they lack no more blocks than there are free.

    No row may have to copy. `tokens` is i32[max_seqs, max_new]; or i32[num_tokens], packed, with `seq_ids`.
    For `kept_len` see `propose`.
    """
    config, control = cache.config, cache.control
    is_packed = seq_ids is not None
    layout = packed_tokens(num_new, tokens.size) if is_packed else padded_tokens(*tokens.shape)
    most = min(tokens.shape[-1], config.query_len_limit)
    control, plan = propose(
        control, seq_ids, num_new, layout, most, config, kept_len=kept_len, may_copy=False
    )
    control, _ = take_blocks(control, plan, config, evicts=False)
    control, step = grow(control, plan, config)
    if control.prefix_index is not None:
        control = record_tokens(control, tokens, step, None, config)
    cache = dataclasses.replace(cache, control=control)
    return cache, plan_attention(cache, step) if cache.pools else step
