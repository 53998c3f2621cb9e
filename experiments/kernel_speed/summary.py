"""What the figures of `experiments.kernel_speed` mean: bandwidths, ratios to the best peer, and the bars."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.kernel_speed.cells import LARGE_BYTES
from experiments.kernel_speed.names import COPY, OURS, READ
from experiments.kernel_speed.timing import MEASURED

LEAST_OF_CEILING, LEAST_MEAN, LEAST_RATIO = 0.9, 1.0, 0.9


def medians_us(entry: dict) -> dict[str, float]:
    """Of the sides that were measured."""
    return {side["side"]: side["median_us"] for side in entry["sides"] if side["status"] == MEASURED}


def gb_per_s(entry: dict, side: str = OURS) -> float | None:
    """What must be moved, over the time that a side took; in 10^9 bytes."""
    median = medians_us(entry).get(side)
    return None if median is None else entry["num_bytes"] / median / 1e3


def add_figures(report: dict[str, Any]) -> None:
    """Adds to a report what follows from its entries, each beside the ceilings of its own call."""
    calls = report["calls"]
    for nth, call in enumerate(calls):
        call["ceilings"] = ceilings([entry for entry in report["entries"] if entry["call"] == nth])
    for entry in report["decodes"]:
        entry["comparison"] = comparison(entry, calls[entry["call"]]["ceilings"].get(READ))
    for kind, ceiling in (("moves", COPY), ("steps", READ)):
        for entry in report[kind]:
            rate = calls[entry["call"]]["ceilings"].get(ceiling)
            rates = {side: gb_per_s(entry, side) for side in medians_us(entry)}
            entry["of_ceiling"] = {side: (got or 0) / rate for side, got in rates.items()} if rate else {}
    report["summary"] = summary(report["decodes"])
    report["seconds"] = sum(call["seconds"] for call in calls)


def ceiling_rates(report: dict[str, Any]) -> dict[str, list[float]]:
    """By the ceiling's name, what the calls measured, sorted; empty where none did."""
    names = {name: None for call in report["calls"] for name in call["ceilings"]}
    found = {name: [call["ceilings"].get(name) for call in report["calls"]] for name in names}
    return {name: sorted(rate for rate in rates if rate is not None) for name, rates in found.items()}


def ceilings(entries: Sequence[dict]) -> dict[str, float | None]:
    """The best of each kind, in GB/s, by the entry's name."""
    best = {}
    for entry in entries:
        if not entry["num_bytes"]:
            continue
        rates = [gb_per_s(entry, side) for side in medians_us(entry)]
        best[entry["name"]] = max((rate for rate in rates if rate is not None), default=None)
    return best


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
