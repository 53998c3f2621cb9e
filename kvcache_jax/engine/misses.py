"""Misses of the cache by their reasons, as far as the host can tell: what turns left, and returns.

Of each conversation the host keeps what its last turn left: a digest of each unit of its tokens, a unit
being the tokens of which cached prefixes are multiples.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

REASONS: tuple[str, ...] = "unnamed", "new", "evicted", "reset", "other_namespace", "other_shard"
_MOST_CONVERSATIONS = 4096
"""Of which the host remembers the last turn."""


class _Left(NamedTuple):
    """Tokens that the last turn of a conversation left in the cache."""

    digests: np.ndarray  # u64[units]
    namespace: bytes
    shard: int
    is_reset: bool = False


class Misses:
    """Counts tokens of prompts that the cache did not have, by reason.

    Args:
      unit: Tokens of which cached prefixes are multiples; None without prefix caching.

    Attributes:
      num_tokens: By reason. "unnamed": the request names no conversation. "new": the conversation's last turn
        did not have them in whole units, or it is the first that is remembered. Others were left by the last
        turn. "evicted": they are not there any more, or the states without which they are of no use.
        "reset": the engine was reset since. "other_namespace": they are under another namespace, or of other
        weights. "other_shard": the request went to another shard.
    """

    def __init__(self, unit: int | None):
        self._unit = unit
        self._left: OrderedDict[Hashable, _Left] = OrderedDict()
        self._factors = np.zeros(0, np.uint64)
        if unit is not None:
            factors = np.random.default_rng(0).integers(0, 2**64, unit, np.uint64)
            self._factors = factors | np.uint64(1)
        self.num_tokens = dict.fromkeys(REASONS, 0)

    def note_start(
        self, conversation: Hashable, prompt: np.ndarray, namespace: bytes, shard: int, num_cached: int
    ) -> None:
        """Counts a prompt i32[n] of which the cache had `num_cached` first tokens."""
        if self._unit is None:
            return
        num_left, reason = 0, "new"
        left = self._left.get(conversation) if conversation is not None else None
        if conversation is None:
            reason = "unnamed"
        elif left is not None:
            digests = self._digests(prompt[: len(prompt) - 1])  # the last token is always computed
            num = min(len(digests), len(left.digests))
            is_equal = digests[:num] == left.digests[:num]
            num_left = (num if is_equal.all() else int(is_equal.argmin())) * self._unit
        num_lost = max(num_left - num_cached, 0)
        self.num_tokens[reason] += len(prompt) - num_cached - num_lost
        if left is not None and num_lost:
            self.num_tokens[_why(left, namespace, shard)] += num_lost

    def note_end(self, conversation: Hashable, tokens: np.ndarray, namespace: bytes, shard: int) -> None:
        """Hears that a turn left the keys and values of tokens i32[n] under a namespace of 16 bytes."""
        if self._unit is None or conversation is None:
            return
        self._left[conversation] = _Left(self._digests(tokens), namespace, shard)
        self._left.move_to_end(conversation)
        if len(self._left) > _MOST_CONVERSATIONS:
            self._left.popitem(last=False)

    def note_reset(self) -> None:
        """Hears that nothing is cached any more."""
        for conversation, left in self._left.items():
            self._left[conversation] = left._replace(is_reset=True)

    def _digests(self, tokens: np.ndarray) -> np.ndarray:
        """Computes a digest of each whole unit of tokens i32[n]; nothing but a count depends on them."""
        unit = len(self._factors)
        num_units = len(tokens) // unit
        units = tokens[: num_units * unit].reshape(num_units, unit).astype(np.uint64)
        return ((units + np.uint64(1)) * self._factors).sum(axis=1, dtype=np.uint64)


def _why(left: _Left, namespace: bytes, shard: int) -> str:
    if left.is_reset:
        return "reset"
    if left.namespace != namespace:
        return "other_namespace"
    return "evicted" if left.shard == shard else "other_shard"
