"""What the figures of `experiments.kernel_speed` mean: ratios to the best peer, bars, tables, a picture."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.common.report import figure, verdict
from experiments.common.timing import show_table
from experiments.kernel_speed.cells import BLOCK_SIZES, LARGE_BYTES
from experiments.kernel_speed.names import COPY, OURS, READ, WITH_PLAN
from experiments.kernel_speed.timing import MEASURED

NOT_MEASURED = "not measured"
LEAST_OF_CEILING, LEAST_MEAN, LEAST_RATIO = 0.9, 1.0, 0.9


def medians_us(entry: dict) -> dict[str, float]:
    """Of the sides that were measured."""
    return {side["side"]: side["median_us"] for side in entry["sides"] if side["status"] == MEASURED}


def gb_per_s(entry: dict, side: str = OURS) -> float | None:
    """What must be moved, over the time that a side took; in 10^9 bytes."""
    median = medians_us(entry).get(side)
    return None if median is None else entry["num_bytes"] / median / 1e3


def add_figures(report: dict[str, Any]) -> None:
    """Adds to a report what follows from its entries."""
    report["ceilings"] = ceilings(report["entries"])
    for entry in report["decodes"]:
        entry["comparison"] = comparison(entry, report["ceilings"].get(READ))
    for kind, ceiling in (("moves", COPY), ("steps", READ)):
        for entry in report[kind]:
            rate = report["ceilings"].get(ceiling)
            rates = {side: gb_per_s(entry, side) for side in medians_us(entry)}
            entry["of_ceiling"] = {side: (got or 0) / rate for side, got in rates.items()} if rate else {}
    report["summary"] = summary(report["decodes"])


def ceilings(entries: Sequence[dict]) -> dict[str, float | None]:
    """The best of each kind, in GB/s, by the entry's name."""
    rates = {
        entry["name"]: [gb_per_s(entry, side) for side in medians_us(entry)]
        for entry in entries
        if entry["num_bytes"]
    }
    return {name: max((rate for rate in of if rate is not None), default=None) for name, of in rates.items()}


def comparison(entry: dict, ceiling: float | None) -> dict[str, Any]:
    """Ours on one entry: `gb_per_s`, `of_ceiling`, `best_peer`, `ratio` (its time over ours), each None if
    there is none, and `why_no_ratio`."""
    medians, rate = medians_us(entry), gb_per_s(entry)
    is_ours = {side["side"]: side["is_ours"] for side in entry["sides"]}
    peers = {side: median for side, median in medians.items() if not is_ours[side]}
    best_peer = min(peers, key=lambda side: peers[side], default=None)
    ratio, why = None, ""
    if rate is None:
        (ours,) = (side for side in entry["sides"] if side["side"] == OURS)
        why = f"ours: {ours['status']}{': ' * bool(ours['reason'])}{ours['reason']}"
    elif best_peer is None:
        why = "no peer was measured"
    else:
        ratio = peers[best_peer] / medians[OURS]
    return {
        "gb_per_s": rate,
        "of_ceiling": rate / ceiling if rate and ceiling else None,
        "best_peer": best_peer,
        "ratio": ratio,
        "why_no_ratio": why,
    }


def summary(decodes: Sequence[dict]) -> dict[str, Any]:
    """Over all cells that have a `comparison`: the geometric mean of the ratios, who lost, and the bars."""
    compared = [entry for entry in decodes if entry["comparison"]["ratio"] is not None]
    ratios = {entry["name"]: entry["comparison"]["ratio"] for entry in compared}
    large = [
        entry["comparison"]["of_ceiling"]
        for entry in decodes
        if entry["num_bytes"] >= LARGE_BYTES and entry["comparison"]["of_ceiling"] is not None
    ]
    mean = statistics.geometric_mean(ratios.values()) if ratios else None
    losses = [
        {"cell": entry["name"], "ratio": ratios[entry["name"]], "best_peer": entry["comparison"]["best_peer"]}
        for entry in sorted(compared, key=lambda entry: ratios[entry["name"]])
        if ratios[entry["name"]] < 1
    ]
    return {
        "num_cells": len(decodes),
        "num_compared": len(compared),
        "geometric_mean": mean,
        "losses": losses,
        "below_least_ratio": [loss["cell"] for loss in losses if loss["ratio"] < LEAST_RATIO],
        "not_compared": [
            {"cell": entry["name"], "reason": entry["comparison"]["why_no_ratio"]}
            for entry in decodes
            if entry["comparison"]["ratio"] is None
        ],
        "bars": [
            _bar(
                f"least share of the read bandwidth, {LARGE_BYTES / 1e9:g} GB or more",
                large,
                LEAST_OF_CEILING,
            ),
            _bar("geometric mean of the ratios to the best peer", [mean] if mean else [], LEAST_MEAN),
            _bar("smallest ratio to the best peer", list(ratios.values()), LEAST_RATIO),
        ],
    }


