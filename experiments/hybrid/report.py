"""The tables and the figure of `experiments.hybrid`."""

from typing import Any

from experiments.common.report import figure, show_bars, show_provenance
from experiments.common.timing import show_records

KIB, MIB, GIB = 2**10, 2**20, 2**30
SNAPSHOTS = {
    "computed": "{num_computed:,}",
    "saved": "{saved:.1%}",
    "snapshots": "{num_snapshots}",
    "KiB": lambda one: f"{one['snapshot_bytes'][0] / KIB:,.0f}",
    "Qwen3-Next, GiB": lambda one: f"{one['snapshot_bytes'][1] / GIB:.2f}",
    "of every block's tokens": "{share_of_saved:.1%}",
    "of its bytes": "{share_of_bytes:.2%}",
}


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as tables."""
    show_provenance(report)
    for name in dict.fromkeys(one["workload"] for one in report["policies"]):
        records = [one for one in report["policies"] if one["workload"] == name]
        title = f"{name}: {records[0]['num_tokens']:,} tokens of prompts, with the model"
        show_records(title, {"policy": "{policy}", **SNAPSHOTS}, records)
    points = report["few_points"][0]["num_points"]
    title = f"two levels, a pool of {points} points, tables alone"
    show_records(title, {"policy": "{policy}", **SNAPSHOTS}, report["few_points"])
    title = "junctions and ends in a pool of few points, tables alone"
    show_records(title, {"": "{workload}", "points": "{num_points}", **SNAPSHOTS}, report["limited"])
    prefixes = {
        "shared tokens": "{shared:,}",
        "cached, by request": lambda one: ", ".join(map(str, one["cached"])),
        "by blocks of 528": "{others:,}",
    }
    show_records("four prompts of one prefix, junctions, with the model", prefixes, report["prefixes"])
    moved = [{"what": what, "mib": num / MIB} for what, num in report["decode_bytes"].items()]
    title = "bytes per token and layer in decode, Qwen3-Next's sizes, MiB"
    show_records(title, {"": "{what}", "MiB": "{mib:.3f}"}, moved)
    print(f"\n{report['num_different']} of {report['num_compared']:,} predictions are not the uncached ones")
    show_bars(report)


@figure((12, 9), 2, 1, grid="x")
def draw(report: dict[str, Any], *panels: Any) -> None:
    """A panel for each workload: a line of blocks for each request, and where snapshots are in the end."""
    for axes, (name, requests) in zip(panels, report["maps"].items(), strict=True):
        rows = range(len(requests))
        found = [one["num_found"] for one in requests]
        computed = [one["num_blocks"] - one["num_found"] for one in requests]
        axes.barh(rows, found, color="C0", alpha=0.25, height=0.9, label="found")
        axes.barh(rows, computed, left=found, color="C1", alpha=0.35, height=0.9, label="computed")
        dots = [(column + 0.5, row) for row, one in enumerate(requests) for column in one["snapshots"]]
        axes.plot(*zip(*dots, strict=True), "k.", markersize=4, label="carries a snapshot")
        axes.set(title=f"{name}, junctions and ends", xlabel="block", ylabel="request")
        axes.invert_yaxis()
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
