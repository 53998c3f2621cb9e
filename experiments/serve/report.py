"""The tables and the figure of `experiments.serve`."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.timing import show_table
from experiments.serve.sides import CONTINUOUS, HOST, PREFIX, STATIC

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE_CHARACTERS = 26
"""Of a line: as wide as a panel."""

CHECK_IN = "second", "running", "waiting", "blocks", "tokens", "preemptions"


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as tables."""
    host = report["machine"]
    print(f"{host['cpu']}, {host['num_cores']} cores, load {report['load']:.1f}, jax {report['jax']}")
    for work in report.get("workloads", ()):
        print(f"\n{work['name']}: {work['source']}")
        _show_sides(f"{work['name']}, {report['rows']} rows", work["sides"])
    if "interference" in report:
        _show_interference(report["interference"])
    if "simulated" in report:
        _show_simulated(report["simulated"])
    if "bars" in report:
        show_bars(report["bars"])
    print(f"\n{report['seconds']:.0f} s in all")


def _show_sides(title: str, records: Sequence[dict]) -> None:
    rows = [
        [
            record["side"],
            f"{record['tokens_per_s']:,.0f}",
            _pair(record["first_token_s"], ".2f"),
            _pair(record["per_token_ms"], ".1f"),
            f"{record['transfers_per_token']:.3f}",
            f"{record['rows_per_step']:.1f}",
            f"{record['step_ms']:.2f}",
            f"{record['hit_rate']:.0%}",
            f"{record['peak_blocks']:,} of {record['num_blocks']:,}",
            f"{record['preemptions']}",
        ]
        for record in records
    ]
    header = [
        "",
        "tokens/s",
        "first token, s",
        "a token, ms",
        "transfers a token",
        "rows a step",
        "ms a step",
        "hits",
        "blocks",
        "preempted",
    ]
    show_table(f"{title}; p50 - p99", header, rows)


def _show_interference(records: Sequence[dict]) -> None:
    rows = [
        [
            record["side"],
            _pair(record["idle_ms"], ".1f"),
            _pair(record["disturbed_ms"], ".1f"),
            f"{record['slow_down_p50']:.2f}x",
            f"{record['slow_down_p99']:.2f}x",
            f"{record['deliveries']}",
        ]
        for record in records
    ]
    header = ["", "idle", "disturbed", "p50", "p99", "deliveries"]
    show_table("ms between deliveries, p50 - p99; a thread in Python, a process on a core", header, rows)


def _show_simulated(simulated: dict) -> None:
    chips = f"{simulated['num_chips']} x {simulated['machine']}"
    print(f"\n{simulated['model']} on {chips}, simulated: {simulated['source']}")
    _show_sides(f"{simulated['rows']:,} rows, simulated", simulated["sides"])
    for record in simulated["sides"]:
        print(
            f"  {record['side']}: at most {record['most_rows']:,} rows at once; "
            f"here {record['here_step_ms']:.1f} ms a step, {record['here_s']:.0f} s in all"
        )


def show_bars(bars: Sequence[dict]) -> None:
    """Prints each bar with what was measured, and whether it holds."""
    show_table("bars", ["bar", "got", "bar", ""], [bar_cells(bar) for bar in bars])
    num_failed = sum(not bar["holds"] for bar in bars)
    print(f"\n{num_failed} of {len(bars)} bars do not hold")


def bar_cells(bar: dict) -> list[str]:
    """Words of a bar's row."""
    limit = f"at most {bar['at_most']:g}" if "at_most" in bar else f"at least {bar['at_least']:g}"
    return [bar["bar"], f"{bar['measured']:.3g}", limit, "holds" if bar["holds"] else "does not hold"]


