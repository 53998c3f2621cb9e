"""Logarithmic axes whose ticks are plain numbers, and several of them however short the axis is."""

import math
from typing import Any

FEWEST, MOST = 4, 10
"""Ticks of an axis; those of a short one may be two."""


def log_ticks(low: float, high: float) -> list[float]:
    """Finds round numbers from `low`, above 0, to `high`: the roundest of which there are enough."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        # By digits, so that 3e-1 is 0.3 and nothing beside it.
        ticks = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= FEWEST:
            break
    else:  # so short that it is nearly linear
        exponent = math.floor(math.log10((high - low) / 2))
        numbers = range(math.ceil(low / 10.0**exponent), math.floor(high / 10.0**exponent) + 1)
        ticks = [float(f"{number}e{exponent}") for number in numbers]
    return ticks[:: math.ceil(len(ticks) / MOST)]


def label(axis: Any) -> None:
    """Labels a matplotlib axis, an `xaxis` or `yaxis`, once all is drawn that it spans."""
    from matplotlib.ticker import NullLocator

    ticks = log_ticks(*sorted(axis.get_view_interval()))
    axis.set_ticks(ticks, [f"{tick:,.10g}" if tick < 1e6 else f"{tick:,.0f}" for tick in ticks])
    axis.set_minor_locator(NullLocator())
