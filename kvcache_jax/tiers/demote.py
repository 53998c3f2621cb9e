"""Demotion: blocks that the device evicts are kept on the host, whose oldest are forgotten for them."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import (
    first_of_equal,
    first_true,
    get_at,
    num_true,
    rank_true,
    remainder,
    set_at,
)
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control, GroupLinks
from kvcache_jax.prefix import eviction, group_links, prefix_index
from kvcache_jax.prefix.prefix_index import Content
from kvcache_jax.tiers.hosted import HostTier, capacity, host_config, linked_groups, tier_of, with_tier

_MOST_SERIALS = 2**31 - 1


def demote(
    control: Control,
    group_id: int,
    block_ids: jax.Array,
    num_blocks: int,
    store_after: int,
    config: CacheConfig,
) -> Control:
    """Keeps cached blocks i32[n] of a group, the first to be evicted first; nowhere is skipped.

    The last of them are kept where the host has no room for all. Blocks whose contents have yet to come from
    the host are forgotten.
    """
    tier, index = tier_of(control), control.prefix_index
    assert index is not None
    most = capacity(config, num_blocks)
    if group_id != config.indexed_group:
        return with_tier(control, _keep_linked(control, tier, group_id, block_ids, most[group_id], config))
    for g, links in linked_groups(index):
        linked = get_at(links.block_ids, block_ids, links.indexed_ids.shape[0]).reshape(-1)
        tier = _keep_linked(control, tier, g, linked, most[g], config)
    is_wanted = block_ids < index.parent.shape[0]
    if store_after:
        is_wanted &= get_at(tier.num_hits, block_ids) >= store_after
    return with_tier(control, _keep_indexed(control, tier, block_ids, is_wanted, most[group_id], config))


def _keep_indexed(
    control: Control,
    tier: HostTier,
    block_ids: jax.Array,
    is_wanted: jax.Array,
    most: int,
    config: CacheConfig,
) -> HostTier:
    g, index = config.indexed_group, control.prefix_index
    assert index is not None
    nowhere = index.parent.shape[0]
    tier, has_contents = _cancel(tier, g, block_ids)
    # A block takes its serial number along, and the block before it needs one from now on.
    parents = get_at(index.parent, block_ids, nowhere)
    tier = _with_serials(tier, jnp.where(is_wanted, tier.of_device(parents), tier.nowhere))
    parent_serial = get_at(tier.serial, tier.of_device(parents), 0)
    tier, is_kept = _make_room(tier, g, is_wanted & has_contents, most, config)
    hashes = get_at(index.block_hash, block_ids)
    buckets = prefix_index.bucket_of(tier.index, hashes)
    order = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    goes_before = (order[:, None] > order[None]) & (buckets[:, None] == buckets[None]) & is_kept[None]
    in_bucket = tier.index.buckets[buckets]
    way, has_way = prefix_index.free_way(tier.index, in_bucket, jnp.sum(goes_before, axis=1, dtype=jnp.int32))
    # A block with the same hash would make this one unfindable.
    is_kept &= has_way & (prefix_index.candidates(tier.index, in_bucket, hashes) == tier.nowhere)
    tier, ids = _append(tier, g, is_kept)
    tokens = get_at(index.block_tokens, block_ids)
    content = Content(tokens, hashes, parent_serial, get_at(index.namespace, block_ids))
    hosted = prefix_index.insert(tier.index, is_kept, ids, way, content)
    hosted = dataclasses.replace(hosted, block_tokens=set_at(hosted.block_tokens, ids, tokens))
    tier = tier.with_control(prefix_index=hosted)
    on_device = tier.of_device(block_ids)
    tier = move_entries(tier, on_device, jnp.where(is_kept, ids, tier.nowhere))
    # Of a block that is forgotten nothing is kept.
    forgotten = jnp.where(is_kept, tier.nowhere, on_device)
    tier = dataclasses.replace(tier, control=group_links.drop_links(tier.control, forgotten))
    tier = tier.waiting(g, awaits=set_at(tier.awaits[g], ids, block_ids))
    num_demoted = tier.num_demoted + num_true(is_kept).astype(jnp.uint32)
    return dataclasses.replace(tier, num_demoted=num_demoted)


def _keep_linked(
    control: Control, tier: HostTier, group_id: int, block_ids: jax.Array, most: int, config: CacheConfig
) -> HostTier:
    """Keeps blocks of a group that is not indexed, under their indexed blocks on the device."""
    index = control.prefix_index
    assert index is not None
    links, hosted = index.group_links[group_id], tier.index.group_links[group_id]
    assert links is not None and hosted is not None
    tier, has_contents = _cancel(tier, group_id, block_ids)
    indexed_ids = get_at(links.indexed_ids, block_ids, links.block_ids.shape[0])
    slots = first_true(get_at(links.block_ids, indexed_ids) == block_ids[:, None])
    owners = tier.of_device(indexed_ids)
    is_kept = has_contents & (owners < tier.nowhere)
    is_kept &= get_at(hosted.block_ids, (owners, slots), 0) == hosted.indexed_ids.shape[0]
    tier, is_kept = _make_room(tier, group_id, is_kept, most, config)
    tier, ids = _append(tier, group_id, is_kept)
    hosted = tier.index.group_links[group_id]
    assert hosted is not None
    hosted = dataclasses.replace(
        hosted,
        block_ids=set_at(hosted.block_ids, (jnp.where(is_kept, owners, tier.nowhere), slots), ids),
        indexed_ids=set_at(hosted.indexed_ids, ids, owners),
    )
    if links.is_wanted is not None and hosted.is_wanted is not None:
        is_wanted = set_at(hosted.is_wanted, ids, get_at(links.is_wanted, block_ids))
        hosted = dataclasses.replace(hosted, is_wanted=is_wanted)
        cached, moments = control.block_pools[group_id].cached, tier.released_at[group_id]
        assert cached is not None and cached.released_at is not None and moments is not None
        moments = set_at(moments, ids, get_at(cached.released_at, block_ids))
        all_moments = (*tier.released_at[:group_id], moments, *tier.released_at[group_id + 1 :])
        tier = dataclasses.replace(tier, released_at=all_moments)
    tier = with_links(tier, group_id, hosted)
    return tier.waiting(group_id, awaits=set_at(tier.awaits[group_id], ids, block_ids))


def _cancel(tier: HostTier, group_id: int, block_ids: jax.Array) -> tuple[HostTier, jax.Array]:
    """Cancels what blocks i32[n], which differ, wait for; masks the blocks that have contents, bool[n]."""
    pool, sources = tier.control.block_pools[group_id], tier.sources[group_id]
    awaited = get_at(sources, block_ids, pool.num_blocks)
    tier = tier.with_pool(group_id, block_pool.release(pool, awaited))
    tier = tier.waiting(group_id, sources=set_at(sources, block_ids, pool.num_blocks))
    return tier, (awaited == pool.num_blocks) & (block_ids < sources.shape[0])


def _with_serials(tier: HostTier, ids: jax.Array) -> HostTier:
    """Gives a number to the ids i32[n] of the index without a serial number; nowhere is skipped."""
    lacks = get_at(tier.serial, ids, 1) == 0
    is_first, serial = first_of_equal(tier.serial, lacks, ids)
    rank, num_new = rank_true(is_first)
    numbers = 1 + remainder(tier.num_serials + rank, _MOST_SERIALS)
    return dataclasses.replace(
        tier,
        serial=set_at(serial, jnp.where(is_first, ids, tier.nowhere), numbers),
        num_serials=remainder(tier.num_serials + num_new, _MOST_SERIALS),
    )


def _make_room(
    tier: HostTier, group_id: int, mask: jax.Array, most: int, config: CacheConfig
) -> tuple[HostTier, jax.Array]:
    """Evicts from the host what the masked blocks displace; masks the blocks that are kept, bool[n]."""
    pool = tier.control.block_pools[group_id]
    num_cached = block_pool.num_available(pool) - pool.num_free
    rank, num_wanted = rank_true(mask)
    if group_id in config.snapshot_groups:  # no more than both tiers have room for, so that all find a place
        return tier, mask & (rank < pool.num_free)
    num_kept = jnp.minimum(num_wanted, jnp.minimum(most, block_pool.num_available(pool)))
    num_evicted = num_kept - jnp.minimum(most - num_cached, pool.num_free)
    control = eviction.evict(tier.control, group_id, jnp.maximum(num_evicted, 0), host_config(config))
    # The first would be displaced by the last.
    return dataclasses.replace(tier, control=control), mask & (rank >= num_wanted - num_kept)


def _append(tier: HostTier, group_id: int, mask: jax.Array) -> tuple[HostTier, jax.Array]:
    """Takes a block per true entry, which is evicted after all others; i32 like `mask`, else nowhere."""
    pool, ids = block_pool.take(tier.control.block_pools[group_id], mask)
    pool = block_pool.sweep_queue(block_pool.mark_published(pool, ids), mask.any())
    return tier.with_pool(group_id, block_pool.release(pool, ids)), ids


def move_entries(tier: HostTier, ids: jax.Array, new_ids: jax.Array) -> HostTier:
    """Moves serial numbers, and blocks of other groups, from `ids` i32[n] of the index to `new_ids`.

    Both differ. Where `new_ids` is nowhere, the serial number is forgotten and the rest stays.
    """
    serial = get_at(tier.serial, ids, 0)
    cleared = set_at(tier.serial, ids, 0)
    tier = dataclasses.replace(tier, serial=set_at(cleared, new_ids, serial))
    for g, links in linked_groups(tier.index):
        nowhere = links.indexed_ids.shape[0]
        moved = jnp.where(new_ids[:, None] < tier.nowhere, get_at(links.block_ids, ids, nowhere), nowhere)
        left = jnp.where(new_ids < tier.nowhere, ids, tier.nowhere)
        block_ids = set_at(set_at(links.block_ids, left, nowhere), new_ids, moved)
        owners = jnp.broadcast_to(new_ids[:, None], moved.shape)
        indexed_ids = set_at(links.indexed_ids, moved, owners)
        links = dataclasses.replace(links, block_ids=block_ids, indexed_ids=indexed_ids)
        tier = with_links(tier, g, links)
    return tier


def with_links(tier: HostTier, group_id: int, links: GroupLinks) -> HostTier:
    """Sets the links of the host's index to a layer group."""
    all_links = tier.index.group_links
    all_links = (*all_links[:group_id], links, *all_links[group_id + 1 :])
    return tier.with_control(prefix_index=dataclasses.replace(tier.index, group_links=all_links))
