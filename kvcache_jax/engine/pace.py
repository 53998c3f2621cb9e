"""The length of dispatches, and how many are under way: as short, and as few, as the host's part allows.

Requests that come, and tokens that were drawn, wait for what is under way, so dispatches are short. But each
costs the host some time, to pack, launch, read and deliver it, in which a device without another dispatch
does nothing. Where the host can end one that is under way, it does so as soon as a request waits; see
`LiveLength`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from kvcache_jax.core.extras import ticks_of

_SHARE, _MOST_SHARE = 0.02, 0.03
"""The host's share of the time by which a dispatch is so long, and up to which news may end dispatches.

The second is of what dispatches of the most steps would not take.
"""
_LIVE = 0.25
"""Times these where dispatches can be shortened: who comes does not wait for their length, and the host works
on the device's cores, which lose more for each dispatch than `drain` takes: of the tokens a second of the
longest dispatches a half left 93%, and a quarter leaves all.
"""
_LATELY_S = 1.0
_KEPT = 0.8
"""Weight of what was measured before, beside one dispatch more."""


class Length(NamedTuple):
    """Steps of a dispatch."""

    least: int  # it ends after these as soon as a request has its first token or has ended
    most: int


class Pace:
    """Measures what dispatches cost, and says how long the next one is and how many are under way.

    Args:
      most_steps: Of any dispatch.
      shorten: `() -> None`, ends those under way after their least steps; None where none can be shortened.
    """

    def __init__(self, most_steps: int, shorten: Callable[[], None] | None = None):
        self._most_steps, self._shorten = most_steps, shorten
        self._step_s = self._host_s = 0.0  # of a step on the device, of a dispatch on the host
        self._late_s = self._late_more_s = 0.0  # in the last second or so; of it, what short dispatches took
        self._noted_at = self._news_at = -math.inf
        self._began_at: float | None = None

    def choose(self, now: float, has_free_row: bool) -> tuple[Length, int]:
        """Chooses the length of the next dispatch, and how many are under way with it.

        It is one while requests come and go and a row is free, so that the next one to come waits for no
        other. Else it is two, and the device never waits for the host; with a free row they are half as long,
        so that a request that comes then waits for as many steps, unless it shortens them.
        """
        num_ahead = 1 if has_free_row and now - self._news_at < _LATELY_S else 2
        if not self._step_s:
            return Length(1, 1), num_ahead
        share = _LIVE if self._shorten else num_ahead if has_free_row else 1
        most = math.ceil(self._host_s / (_SHARE * self._step_s * share))
        most = min(max(most, 1), self._most_steps)
        is_cheap = self._late_more_s < _MOST_SHARE * share * self._late_s
        return Length(1 if is_cheap else most, most), num_ahead

    def ticks(self, now: float) -> int:
        """Counts the ticks since the first call, by the engine's clock."""
        self._began_at = now if self._began_at is None else self._began_at
        return ticks_of(now - self._began_at)

    def note_news(self, now: float, is_awaited: bool = False) -> None:
        """Hears that a request came, got its first token, or ended.

        If it `is_awaited`, a request waits for the end of what is under way.
        """
        self._news_at = now
        if is_awaited and self._shorten:
            self._shorten()

    def note(self, now: float, host_s: float, num_steps: int, device_s: float | None) -> None:
        """Takes in one dispatch: seconds of the host, and of the device if they are known."""
        elapsed = min(now - self._noted_at, _LATELY_S)
        kept = math.exp(-elapsed / _LATELY_S)
        self._late_s = kept * self._late_s + elapsed
        more = 1 - min(num_steps / self._most_steps, 1)
        self._late_more_s = kept * self._late_more_s + more * host_s
        self._noted_at = now
        self._host_s = _mean(self._host_s, host_s)
        if num_steps and device_s is not None:
            self._step_s = _mean(self._step_s, device_s / num_steps)


def _mean(before: float, value: float) -> float:
    return _KEPT * before + (1 - _KEPT) * value if before else value
