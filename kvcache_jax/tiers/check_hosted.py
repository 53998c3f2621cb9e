"""Checks of the host's blocks: on the host, slow, and written without the code that keeps what they check."""

import numpy as np

from kvcache_jax.core.state import BlockPool, Cache
from kvcache_jax.inspect.check_invariants import check_counts, check_group_links
from kvcache_jax.prefix.prefix_index import bucket_of
from kvcache_jax.tiers.hosted import HostTier, tier_of


def violations(cache: Cache) -> list[str]:
    """Finds what is wrong with the host's blocks, a sentence for each."""
    tier, control = tier_of(cache.control), cache.control
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
    # A prefix is in one tier: its content is told by the block before it and its own tokens.
    parents = np.asarray(device.parent)
    on_device = {
        (
            int(parents[b]),
            np.asarray(device.namespace)[b].tobytes(),
            np.asarray(device.block_tokens)[b].tobytes(),
        ): b
        for b in np.flatnonzero(is_published).tolist()
    }
    for block in np.flatnonzero(is_hosted).tolist():
        number = int(np.asarray(index.parent)[block])
        before = owners.get(number, 0) - tier.num_blocks if number else len(is_published)
        words, tokens = np.asarray(index.namespace)[block], np.asarray(index.block_tokens)[block]
        if (twin := on_device.get((before, words.tobytes(), tokens.tobytes()))) is not None:
            found.append(f"the host's block {block} has the contents of the device's block {twin}")
        if number in owners:
            both = np.concatenate(
                [np.asarray(index.namespace)[: tier.num_blocks], np.asarray(device.namespace)]
            )
            if (both[owners[number]] != words).any():
                found.append(f"the host's block {block} follows one of another namespace")
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
