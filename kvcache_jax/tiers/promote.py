"""Promotion: blocks of the device get contents from the host, and are published in their place."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import (
    add_at,
    first_of_equal,
    first_true,
    get_at,
    min_at,
    num_true,
    run_if,
    set_at,
)
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control
from kvcache_jax.prefix import block_metadata, group_links, prefix_index
from kvcache_jax.prefix.prefix_index import Content
from kvcache_jax.tiers.demote import move_entries, with_links
from kvcache_jax.tiers.hosted import HostTier, linked_groups, tier_of, with_tier


def hosted_ids(hits: jax.Array, nowhere: int, none: int) -> jax.Array:
    """Returns the host's ids of hits i32[...] past `nowhere`, `none` for other hits."""
    return jnp.where(hits > nowhere, hits - nowhere - 1, none)


def hold(control: Control, hits: Sequence[jax.Array], config: CacheConfig) -> Control:
    """Holds the host's blocks among hits, per group i32[n, C], and counts uses of the device's."""
    tier = tier_of(control)
    num_hits = add_at(tier.num_hits, hits[config.indexed_group], 1)
    tier = dataclasses.replace(tier, num_hits=num_hits)

    for g, pool in enumerate(tier.control.block_pools):
        if not pool.num_blocks:
            continue
        ids = hosted_ids(hits[g], control.block_pools[g].num_blocks, pool.num_blocks)
        tier = tier.with_pool(g, block_pool.revive(pool, ids)[0])
    return with_tier(control, tier)


def _swept(tier: HostTier) -> HostTier:
    """Returns the state with room in the queues for the blocks that are held."""
    for g, pool in enumerate(tier.control.block_pools):
        if pool.num_blocks:
            tier = tier.with_pool(g, block_pool.sweep_queue(pool, pool.num_free >= 0))
    return tier


def _are_hosted(control: Control, hits: Sequence[jax.Array]) -> jax.Array:
    """Tests whether there are blocks of the host among hits, bool[]."""
    pairs = zip(control.block_pools, hits, strict=True)
    return jnp.stack([(ids > pool.num_blocks).any() for pool, ids in pairs]).any()


def restore(
    control: Control,
    rows: jax.Array,
    hits: Sequence[jax.Array],
    held: Mapping[int, jax.Array],
    config: CacheConfig,
) -> Control:
    """Gives blocks `held` of the device the contents of the host's that were hit; see `Keeper.restore`.

    Of several that get the same contents the first is published. The others are their rows' own, as are those
    for which the device's index has no place, and all after them: their contents stay on the host, too.
    """

    def restore_all(control: Control) -> Control:
        control = with_tier(control, _swept(tier_of(control)))
        control = _restore_indexed(
            control, rows, hits[config.indexed_group], held[config.indexed_group], config
        )
        for g, _ in linked_groups(tier_of(control).index):
            control = _restore_linked(control, g, rows, hits[g], held, config)
        return control

    return run_if(_are_hosted(control, hits), restore_all, control)


