"""The bars and tables of `experiments.evaluate`."""

from typing import Any

from experiments.common.report import at_least, at_most, show_bars, show_provenance
from experiments.common.timing import show_records


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


RIGHT = {
    "task": "{task}",
    "items": "{items}",
    "bytes of context": "{mean_context:.0f}",
    "right, per byte": "{accuracy_per_byte:.0%}",
    "in sum": "{accuracy:.0%}",
    "found in the cache": "{hit_rate:.1%}",
    "s": "{seconds:.1f}",
}
SAVED = {
    "tokens computed": "{task}",
    "prefix cache": "{computed:,}",
    "none": "{computed_uncached:,}",
    "each choice alone": "{computed_alone:,}",
    "ms an item": lambda task: _times(task, "cached"),
    "ms, none": lambda task: _times(task, "uncached"),
    "ms, alone": lambda task: _times(task, "alone"),
}


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as tables."""
    tasks = report["tasks"]
    show_provenance(report)
    print(
        f"{report['model']}, seed {report['seed']}; {report['found']} results of {report['items']} were there"
    )
    show_records("four choices, by log-likelihood; by chance 25% are right", RIGHT, tasks)
    num = max(task["compared"] for task in tasks)
    show_records(f"what sharing saves; times of the first {num} items of a task", SAVED, tasks)
    show_bars(report)


def _times(task: dict[str, Any], way: str) -> str:
    if not task["compared"]:
        return ""
    return f"{1e3 * task['seconds_compared'][way] / task['compared']:.0f}"
