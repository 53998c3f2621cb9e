"""The blocks of the oracle: their owners, the prefixes that they hold, and the order of eviction."""

import dataclasses
from collections import Counter as Multiset
from collections.abc import Callable, Sequence

from kvcache_jax.core.config import CacheConfig


@dataclasses.dataclass
class OracleBlock:
    """The facts that eviction policies look at in a published block; see `BlockMetadata`."""

    published_at: int
    last_used_at: int
    priority: int
    depth: int
    num_hits: int = 0


EVICTION_KEYS: dict[str, Callable[[OracleBlock, int], int]] = {
    "lru": lambda block, clock: 0,
    "lfu": lambda block, clock: block.num_hits,
    "fifo": lambda block, clock: block.published_at,
    "priority": lambda block, clock: block.priority,
    "hyperbolic": lambda block, clock: -((clock - block.published_at) // (1 + block.num_hits)),
}

Prefix = tuple[tuple[int, ...], tuple[int | None, ...]]
"""A namespace and all tokens up to the end of a block: the content of a published block."""


class OracleBlocks:
    """Blocks by serial number: owners, contents and eviction.

    See `Oracle` for the attributes.
    """

    def __init__(self, config: CacheConfig, eviction_key: Callable[[OracleBlock, int], int] | None = None):
        """`eviction_key(block, clock)` is that of a policy of one's own, as a function of one block."""
        self.config = config
        self._eviction_key = eviction_key or EVICTION_KEYS[config.eviction.policy]
        self.owners: list[Multiset[int]] = [Multiset() for _ in config.groups]
        self.published: dict[Prefix, int] = {}
        self.cached: dict[int, None] = {}
        self.history: dict[int, OracleBlock] = {}
        self.num_evictions = self.clock = 0
        self._prefix_of: dict[int, Prefix] = {}
        self._next_block = 0

    def num_free(self, group_id: int) -> int:
        """Counts the blocks of a group that no row holds and that are not cached."""
        return self.num_available(group_id) - len(self.cached) * (group_id == self.config.indexed_group)

    def num_available(self, group_id: int) -> int:
        """Counts the blocks of a group that no row holds."""
        return self.config.groups[group_id].num_blocks - len(self.owners[group_id])

    def is_published(self, group_id: int, block: int) -> bool:
        """Tells whether a block is findable by its tokens."""
        return group_id == self.config.indexed_group and block in self._prefix_of

    def _take(self, group_id: int) -> int:
        """Hands out a block that was free."""
        self._next_block += 1
        self.owners[group_id][self._next_block] = 1
        assert self.num_free(group_id) >= 0, "more blocks were taken than there are"
        return self._next_block

    def _hold(self, group_id: int, block: int) -> None:
        """Adds an owner."""
        self.cached.pop(block, None)
        self.owners[group_id][block] += 1

    def _let_go(self, group_id: int, block: int) -> None:
        """Takes an owner away; a published block without any is the last in the queue."""
        self.owners[group_id][block] -= 1
        if not self.owners[group_id][block]:
            del self.owners[group_id][block]
            if self.is_published(group_id, block):
                self.cached[block] = None

    def _publish(self, prefix: Prefix, block: int, priority: int, depth: int) -> None:
        self.published[prefix], self._prefix_of[block] = block, prefix
        self.history[block] = OracleBlock(self.clock, self.clock, priority, depth)

    def _note_use(self, blocks: Sequence[int], priority: int) -> None:
        for block in blocks:
            self.history[block].num_hits += 1
            self.history[block].last_used_at, self.history[block].priority = self.clock, priority

    def _forget_all(self) -> None:
        self.published, self.cached, self._prefix_of, self.history = {}, {}, {}, {}

    def _make_room(self, num_new: Sequence[int]) -> None:
        """Evicts until as many blocks are free; only the indexed group has cached ones."""
        group_id = self.config.indexed_group
        self._evict(num_new[group_id] - self.num_free(group_id))

    def _evict(self, num_blocks: int) -> None:
        """Gives up the least valuable cached blocks, of equal ones that released longest ago."""
        block_size = self.config.groups[self.config.indexed_group].block_size
        batch = 1 if self.config.eviction.policy == "lru" else self.config.eviction.batch_size
        while num_blocks > 0:
            parents = {(namespace, tokens[:-block_size]) for namespace, tokens in self.published}
            leaves = [block for block in self.cached if self._prefix_of[block] not in parents]
            leaves.sort(key=lambda block: self._eviction_key(self.history[block], self.clock))
            for block in leaves[: min(batch, num_blocks)]:
                del self.cached[block], self.history[block], self.published[self._prefix_of.pop(block)]
                self.num_evictions += 1
                num_blocks -= 1
