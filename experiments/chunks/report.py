"""The bars, tables and figure of `experiments.chunks`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.chunks.quality import ALL, NONE, RANDOM, SEEN, SHARES, UNTURNED
from experiments.chunks.times import FULL
from experiments.common import log_axes
from experiments.common.report import at_least, at_most, figure, framed
from experiments.common.timing import ms_columns, show_records, show_table


def bars_of(texts: Sequence[dict[str, Any]], trace: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, beside what was measured; what full prefill alone shows counts for no selector."""
    bars = []
    for text in texts:
        kl = _kl(text)
        shares = {share: {name: of[share] for name, of in kl.items() if share in of} for share in (0.2, 0.5)}
        known = {share: {name: x for name, x in of.items() if name != SEEN} for share, of in shares.items()}
        for share, limit in ((0.2, 0.7), (0.5, 0.4)):
            name = min(known[share], key=known[share].__getitem__)
            measured = known[share][name] / kl[NONE][0.0]
            bars.append(at_most(f"KL, {share:.0%} again, of none: {text['text']}, {name}", measured, limit))
        measured = known[0.5][RANDOM] / min(known[0.5].values())
        bars.append(at_least(f"KL of random, 50% again, of the best's: {text['text']}", measured, 1))
    for text in texts:
        what = f"log-probabilities off full prefill's, all again: {text['text']}"
        bars.append(at_most(what, text["difference_of_all"], 1e-4))
    different = sum(text["different_bits_of_first"] for text in texts)
    bars.append(at_most("numbers of first passages that are not a prefill's bit for bit", different, 0))
    sides = {(record["side"], record["share"]): record["computed"] for record in trace}
    measured = sides["chunk cache", 0.2] / sides["prefix cache, memory for all", None]
    bars.append(at_most("tokens computed, chunk cache at 20%, of the prefix cache's", measured, 0.45))
    return bars


def _kl(text: dict[str, Any]) -> dict[str, dict[float, float]]:
    found: dict[str, dict[float, float]] = {}
    for record in text["records"]:
        found.setdefault(record["selector"], {})[record["share"]] = record["kl"]
    return found


TIMES = {
    "": "{way}",
    "computed again": "{share:.0%}",
    **ms_columns(),
    "of full, each round": "{times_full[1]:.2f} ({times_full[0]:.2f} - {times_full[2]:.2f})",
    "first call (compiles)": "{first_call_s:.1f} s",
}
TRACE = {
    "": "{side}",
    "computed again": lambda record: _side(record)[1],
    "tokens computed": "{computed:,}",
    "of all": "{of_all:.1%}",
    "blocks": "{blocks:,}",
}


@framed
def show(report: dict[str, Any]) -> None:
    for text in report["texts"]:
        rows = [
            [name, *(f"{abs(of[share]):.4f}" if share in of else "" for share in (0.0, *SHARES, 1.0))]
            for name, of in _kl(text).items()
        ]
        title = f"KL to full prefill, nats a byte, {text['text']} text; computed again"
        show_table(title, ["", *(f"{share:.0%}" for share in (0.0, *SHARES, 1.0))], rows)
    show_records("until the first prediction, ms", TIMES, report["times"])
    most = report["trace"][0]["computed"]
    records = [{**record, "of_all": record["computed"] / most} for record in report["trace"]]
    show_records(f"{report['num_requests']} requests about {report['num_files']} files", TRACE, records)


@figure((11, 8), 2, 2, grid=("both", "both", "both", "x"))
def draw(report: dict[str, Any], *panels: Any) -> None:
    *losses, times, tokens = panels
    for axes, text in zip(losses, report["texts"], strict=True):
        _draw_text(axes, text)
    losses[0].set_ylabel("nats a byte")
    losses[0].legend(frameon=False, fontsize=8, loc="lower left")
    _draw_times(times, report["times"])
    names = [" ".join(_side(record)).replace(", ", ",\n").strip() for record in report["trace"]]
    bars = tokens.barh(names, [record["computed"] / 1e3 for record in report["trace"]], color="C0")
    tokens.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    tokens.invert_yaxis()
    tokens.tick_params(axis="y", labelsize=8)
    tokens.margins(x=0.15)
    tokens.set_title(f"{report['num_requests']} requests, thousand tokens computed")


def _draw_text(axes: Any, text: dict[str, Any]) -> None:
    kl = _kl(text)
    unturned, none = (kl[name][0.0] for name in (UNTURNED, NONE))
    for i, name in enumerate(name for name in kl if name not in (NONE, UNTURNED, ALL)):
        points = [(0.0, none), *kl[name].items()]
        style = dict(color="0.3", linestyle=":") if name == SEEN else dict(color=f"C{i}")
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
    axes.axhline(unturned, color="0.6", linestyle="--", linewidth=1)
    axes.text(0.02, unturned, UNTURNED, va="bottom", fontsize=8, color="0.4")
    axes.set(yscale="log", xlabel="share computed again", title=f"KL to full prefill, {text['text']} text")
    axes.set_ylim(top=2.5 * unturned)
    log_axes.label(axes.yaxis)


def _draw_times(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    (full,) = (record["median_us"] / 1e3 for record in records if record["way"] == FULL)
    for i, way in enumerate(dict.fromkeys(record["way"] for record in records if record["way"] != FULL)):
        points = [record for record in records if record["way"] == way]
        times = [[point[f"{key}_us"] / 1e3 for key in ("p10", "median", "p90")] for point in points]
        low, median, high = np.array(times).T
        shares, style = (
            [point["share"] for point in points],
            dict(marker="o", markersize=4, color=("C3", "C1")[i]),
        )
        axes.errorbar(shares, median, (median - low, high - median), label=f"composed, {way}", **style)
    axes.axhline(full, color="black", linewidth=1, label=FULL)
    axes.set(xlabel="share computed again", title="until the first prediction, ms", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def _side(record: dict[str, Any]) -> tuple[str, str]:
    """A side's name, and its share."""
    return record["side"], "" if record["share"] is None else f"{record['share']:.0%}"
