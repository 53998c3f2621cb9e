"""Events and counts that the host is told, and how they are read from a report."""

import dataclasses
from collections.abc import Hashable

import jax
import numpy as np

from kvcache_jax.engine.program import HEADER_LEN, Report
from kvcache_jax.engine.state import NO_TOKEN, NUM_COLUMNS, EngineCounter, Finish
from kvcache_jax.engine.table import RequestTable, Sample


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """News of one continuation: tokens, or its end, or both.

    Attributes:
      id: The request's.
      sample_id: Index among its samples.
      tokens: New ones.
      logprobs: Log-probability of each under the model's own distribution (after `process_logits`).
      top_logprobs: For each token the most probable ones, {token: log-probability}; empty without
        `num_top_logprobs`.
      finish_reason: "stop", "length", "nan_logits" (a logit is NaN or +inf), "no_token" (all are -inf),
        "refused", "cancelled" or "deadline"; None if it goes on.
    """

    id: Hashable
    sample_id: int
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class EngineFigures:
    """Figures of an engine at its last drain.

    Attributes:
      running: Rows with a request.
      waiting: RequestArrays without a row, those included that the device has not heard of.
      blocks_used: Referenced blocks, all groups.
      blocks_cached: Published blocks without owner.
      blocks_free: The others.
      counts: Events since the engine was made, by `engine.Counter`.
      num_reads: Reads of the device.
    """

    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    counts: dict[EngineCounter, int]
    num_reads: int


def events_of(report: np.ndarray, width: int, table: RequestTable) -> list[TokenEvent]:
    """Makes events of a report, one per continuation; those that ended leave the table."""
    entries = report[HEADER_LEN:].reshape(-1, width)[: report[Report.OUTBOX_LEN]]
    news: dict[tuple[int, int], list[np.ndarray]] = {}
    for entry in entries:
        news.setdefault((entry[0].item(), entry[1].item()), []).append(entry)
    events = []
    for (slot, uid), entries_of_one in news.items():
        sample, rows = table.find(slot, uid), np.stack(entries_of_one)
        reason = Finish(rows[-1, 4].item())
        events.append(event(sample, reason, rows[rows[:, 2] != NO_TOKEN]))
        if reason != Finish.NOT_YET:
            table.remove(sample)
    return events


def event(sample: Sample, reason: Finish, entries: np.ndarray | None = None) -> TokenEvent:
    """Makes an event of the outbox entries i32[n, width] of one sample's new tokens."""
    if entries is None:
        entries = np.zeros((0, NUM_COLUMNS), np.int32)
    tops = entries[:, NUM_COLUMNS:]
    num_tops = tops.shape[1] // 2
    pairs = zip(tops[:, :num_tops].tolist(), _floats(tops[:, num_tops:]), strict=True)
    return TokenEvent(
        id=sample.id,
        sample_id=sample.sample_id,
        tokens=entries[:, 2].tolist(),
        logprobs=_floats(entries[:, 3]),
        top_logprobs=[dict(zip(*pair, strict=True)) for pair in pairs] if num_tops else [],
        finish_reason=None if reason == Finish.NOT_YET else reason.name.lower(),
    )


def _floats(bits: np.ndarray) -> list:
    return np.ascontiguousarray(bits).view(np.float32).tolist()


def add_counts(counts: dict[EngineCounter, int], report: np.ndarray) -> None:
    """Brings counts, which only grow, up to a report's counters, which are taken modulo 2**32."""
    counters = report[len(Report) : HEADER_LEN].view(np.uint32)
    for counter in EngineCounter:
        counts[counter] += (counters[counter].item() - counts[counter]) % 2**32


class Reader:
    """The one place where the engine reads arrays of the device; each read waits for it, and is counted."""

    def __init__(self):
        self.num_reads = 0

    def __call__(self, array: jax.Array) -> np.ndarray:
        """Waits for an array and copies it to the host."""
        self.num_reads += 1
        return jax.device_get(array)
