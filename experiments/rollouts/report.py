"""The bars, tables and figure of `experiments.rollouts`."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common.report import at_least, at_most, figure, show_bars, show_provenance
from experiments.common.timing import show_records

LEAST_REWARD = 0.85
SMOOTHED = 10  # updates that a point of a curve is the mean of


def bars_of(ways: Sequence[dict], sharing: dict, group_size: int) -> list[dict]:
    """What must hold, beside what was measured."""
    engine, (shared, apart) = ways[1], sharing["ways"]
    tokens, temporary = (shared[key] / apart[key] for key in ("prompt_tokens", "temporary_bytes"))
    num_untold, gradients = engine["updates"] - engine["updates_told"], sharing["gradient_difference"]
    rewards = [(f"reward of the last updates, {way['way']}", way["last"]) for way in ways]
    off = [(f"log-probabilities off the trainer's, {way['way']}", way["difference"]) for way in ways]
    return [
        *(at_least(*reward, LEAST_REWARD) for reward in rewards),
        *(at_most(*difference, 1e-5) for difference in off),
        at_least("answers that go on under new weights", engine["partial"], 0.05),
        at_most("updates that the engine was not told of", num_untold, 0),
        at_most("prompt tokens in a step, share of each answer's own", tokens, 1 / group_size),
        # Samples that wait for a row begin behind the blocks of their prompt, or anew under other weights.
        at_most("prompt tokens by the engine, likewise", engine["prompt_share"], 2 / group_size),
        at_least("a step with prompts apart, in times of a shared one", sharing["times_faster"], 2.0),
        at_most("temporary memory of a shared step, in that of one apart", temporary, 0.5),
        at_most("gradient off that of prompts apart, in its largest entry", gradients, 1e-4),
    ]


WAYS = {
    "way": "{way}",
    "reward at first": "{first:.3f}",
    "at last": "{last:.3f}",
    "log-probabilities off": "{difference:.1e}",
    "tokens clipped": "{clipped:.1%}",
    "ms an update": "{ms:.0f}",
}
SHARING = {
    "": "prompts {way}",
    "prompt tokens": "{prompt_tokens:,}",
    "pools, MiB": lambda way: f"{way['pool_bytes'] / 2**20:.2f}",
    "temporary, MiB": lambda way: f"{way['temporary_bytes'] / 2**20:.1f}",
    "a step, ms": lambda way: f"{statistics.median(way['ms']):.0f}",
    "of rounds": lambda way: f"{min(way['ms']):.0f} - {max(way['ms']):.0f}",
}


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as tables."""
    sizes = report["sizes"]
    show_provenance(report)
    title = (
        f"{sizes['updates']} updates of {sizes['prompts']} questions and {sizes['group']} answers each, "
        f"seed {sizes['seed']}"
    )
    show_records(title, WAYS, report["ways"])
    engine = report["ways"][1]
    print(
        f"  beside an engine {engine['partial']:.1%} of the answers go on under new weights; the oldest "
        f"token is {engine['oldest']} updates old; {engine['forks']:,} forks"
    )
    ways = report["sharing"]["ways"]
    show_records(f"a step, {len(ways[0]['ms'])} rounds in turns", SHARING, ways)
    print(f"  the same answers to {report['sharing']['same_answers']:.1%} of the questions")
    show_bars(report)


@figure((10, 4), 1, 2, grid="y", width_ratios=(3, 2))
def draw(report: dict, curves: Any, costs: Any) -> None:
    """Two panels: the reward by updates, and what a step takes with prompts shared and apart."""
    for i, way in enumerate(report["ways"]):
        rewards = np.array(way["rewards"])
        curves.plot(np.arange(len(rewards)) + 1, rewards, color=f"C{i}", alpha=0.25, linewidth=0.8)
        width = min(SMOOTHED, len(rewards))
        smooth = np.convolve(rewards, np.full(width, 1 / width), "valid")
        curves.plot(np.arange(len(smooth)) + width, smooth, color=f"C{i}", label=way["way"])
    curves.set(xlabel="updates", ylabel="share of right answers", ylim=(0, 1.02))
    curves.set_title("Digits put in order, learned by reward alone")
    curves.legend(frameon=False, loc="lower right")

    shared, apart = report["sharing"]["ways"]
    names = ["prompt tokens", "pools", "temporary\nmemory", "time"]
    ratios = [apart[key] / shared[key] for key in ("prompt_tokens", "pool_bytes", "temporary_bytes")]
    bars = costs.bar(names, [*ratios, report["sharing"]["times_faster"]], color="C2", width=0.6)
    costs.bar_label(bars, fmt="%.1fx", padding=2)
    costs.axhline(1, color="black", linewidth=0.8)
    costs.set_title("Prompts apart, in times of shared ones")
    costs.margins(y=0.12)
