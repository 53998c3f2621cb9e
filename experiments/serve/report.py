"""The tables and the figure of `experiments.serve`."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.report import framed, limit_of, verdict
from experiments.common.timing import Columns, cells, show_records
from experiments.serve.sides import CONTINUOUS, HOST, PREFIX, STATIC

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE_CHARACTERS = 26
"""Of a line: as wide as a panel."""

CHECK_IN = "second", "running", "waiting", "blocks", "tokens", "preemptions"


def _pair(name: str, digits: int) -> Callable[[dict], str]:
    """Writes two percentiles; a dash where nothing was measured, which older records have as 0."""

    def words(record: dict) -> str:
        p50, p99 = record[name]["p50"], record[name]["p99"]
        return f"{p50:.{digits}f} - {p99:.{digits}f}" if p50 and p99 else "-"

    return words


SIDES = {
    "": "{side}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "first token, s": _pair("first_token_s", 2),
    "a token, ms": _pair("per_token_ms", 1),
    "transfers a token": "{transfers_per_token:.3f}",
    "rows a step": "{rows_per_step:.1f}",
    "ms a step": "{step_ms:.2f}",
    "hits": "{hit_rate:.0%}",
    "blocks": "{peak_blocks:,} of {num_blocks:,}",
    "preempted": "{preemptions}",
}
DELIVERIES = {
    "": "{side}",
    "idle": _pair("idle_ms", 1),
    "disturbed": _pair("disturbed_ms", 1),
    "p50": "{slow_down_p50:.2f}x",
    "p99": "{slow_down_p99:.2f}x",
    "deliveries": "{deliveries}",
}
BARS = {
    "what must hold": "{bar}",
    "measured": "{measured:.3g}",
    "bar": limit_of,
    "": lambda bar: verdict(bar["holds"]),
}
# As docs/measured.md has them.
MARKDOWN_SIDES = {name: SIDES[name] for name in list(SIDES)[:6]} | {
    "first token, s": _pair("first_token_s", 1)
}
MARKDOWN_DELIVERIES = {
    "ms between deliveries": "{side}",
    "idle": DELIVERIES["idle"],
    "disturbed": DELIVERIES["disturbed"],
    "p99, times": "{slow_down_p99:.2f}",
}
MARKDOWN_SIMULATED = {
    "simulated": "{side}",
    **{name: SIDES[name] for name in ("tokens/s", "first token, s", "a token, ms")},
    "most rows": "{most_rows:,}",
    "ms a step, here": "{here_step_ms:.1f}",
}


@framed
def show(report: dict[str, Any]) -> None:
    print(f"load {report['load']:.1f}")
    for work in report.get("workloads", ()):
        print(f"\n{work['name']}: {work['source']}")
        show_records(f"{work['name']}, {report['rows']} rows; p50 - p99", SIDES, work["sides"])
    if "interference" in report:
        title = "ms between deliveries, p50 - p99; a thread in Python, a process on a core"
        show_records(title, DELIVERIES, report["interference"])
    if "simulated" in report:
        _show_simulated(report["simulated"])
    if "bars" not in report:
        print(f"\n{report['seconds']:.0f} s in all")


def _show_simulated(simulated: dict) -> None:
    chips = f"{simulated['num_chips']} x {simulated['machine']}"
    print(f"\n{simulated['model']} on {chips}, simulated: {simulated['source']}")
    show_records(f"{simulated['rows']:,} rows, simulated; p50 - p99", SIDES, simulated["sides"])
    for record in simulated["sides"]:
        print(
            f"  {record['side']}: at most {record['most_rows']:,} rows at once; "
            f"here {record['here_step_ms']:.1f} ms a step, {record['here_s']:.0f} s in all"
        )


def markdown(report: dict[str, Any]) -> str:
    tables = []
    for work in report.get("workloads", ()):
        tables.append(_markdown_table(MARKDOWN_SIDES, work["sides"], work["name"]))
    if "interference" in report:
        tables.append(_markdown_table(MARKDOWN_DELIVERIES, report["interference"]))
    if "simulated" in report:
        tables.append(_markdown_table(MARKDOWN_SIMULATED, report["simulated"]["sides"]))
    if "bars" in report:
        tables.append(_markdown_table(BARS, report["bars"]))
    return "\n".join(tables)


def _markdown_table(columns: Columns, records: Sequence[dict], corner: str | None = None) -> str:
    header = list(columns) if corner is None else [corner, *list(columns)[1:]]
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *cells(columns, records)]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def draw(report: dict[str, Any], path: Path) -> None:
    picture(report).savefig(path, dpi=110)


def picture(report: dict[str, Any]) -> "Figure":
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
