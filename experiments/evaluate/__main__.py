"""Question: what does an evaluation save where contexts begin alike, and does one that was killed go on?

Command: python -m experiments.evaluate [--data DIR] [--results FILE] [--items N] [--seed N] [--json]
Machine: 2 cores of an Intel Xeon; jax 0.12.0.1
Answer:  of eight-shot GSM8K contexts 94% are found, and an item takes 2.4 times as long without the
  cache, 7.0 times with each choice alone. One that was killed ends with the results of one that was not, bit
  for bit. Right are 45% of the questions, 20% of the problems, 70% of the source; by chance 25%.
Record:  experiments/results/evaluate.json

Multiple choice with the small model: a context and four choices, of which one belongs to it and three to
other items. The right one should be the most likely: in sum, or per byte. `kv.score` computes a context once
for its choices, which are forks of it, and the prefix cache what contexts have in common once for all items.
Without --data or KVCACHE_DATA_DIR there is source alone.

With --results a line is added to the file for each item as soon as it is scored. The same command again
computes what is missing, and no item twice: a run that was killed, at any time, ends with the results of one
that was not, to the last bit. All that an item shares with others is its task's prefix (see `items.py`),
and a process computes that first.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvcache_jax as kv
from experiments.common import byte_model, command, corpus
from experiments.common.command import InputError
from experiments.common.progress import progress
from experiments.common.report import add_options, at_least, at_most, deliver, framed
from experiments.common.timing import show_records
from experiments.evaluate.items import BLOCK_SIZE, NUM_CHOICES, Task, grade_school, programs, source
from models.decoder import Decoder, cache_config, forward

NUM_COMPARED = 4


class Results:
    """Results by the id of their request; all of them are in the file as soon as `add` returns.

    The first line says what the results depend on, and another run's file is refused. A line that a kill cut
    short is taken off, and its request is answered again: a line is a result if it ends. Without a path they
    are kept in memory alone.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self._path, self._by_id = path, {}
        self.num_found = 0
        if path is None:
            return
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):
                os.truncate(path, sum(map(len, lines[:-1])))
                lines.pop()
            entries = [json.loads(line) for line in lines]
            if not entries:
                self._append(settings)
        except (OSError, ValueError) as error:
            raise InputError(f"got --results {path}, which cannot be gone on with: {error}") from None
        if entries and entries[0] != settings:
            raise InputError(
                f"got --results {path}, whose {_difference(entries[0], settings)}: name another file"
            )
        self._by_id = {entry["id"]: entry for entry in entries[1:]}
        self.num_found = len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> dict[str, Any]:
        return self._by_id[request_id]

    def add(self, result: dict[str, Any]) -> None:
        """Keeps a result, whose `id` none has; after this no kill loses it."""
        assert result["id"] not in self._by_id
        self._by_id[result["id"]] = result
        if self._path is not None:
            self._append(result)

    def _append(self, entry: dict[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _difference(found: Any, expected: dict[str, Any]) -> str:
    if not isinstance(found, dict):
        return "first line is no settings"
    names = [name for name in expected if found.get(name) != expected[name]] or ["settings"]
    return f"{names[0]} is {found.get(names[0])!r}, expected {expected.get(names[0])!r}"


class Scorer:
    """A model and the cache that it goes on with; its programs are compiled, for up to `longest` bytes."""

    def __init__(self, decoder: Decoder, longest: int, *, has_prefix_cache: bool):
        self._decoder = decoder
        sizes = dict(block_size=BLOCK_SIZE, max_seqs=1 + NUM_CHOICES, max_seq_len=longest)
        self._config = cache_config(decoder.config, **sizes, enable_prefix_caching=has_prefix_cache)
        self._cache = kv.init(self._config)
        # Prompts of a few tokens and of many have programs of their own.
        for length in (1, min(longest - 2, 300)):
            self.score(bytes(length), [bytes(2)] * NUM_CHOICES)
        self._cache = kv.reset(self._cache)

    def score(self, context: bytes, choices: Sequence[bytes]) -> dict[str, Any]:
        """Scores choices of one context, which is computed once for all of them.

        `sums` are the log-likelihoods; `cached` and `computed` count bytes.
        """
        start = time.perf_counter()
        lists = [list(choice) for choice in choices]
        result = kv.score(forward, self._decoder, list(context), lists, self._config, cache=self._cache)
        seconds, self._cache = time.perf_counter() - start, result.cache
        return {
            "sums": [float(logprobs.sum(dtype=np.float64)) for logprobs in result.logprobs],
            "cached": result.num_cached_tokens,
            "computed": num_computed(context, choices) - result.num_cached_tokens,
            "seconds": seconds,
        }


def num_computed(context: bytes, choices: Sequence[bytes]) -> int:
    """Counts the tokens that are computed where nothing is cached: nothing is asked after a choice."""
    return len(context) + sum(len(choice) - 1 for choice in choices)


def evaluate(
    decoder: Decoder, tasks: Sequence[Task], results: Results, num_compared: int
) -> Iterator[dict[str, Any]]:
    """Scores what has no result yet, one item after the other; yields each result when it is kept.

    The first `num_compared` items of a task are scored twice more: without the prefix cache, and each choice
    by itself after the whole context, as one would without sharing.
    """
    waiting = [
        (task, i, item) for task in tasks for i, item in enumerate(task.items) if item.id not in results
    ]
    if not waiting:
        return
    longest = max(task.longest for task in tasks)
    cached, plain, before = Scorer(decoder, longest, has_prefix_cache=True), None, None
    for task, i, item in waiting:
        if task is not before and task.prefix:  # so that all of its items find it, in this process as in any
            cached.score(task.prefix, [])
        before = task
        context = task.prefix + item.own
        result = {"id": item.id, "task": task.name, "right": item.right, "context": len(context)}
        result |= {"lengths": [len(choice) for choice in item.choices], **cached.score(context, item.choices)}
        if i < num_compared:
            plain = plain or Scorer(decoder, longest, has_prefix_cache=False)
            result["uncached"] = plain.score(context, item.choices)
            alone = [plain.score(context, [choice]) for choice in item.choices]
            result["alone"] = {key: sum(each[key] for each in alone) for key in ("computed", "seconds")}
        results.add(result)
        yield result


def digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256(repr([tuple(task) for task in tasks]).encode()).hexdigest()[:32]


def is_right(result: dict[str, Any], *, per_byte: bool) -> bool:
    """Tells whether the right choice has the highest log-likelihood, or the highest per byte."""
    sums = np.array(result["sums"])
    return int((sums / result["lengths"] if per_byte else sums).argmax()) == result["right"]


def summary(task: Task, results: Results) -> dict[str, Any]:
    """Sums up the results of a task, of this run and of those before it."""
    found: list[dict[str, Any]] = [results[item.id] for item in task.items]
    compared = [result for result in found if "uncached" in result]

    def total(name: str, records: Sequence[dict[str, Any]] = found) -> Any:
        return sum(record[name] for record in records)

    num_context, num_cached = total("context"), total("cached")
    differences = [
        abs(a - b) / length
        for result in compared
        for a, b, length in zip(result["sums"], result["uncached"]["sums"], result["lengths"], strict=True)
    ]
    return {
        "task": task.name,
        "items": len(found),
        "prefix": len(task.prefix),
        "mean_context": num_context / len(found),
        "accuracy_per_byte": sum(is_right(result, per_byte=True) for result in found) / len(found),
        "accuracy": sum(is_right(result, per_byte=False) for result in found) / len(found),
        "hit_rate": num_cached / num_context,
        # Of each item's context all but the prefix is its own.
        "prefix_computed": num_context - num_cached - sum(len(item.own) for item in task.items),
        "computed": total("computed"),
        "computed_uncached": total("computed") + num_cached,
        "computed_alone": NUM_CHOICES * num_context + sum(n - 1 for each in found for n in each["lengths"]),
        "seconds": total("seconds"),
        "compared": len(compared),
        "seconds_compared": {
            "cached": total("seconds", compared),
            **{way: total("seconds", [each[way] for each in compared]) for way in ("uncached", "alone")},
        },
        "difference": max(differences, default=0.0),
    }


def bars_of(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bars = []
    for task in tasks:
        name = task["task"]
        if task["prefix"]:
            what = f"{name}: bytes of the prefix that items computed"
            bars.append(at_most(what, task["prefix_computed"], 0))
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


@framed
def show(report: dict[str, Any]) -> None:
    tasks = report["tasks"]
    print(
        f"{report['model']}, seed {report['seed']}; {report['found']} results of {report['items']} were there"
    )
    show_records("four choices, by log-likelihood; by chance 25% are right", RIGHT, tasks)
    num = max(task["compared"] for task in tasks)
    show_records(f"what sharing saves; times of the first {num} items of a task", SAVED, tasks)


def _times(task: dict[str, Any], way: str) -> str:
    if not task["compared"]:
        return ""
    return f"{1e3 * task['seconds_compared'][way] / task['compared']:.0f}"


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.evaluate", __doc__)
    command.add_data_folder(parser, "text/, see experiments/common/benchmarks.py")
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
    num_items, scored = (
        sum(len(task.items) for task in tasks),
        evaluate(decoder, tasks, results, NUM_COMPARED),
    )
    with progress("items", num_items, every=8) as tell:
        for num_done, result in enumerate(scored, results.num_found + 1):
            tell(num_done, result["id"])
    summaries = [summary(task, results) for task in tasks]
    report = {
        "model": options.checkpoint.name,
        "seed": options.seed,
        "items": num_items,
        "found": results.num_found,
        "tasks": summaries,
        "bars": bars_of(summaries),
    }
    return deliver(report, options, show)


def tasks_of(options: Any) -> list[Task]:
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
