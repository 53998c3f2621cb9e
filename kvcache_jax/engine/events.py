"""Events and figures that the host is told, and the place where it reads the device."""

import dataclasses
from collections.abc import Hashable

import jax
import numpy as np

from kvcache_jax.engine.state import EngineCounter


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
      text: New text of a request with stop strings, else None. It may be ahead of the tokens, never of a stop
        string, and the tokens never have one of a stop string.
      prompt_logprobs: Of a request that asks for them, beside its first tokens: log-probability of each token
        of the prompt but the first.
      num_cached_tokens: First tokens of its prompt that the cache had when it got a row; None if it goes on,
        or never had one, or had one by a fork of its first sample's.
      time_queued: Seconds from its push until it had a row, as far as dispatches tell; None if it goes on.
      time_to_first_token: Seconds from its push until its first tokens came; None if it goes on or has none.
    """

    id: Hashable
    sample_id: int
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None
    text: str | None = None
    prompt_logprobs: list[float] | None = None
    num_cached_tokens: int | None = None
    time_queued: float | None = None
    time_to_first_token: float | None = None


@dataclasses.dataclass(frozen=True)
class EngineFigures:
    """Figures of an engine at its last drain.

    Attributes:
      running: Rows with a request.
      waiting: Requests without a row, those included that the device has not heard of.
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


class Reader:
    """The one place where the engine reads arrays of the device; each read waits for it, and is counted."""

    def __init__(self):
        self.num_reads = 0

    def __call__(self, array: jax.Array) -> np.ndarray:
        """Waits for an array and copies it to the host."""
        self.num_reads += 1
        return jax.device_get(array)
