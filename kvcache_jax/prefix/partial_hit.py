"""Sharing inside a block: a prompt starts within a published block whose first tokens are its own.

The row then ends inside a block that others may find, as after `truncate` into a published block: its next
`extend` copies the block before it is written.
"""

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control


def with_partial_hit(
    control: Control,
    columns: list[jax.Array],  # per group i32[max_blocks_per_seq], the whole hits, then nowhere
    num_cached: jax.Array,  # i32[], their tokens
    tokens: jax.Array,  # i32[P], the prompt
    num_tokens: jax.Array,  # i32[], how many of them are the prompt
    most: jax.Array,  # i32[], how many of these may be reused
    namespace: jax.Array,  # u32[4]
    items: jax.Array | None,  # i32[I, 2], first position and end of items, reused whole or not at all
    config: CacheConfig,  # whose groups have blocks of one size
) -> tuple[list[jax.Array], jax.Array]:
    """Adds to a prompt's whole hits the block after them that agrees longest, by its parent and tokens.

    Nothing is added where the pool could not hold the row and the copy: the row would be refused for ever.
    """
    index, group_id = control.prefix_index, config.indexed_group
    assert index is not None
    pool, block_size = control.block_pools[group_id], config.groups[group_id].block_size
    assert pool.cached is not None
    column = quotient(num_cached, block_size)
    parent = get_at(columns[group_id], column - 1, pool.num_blocks)
    is_child = pool.cached.is_published & (index.parent == parent)
    is_child &= (index.namespace == namespace[None]).all(axis=1)
    place = num_cached + jnp.arange(block_size, dtype=jnp.int32)
    is_same = index.block_tokens == get_at(tokens, place, 0)[None]
    is_same &= (place < most)[None]
    num_same = jnp.sum(jnp.cumprod(is_same, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    num_same = jnp.where(is_child, num_same, 0)
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        most_held = jnp.minimum(group.num_columns(num_tokens), group.max_held_blocks)
        num_same = jnp.where(most_held < pool.num_blocks, num_same, 0)
    companions = []  # the blocks of each group that hold the same tokens as each published one
    for g, links in enumerate(index.group_links):
        ids = jnp.arange(index.parent.shape[0], dtype=jnp.int32) if links is None else links.block_ids[:, 0]
        num_same = jnp.where(ids < control.block_pools[g].num_blocks, num_same, 0)
        companions.append(ids)
    lengths = jnp.arange(block_size + 1, dtype=jnp.int32)
    is_whole = jnp.ones(lengths.shape, bool)
    if items is not None:
        end = (num_cached + lengths)[None]
        is_whole = ~((items[:, :1] < end) & (items[:, 1:] > end)).any(axis=0)
    best = jnp.argmax(num_same)
    num_more = jnp.max(jnp.where(is_whole & (lengths <= num_same[best]), lengths, 0))
    length = num_cached + num_more
    for g, group in enumerate(config.groups):
        order = jnp.arange(columns[g].shape[0], dtype=jnp.int32)
        nowhere = control.block_pools[g].num_blocks
        shared = jnp.where(num_more > 0, companions[g][best], nowhere)
        held = jnp.where(order == column, shared, columns[g])
        first, _ = group.span.needed_columns(length, block_size)
        columns[g] = jnp.where((order < group.num_sink_blocks) | (order >= first), held, nowhere)
    return columns, length
