"""Prefixes over several layer groups: only one group is indexed, and its blocks link to the others' blocks.

A published block of the indexed group carries the ids of the blocks that hold the same tokens in every other
group. A prefix can be reused up to a length at which every group still has the tokens that the next token
reads: all of them with full attention; with a window the window and the sinks.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import (
    first_of_equal,
    first_true,
    get_at,
    num_true,
    read_first,
    remainder,
    set_at,
)
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Control, GroupLinks, PrefixIndex
from kvcache_jax.layers.layer_group import LayerGroup


def find_columns(control: Control, found: jax.Array, config: CacheConfig) -> list[jax.Array]:
    """Lists every group's blocks for the prefix `found` i32[K] of the indexed group, i32[any] by column."""
    index, pools = control.prefix_index, control.block_pools
    assert index is not None
    found = found[: pools[config.indexed_group].max_blocks_per_seq]

    def columns_of(group_id: int, links: GroupLinks | None) -> jax.Array:
        if links is None:
            return found
        if not links.block_ids.shape[1]:  # no prefix needs blocks of the group
            return jnp.full_like(found, pools[group_id].num_blocks)
        return linked_columns(links, found, group_id, config)[: pools[group_id].max_blocks_per_seq]

    return [columns_of(*pair) for pair in enumerate(index.group_links)]


