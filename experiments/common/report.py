"""What the reports of studies have alike: where they were made, bars, and --json and --picture.

parser = command.Parser("experiments.some", __doc__)
report.add_options(parser)
options = parser.parse_args(arguments)
found = {"records": records, "bars": [report.at_most("seconds", 3.2, 4)]}
return report.deliver(found, options, show, draw)
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.common import command, timing

Report = dict[str, Any]
Show = Callable[[Report], None]
Draw = Callable[[Report, Path], None]

_LIMITS = "at_most", "at_least", "exactly"


def at_most(bar: str, measured: float, limit: float) -> Report:
    """Says what must not exceed a limit, and whether it does."""
    return {"bar": bar, "measured": measured, "at_most": limit, "holds": bool(measured <= limit)}


def at_least(bar: str, measured: float, limit: float) -> Report:
    """Says what must not fall below a limit, and whether it does."""
    return {"bar": bar, "measured": measured, "at_least": limit, "holds": bool(measured >= limit)}


def add_options(parser: argparse.ArgumentParser, *, draws: bool = True) -> None:
    """Adds the options --json and, where there is a figure, --picture; from here on seconds count."""
    parser.set_defaults(start=time.perf_counter())
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    if draws:
        parser.add_argument("--picture", type=command.picture, metavar="FILE", help="also draw a figure")


def provenance() -> Report:
    """Tells where and with which code a report is made."""
    import jax

    return {
        "machine": timing.machine(),
        "revision": timing.revision(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def deliver(found: Report, options: argparse.Namespace, show: Show, draw: Draw | None = None) -> int:
    """Prints a report as the options of `add_options` want it, and draws its figure; returns exit code 0.

    What was `found` lacks its provenance and the seconds that it took.
    """
    report = provenance() | {"seconds": time.perf_counter() - options.start} | found
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    if draw is not None and options.picture:
        draw(report, options.picture)
    return 0


def figure(
    size: tuple[float, float], *shape: int, grid: str | Sequence[str] = "both", dpi: int = 120, **options: Any
) -> Callable[[Callable[..., None]], Draw]:
    """Makes of a function that draws a report on panels one that writes its figure to a file.

    Args:
      size: Inches.
      *shape: Rows and columns of the panels, which the function is given row by row.
      grid: The axis of the grids under what is drawn, or one for each panel.
      dpi: Dots per inch.
      **options: Of matplotlib's `Figure.subplots`.
    """

    def decorate(draw: Callable[..., None]) -> Draw:
        @functools.wraps(draw)
        def write(report: Report, path: Path) -> None:
            from matplotlib.figure import Figure

            made = Figure(figsize=size, layout="constrained")
            panels = made.subplots(*shape, squeeze=False, **options).ravel()
            draw(report, *panels)
            grids = [grid] * len(panels) if isinstance(grid, str) else grid
            for axes, axis in zip(panels, grids, strict=True):
                axes.grid(alpha=0.3, axis=axis)
                axes.set_axisbelow(True)
            made.savefig(path, dpi=dpi)

        return write

    return decorate


def framed(show: Show, digits: int = 3) -> Show:
    """Decorates what prints a report's tables: first where it was made, at last its bars if it has any."""

    @functools.wraps(show)
    def shown(report: Report) -> None:
        show_provenance(report)
        show(report)
        if "bars" in report:
            show_bars(report, digits)

    return shown


def table(title: str, columns: timing.Columns, digits: int = 3) -> Show:
    """Makes the function that prints a report whose `records` are its one table."""
    return framed(lambda report: timing.show_records(title, columns, report["records"]), digits)


def show_provenance(report: Report) -> None:
    """Prints the line that a report begins with."""
    host = report["machine"]
    print(f"{host['cpu']}, {host['num_cores']} cores, {report['device']}, jax {report['jax']}")


def show_bars(report: Report, digits: int = 3) -> None:
    """Prints what a report ends with: its bars, how many do not hold, and the time of all."""
    bars: Sequence[Report] = report["bars"]
    columns = {
        "bar": "{bar}",
        "measured": f"{{measured:.{digits}g}}",
        "": limit_of,
        "verdict": lambda bar: verdict(bar["holds"]),
    }
    timing.show_records("bars", columns, bars)
    num_failed = sum(not bar["holds"] for bar in bars)
    print(f"\n{num_failed} of {len(bars)} bars do not hold; {report['seconds']:.0f} s in all")


def limit_of(bar: Report) -> str:
    name = next(name for name in _LIMITS if name in bar)
    return f"{name.replace('_', ' ')} {bar[name]:g}"


def verdict(holds: bool) -> str:
    """Words whether a bar holds; `show_table` colours it."""
    return "holds" if holds else "does not hold"
