"""Hit rates of an LRU of every size, from one pass over a trace.

An LRU of `n` blocks holds the `n` that were used last, so a block is a hit of all caches that are as large as
the number of blocks used since, itself included (its stack distance). A request uses its last block first:
what it shares with others stays longest, and a block that is there has all before it.

References:
  Evaluation techniques for storage hierarchies (Mattson et al., 1970).
"""

import numpy as np

from experiments.traces.trace import Trace


def hit_rates(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Computes hit rates by block and by token of caches of 0, 1, ... blocks, f64[num_distinct + 1] each."""
    distances = stack_distances(trace)
    is_id = np.arange(trace.ids.shape[1]) < trace.num_ids[:, None]
    num_before = np.arange(1, trace.ids.shape[1] + 1) * np.int64(trace.tokens_per_id)
    ends = np.minimum(num_before, trace.num_tokens[:, None])  # tokens up to an id's end
    num_tokens = np.diff(ends, axis=1, prepend=0)[is_id]
    by_distance = [
        np.bincount(distances[is_id], weights, trace.num_distinct + 1)
        for weights in (np.ones(num_tokens.shape), num_tokens)
    ]
    by_block, by_token = (np.cumsum(np.where(np.arange(len(n)) > 0, n, 0)) / n.sum() for n in by_distance)
    return by_block, by_token


def stack_distances(trace: Trace) -> np.ndarray:
    """Counts the blocks used since each id was, itself included; i64[num_requests, longest], 0 of new ids."""
    distances = np.zeros(trace.ids.shape, np.int64)
    counts = _Counts(int(trace.num_ids.sum()))
    last_used = np.zeros(trace.num_distinct + 1, np.int64)  # a time each, counted from 1; 0 of a new id
    now = num_known = 0
    for distance, ids, num in zip(distances, trace.ids, trace.num_ids, strict=True):
        ids = ids[:num]
        before = last_used[ids]
        known = before[before > 0]
        distance[: len(known)] = num_known - counts.up_to(known) + 1
        last_used[ids] = now + np.arange(num, 0, -1)
        counts.add(known, -1)
        counts.add(last_used[ids], 1)
        now, num_known = now + num, num_known + num - len(known)
    return distances


class _Counts:
    """How many of the times 1 to `most` are marked, in a binary indexed tree (Fenwick, 1994)."""

    def __init__(self, most: int):
        self.sums = np.zeros(most + 1, np.int64)

    def add(self, times: np.ndarray, change: int) -> None:
        while len(times):
            np.add.at(self.sums, times, change)
            times = times + (times & -times)
            times = times[times < len(self.sums)]

    def up_to(self, times: np.ndarray) -> np.ndarray:
        total = np.zeros_like(times)
        while times.any():
            total += self.sums[times]
            times = times & (times - 1)
        return total
