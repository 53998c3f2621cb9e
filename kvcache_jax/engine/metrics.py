"""Metrics of an engine under the names that vLLM's dashboards and autoscalers ask for."""

import bisect
from collections.abc import Sequence
from typing import Any

from kvcache_jax.engine.events import EngineFigures
from kvcache_jax.engine.misses import Misses
from kvcache_jax.engine.state import EngineCounter
from kvcache_jax.engine.table import Sample

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


class Histogram:
    """Counts values by the least bound that is not below them."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = (*bounds, float("inf"))
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def note(self, value: float, num: int = 1) -> None:
        """Counts a value that came `num` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += num
        self._sum += num * value

    def as_dict(self) -> dict[str, Any]:
        """Returns the buckets, {bound: values up to it}, the sum of the values and their number."""
        up_to, buckets = 0, {}
        for bound, num in zip(self._bounds, self._counts, strict=True):
            up_to += num
            buckets[bound] = up_to
        return {"buckets": buckets, "sum": self._sum, "count": up_to}


class Metrics:
    """Counts and times of the requests of an engine, from its start on.

    Args:
      unit: See `Misses`.

    Attributes:
      misses: `Misses`, tokens of prompts.
    """

    def __init__(self, unit: int | None):
        self.misses = Misses(unit)
        self._num_prompt = self._num_generated = 0
        self._ends: dict[str, int] = {}
        self._histograms = {
            "time_to_first_token_seconds": Histogram(_SECONDS),
            "inter_token_latency_seconds": Histogram(_SECONDS),
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "request_time_per_output_token_seconds": Histogram(_SECONDS),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
        }

    def note_tokens(self, sample: Sample, num: int, now: float) -> None:
        """Counts tokens that are told to a consumer now, before the sample's times are set."""
        if not num:
            return
        self._num_generated += num
        if sample.told_at is None:
            self._num_prompt += len(sample.request.prompt)
            self._histograms["time_to_first_token_seconds"].note(now - sample.pushed_at)
        else:
            self._histograms["inter_token_latency_seconds"].note((now - sample.told_at) / num, num)

    def note_end(self, sample: Sample, reason: str, now: float) -> None:
        """Counts the end of a sample."""
        self._ends[reason] = self._ends.get(reason, 0) + 1
        num = sample.num_told
        values = {
            "e2e_request_latency_seconds": now - sample.pushed_at,
            "request_queue_time_seconds": sample.time_queued(now),
            "request_prompt_tokens": len(sample.request.prompt),
            "request_generation_tokens": num,
        }
        if num > 1 and sample.first_at is not None and sample.told_at is not None:
            values["request_time_per_output_token_seconds"] = (sample.told_at - sample.first_at) / (num - 1)
        for name, value in values.items():
            self._histograms[name].note(value)

    def as_dict(self, figures: EngineFigures) -> dict[str, Any]:
        """Returns all metrics; `figures` are the engine's."""
        counts = figures.counts
        cached = counts[EngineCounter.CACHED_TOKENS]
        computed = counts[EngineCounter.PREFILL_TOKENS] + counts[EngineCounter.ADMISSIONS]
        num_blocks = figures.blocks_used + figures.blocks_cached + figures.blocks_free
        values: dict[str, Any] = {
            "num_requests_running": figures.running,
            "num_requests_waiting": figures.waiting,
            "kv_cache_usage_perc": figures.blocks_used / max(num_blocks, 1),
            "prefix_cache_queries": cached + computed,
            "prefix_cache_hits": cached,
            "prefix_cache_misses": dict(self.misses.num_tokens),
            "num_preemptions": counts[EngineCounter.PREEMPTIONS],
            "prompt_tokens": self._num_prompt,
            "generation_tokens": self._num_generated,
            "request_success": dict(self._ends),
        }
        values |= {name: histogram.as_dict() for name, histogram in self._histograms.items()}
        return {f"vllm:{name}": value for name, value in values.items()}
