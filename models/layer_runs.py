"""Which layers of a model repeat, so that one `lax.scan` computes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Run(NamedTuple):
    """Layers that follow each other: the kinds of `period` layers, `num_repeats` times over."""

    start: int
    period: int
    num_repeats: int

    @property
    def layer_ids(self) -> range:
        return range(self.start, self.start + self.period * self.num_repeats)


def layer_runs(kinds: Sequence[Any]) -> tuple[Run, ...]:
    """Splits layers into runs; a single one of period 1 where all kinds are equal.

    Each run repeats the period that covers most of the layers that are left, the shortest of equals. Of 26
    layers, five windows and a full one in turn, 24 are a run of period 6 and the last 2 a run of period 1.
    """
    runs, start = [], 0
    while start < len(kinds):
        rest = kinds[start:]
        repeats = {period: _num_repeats(rest, period) for period in range(1, 1 + len(rest) // 2)} or {1: 1}
        period = max(repeats, key=lambda period: period * repeats[period] * (repeats[period] > 1))
        runs.append(Run(start, period, repeats[period]))
        start = runs[-1].layer_ids.stop
    return tuple(runs)


def _num_repeats(kinds: Sequence[Any], period: int) -> int:
    """How often the first `period` kinds follow each other."""
    num = 1
    while kinds[num * period : (num + 1) * period] == kinds[:period]:
        num += 1
    return num
