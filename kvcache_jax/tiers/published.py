"""Published blocks of a cache, on the device and on the host, by their names in stores."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from kvcache_jax.core.state import BlockPool, Cache
from kvcache_jax.tiers.hosted import NAME, tier_of
from kvcache_jax.tiers.stored_block import BlockName, Scope


class Entry(NamedTuple):
    """A block of one layer group that a store keeps, or may.

    Attributes:
      key: Its own.
      anchor: Key of the block before it; of a linked block, the key of the indexed block with its last token.
      group_id: Layer group.
      slot: Its place among the blocks of that group with the indexed block's tokens.
      stamp: Moment of its last use; later is larger. Compared within a layer group.
    """

    key: str
    anchor: str
    group_id: int
    slot: int
    stamp: int


class Published(NamedTuple):
    """A published block of the group that prefixes are found by, first, and those linked to it in others.

    Attributes:
      names: The name of each.
      entries: The entry of each.
      ids: Its id in the pool of its group; what the host keeps follows the pool, see `Blocks`.
    """

    names: tuple[BlockName, ...]
    entries: tuple[Entry, ...]
    ids: tuple[int, ...]


class Blocks(NamedTuple):
    """The blocks of a cache in numpy. In each group the pool's blocks are first, then blocks on the host.

    Attributes:
      tokens: i32[n, block_size], of the group that prefixes are found by, as all without groups.
      namespaces: u32[n, 4].
      parents: The block before each; n at the start of a text, and -1 where it was forgotten.
      is_published: bool[n].
      links: Per group i64[n, slots], its blocks with the block's tokens, or -1; None for the group itself.
      ranks: Per group, of all its blocks by their last use.
    """

    tokens: np.ndarray
    namespaces: np.ndarray
    parents: list[int]
    is_published: np.ndarray
    links: list[np.ndarray | None]
    ranks: list[np.ndarray]

    def namespace(self, block: int) -> str:
        """Returns a block's namespace as 32 hexadecimal digits."""
        return np.ascontiguousarray(self.namespaces[block], "<u4").tobytes().hex()


def read_blocks(cache: Cache) -> Blocks:
    """Reads the blocks of a cache with values and prefix caching, which is settled."""
    group_id, control = cache.config.indexed_group, cache.control
    index, pools = jax.device_get((control.prefix_index, control.block_pools))
    num_blocks = [pool.num_blocks for pool in pools]
    ranks = [_ranks(pool) for pool in pools]
    links = [
        None if each is None else np.where(each.block_ids < num, each.block_ids, -1)
        for each, num in zip(index.group_links, num_blocks, strict=True)
    ]
    is_published, end = pools[group_id].cached.is_published, num_blocks[group_id]
    if NAME not in control.extras:
        parents = index.parent.tolist()
        return Blocks(index.block_tokens, index.namespace, parents, is_published, links, ranks)
    tier = jax.device_get(tier_of(control))
    num_hosted, hosted = tier.num_blocks, tier.control.block_pools
    is_published = np.concatenate([is_published, hosted[group_id].cached.is_published[:num_hosted]])
    # In the host's index the blocks of the pool follow its own.
    serials = np.roll(tier.serial, -num_hosted)
    owners = {number: i for i, number in enumerate(serials.tolist()) if number and is_published[i]}
    parents = [parent if parent < end else end + num_hosted for parent in index.parent.tolist()]
    for serial in tier.index.parent[:num_hosted].tolist():
        parents.append(owners.get(serial, -1) if serial else end + num_hosted)
    for g, each in enumerate(tier.index.group_links):
        if each is not None:
            ids = np.where(each.block_ids < hosted[g].num_blocks, num_blocks[g] + each.block_ids, -1)
            ids = np.roll(ids, -num_hosted, axis=0)
            on_device = links[g]
            assert on_device is not None
            ids[:end] = np.where(on_device >= 0, on_device, ids[:end])
            links[g] = ids
        count = num_hosted if g == group_id else hosted[g].num_blocks
        ranks[g] = np.concatenate([hosted[g].num_blocks + ranks[g], _ranks(hosted[g])[:count]])
    return Blocks(
        np.concatenate([index.block_tokens, tier.index.block_tokens[:num_hosted]]),
        np.concatenate([index.namespace, tier.index.namespace[:num_hosted]]),
        parents,
        is_published,
        links,
        ranks,
    )