def markdown(report: dict[str, Any]) -> str:
    """Writes a record's tables as docs/measured.md has them."""
    tables = []
    for work in report.get("workloads", ()):
        header = work["name"], "tokens/s", "first token, s", "a token, ms", "transfers a token", "rows a step"
        rows = [
            [
                record["side"],
                f"{record['tokens_per_s']:,.0f}",
                _pair(record["first_token_s"], ".1f"),
                _pair(record["per_token_ms"], ".1f"),
                f"{record['transfers_per_token']:.3f}",
                f"{record['rows_per_step']:.1f}",
            ]
            for record in work["sides"]
        ]
        tables.append(_markdown_table(header, rows))
    if "interference" in report:
        rows = [
            [
                record["side"],
                _pair(record["idle_ms"], ".1f"),
                _pair(record["disturbed_ms"], ".1f"),
                f"{record['slow_down_p99']:.2f}",
            ]
            for record in report["interference"]
        ]
        header = "ms between deliveries", "idle", "disturbed", "p99, times"
        tables.append(_markdown_table(header, rows))
    if "simulated" in report:
        rows = [
            [
                record["side"],
                f"{record['tokens_per_s']:,.0f}",
                _pair(record["first_token_s"], ".2f"),
                _pair(record["per_token_ms"], ".1f"),
                f"{record['most_rows']:,}",
                f"{record['here_step_ms']:.1f}",
            ]
            for record in report["simulated"]["sides"]
        ]
        header = "simulated", "tokens/s", "first token, s", "a token, ms", "most rows", "ms a step, here"
        tables.append(_markdown_table(header, rows))
    if "bars" in report:
        tables.append(
            _markdown_table(
                ("what must hold", "measured", "bar", ""), [bar_cells(bar) for bar in report["bars"]]
            )
        )
    return "\n".join(tables)


def readme_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Writes the rows of README's table that a record is in: how each begins, and all of it."""
    batches, prefix = (bar["measured"] for bar in report["bars"][:2])
    engine, host = (record["slow_down_p99"] for record in report["interference"])
    figures = {
        "tokens/s of continuous batching": f"{batches:.2f} times those of static batches, {prefix:.2f} times "
        "with the prefix cache on 8-shot GSM8K | `python -m experiments.serve`",
        "p99 between deliveries on a busy host": f"{engine:.2f} times that of an idle one; a dispatch per "
        f"token: {host:.2f} | `python -m experiments.serve --interference`",
    }
    return [(f"| {what} |", f"| {what} | {figure} |") for what, figure in figures.items()]


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def _pair(percentiles: dict[str, float | None], style: str) -> str:
    """Words of two percentiles; a dash where nothing was measured, which older records have as 0."""
    p50, p99 = percentiles["p50"], percentiles["p99"]
    return f"{p50:{style}} - {p99:{style}}" if p50 and p99 else "-"


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the picture of a report to a file."""
    picture(report).savefig(path, dpi=110)


def picture(report: dict[str, Any]) -> "Figure":
    """A panel each for rows, requests that wait, blocks and tokens over time; a line per side."""
    from matplotlib.figure import Figure

    works = report.get("workloads") or [{"name": "simulated", "sides": report["simulated"]["sides"]}]
    figure = Figure(figsize=(11, 2.8 * len(works) + 0.6), layout="constrained")
    colours = {
        name: f"C{i}" for i, name in enumerate((STATIC, CONTINUOUS, PREFIX, HOST))
    }  # a table is too fast
    panels = figure.subplots(len(works), 4, squeeze=False)
    for axes, work in zip(panels, works, strict=True):
        for side in work["sides"]:
            if side["side"] not in colours:
                continue
            columns = dict(zip(CHECK_IN, zip(*side["timeline"], strict=True), strict=True))
            style = {"label": side["side"], "color": colours[side["side"]], "linewidth": 1.2}
            for panel, name in zip(axes, ("running", "waiting", "blocks", "tokens"), strict=True):
                panel.plot(columns["second"], columns[name], **style)
        num_blocks = max(side["num_blocks"] for side in work["sides"])
        titles = "rows that run", "requests that wait", f"blocks held, of {num_blocks:,}", "tokens"
        name = textwrap.fill(work["name"], _TITLE_CHARACTERS)
        for panel, title in zip(axes, titles, strict=True):
            panel.set_title(f"{name}\n{title}", fontsize=9)
            panel.grid(alpha=0.3)
            panel.set_axisbelow(True)
            panel.tick_params(labelsize=8)
            panel.set_ylim(bottom=0)
            panel.set_xlabel("s", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure
