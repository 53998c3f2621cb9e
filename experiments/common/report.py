"""What the reports of studies have alike: where they were made, bars, and --json and --picture.

parser = command.Parser("experiments.some", __doc__)
report.add_options(parser)
options = parser.parse_args(arguments)
start = time.perf_counter()
found = {"records": records, "bars": [report.at_most("seconds", 3.2, 4)]}
report.deliver(report.provenance() | found | {"seconds": time.perf_counter() - start}, options, show, draw)
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.common import command, timing

_LIMITS = "at_most", "at_least", "exactly"
_VERDICTS = {True: "holds", False: "does not hold"}


def at_most(bar: str, measured: float, limit: float) -> dict[str, Any]:
    """Says what must not exceed a limit, and whether it does."""
    return {"bar": bar, "measured": measured, "at_most": limit, "holds": bool(measured <= limit)}


def at_least(bar: str, measured: float, limit: float) -> dict[str, Any]:
    """Says what must not fall below a limit, and whether it does."""
    return {"bar": bar, "measured": measured, "at_least": limit, "holds": bool(measured >= limit)}


def add_options(parser: argparse.ArgumentParser, *, draws: bool = True) -> None:
    """Adds the options --json and, where there is a figure, --picture."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    if draws:
        parser.add_argument("--picture", type=command.picture, metavar="FILE", help="also draw a figure")


def provenance() -> dict[str, Any]:
    """Tells where and with which code a report is made."""
    import jax

    return {
        "machine": timing.machine(),
        "revision": timing.revision(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def deliver(
    report: dict[str, Any],
    options: argparse.Namespace,
    show: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Prints a report, as tables or as one JSON object, and draws its figure, as the options want it."""
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    if draw is not None and options.picture:
        draw(report, options.picture)


def show_provenance(report: dict[str, Any]) -> None:
    """Prints the line that a report begins with."""
    host = report["machine"]
    print(f"{host['cpu']}, {host['num_cores']} cores, {report['device']}, jax {report['jax']}")


def show_bars(report: dict[str, Any], digits: int = 3) -> None:
    """Prints what a report ends with: its bars, how many do not hold, and the time of all."""
    bars: Sequence[dict[str, Any]] = report["bars"]
    columns = {
        "bar": "{bar}",
        "measured": f"{{measured:.{digits}g}}",
        "": limit_of,
        "verdict": lambda bar: verdict(bar["holds"]),
    }
    timing.show_records("bars", columns, bars)
    num_failed = sum(not bar["holds"] for bar in bars)
    print(f"\n{num_failed} of {len(bars)} bars do not hold; {report['seconds']:.0f} s in all")


def limit_of(bar: dict[str, Any]) -> str:
    """Words a bar's limit."""
    name = next(name for name in _LIMITS if name in bar)
    return f"{name.replace('_', ' ')} {bar[name]:g}"


def verdict(holds: bool) -> str:
    """Words whether a bar holds; `show_table` colours it."""
    return _VERDICTS[holds]