def usable_prefix(
    control: Control, columns: list[jax.Array], items: jax.Array | None, config: CacheConfig
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Finds the part of a prefix, found in `columns` per group i32[any], that every group can serve.

    Items i32[I, 2], first position and end, are reused whole or not at all. Returns the blocks to start from,
    per group i32[max_blocks_per_seq] by column, or nowhere; their tokens, i32[]; and the junction, i32[]: the
    tokens that the keys of all groups could serve where they are more, else 0.
    """
    group_id, pools = config.indexed_group, control.block_pools
    indexed, found = config.groups[group_id], columns[group_id]
    lengths = jnp.arange(found.shape[0] + 1, dtype=jnp.int32) * indexed.block_size
    num_found = num_true(found != pools[group_id].num_blocks)
    # A hit ends at a block's end in every group, so that no row writes into a block that was hit.
    step = config.prefix_unit
    is_usable = (remainder(lengths, step) == 0) & (lengths <= num_found * indexed.block_size)
    if items is not None:
        is_inside = (items[:, :1] < lengths[None]) & (items[:, 1:] > lengths[None])  # [I, K + 1]
        is_usable &= ~is_inside.any(axis=0)
    columns = [_padded(ids, pool) for ids, pool in zip(columns, pools, strict=True)]
    has_states = jnp.ones_like(is_usable)
    for g, (pool, group) in enumerate(zip(pools, config.groups, strict=True)):
        if g == group_id or not group.span.is_in_prefix:
            continue
        num_missing = jnp.cumsum(
            jnp.append(jnp.zeros(1, bool), columns[g] == pool.num_blocks), dtype=jnp.int32
        )
        # Blocks may be missing between the sinks and the window: the next token reads none of them.
        first, end = _needed(group, jnp.minimum(lengths, config.max_seq_len // step * step))
        is_there = num_missing[jnp.minimum(group.num_sink_blocks, end)] == 0
        is_there &= num_missing[end] == num_missing[jnp.minimum(first, end)]
        # A row that computes the prefix keeps its state, and the windows before it.
        if g in config.snapshot_groups:
            has_states &= is_there
        else:
            is_usable &= is_there
    num_tokens = jnp.max(jnp.where(is_usable & has_states, lengths, 0))
    num_with_keys = jnp.max(jnp.where(is_usable, lengths, 0))
    junction = jnp.where(num_with_keys > num_tokens, num_with_keys, 0)
    for g, (pool, group) in enumerate(zip(pools, config.groups, strict=True)):
        order = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
        first, end = _needed(group, num_tokens)
        is_kept = (order < end) & ((order < group.num_sink_blocks) | (order >= first))
        columns[g] = jnp.where(is_kept, columns[g], pool.num_blocks)
    return columns, num_tokens, junction


def linked_columns(links: GroupLinks, found: jax.Array, group_id: int, config: CacheConfig) -> jax.Array:
    """Lists the blocks linked to the indexed blocks i32[K] of a prefix, by column of their group, i32[n]."""
    indexed, other = config.groups[config.indexed_group], config.groups[group_id]
    num_columns = found.shape[0] * indexed.block_size // other.block_size
    indexed_columns, slots = link_places(num_columns, group_id, config)
    return get_at(links.block_ids, (found[indexed_columns], slots), links.indexed_ids.shape[0])


def link_places(num_columns: int, group_id: int, config: CacheConfig) -> tuple[np.ndarray, np.ndarray]:
    """Finds what the first columns of a group are linked to, i32[num_columns] twice.

    Returns:
      The columns of the indexed group that hold the last token of each; and its place among the blocks there.
    """
    indexed, other = config.groups[config.indexed_group], config.groups[group_id]
    columns = np.arange(num_columns, dtype=np.int32)
    indexed_columns = ((columns + 1) * other.block_size - 1) // indexed.block_size
    return indexed_columns, columns - indexed_columns * indexed.block_size // other.block_size


def tokens_between(index: PrefixIndex, links: GroupLinks, config: CacheConfig) -> jax.Array:
    """Counts the tokens from the linked block before each block of a group to its own, i32[num_blocks]."""
    block_size = config.groups[config.indexed_group].block_size
    nowhere, num_blocks = index.parent.shape[0], links.indexed_ids.shape[0]
    is_linked = (links.block_ids < num_blocks).any(axis=1)
    before, num_steps = index.parent, jnp.ones_like(index.parent)
    # Each trip looks twice as far back: from a block without a link on, as far as that one has looked.
    for _ in range(config.groups[config.indexed_group].max_blocks_per_seq.bit_length()):
        goes_on = ~get_at(is_linked, before, True)
        num_steps += jnp.where(goes_on, get_at(num_steps, before, 0), 0)
        before = jnp.where(goes_on, get_at(before, before, nowhere), before)
    return get_at(num_steps, links.indexed_ids, 1) * block_size


def _padded(block_ids: jax.Array, pool: BlockPool) -> jax.Array:
    """Cuts or fills `block_ids` to the width of the block table."""
    block_ids = block_ids[: pool.max_blocks_per_seq]
    num_missing = pool.max_blocks_per_seq - block_ids.shape[0]
    return jnp.pad(block_ids, (0, num_missing), constant_values=pool.num_blocks)


def _needed(group: LayerGroup, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the columns `[first, end)`, beside sinks, that a row of `length` tokens must hold."""
    return group.span.needed_columns(length, group.block_size)


def link(
    control: Control,
    mask: jax.Array,  # bool[E], which entries count
    rows: jax.Array,  # i32[E]
    columns: jax.Array,  # i32[E], of the indexed group
    canonical: jax.Array,  # i32[E], the published blocks there
    config: CacheConfig,
    *,
    is_wanted: jax.Array | None = None,  # bool[E], whether prompts asked for the states
) -> Control:
    """Links published blocks to blocks of the same tokens in other groups, of keys or else of states."""
    index, indexed = control.prefix_index, config.groups[config.indexed_group]
    assert index is not None
    pools, all_links = list(control.block_pools), list(index.group_links)
    for g, (pool, group) in enumerate(zip(control.block_pools, config.groups, strict=True)):
        links = all_links[g]
        if links is None or not group.span.is_in_prefix or group.span.is_read_later == (is_wanted is None):
            continue
        slots = jnp.arange(links.block_ids.shape[1], dtype=jnp.int32)
        column = (columns * indexed.block_size // group.block_size)[:, None] + slots[None]
        is_whole = (column + 1) * group.block_size <= ((columns + 1) * indexed.block_size)[:, None]
        ids = get_at(pool.block_table, (rows[:, None], column), pool.num_blocks)
        present = get_at(links.block_ids, canonical, 0)
        is_linked = mask[:, None] & is_whole & (ids < pool.num_blocks) & (present == pool.num_blocks)
        wanted = is_wanted
        if links.is_wanted is not None:
            if wanted is None:
                wanted = _is_wanted(control, rows, column, group, config)  # [E, slots]
            wanted = jnp.broadcast_to(wanted.reshape(len(wanted), -1), ids.shape)
        owners = jnp.where(mask, canonical, indexed.num_blocks)
        control, is_kept = config.keeper.link(control, g, owners, wanted, config)
        is_linked &= jnp.logical_not(is_kept)
        # A block is linked once: a second link would outlive the first one's eviction.
        is_linked &= ~block_pool.is_published(pool, ids)
        # Of entries with the same contents the first that still holds the block links its own.
        is_linked &= ~_is_linked_before(is_linked, canonical)
        # Of entries that want to link the same block, as forks may, the first gets it.
        is_linked, marks = first_of_equal(links.indexed_ids, is_linked, ids)
        indexed_ids = jnp.where(is_linked, canonical[:, None], links.block_ids.shape[0])
        linked = jnp.where(is_linked, ids, pool.num_blocks)
        links = dataclasses.replace(
            links,
            block_ids=set_at(links.block_ids, (indexed_ids, slots), ids),
            indexed_ids=set_at(marks, linked, indexed_ids),
        )
        if links.is_wanted is not None:
            assert wanted is not None
            noted = set_at(links.is_wanted, linked, wanted)
            # What another row had published, and nothing asked for then, is wanted from now on.
            present = jnp.where(mask[:, None] & wanted, present, pool.num_blocks)
            links = dataclasses.replace(links, is_wanted=set_at(noted, present, True))
        all_links[g] = links
        pools[g] = block_pool.mark_published(pool, linked)
    index = dataclasses.replace(index, group_links=tuple(all_links))
    return dataclasses.replace(control, block_pools=tuple(pools), prefix_index=index)


def _is_wanted(
    control: Control, rows: jax.Array, columns: jax.Array, group: LayerGroup, config: CacheConfig
) -> jax.Array:
    """Masks the columns i32[E, slots] of windows that the next wanted state of a row needs."""
    assert control.marks is not None
    junction = get_at(control.marks, rows, 0)[:, :1]
    length = config.snapshots.next_wanted((columns + 1) * group.block_size, junction)
    return columns >= _needed(group, length)[0]


def _is_linked_before(is_linked: jax.Array, canonical: jax.Array) -> jax.Array:
    """Masks the bool[E, slots] whose slot an earlier entry of the same canonical block links."""
    order = jnp.arange(canonical.shape[0], dtype=jnp.int32)
    is_earlier = (canonical[:, None] == canonical[None]) & (order[:, None] > order[None])
    return (is_earlier[:, :, None] & is_linked[None]).any(axis=1)


def drop_links(control: Control, indexed_ids: jax.Array) -> Control:
    """Unlinks and withdraws the blocks linked to indexed blocks i32[n], which are published no more."""
    index = control.prefix_index
    assert index is not None
    pools, all_links = list(control.block_pools), list(index.group_links)
    for g, links in enumerate(index.group_links):
        if links is None or not links.block_ids.shape[1]:
            continue
        nowhere = links.indexed_ids.shape[0]
        # Linked blocks are found through the indexed one alone. Without it no row could find them.
        ids, block_ids = read_first(get_at(links.block_ids, indexed_ids, nowhere), links.block_ids)
        ids = ids.reshape(-1)
        pools[g] = block_pool.withdraw(pools[g], ids)
        all_links[g] = dataclasses.replace(
            links,
            block_ids=set_at(block_ids, indexed_ids, nowhere),
            indexed_ids=set_at(links.indexed_ids, ids, links.block_ids.shape[0]),
        )
    index = dataclasses.replace(index, group_links=tuple(all_links))
    return dataclasses.replace(control, block_pools=tuple(pools), prefix_index=index)


def unlink(index: PrefixIndex, group_id: int, block_ids: jax.Array) -> PrefixIndex:
    """Unlinks blocks i32[n] of a group, which differ, from indexed blocks; nowhere is skipped."""
    links = index.group_links[group_id]
    assert links is not None
    if not links.block_ids.shape[1]:
        return index
    nowhere = links.indexed_ids.shape[0]
    indexed_ids = get_at(links.indexed_ids, block_ids, links.block_ids.shape[0])
    slots = first_true(get_at(links.block_ids, indexed_ids, nowhere) == block_ids[:, None])
    (indexed_ids, slots), links = read_first((indexed_ids, slots), links)
    links = dataclasses.replace(
        links,
        block_ids=set_at(links.block_ids, (indexed_ids, slots), nowhere),
        indexed_ids=set_at(links.indexed_ids, block_ids, links.block_ids.shape[0]),
    )
    everything = (*index.group_links[:group_id], links, *index.group_links[group_id + 1 :])
    return dataclasses.replace(index, group_links=everything)
