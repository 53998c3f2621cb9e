"""Changes of the prefix index as events, by which a router knows the prefixes that each replica holds."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcache_jax.arrays.number_checks import as_list
from kvcache_jax.core.cache_checks import require_prefix_index
from kvcache_jax.core.state import Cache
from kvcache_jax.tiers.published import Blocks, NamedBlocks, read_blocks

DEVICE, HOST = "GPU", "CPU"
"""Media of blocks, by the names that subscribers know."""


class BlockStored(NamedTuple):
    """Blocks that prompts find from now on, each of which continues the one before.

    Attributes:
      block_hashes: One per block: 64 bits of a digest of the namespace and all tokens up to the block's end,
        the same in every process.
      parent_block_hash: Of the block before the first; None at the start of a text.
      token_ids: Of all the blocks.
      block_size: Tokens per block.
      medium: "GPU" for the device, of whichever kind, and "CPU" for the host.
      namespace: u32[4] as 32 hexadecimal digits; "" for the common one.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str
    namespace: str


class BlockRemoved(NamedTuple):
    """Blocks that no prompt finds there any more.

    Attributes:
      block_hashes: As in `BlockStored`.
      medium: The place.
    """

    block_hashes: tuple[int, ...]
    medium: str


class AllBlocksCleared(NamedTuple):
    """The end of all blocks."""


type IndexEvent = BlockStored | BlockRemoved | AllBlocksCleared


def require_events(events: Iterable[IndexEvent]) -> tuple[IndexEvent, ...]:
    """Refuses what is no list of events; an event alone is a tuple too, of its fields."""
    kinds = BlockStored, BlockRemoved, AllBlocksCleared
    if isinstance(events, kinds):
        raise TypeError(f"events is {events!r}, expected a list of events")
    events = tuple(as_list("events", events, "events"))
    for i, event in enumerate(events):
        if not isinstance(event, kinds):
            raise TypeError(
                f"events[{i}] is {event!r}, expected one of {', '.join(kind.__name__ for kind in kinds)}"
            )
    return events


class IndexFollower:
    """The index of a cache at the last look, from which `update` tells what changed.

    Example:
      >>> import numpy as np, kvcache_jax as kv
      >>> config = kv.CacheConfig(
      ...     [kv.FullAttention(1, 8)], block_size=2, max_seqs=1, max_seq_len=8, enable_prefix_caching=True)
      >>> cache, follower = kv.init(config), kv.processes.IndexFollower()
      >>> cache, _ = kv.allocate(cache, [0], [4], tokens=np.array([[5, 6, 7, 8]]))
      >>> cache, _ = kv.extend(cache, [4], max_new=4, tokens=np.array([[5, 6, 7, 8]]))
      >>> [event] = follower.update(kv.commit(cache)[0])
      >>> len(event.block_hashes), event.parent_block_hash, event.token_ids, event.medium
      (2, None, (5, 6, 7, 8), 'GPU')
    """

    def __init__(self):
        self._named: NamedBlocks[int] = NamedBlocks()
        self._shape: tuple[int, ...] | None = None  # of the tokens in blocks

    def update(self, cache: Cache) -> list[IndexEvent]:
        """Lists the changes since the last call, at first since an empty index.

        Applied in order they give this index. It is read from the device once, and digests are computed of
        new blocks alone.

        Args:
          cache: With prefix caching, of the same config in every call.

        Raises:
          ValueError: a cache without prefix caching, or of another config.
        """
        require_prefix_index("IndexFollower.update", cache)
        blocks = read_blocks(cache)
        group = cache.config.groups[cache.config.indexed_group]
        shape = blocks.tokens.shape
        if self._shape not in (None, shape):
            raise ValueError(
                f"the cache has {shape} tokens in blocks and the one before had {self._shape}, expected the "
                "same config: make an IndexFollower for each"
            )
        self._shape, was = shape, _places(self._named.names, group.num_blocks)
        order = self._named.update(blocks, _name)
        names = self._named.names
        now = _places(names, group.num_blocks)
        if was and not now:
            return [AllBlocksCleared()]
        events: list[IndexEvent] = []
        for medium in (DEVICE, HOST):
            if gone := tuple(name for name, where in was if where == medium and (name, where) not in now):
                events.append(BlockRemoved(gone, medium))
        new = [block for block in order if (names[block], _medium(block, group.num_blocks)) not in was]
        return events + _stored(blocks, names, new, group.num_blocks)


def hash_block(namespace: np.ndarray, tokens: np.ndarray, before: int | None) -> int:
    """Computes the hash of a block of a namespace u32[4], with tokens i32[n], after the block before it."""
    text = namespace.astype("<u4").tobytes() + tokens.astype("<i4").tobytes()
    parent = b"" if before is None else before.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(parent + text, digest_size=8).digest(), "little")


def _name(blocks: Blocks, block: int, parent: int | None) -> int:
    return hash_block(blocks.namespaces[block], blocks.tokens[block], parent)


def _medium(block: int, num_on_device: int) -> str:
    return DEVICE if block < num_on_device else HOST


def _places(names: list[int | None], num_on_device: int) -> dict[tuple[int, str], None]:
    """Lists names with their media, in the order of blocks."""
    return {
        (name, _medium(block, num_on_device)): None for block, name in enumerate(names) if name is not None
    }


def _stored(
    blocks: Blocks, names: list[int | None], new: Iterable[int], num_on_device: int
) -> list[IndexEvent]:
    """Joins blocks that continue one another in one event each."""
    runs: list[list[int]] = []
    for block in new:
        last = runs[-1][-1] if runs else -1
        if blocks.parents[block] == last and (block < num_on_device) == (last < num_on_device):
            runs[-1].append(block)
        else:
            runs.append([block])
    events: list[IndexEvent] = []
    for run in runs:
        parent, namespace = blocks.parents[run[0]], blocks.namespace(run[0])
        events.append(
            BlockStored(
                tuple(name for block in run if (name := names[block]) is not None),
                None if parent == len(names) else names[parent],
                tuple(blocks.tokens[run].reshape(-1).tolist()),
                blocks.tokens.shape[1],
                _medium(run[0], num_on_device),
                namespace if int(namespace, 16) else "",
            )
        )
    return events
