"""The bars and tables of `experiments.evaluate`."""

from typing import Any

from experiments.common.timing import show_table


def bars_of(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, beside what was measured."""
    bars = []

    def add(bar: str, measured: float, limit: float, is_least: bool = False) -> None:
        holds = bool(measured >= limit if is_least else measured <= limit)
        bars.append(
            {"bar": bar, "measured": measured, "at_least" if is_least else "at_most": limit, "holds": holds}
        )

    for task in tasks:
        if task["prefix"]:
            add(f"{task['task']}: bytes of the prefix that items computed", task["prefix_computed"], 0)
        if task["compared"]:
            times = task["seconds_compared"]
            add(
                f"{task['task']}: time of each choice alone, in times",
                times["alone"] / times["cached"],
                2 if task["prefix"] else 1.5,
                True,
            )
            add(
                f"{task['task']}: log-likelihood per byte, off that without a cache", task["difference"], 1e-5
            )
    return bars


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as tables."""
    host, tasks = report["machine"], report["tasks"]
    print(f"{host['cpu']}, {host['num_cores']} cores, {report['device']}, jax {report['jax']}")
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
    rows = [
        [
            bar["bar"],
            f"{bar['measured']:.3g}",
            f"at most {bar['at_most']:g}" if "at_most" in bar else f"at least {bar['at_least']:g}",
            "holds" if bar["holds"] else "does not hold",
        ]
        for bar in report["bars"]
    ]
    show_table("bars", ["bar", "measured", "", ""], rows)
    num_failed = sum(not bar["holds"] for bar in report["bars"])
    print(f"\n{num_failed} of {len(rows)} bars do not hold; {report['seconds']:.0f} s in all")


def _times(task: dict[str, Any], way: str) -> str:
    if not task["compared"]:
        return ""
    return f"{1e3 * task['seconds_compared'][way] / task['compared']:.0f}"
