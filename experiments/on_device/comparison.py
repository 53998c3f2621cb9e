"""What the figures of `experiments.first_gpu_run` mean: shares of the ceilings, ratios to peers, bars."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.common.report import at_least, show_bars
from experiments.common.timing import show_records
from experiments.on_device.cells import LARGE_BYTES, NAMES_OF_8_BITS
from experiments.on_device.contests import COPY, MEASURED, OURS, READ, WITH_PLAN

NOT_MEASURED = "not measured"
LEAST_OF_CEILING, LEAST_MEAN, LEAST_RATIO = 0.9, 1.0, 0.9
MOVES = "append ", "append_scaled ", "gather ", "scatter ", "copy "
"""What they move is read and written, so that copying is their ceiling; of all others it is reading."""


def medians_us(contest: dict) -> dict[str, float]:
    """Of the sides that were measured."""
    return {side["side"]: side["median_us"] for side in contest["sides"] if side["status"] == MEASURED}


def gb_per_s(contest: dict, side: str = OURS) -> float | None:
    """What must be moved, over the time that a side took; in 10^9 bytes."""
    median = medians_us(contest).get(side)
    return contest["num_bytes"] / median / 1e3 if median and contest["num_bytes"] else None


def compare(contests: Sequence[dict]) -> dict[str, Any]:
    """Tells the `ceilings` in GB/s, how ours did beside its peers, decode by decode (`cells`), and `bars`."""
    ceilings = {
        contest["name"]: max((gb_per_s(contest, side) or 0 for side in medians_us(contest)), default=0)
        for contest in contests
        if contest["name"] in (READ, COPY)
    }
    cells = [_compared(contest, ceilings) for contest in contests if contest["is_cell"]]
    # Of 8 bits no peer reads what ours reads.
    ratios = [cell["ratio"] for cell in cells if cell["ratio"] and not cell["cell"].endswith(NAMES_OF_8_BITS)]
    shares = [cell["of_ceiling"] for cell in cells if cell["num_bytes"] >= LARGE_BYTES and cell["of_ceiling"]]
    bars = []
    if shares:
        name = f"least share of the read bandwidth, {LARGE_BYTES / 1e9:g} GB or more"
        bars.append(at_least(name, min(shares), LEAST_OF_CEILING))
    if ratios:
        name = "geometric mean of the ratios to the best peer"
        bars.append(at_least(name, statistics.geometric_mean(ratios), LEAST_MEAN))
        bars.append(at_least("smallest ratio to the best peer", min(ratios), LEAST_RATIO))
    return {"ceilings": ceilings, "cells": cells, "bars": bars}


def of_ceiling(contest: dict, side: str, ceilings: dict[str, float]) -> float | None:
    """The share of what the memory can do that a side reached."""
    rate, ceiling = gb_per_s(contest, side), ceilings.get(COPY if contest["name"].startswith(MOVES) else READ)
    return rate / ceiling if rate and ceiling else None


def _compared(contest: dict, ceilings: dict[str, float]) -> dict[str, Any]:
    """Ours on one cell: `ratio` is the best peer's time over ours, None with the reason in `why_no_ratio`."""
    medians = medians_us(contest)
    peers = {side["side"] for side in contest["sides"] if not side["is_ours"]} & medians.keys()
    best_peer = min(peers, key=lambda side: medians[side], default=None)
    ratio, why = None, ""
    if OURS not in medians:
        (ours,) = (side for side in contest["sides"] if side["side"] == OURS)
        why = f"ours: {ours['status']}{': ' * bool(ours['reason'])}{ours['reason']}"
    elif best_peer is None:
        why = "no peer was measured"
    else:
        ratio = medians[best_peer] / medians[OURS]
    return {
        "cell": contest["name"],
        "num_bytes": contest["num_bytes"],
        "ours_us": medians.get(OURS),
        "with_plan_us": medians.get(WITH_PLAN),
        "of_ceiling": of_ceiling(contest, OURS, ceilings),
        "best_peer": best_peer,
        "best_peer_us": medians[best_peer] if best_peer else None,
        "ratio": ratio,
        "why_no_ratio": why,
    }


def absences(contests: Sequence[dict]) -> list[str]:
    """Words who was not measured, why, and where: a line for each side and reason."""
    found: dict[str, list[str]] = {}
    for contest in contests:
        for side in contest["sides"]:
            if side["reason"]:
                reason = f"{side['side']}: {side['status']}: {side['reason']}"
                found.setdefault(reason, []).append(contest["name"])
    return [
        f"{reason} ({names[0] if len(names) == 1 else f'{len(names)} contests, {names[0]} and others'})"
        for reason, names in found.items()
    ]


COLUMNS = {
    "batch x context": "{cell}",
    "GB": lambda cell: f"{cell['num_bytes'] / 1e9:.3g}",
    "ours, us": lambda cell: _us(cell["ours_us"]),
    "with plan": lambda cell: _us(cell["with_plan_us"]),
    "of reading": lambda cell: percent(cell["of_ceiling"]),
    "best peer, us": lambda cell: f"{cell['best_peer'] or 'none'} {_us(cell['best_peer_us'])}",
    "its time / ours": lambda cell: f"{cell['ratio']:.2f}x" if cell["ratio"] else cell["why_no_ratio"],
}


def show(compared: dict[str, Any], seconds: float) -> None:
    if compared["cells"]:
        show_records(
            "paged decode beside peers, bfloat16 where no other numbers are named", COLUMNS, compared["cells"]
        )
    if compared["bars"]:
        show_bars({"bars": compared["bars"], "seconds": seconds})


def _us(median: float | None) -> str:
    return NOT_MEASURED if median is None else f"{median:,.1f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