def _bar(name: str, values: Sequence[float], at_least: float) -> dict[str, Any]:
    """Neither holds nor fails without a value."""
    measured = min(values, default=None)
    return {
        "bar": name,
        "measured": measured,
        "at_least": at_least,
        "holds": None if measured is None else measured >= at_least,
    }


def absences(entries: Sequence[dict]) -> list[dict[str, Any]]:
    """Who was not measured, and why: one record for each side and reason, with the entries' names."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for side in entry["sides"]:
            if side["reason"]:
                found.setdefault((side["side"], f"{side['status']}: {side['reason']}"), []).append(
                    entry["name"]
                )
    return [{"side": side, "reason": reason, "on": names} for (side, reason), names in found.items()]


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as tables."""
    device = report["device"]
    print(f"{device['name']}, jax {report['jax']}, {report['date']}, {report['revision'] or 'no revision'}")
    if report["is_interpreted"]:
        print("interpreted on the CPU: the path is checked, nothing is measured")
    print(f"ceilings: {', '.join(f'{name} {_gb(rate)}' for name, rate in report['ceilings'].items())}")
    floors = [entry for entry in report["entries"] if not entry["num_bytes"]]
    _show_others("what a launch costs at least", floors)
    _show_decodes(report["decodes"])
    _show_others("movement of tokens and blocks", report["moves"])
    _show_others("a whole step of the decoder", report["steps"])
    _show_absences(report)
    _show_summary(report)


def _show_decodes(entries: Sequence[dict]) -> None:
    rows = []
    for entry in entries:
        compared, medians = entry["comparison"], medians_us(entry)
        best = compared["best_peer"]
        rows.append(
            [
                entry["name"],
                f"{entry['num_bytes'] / 1e9:.3g}",
                _us(entry, OURS),
                _us(entry, WITH_PLAN),
                _gb(compared["gb_per_s"]),
                _percent(compared["of_ceiling"]),
                f"{best} {medians[best]:,.1f}" if best else "none",
                f"{compared['ratio']:.2f}x" if compared["ratio"] else compared["why_no_ratio"],
            ]
        )
    header = [
        "batch x context",
        "GB",
        "ours, us",
        "with plan",
        "",
        "of reading",
        "best peer, us",
        "its time / ours",
    ]
    if rows:
        show_table("paged decode, bfloat16", header, rows)


def _show_others(title: str, entries: Sequence[dict]) -> None:
    rows = []
    for entry in entries:
        for side in entry["sides"]:
            rows.append(
                [
                    entry["name"],
                    side["side"],
                    f"{entry['num_bytes'] / 1e9:.3g}",
                    _us(entry, side["side"]),
                    _gb(gb_per_s(entry, side["side"])) if entry["num_bytes"] else "",
                    _percent(entry.get("of_ceiling", {}).get(side["side"])),
                    side["status"],
                ]
            )
    header = ["", "", "GB", "median (p10 - p90), us", "", "of the ceiling", ""]
    if rows:
        show_table(title, header, rows, num_text=2)


def _show_absences(report: dict) -> None:
    for absence in absences([*report["entries"], *report["decodes"], *report["moves"], *report["steps"]]):
        names = absence["on"]
        where = names[0] if len(names) == 1 else f"{len(names)} entries, {names[0]} and others"
        print(f"{absence['side']}: {absence['reason']} ({where})")
    for skipped in report["skipped"]:
        print(f"skipped {skipped['cell']}: {skipped['reason']}")
    if report["left_out"]:
        print(f"left out, no time: {'; '.join(report['left_out'])}")
    if report["stopped"]:
        print(f"stopped early: {report['stopped']}")


