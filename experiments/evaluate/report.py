"""The bars and tables of `experiments.evaluate`."""

from typing import Any

from experiments.common.report import at_least, at_most, show_bars, show_provenance
from experiments.common.timing import show_table


def bars_of(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, beside what was measured."""
    bars = []
    for task in tasks:
        name = task["task"]
        if task["prefix"]:
            bars.append(
                at_most(f"{name}: bytes of the prefix that items computed", task["prefix_computed"], 0)
            )
        if task["compared"]:
            times, least = task["seconds_compared"], 2 if task["prefix"] else 1.5
            ratio, off = times["alone"] / times["cached"], task["difference"]
            bars.append(at_least(f"{name}: time of each choice alone, in times", ratio, least))
            bars.append(at_most(f"{name}: log-likelihood per byte, off that without a cache", off, 1e-5))
    return bars


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as tables."""
    tasks = report["tasks"]
    show_provenance(report)
    print(
        f"{report['model']}, seed {report['seed']}; {report['found']} results of {report['items']} were there"
    )
    rows = [
        [
            task["task"],
            str(task["items"]),
            f"{task['mean_context']:.0f}",
            f"{task['accuracy_per_byte']:.0%}",
            f"{task['accuracy']:.0%}",
            f"{task['hit_rate']:.1%}",
            f"{task['seconds']:.1f}",
        ]
        for task in tasks
    ]
    header = ["task", "items", "bytes of context", "right, per byte", "in sum", "found in the cache", "s"]
    show_table("four choices, by log-likelihood; by chance 25% are right", header, rows)
    rows = [
        [
            task["task"],
            f"{task['computed']:,}",
            f"{task['computed_uncached']:,}",
            f"{task['computed_alone']:,}",
            *(_times(task, way) for way in ("cached", "uncached", "alone")),
        ]
        for task in tasks
    ]
    num = max(task["compared"] for task in tasks)
    header = ["tokens computed", "prefix cache", "none", "each choice alone", "ms an item", "none", "alone"]
    show_table(f"what sharing saves; times of the first {num} items of a task", header, rows)
    show_bars(report)


def _times(task: dict[str, Any], way: str) -> str:
    if not task["compared"]:
        return ""
    return f"{1e3 * task['seconds_compared'][way] / task['compared']:.0f}"