def namespaces_of(blocks: Blocks) -> set[str]:
    """Lists the namespaces of published blocks, each as 32 hexadecimal digits."""
    rows = np.unique(blocks.namespaces[blocks.is_published], axis=0)
    return {np.ascontiguousarray(row, "<u4").tobytes().hex() for row in rows}


class NamedBlocks[Name]:
    """The names of the published blocks that prompts can find, made once for as long as a block stays.

    Attributes:
      blocks: Of the last update.
      names: Their names; None for a block without.
    """

    def __init__(self):
        self.blocks: Blocks | None = None
        self.names: list[Name | None] = []

    def update(self, blocks: Blocks, name: Callable[[Blocks, int, Name | None], Name | None]) -> list[int]:
        """Names the blocks that changed since the last call; lists them, a block before its followers.

        Args:
          blocks: Of a cache of the same config as before.
          name: `(blocks, block, name of the block before) -> name`, None for a block that is left out.
        """
        nowhere, parents = len(blocks.parents), np.array([*blocks.parents, 0])
        changed = np.append(blocks.is_published, False)
        names: list[Name | None] = [None] * nowhere
        before = self.blocks
        if before is not None:
            changed[:-1] &= (
                ~before.is_published
                | (before.tokens != blocks.tokens).any(axis=1)
                | (before.namespaces != blocks.namespaces).any(axis=1)
                | (np.array(before.parents) != parents[:-1])
            )
            # A block after another predecessor has another name, though its own tokens are the same.
            while True:
                more = changed | np.append(blocks.is_published & changed[parents[:-1]], False)
                if (more == changed).all():
                    break
                changed = more
            names = [
                name if kept else None
                for name, kept in zip(self.names, blocks.is_published & ~changed[:-1], strict=True)
            ]
        order: list[int] = []
        is_named = ~changed
        is_named[-1] = True
        for block in np.flatnonzero(changed).tolist():
            path = []
            while block >= 0 and not is_named[block]:
                path.append(block)
                is_named[block] = True
                block = blocks.parents[block]
            for at in reversed(path):
                parent = blocks.parents[at]
                parent_name = None if parent == nowhere else names[parent]
                # After a block that was forgotten no prompt finds this one.
                if parent == nowhere or (parent >= 0 and parent_name is not None):
                    names[at] = name(blocks, at, parent_name)
                    if names[at] is not None:
                        order.append(at)
        self.blocks, self.names = blocks, names
        return order


type Keyed = tuple[str, BlockName]
"""The key in stores, and the name that it is the digest of."""


def keyed_by(
    scopes: Mapping[str, Scope], group_id: int
) -> Callable[[Blocks, int, Keyed | None], Keyed | None]:
    """Makes a function for `NamedBlocks.update`: names in stores of the blocks of some namespaces.

    Args:
      scopes: By namespace; another namespace's blocks are left out.
      group_id: The group that prefixes are found by.
    """

    def name(blocks: Blocks, block: int, before: Keyed | None) -> Keyed | None:
        scope = scopes.get(blocks.namespace(block))
        if scope is None:
            return None
        own = BlockName(scope, before[0] if before else "", tuple(blocks.tokens[block].tolist()), group_id)
        return own.key, own

    return name


def published_block(blocks: Blocks, block: int, keyed: Keyed, now: int) -> Published:
    """Collects a block and those linked to it; the stamps of its entries are before `now`."""
    key, name = keyed
    starts = [now - len(ranks) - max(map(len, blocks.ranks)) for ranks in blocks.ranks]
    g = name.group_id
    names, ids = [name], [block]
    entries = [Entry(key, name.parent, g, 0, starts[g] + int(blocks.ranks[g][block]))]
    for g, links in enumerate(blocks.links):
        for slot, linked in enumerate(links[block].tolist() if links is not None else ()):
            if linked >= 0:
                names.append(name._replace(group_id=g, slot=slot))
                ids.append(linked)
                stamp = starts[g] + int(blocks.ranks[g][linked])
                entries.append(Entry(names[-1].key, key, g, slot, stamp))
    return Published(tuple(names), tuple(entries), tuple(ids))


def _ranks(pool: BlockPool) -> np.ndarray:
    """Ranks a pool's blocks by their last use, i64[num_blocks]: by release, and rows' blocks last."""
    assert pool.cached is not None
    age = (pool.cached.queued_at - pool.cached.head).astype(np.int64)
    recency = np.where(pool.ref_count > 0, np.int64(2**32), age)
    ranks = np.empty(pool.num_blocks, np.int64)
    ranks[np.argsort(recency, kind="stable")] = np.arange(pool.num_blocks)
    return ranks