def _show_summary(report: dict) -> None:
    summary = report["summary"]
    if summary["losses"]:
        rows = [[loss["cell"], loss["best_peer"], f"{loss['ratio']:.2f}x"] for loss in summary["losses"]]
        show_table("cells in which a peer is faster", ["batch x context", "peer", "its time / ours"], rows, 2)
    rows = [
        [
            bar["bar"],
            NOT_MEASURED if bar["measured"] is None else f"{bar['measured']:.3g}",
            f"at least {bar['at_least']:g}",
            NOT_MEASURED if bar["holds"] is None else verdict(bar["holds"]),
        ]
        for bar in summary["bars"]
    ]
    show_table("bars", ["bar", "measured", "", ""], rows)
    num_compared, num_cells = summary["num_compared"], summary["num_cells"]
    print(f"\n{num_compared} of {num_cells} cells compared with a peer; {report['seconds']:.0f} s in all")


def _us(entry: dict, name: str) -> str:
    for side in entry["sides"]:
        if side["side"] == name:
            if side["median_us"] is None:
                return side["status"]
            return f"{side['median_us']:,.1f} ({side['p10_us']:,.1f} - {side['p90_us']:,.1f})"
    return ""


def _gb(rate: float | None) -> str:
    return NOT_MEASURED if rate is None else f"{rate:,.0f} GB/s"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


@figure((14, 4.5), 1, 3)
def draw(report: dict, bandwidth: Any, ratios: Any, others: Any) -> None:
    """Three panels: the decode's bandwidth by bytes, its ratio to the best peer, and the other kernels'."""
    title = f"{report['device']['name']}, jax {report['jax']}, {report['date']} {report['revision']}"
    bandwidth.figure.suptitle(title, fontsize=9)

    decodes, read = report["decodes"], report["ceilings"].get(READ)
    for nth, block_size in enumerate(BLOCK_SIZES):
        points = [
            (entry["num_bytes"] / 1e9, entry["comparison"]["gb_per_s"])
            for entry in decodes
            if entry["block_size"] == block_size and entry["comparison"]["gb_per_s"] is not None
        ]
        if points:
            bandwidth.plot(
                *zip(*points, strict=True), "o", color=f"C{nth}", label=f"ours, block {block_size}"
            )
    peers = [
        (entry["num_bytes"] / 1e9, gb_per_s(entry, entry["comparison"]["best_peer"]))
        for entry in decodes
        if entry["comparison"]["best_peer"]
    ]
    if peers:
        bandwidth.plot(*zip(*peers, strict=True), "x", color="0.5", label="best peer")
    if read is not None:
        bandwidth.axhline(read, color="0.3", linestyle="--", linewidth=1, label="reading only")
    bandwidth.axvline(LARGE_BYTES / 1e9, color="0.8")
    bandwidth.set(xscale="log", xlabel="GB of keys and values", ylabel="GB/s", title="paged decode")
    bandwidth.set_ylim(0)
    bandwidth.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    bandwidth.minorticks_off()

    compared = sorted(
        (entry["comparison"]["ratio"], entry["name"])
        for entry in decodes
        if entry["comparison"]["ratio"] is not None
    )
    places = range(len(compared))
    ratios.bar(places, [ratio for ratio, _ in compared], color=["C3" if r < 1 else "C0" for r, _ in compared])
    if len(compared) <= 24:
        ratios.set_xticks(places, [name for _, name in compared], rotation=90, fontsize=6)
    for value, style in ((1.0, "-"), (0.9, ":")):
        ratios.axhline(value, color="0.3", linestyle=style)
    ratios.set(ylabel="the best peer's time / ours", title="every cell that has a peer")

    bars = [
        (f"{entry['name']}, {side}", gb_per_s(entry, side), side == OURS)
        for entry in (*report["moves"], *report["steps"])
        for side in medians_us(entry)
    ]
    others.barh(
        [name for name, _, _ in bars],
        [rate for _, rate, _ in bars],
        color=["C0" if is_ours else "0.6" for _, _, is_ours in bars],
    )
    others.invert_yaxis()
    others.tick_params(axis="y", labelsize=6)
    others.set(xlabel="GB/s, read and written", title="movement, and whole steps")

    for axes, drawn in ((bandwidth, decodes and read), (ratios, compared), (others, bars)):
        if not drawn:
            axes.text(0.5, 0.5, NOT_MEASURED, ha="center", va="center", transform=axes.transAxes)
    if bandwidth.get_legend_handles_labels()[0]:
        bandwidth.legend(frameon=False, fontsize=7)
