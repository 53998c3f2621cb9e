"""Question: can a model be trained by its own samples without leaving JAX, each prompt computed once?

Command: python -m experiments.rollouts [--updates N] [--seed N] [--json] [--picture FILE]
Machine: 2 cores of an Intel Xeon; jax 0.12.0.1
Answer:  yes. In 200 updates the share of right answers rises from 0.34 to 0.91 within a step, and from 0.31
  to 0.90 beside an engine that goes on under new weights, as do 16% of its answers. A step takes 4.1 times as
  long where each answer computes its prompt, and 5.7 times the memory. The sampler's log-probabilities are
  off the trainer's by 1.7e-5 at most (bar 1e-5: missed).
Record:  experiments/results/rollouts.json, docs/rollouts.png.

A small model of bytes, which has read texts that look like the task, learns by reward alone: GRPO with optax,
16 questions and 8 answers to each per update. In two ways:
  in a step         questions in, parameters out: answers are drawn, judged and learned from in one program
  beside an engine  a `kv.Engine` draws all the time, and goes on under new weights between two dispatches:
                    an answer may begin under one set of weights and end under another; each token is learned
                    from by the log-probability it was drawn with

A prompt is computed once for its group, when answers are drawn and when they are learned from: rows are forks
of the row that has it, and the gradient comes back through forks. The sampler's log-probabilities are
compared with the trainer's own of the same answers, which is another program: the answers of every update in
a step, and of the engine those that were asked for and drawn under the last weights.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common import command
from experiments.common.report import add_options, at_least, at_most, deliver, figure, framed
from experiments.common.timing import show_records
from experiments.rollouts import study
from experiments.rollouts.study import Sizes
from experiments.rollouts.training import teach

LEAST_REWARD = 0.85
SMOOTHED = 10  # updates that a point of a curve is the mean of
TEACHING_STEPS = 200


def bars_of(ways: Sequence[dict], sharing: dict, group_size: int) -> list[dict]:
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
        # Samples that wait for a row begin after the blocks of their prompt, or anew under other weights.
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


@framed
def show(report: dict) -> None:
    sizes = report["sizes"]
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


@figure((10, 4), 1, 2, grid="y", width_ratios=(3, 2))
def draw(report: dict, curves: Any, costs: Any) -> None:
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


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.rollouts", __doc__)
    parser.count("--updates", 200)
    parser.count("--seed", 0, least=0)
    add_options(parser)
    options = parser.parse_args(arguments)
    sizes = Sizes(prompts=16, group=8, updates=options.updates, seed=options.seed)
    decoder = teach(sizes.seed, TEACHING_STEPS)
    steps = study.compile_steps(decoder, sizes)
    ways = [study.train_in_step(decoder, sizes, steps), study.train_beside_engine(decoder, sizes)]
    sharing = study.compare_sharing(decoder, sizes, steps)
    report = {
        "sizes": sizes._asdict(),
        "ways": ways,
        "sharing": sharing,
        "bars": bars_of(ways, sharing, sizes.group),
    }
    return deliver(report, options, show, draw)


if __name__ == "__main__":
    command.run(main)
