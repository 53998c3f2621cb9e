"""Checks of the host's blocks: on the host, slow, and written without the code that keeps what they check."""

import dataclasses

import jax
import numpy as np

from kvcache_jax.core.state import BlockPool, Cache
from kvcache_jax.inspect.check_invariants import (
    check_counts,
    check_group_links,
    check_ids,
    expected_hashes,
)
from kvcache_jax.prefix.prefix_index import bucket_of
from kvcache_jax.tiers.hosted import HostTier, tier_of


def violations(cache: Cache) -> list[str]:
    """Finds what is wrong with the host's blocks, a sentence for each."""
    tier, control = tier_of(cache.control), cache.control
    if unusable := check_ids(_lists_of_ids(cache, tier)):
        return unusable  # the checks below look things up by them
    found = []
    for g, pool in enumerate(tier.control.block_pools):
        awaits, sources = np.asarray(tier.awaits[g]), np.asarray(tier.sources[g])
        held = [sources[sources < pool.num_blocks]]
        if g == cache.config.indexed_group:
            held.append(np.arange(tier.num_blocks, tier.nowhere))
        found += [f"host, group {g}: {violation}" for violation in check_counts(pool, *held)]
        nowhere = control.block_pools[g].num_blocks
        assert pool.cached is not None
        waits = (awaits < nowhere) & np.asarray(pool.cached.is_published)[: len(awaits)]
        for block in np.flatnonzero(waits[held[0]]):
            found.append(f"host, group {g}: block {held[0][block]} is a source and awaits contents")
        if bool(tier.is_settled) and (waits.any() or len(held[0])):
            found.append(f"host, group {g}: blocks wait for contents in a settled cache")
        found += [f"group {g}: {what}" for what in _check_releases(control.block_pools[g])]
    return found + _check_host_index(cache, tier)


def _lists_of_ids(cache: Cache, tier: HostTier) -> list[tuple[str, jax.Array, int]]:
    lists = [("the host's index", tier.index.buckets, tier.nowhere)]
    for g, pool in enumerate(tier.control.block_pools):
        nowhere, links = pool.num_blocks, tier.index.group_links[g]
        assert pool.cached is not None
        of_group = [("block table", pool.block_table, nowhere), ("queue", pool.cached.queue, nowhere)]
        of_group.append(("list of sources", tier.sources[g], nowhere))
        awaited = cache.control.block_pools[g].num_blocks
        of_group.append(("list of awaited blocks", tier.awaits[g], awaited))
        if links is not None:
            of_group.append(("list of linked blocks", links.block_ids, nowhere))
            of_group.append(("list of indexed blocks", links.indexed_ids, tier.nowhere))
        lists += [(f"host, group {g}: the {name}", ids, most) for name, ids, most in of_group]
    return lists


def _check_releases(pool: BlockPool) -> list[str]:
    cached = pool.cached
    if cached is None or cached.released_at is None or cached.num_released is None:
        return []
    blocks = np.flatnonzero(np.asarray(cached.is_published) & (np.asarray(pool.ref_count) == 0))
    order = np.argsort(np.asarray(cached.queued_at - cached.head)[blocks])
    ago = np.asarray(cached.num_released - cached.released_at).astype(np.int64)[blocks][order]
    is_in_order = (np.diff(ago) < 0).all() and (ago > 0).all()
    return [] if is_in_order else ["the moments of release are not in the order of the queue"]


def _check_host_index(cache: Cache, tier: HostTier) -> list[str]:
    index, device, g = tier.index, cache.control.prefix_index, cache.config.indexed_group
    hosted, cached = tier.control.block_pools[g].cached, cache.control.block_pools[g].cached
    assert device is not None and hosted is not None and cached is not None
    is_hosted, is_published = np.asarray(hosted.is_published), np.asarray(cached.is_published)
    found, buckets = [], np.asarray(index.buckets)
    entries = np.sort(buckets[buckets < tier.nowhere]).tolist()
    if entries != np.flatnonzero(is_hosted).tolist():
        found.append(f"the host's index lists {entries}, and {np.flatnonzero(is_hosted).tolist()} are there")
    is_listed = (
        buckets[np.asarray(bucket_of(index, index.block_hash))] == np.arange(len(is_hosted))[:, None]
    ).any(1)
    found += [
        f"the host's block {block} is in the wrong bucket" for block in np.flatnonzero(is_hosted & ~is_listed)
    ]
    is_there = np.concatenate([is_hosted[: tier.num_blocks], is_published])
    serial = np.where(is_there, np.asarray(tier.serial), 0)
    owners = {number: block for block, number in enumerate(serial.tolist()) if number}
    if len(owners) != (serial > 0).sum():
        found.append("two blocks have the same serial number")
    # By ids of the host's index: the host's blocks, then the device's.
    both = {
        name: np.concatenate([np.asarray(getattr(index, name))[: tier.num_blocks], getattr(device, name)])
        for name in ("block_tokens", "block_hash", "namespace")
    }
    numbers = np.asarray(index.parent)[: tier.num_blocks].tolist()
    parents = np.array([owners.get(number, -1) if number else tier.nowhere for number in numbers])
    parents = np.append(parents, np.asarray(tier.of_device(device.parent)))
    parents[~is_there] = -1  # as of a block whose parent is gone
    depth, num_known = np.where(parents == tier.nowhere, 0, -1), -1
    while num_known < (num_known := (depth >= 0).sum()):
        after = np.append(depth, -1)[parents]
        depth = np.where(after >= 0, after + 1, depth)
    whole = dataclasses.replace(index, parent=parents, **both)
    hashes, _ = expected_hashes(whole, cache.control.hash_key, depth)
    is_other = (np.asarray(hashes) != both["block_hash"]).any(axis=1)
    # A prefix is in one tier: its content is told by the block before it and its own tokens.
    contents: dict[tuple, int] = {}
    for block in np.flatnonzero(depth >= 0)[::-1].tolist():
        words, name = both["namespace"][block], f"the host's block {block}"
        content = int(parents[block]), words.tobytes(), both["block_tokens"][block].tobytes()
        twin = contents.setdefault(content, block)
        if block >= tier.num_blocks:
            continue
        if twin != block:
            where = f"device's block {twin - tier.num_blocks}" if twin >= tier.num_blocks else f"block {twin}"
            found.append(f"{name} has the contents of the {where}")
        if parents[block] < tier.nowhere and (both["namespace"][parents[block]] != words).any():
            found.append(f"{name} follows one of another namespace")
        elif is_other[block]:
            found.append(f"{name} has another hash than its tokens")
    for other, (links, pool) in enumerate(zip(index.group_links, tier.control.block_pools, strict=True)):
        if links is not None and pool.cached is not None:
            wrong = check_group_links(links, is_there, np.asarray(pool.cached.is_published))
            found += [f"host, group {other}: {what}" for what in wrong]
            mine = device.group_links[other]
            assert mine is not None
            theirs = np.asarray(links.block_ids)[tier.num_blocks :] < pool.num_blocks
            is_twice = theirs & (np.asarray(mine.block_ids) < cache.control.block_pools[other].num_blocks)
            for owner in np.flatnonzero(is_twice.any(axis=1)):
                found.append(f"group {other}: the device and the host have what block {owner} is linked to")
    return found
