"""The front of a fleet without Ray: what it knows of replicas, requests that go on, metrics of all."""

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import kvcache_jax as kv
from kvcache_jax.processes import (
    BlockStored,
    IndexFollower,
    Replica,
    ReplicaIndex,
    choose_replica,
    prompt_hashes,
)

STATS_S = 0.5
"""Seconds between two summaries of a replica."""
LATE_S = 4 * STATS_S
"""Seconds after which a summary has what was sent before."""
_MEANS = ("vllm:kv_cache_usage_perc",)


class Summary(kv.engine.Attachment):
    """What a replica tells the router: the hashes of its blocks, and how often they changed."""

    def __init__(self):
        self._follower, self._index = IndexFollower(), ReplicaIndex()
        self.stats: dict[str, Any] = {"number": 0, "hashes": []}

    def look(self, cache: kv.Cache) -> None:
        if events := self._follower.update(cache):
            self._index.apply(events)
            self.stats = {"number": self.stats["number"] + 1, "hashes": sorted(self._index.hashes)}


class Knowledge:
    """What the router knows of replicas, by their names.

    A request that was sent counts as queued until it ends, and its prompt as held at once.
    """

    def __init__(self, block_size: int, policy: str, clock: Callable[[], float] = time.monotonic):
        self._block_size, self._policy, self._clock, self._turn = block_size, policy, clock, 0
        self._indexes: dict[str, tuple[int, ReplicaIndex]] = {}
        self._sent: collections.deque[tuple[float, str, Sequence[int]]] = collections.deque(maxlen=4096)
        self._open: dict[Hashable, tuple[str, int, int]] = {}  # replica, tokens to compute, tokens

    def rank(self, request: kv.GenerationRequest, stats: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Lists the replicas with the chosen one first, given the last summary of each."""
        names, hashes = sorted(stats), self._hashes(request)
        known = [self._known(name, stats[name], hashes) for name in names]
        best = names.pop(choose_replica(known, len(request.prompt), self._policy, turn=self._turn))
        return [best, *names]

    def send(
        self, request: kv.GenerationRequest, number: Hashable, name: str, stats: Mapping[str, Any]
    ) -> None:
        """Notes a request by its number, and where it was sent."""
        hashes = self._hashes(request)
        num_tokens, num_cached = len(request.prompt), self._known(name, stats, hashes).num_cached
        self._open[number] = name, num_tokens - num_cached, num_tokens
        self._index(name, stats).apply([_stored(hashes)])
        self._sent.append((self._clock(), name, hashes))
        self._turn += 1

    def end(self, number: Hashable) -> None:
        self._open.pop(number, None)

    def _hashes(self, request: kv.GenerationRequest) -> tuple[int, ...]:
        return prompt_hashes(request.prompt, self._block_size, namespace=request.namespace)

    def _known(self, name: str, stats: Mapping[str, Any], hashes: Sequence[int]) -> Replica:
        num_cached = self._index(name, stats).num_blocks(hashes) * self._block_size
        has = [(new, tokens) for where, new, tokens in self._open.values() if where == name]
        return Replica(num_cached, sum(new for new, _ in has), sum(tokens for _, tokens in has))

    def _index(self, name: str, stats: Mapping[str, Any]) -> ReplicaIndex:
        number = stats.get("number", 0)
        if self._indexes.get(name, (None,))[0] != number:
            index = ReplicaIndex()
            index.apply([_stored(stats.get("hashes", ()))])
            # A summary may be older than what was sent just before it came.
            late = self._clock() - LATE_S
            index.apply(_stored(hashes) for at, where, hashes in self._sent if where == name and at > late)
            self._indexes[name] = number, index
        return self._indexes[name][1]


def _stored(hashes: Sequence[int]) -> BlockStored:
    return BlockStored(tuple(hashes), None, (), 0, "GPU", "")


def rest_of(
    request: kv.GenerationRequest, told: Sequence[int]
) -> kv.GenerationRequest | kv.engine.TokenEvent | None:
    """Makes a request for what is not told yet, or the end where all is; None where that cannot be.

    A seed decides draws by a token's position, so that another replica goes on as the first would have. Of
    several samples, or with texts that end it, only a request of which nothing is told begins again.
    """
    if not told:
        return request
    if request.num_samples > 1 or request.stop_strings is not None:
        return None
    is_stopped = told[-1] in {int(token) for token in request.stop_tokens}
    if is_stopped or len(told) >= request.max_new_tokens:
        return kv.engine.TokenEvent(request.id, 0, [], [], [], "stop" if is_stopped else "length")
    prompt = [*map(int, request.prompt), *told]
    return dataclasses.replace(request, prompt=prompt, max_new_tokens=request.max_new_tokens - len(told))


def total(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up metrics of several engines, counts and histograms; a share is their mean."""
    found: dict[str, Any] = {}
    for each in metrics:
        for name, value in each.items():
            if isinstance(value, Mapping):
                found[name] = total([found.get(name, {}), value])
            else:
                found[name] = found.get(name, 0) + value / (len(metrics) if name in _MEANS else 1)
    return found
