"""What every experiment says about a figure: a median and a spread, on which machine, in a readable table.

Only the standard library, because the peers' own interpreters import it too; tables use rich where it is.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Columns = Mapping[str, str | Callable[[Any], str]]
"""By header what a column says of a record: a text for `format`, with its fields by name, or a function."""


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread of repeated calls, in microseconds."""
    ordered = sorted(seconds)

    def quantile_us(fraction: float) -> float:
        return 1e6 * ordered[round(fraction * (len(ordered) - 1))]

    return {
        "median_us": 1e6 * statistics.median(ordered),
        "p10_us": quantile_us(0.1),
        "p90_us": quantile_us(0.9),
        "num_calls": len(ordered),
    }


def take_turns(rounds: Sequence[Callable[[], Any]], seconds: float) -> None:
    """Calls all in turn, for so long and at least five times: what else the machine does meets all alike."""
    end, num_rounds = time.perf_counter() + seconds, 0
    while num_rounds < 5 or time.perf_counter() < end:
        for take_one in rounds:
            take_one()
        num_rounds += 1


def ratios(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Tells p10, median and p90 of what each round took in times of another side."""
    ordered = sorted(a / b for a, b in zip(seconds, others, strict=True))
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return [low, statistics.median(ordered), high]


def machine() -> dict[str, str | int]:
    """CPU model and the cores that this process may use."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.partition(":")[2]
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = models[0].strip() if models else cpu
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": cpu, "num_cores": num_cores, "system": platform.system()}


def revision() -> str:
    """Commit of the working tree, with a plus if it was changed since; empty outside of a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return ""


def cells(columns: Columns, records: Sequence[Any]) -> list[list[str]]:
    """Words the records, a row each."""
    return [
        [style.format(**record) if isinstance(style, str) else style(record) for style in columns.values()]
        for record in records
    ]


def show_records(title: str, columns: Columns, records: Sequence[Any], num_text: int = 1) -> None:
    show_table(title, list(columns), cells(columns, records), num_text)


def ms_columns(digits: int = 1) -> Columns:
    """Says of a `summary` what its calls took, in ms."""

    def ms(record: Any, name: str) -> str:
        return f"{record[name] / 1e3:.{digits}f}"

    return {
        "median": lambda record: ms(record, "median_us"),
        "p10 - p90": lambda record: f"{ms(record, 'p10_us')} - {ms(record, 'p90_us')}",
    }


def number(value: float) -> str:
    """Words a time in three digits, or in whole units."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def spread_columns(unit_us: float = 1.0) -> Columns:
    """Says of a `summary` what its calls took, in units of so many microseconds."""
    return {
        "median": lambda record: number(record["median_us"] / unit_us),
        "p10 - p90": lambda record: " - ".join(number(record[key] / unit_us) for key in ("p10_us", "p90_us")),
    }


def with_spread(key: str | None = None, unit_us: float = 1.0, digits: int = 0) -> Callable[[Any], str]:
    """Words of a `summary`, or of a record's under a key, the median and the spread: 5 (4 - 7)."""

    def words(record: Any) -> str:
        found = record if key is None else record[key]
        names = "median_us", "p10_us", "p90_us"
        median, low, high = (f"{found[name] / unit_us:,.{digits}f}" for name in names)
        return f"{median} ({low} - {high})"

    return words


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1) -> None:
    """Prints a table whose first `num_text` columns are words; a terminal shows verdicts in colour."""
    if sys.stdout.isatty():
        try:
            return _show_rich(title, header, rows, num_text)
        except ImportError:
            pass
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if i < num_text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def _show_rich(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_text: int) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {"holds": "[green]holds[/green]", "does not hold": "[bold red]does not hold[/bold red]"}
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < num_text else "right")
    for row in rows:
        table.add_row(*(colours.get(cell, cell) for cell in row))
    Console().print(table)
