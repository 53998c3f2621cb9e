"""An eviction policy's hits on a trace, without a cache: what `experiments.traces.replay` does, on the host.

A search tries hundreds of policies and sizes. One replay through the cache takes seconds, most of it for
victims in the order of the policy's keys; here the keys of all blocks are computed once per request, and a
heap keeps the order. The hits are the same, request by request, as the tests check.
"""

import functools
import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.traces.trace import Trace

TICKS_PER_REQUEST = 2  # of the cache's clock: one by `allocate`, one by `extend`


class Blocks(NamedTuple):
    """What a candidate may look at: `kvcache_jax.policies.BlockMetadata`, and what a cache could note too.

    Attributes:
      recency: i32[num_blocks], grows with the moment of the last release.
      num_hits: i32[num_blocks], uses after the publication.
      age: i32[num_blocks], ticks since the publication.
      idle: i32[num_blocks], ticks since the last use.
      priority: i32[num_blocks], all 0: traces have none.
      depth: i32[num_blocks], blocks before it in its prompt.
      num_extensions: i32[num_blocks], blocks that were published right behind it. Not in the cache.
      gap: i32[num_blocks], ticks between the last two uses, 0 before the second. Not in the cache.
      prompt_len: i32[num_blocks], blocks of the prompt that used it last. Not in the cache.
    """

    recency: jax.Array
    num_hits: jax.Array
    age: jax.Array
    idle: jax.Array
    priority: jax.Array
    depth: jax.Array
    num_extensions: jax.Array
    gap: jax.Array
    prompt_len: jax.Array


EvictionKey = Callable[[Blocks], jax.Array]


def simulate(trace: Trace, num_blocks: int, key: EvictionKey) -> np.ndarray:
    """i32[num_requests], ids of each request that a cache of `num_blocks` serves; lower keys go first."""
    simulation = _Simulation(trace.num_distinct, num_blocks, jax.jit(key))
    chains = (ids[:n] for ids, n in zip(trace.ids, trace.num_ids, strict=True))
    return np.array([simulation.serve(chain) if len(chain) else 0 for chain in chains], np.int32)


class _Simulation:
    """The cache between two requests: every block is cached or free."""

    def __init__(self, num_ids: int, num_blocks: int, key: EvictionKey):
        ints = functools.partial(np.zeros, num_blocks, np.int32)
        self._key = key
        self._block_of = np.full(num_ids + 1, -1, np.int32)
        self._id_of, self._parent = ints(), ints()
        self._num_children = ints()
        self._is_leaf = np.zeros(num_blocks, bool)
        self._recency, self._num_hits, self._depth = ints(), ints(), ints()
        self._published_at, self._used_at, self._used_before_at = ints(), ints(), ints()
        self._num_extensions, self._prompt_len, self._priority = ints(), ints(), ints()
        self._free = list(range(num_blocks))
        self._clock = self._num_released = 0

    def serve(self, ids: np.ndarray) -> int:
        """One request; returns its hits."""
        blocks = self._block_of[ids]
        is_missing = blocks < 0
        num_hits = int(np.argmax(is_missing)) if is_missing.any() else len(ids)
        held = blocks[:num_hits]
        self._is_leaf[held] = False
        self._num_hits[held] += 1
        self._used_before_at[held] = self._used_at[held]
        self._used_at[held] = self._clock + 1
        if (num_missing := len(ids) - num_hits - len(self._free)) > 0:
            self._evict(num_missing, set(held[-1:].tolist()))
        self._publish(ids, blocks, num_hits)
        self._clock += TICKS_PER_REQUEST
        # The last block is released first.
        self._recency[blocks] = self._num_released + np.arange(len(ids))[::-1]
        self._num_released += len(ids)
        self._prompt_len[blocks] = len(ids)
        self._is_leaf[blocks[-1]] = self._num_children[blocks[-1]] == 0
        return num_hits

    def _publish(self, ids: np.ndarray, blocks: np.ndarray, num_hits: int) -> None:
        """Takes free blocks for the ids behind the hits, and enters them into `blocks`."""
        num_new = len(ids) - num_hits
        if not num_new:
            return
        new = np.array([self._free.pop() for _ in range(num_new)], np.int32)
        blocks[num_hits:] = new
        self._block_of[ids[num_hits:]], self._id_of[new] = new, ids[num_hits:]
        self._num_hits[new] = self._num_extensions[new] = self._num_children[new] = 0
        self._published_at[new] = self._used_at[new] = self._used_before_at[new] = (
            self._clock + TICKS_PER_REQUEST
        )
        self._depth[new] = np.arange(num_hits, len(ids))
        self._parent[new[0]], self._parent[new[1:]] = blocks[num_hits - 1] if num_hits else -1, new[:-1]
        parents = blocks[max(num_hits - 1, 0) : -1]
        self._num_children[parents] += 1
        self._num_extensions[parents] += 1

    def _evict(self, num_blocks: int, held: set[int]) -> None:
        """Frees the blocks of the lowest keys, children before parents; of equal keys the least recent."""
        order = self._order()
        leaves = np.flatnonzero(self._is_leaf)
        if num_blocks < len(leaves):
            leaves = leaves[np.argpartition(order[leaves], num_blocks)[:num_blocks]]
        heap = [(int(order[leaf]), int(leaf)) for leaf in leaves]
        heapq.heapify(heap)
        for _ in range(num_blocks):
            _, block = heapq.heappop(heap)
            self._block_of[self._id_of[block]] = -1
            self._is_leaf[block] = False
            self._free.append(block)
            parent = int(self._parent[block])
            if parent >= 0:
                self._num_children[parent] -= 1
                # Of the blocks in use only the last one can be without children.
                if not self._num_children[parent] and parent not in held:
                    self._is_leaf[parent] = True
                    heapq.heappush(heap, (int(order[parent]), parent))

    def _order(self) -> np.ndarray:
        """i64[num_blocks], by key and then by recency."""
        fields: dict[str, Any] = dict(
            recency=self._recency,
            num_hits=self._num_hits,
            age=np.int32(self._clock + 1) - self._published_at,
            idle=np.int32(self._clock + 1) - self._used_at,
            priority=self._priority,
            depth=self._depth,
            num_extensions=self._num_extensions,
            gap=self._used_at - self._used_before_at,
            prompt_len=self._prompt_len,
        )
        return (np.asarray(self._key(Blocks(**fields))).astype(np.int64) << 32) + self._recency