def _restore_indexed(
    control: Control, rows: jax.Array, hits: jax.Array, held: jax.Array, config: CacheConfig
) -> Control:
    g, tier, index = config.indexed_group, tier_of(control), control.prefix_index
    pool = control.block_pools[g]
    assert index is not None
    is_hosted = hits > pool.num_blocks
    ids = hosted_ids(hits, pool.num_blocks, tier.nowhere).reshape(-1)
    block_ids = jnp.where(is_hosted, held, pool.num_blocks).reshape(-1)
    hashes, tokens = get_at(tier.index.block_hash, ids), get_at(tier.index.block_tokens, ids)
    buckets = prefix_index.bucket_of(index, hashes)
    in_bucket = index.buckets[buckets]
    rank = _rank_of_equal(jnp.where(is_hosted.reshape(-1), buckets, index.buckets.shape[0]))
    way, has_way = prefix_index.free_way(index, in_bucket, rank)
    has_way &= prefix_index.candidates(index, in_bucket, hashes) == pool.num_blocks
    tier, is_first = _first_of_equal(tier, ids)
    is_good = ~is_hosted | (is_first & has_way).reshape(hits.shape)
    is_new = is_hosted & (jnp.cumsum(~is_good, axis=1) == 0)
    # A published block follows its parent in every row.
    parents = jnp.pad(held[:, :-1], [(0, 0), (1, 0)], constant_values=pool.num_blocks)
    content = Content(tokens, hashes, parents.reshape(-1), get_at(tier.index.namespace, ids))
    index = prefix_index.insert(index, is_new.reshape(-1), block_ids, way, content)
    index = dataclasses.replace(index, block_tokens=set_at(index.block_tokens, block_ids, tokens))
    new_ids = jnp.where(is_new.reshape(-1), block_ids, pool.num_blocks)
    if index.history is not None:
        depth = lax.broadcasted_iota(jnp.int32, hits.shape, 1).reshape(-1)
        priority = jnp.repeat(get_at(control.priority, rows, 0), hits.shape[1])
        history = block_metadata.note_published(index.history, new_ids, control.clock, priority, depth)
        history = block_metadata.note_used(history, new_ids, control.clock)
        index = dataclasses.replace(index, history=history)
    pool = block_pool.sweep_queue(block_pool.mark_published(pool, new_ids), is_new.any())

    left = jnp.where(is_new.reshape(-1), ids, tier.nowhere)
    tier = move_entries(tier, left, tier.of_device(new_ids))
    tier = _leave(tier, g, left)
    tier = _wait(tier, g, block_ids, ids)
    tier = dataclasses.replace(
        tier,
        num_hits=set_at(tier.num_hits, new_ids, 1),
        num_promoted=tier.num_promoted + num_true(is_hosted).astype(jnp.uint32),
    )
    is_published = block_pool.is_published(pool, held)
    num_leading = jnp.sum(jnp.cumprod(is_published, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    pools = (*control.block_pools[:g], pool, *control.block_pools[g + 1 :])
    control = with_tier(
        control,
        tier,
        prefix_index=index,
        block_pools=pools,
        num_published=min_at(control.num_published, rows, num_leading),
    )
    return config.hooks.note_published(control, new_ids)


def _restore_linked(
    control: Control,
    group_id: int,
    rows: jax.Array,
    hits: jax.Array,
    held: Mapping[int, jax.Array],
    config: CacheConfig,
) -> Control:
    """Restores blocks of a group that is not indexed, and links them to the indexed blocks of their rows."""
    tier, index, g = tier_of(control), control.prefix_index, config.indexed_group
    pool, indexed = control.block_pools[group_id], control.block_pools[g]
    assert index is not None
    links, hosted = index.group_links[group_id], tier.index.group_links[group_id]
    assert links is not None and hosted is not None
    is_hosted = hits > pool.num_blocks
    none = tier.control.block_pools[group_id].num_blocks
    ids = hosted_ids(hits, pool.num_blocks, none).reshape(-1)
    block_ids = jnp.where(is_hosted, held[group_id], pool.num_blocks).reshape(-1)
    columns, slots = group_links.link_places(hits.shape[1], group_id, config)
    owners = get_at(jnp.moveaxis(held[g], 1, 0), columns).T
    slots = jnp.broadcast_to(slots, owners.shape).reshape(-1)
    is_linked = is_hosted & block_pool.is_published(indexed, owners)
    owners = owners.reshape(-1)
    is_linked = is_linked.reshape(-1) & (get_at(links.block_ids, (owners, slots), 0) == pool.num_blocks)
    # Lent: no place of it is negative.
    is_first, marks = first_of_equal(hosted.indexed_ids, is_linked, ids)
    hosted = dataclasses.replace(hosted, indexed_ids=set_at(marks, ids, get_at(hosted.indexed_ids, ids)))
    tier = with_links(tier, group_id, hosted)
    owners = jnp.where(is_first, owners, indexed.num_blocks)
    new_ids = jnp.where(is_first, block_ids, pool.num_blocks)
    links = dataclasses.replace(
        links,
        block_ids=set_at(links.block_ids, (owners, slots), new_ids),
        indexed_ids=set_at(links.indexed_ids, new_ids, owners),
    )
    if links.is_wanted is not None and hosted.is_wanted is not None:
        is_wanted = get_at(hosted.is_wanted, ids) | jnp.repeat(rows < control.max_seqs, hits.shape[1])
        links = dataclasses.replace(links, is_wanted=set_at(links.is_wanted, new_ids, is_wanted))
    all_links = (*index.group_links[:group_id], links, *index.group_links[group_id + 1 :])
    pool = block_pool.sweep_queue(block_pool.mark_published(pool, new_ids), is_first.any())
    tier = _leave(tier, group_id, jnp.where(is_first, ids, none))
    return with_tier(
        control,
        _wait(tier, group_id, block_ids, ids),
        prefix_index=dataclasses.replace(index, group_links=all_links),
        block_pools=(*control.block_pools[:group_id], pool, *control.block_pools[group_id + 1 :]),
    )


def _rank_of_equal(values: jax.Array) -> jax.Array:
    """Counts the entries before each of i32[n] that are equal to it, i32[n]."""
    order = jnp.arange(values.shape[0], dtype=jnp.int32)
    values, places = lax.sort((values, order), num_keys=1, is_stable=True)
    is_start = (values != jnp.roll(values, 1)) | (order == 0)
    return set_at(order, places, order - lax.cummax(jnp.where(is_start, order, 0)))


def _first_of_equal(tier: HostTier, ids: jax.Array) -> tuple[HostTier, jax.Array]:
    """Masks the first of equal ids i32[n] of the host's index, bool[n]."""
    serials = get_at(tier.serial, ids)
    is_first, marks = first_of_equal(tier.serial, ids < tier.nowhere, ids)
    return dataclasses.replace(tier, serial=set_at(marks, ids, serials)), is_first


def _leave(tier: HostTier, group_id: int, ids: jax.Array) -> HostTier:
    """Takes held blocks i32[n] of the host, which differ, out of the index; nowhere is skipped."""
    pool, index = tier.control.block_pools[group_id], tier.index
    if index.group_links[group_id] is None:
        index = prefix_index.remove(index, ids)
    else:
        index = group_links.unlink(index, group_id, ids)
    tier = tier.with_control(prefix_index=index)
    return tier.with_pool(group_id, block_pool.withdraw(pool, ids))


def _wait(tier: HostTier, group_id: int, block_ids: jax.Array, ids: jax.Array) -> HostTier:
    """Notes that blocks i32[n] of the device wait for the contents of the host's held `ids` i32[n]."""
    pool, sources = tier.control.block_pools[group_id], tier.sources[group_id]
    # What the device's block waited for before is not wanted: its row ended before it came.
    tier = tier.with_pool(group_id, block_pool.release(pool, get_at(sources, block_ids, pool.num_blocks)))
    return tier.waiting(group_id, sources=set_at(sources, block_ids, ids))


def link(
    control: Control, group_id: int, owners: jax.Array, is_wanted: jax.Array | None
) -> tuple[Control, jax.Array]:
    """Masks the host's blocks under indexed blocks `owners` i32[E] of the device; see `Keeper.link`."""
    tier = tier_of(control)
    links = tier.index.group_links[group_id]
    assert links is not None
    nowhere = links.indexed_ids.shape[0]
    ids = get_at(links.block_ids, tier.of_device(owners), nowhere)
    if links.is_wanted is not None and is_wanted is not None:
        noted = set_at(links.is_wanted, jnp.where(is_wanted, ids, nowhere), True)
        control = with_tier(control, with_links(tier, group_id, dataclasses.replace(links, is_wanted=noted)))
    return control, ids < nowhere


def publish(control: Control, block_ids: jax.Array, config: CacheConfig) -> Control:
    """Puts blocks i32[n] that were just published in the places of the host's with the same contents."""
    tier, index, g = tier_of(control), control.prefix_index, config.indexed_group
    assert index is not None
    nowhere = index.parent.shape[0]
    hashes = get_at(index.block_hash, block_ids)
    in_bucket = tier.index.buckets[prefix_index.bucket_of(tier.index, hashes)]
    ids = prefix_index.candidates(tier.index, in_bucket, hashes)
    tokens, namespace = get_at(index.block_tokens, block_ids), get_at(index.namespace, block_ids)
    parent_serial = get_at(tier.index.parent, ids)
    is_same = (block_ids < nowhere) & prefix_index.matches(
        tier.index, ids, Content(tokens, hashes, parent_serial, namespace)
    )
    # A block that is the child of another of the call follows that one's twin, if that has one.
    parents = get_at(index.parent, block_ids, nowhere)
    order = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    is_child = (parents[:, None] == block_ids[None]) & (parents[:, None] < nowhere)
    parent_entry = first_true(is_child)
    before = get_at(tier.serial, tier.of_device(parents), 0)
    before = jnp.where(parent_entry < order.size, get_at(tier.serial, get_at(ids, parent_entry), 0), before)
    is_same &= (parent_serial == before) & ((parents == nowhere) | (before > 0))
    entry = parent_entry
    for _ in range(order.size.bit_length()):
        is_same &= get_at(is_same, entry, True)
        entry = get_at(entry, entry, order.size)

    on_device, left = tier.of_device(block_ids), jnp.where(is_same, ids, tier.nowhere)
    tier = dataclasses.replace(
        tier,
        control=group_links.drop_links(tier.control, on_device),
        serial=set_at(tier.serial, on_device, 0),
        num_hits=set_at(tier.num_hits, block_ids, 0),
    )
    on_device = jnp.where(is_same, on_device, tier.nowhere)
    tier = move_entries(tier, left, on_device)
    control = with_tier(control, _leave(tier, g, left))
    # An import brings blocks with all that is linked to them.
    for other, _ in linked_groups(index):
        control = _leave_linked(control, other, block_ids, on_device)
    return control


def _leave_linked(control: Control, group_id: int, block_ids: jax.Array, on_device: jax.Array) -> Control:
    """Takes out of the host what is linked to the device's indexed blocks i32[n] in both tiers."""
    tier, index = tier_of(control), control.prefix_index
    assert index is not None
    links, hosted = index.group_links[group_id], tier.index.group_links[group_id]
    assert links is not None and hosted is not None
    none, nowhere = (of.block_pools[group_id].num_blocks for of in (tier.control, control))
    mine = get_at(links.block_ids, block_ids, nowhere)
    ids = jnp.where(mine < nowhere, get_at(hosted.block_ids, on_device, none), none)
    if links.is_wanted is not None and hosted.is_wanted is not None:
        is_wanted = get_at(links.is_wanted, mine, False) | get_at(hosted.is_wanted, ids, False)
        links = dataclasses.replace(links, is_wanted=set_at(links.is_wanted, mine, is_wanted))
        all_links = (*index.group_links[:group_id], links, *index.group_links[group_id + 1 :])
        index = dataclasses.replace(index, group_links=all_links)
    return with_tier(control, _leave(tier, group_id, ids.reshape(-1)), prefix_index=index)
