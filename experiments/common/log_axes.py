"""Logarithmic axes whose ticks are plain numbers, and several of them however short the axis is."""

from typing import Any


def label(axis: Any) -> None:
    """Labels a matplotlib axis, an `xaxis` or `yaxis`, once all is drawn that it spans."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    is_long = high > 10 * low
    axis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,)) if is_long else MaxNLocator(5)
    )
    axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}" if tick < 1e6 else f"{tick:,.0f}"))
    axis.set_minor_locator(NullLocator())
