"""Question: what does an evaluation save where contexts begin alike, and does one that was killed go on?

Command: python -m experiments.evaluate [--data DIR] [--results FILE] [--items N] [--seed N] [--json]
Machine: 2 cores of an Intel Xeon; jax 0.12.0.1
Answer:  of eight-shot GSM8K contexts 94% are found, and an item takes 2.4 times as long without the
  cache, 7.0 times with each choice alone. One that was killed ends with the results of one that was not, bit
  for bit. Right are 45% of the questions, 20% of the problems, 70% of the source; by chance 25%.
Record:  experiments/results/evaluate.json

Multiple choice with the small model: a context and four choices, of which one belongs to it and three to
other items. The right one should be the most likely: in sum, or per byte.
  8-shot GSM8K   a question behind eight worked ones, the same for all; choices are worked answers
  HumanEval      a problem, and nothing before it; choices are solutions
  source         a piece of held-out source behind another, the same for all; choices are the next bytes
`kv.score` computes a context once for its choices, which are forks of it, and the prefix cache what contexts
have in common once for all items. The first items of each task are also scored without a prefix cache, and
each choice alone behind its whole context. Without --data or KVCACHE_DATA_DIR there is source alone.

With --results a line is added to the file for each item as soon as it is scored. The same command again
computes what is missing, and no item twice: a run that was killed, at any time, ends with the results of one
that was not, to the last bit. All that an item shares with others is its task's prefix (see `items.py`),
and a process computes that first.
"""

from typing import Any

import jax

from experiments.common import byte_model, command, corpus
from experiments.common.progress import progress
from experiments.common.report import add_options, deliver
from experiments.evaluate import report as reports
from experiments.evaluate.items import Task, grade_school, programs, source
from experiments.evaluate.results import Results
from experiments.evaluate.scoring import digest, evaluate, summary

NUM_COMPARED = 4


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.evaluate", __doc__)
    command.add_data_folder(parser, "text/, see experiments/evaluate/items.py")
    parser.count("--items", 20, "of each task")
    parser.count("--seed", 0, "of the choices", least=0)
    parser.add_argument(
        "--results", type=command.name, metavar="FILE", help="goes on with this file, or makes it"
    )
    byte_model.add_option(parser)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    decoder = byte_model.load(parser, options.checkpoint)
    with parser.refusing():
        tasks = tasks_of(options)
        results = Results(options.results, settings_of(options, tasks))
    num_items = sum(len(task.items) for task in tasks)
    with progress("items", num_items, every=8) as show:
        for num_done, result in enumerate(
            evaluate(decoder, tasks, results, NUM_COMPARED), results.num_found + 1
        ):
            show(num_done, result["id"])
    summaries = [summary(task, results) for task in tasks]
    report = {
        "model": options.checkpoint.name,
        "seed": options.seed,
        "items": num_items,
        "found": results.num_found,
        "tasks": summaries,
        "bars": reports.bars_of(summaries),
    }
    deliver(report, options, reports.show)
    return 0


def tasks_of(options: Any) -> list[Task]:
    """Makes the tasks that there is data for."""
    tasks = [source(options.items, options.seed)]
    if options.data is not None:
        files = options.data, options.items, options.seed
        tasks = [grade_school(*files), programs(*files), *tasks]
    return tasks


def settings_of(options: Any, tasks: list[Task]) -> dict[str, Any]:
    """Says what results depend on."""
    weights = b"".join(path.read_bytes() for path in sorted(options.checkpoint.glob("*.safetensors")))
    return {
        "seed": options.seed,
        "items": options.items,
        "model": corpus.digest(weights),
        "texts": digest(tasks),
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    command.run(main)
