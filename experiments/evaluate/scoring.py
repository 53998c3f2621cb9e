"""Scores of items: the log-likelihood of each choice, with the prefix cache and, for a few items, without."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import kvcache_jax as kv
from experiments.evaluate.items import BLOCK_SIZE, NUM_CHOICES, Task
from experiments.evaluate.results import Results
from models.decoder import Decoder, cache_config, forward


class Scorer:
    """A model and the cache that it goes on with; its programs are compiled.

    Args:
      decoder: Of bytes.
      longest: Bytes of a context and choice together, at most.
      has_prefix_cache: Whether what contexts have in common is computed once.
    """

    def __init__(self, decoder: Decoder, longest: int, *, has_prefix_cache: bool):
        self._decoder = decoder
        self._config = cache_config(
            decoder.config,
            block_size=BLOCK_SIZE,
            max_seqs=1 + NUM_CHOICES,
            max_seq_len=-(-longest // BLOCK_SIZE) * BLOCK_SIZE,
            enable_prefix_caching=has_prefix_cache,
        )
        self._cache = kv.init(self._config)
        # Prompts of a few tokens and of many have programs of their own.
        for length in (1, min(longest - 2, 300)):
            self.score(bytes(length), [bytes(2)] * NUM_CHOICES)
        self._cache = kv.reset(self._cache)

    def score(self, context: bytes, choices: Sequence[bytes]) -> dict[str, Any]:
        """Scores choices of one context, which is computed once for all of them.

        Returns:
          `sums`, the log-likelihood of each; `cached` and `computed`, bytes; `seconds`.
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
    """Counts the tokens that are computed where nothing is cached: nothing is asked behind a choice."""
    return len(context) + sum(len(choice) - 1 for choice in choices)


def evaluate(
    decoder: Decoder, tasks: Sequence[Task], results: Results, num_compared: int
) -> Iterator[dict[str, Any]]:
    """Scores what has no result yet, one item after the other; yields each result when it is kept.

    The first `num_compared` items of a task are scored twice more: without the prefix cache, and each choice
    by itself behind the whole context, as one would without sharing.
    """
    waiting = [
        (task, i, item) for task in tasks for i, item in enumerate(task.items) if item.id not in results
    ]
    if not waiting:
        return
    longest = max(task.longest for task in tasks)
    cached = Scorer(decoder, longest, has_prefix_cache=True)
    plain = None
    before = None
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
    """First half of the SHA-256 of all items."""
    return hashlib.sha256(repr([tuple(task) for task in tasks]).encode()).hexdigest()[:32]


def is_right(result: dict[str, Any], *, per_byte: bool) -> bool:
    """Tells whether the right choice has the highest log-likelihood, or the highest per byte."""
    sums = np.array(result["sums"])
    return int((sums / result["lengths"] if per_byte else sums).argmax()) == result["right"]


def summary(task: Task, results: Results) -> dict[str, Any]:
    """Sums up the results of a task, of this run and of those before it."""
    found: list[dict[str, Any]] = [results[item.id] for item in task.items]
    compared = [result for result in found if "uncached" in result]
    num_context = sum(result["context"] for result in found)
    alone = [
        NUM_CHOICES * result["context"] + sum(length - 1 for length in result["lengths"]) for result in found
    ]
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
        "hit_rate": sum(result["cached"] for result in found) / num_context,
        # Of each item's context all but the prefix is its own.
        "prefix_computed": num_context
        - sum(result["cached"] for result in found)
        - sum(len(item.own) for item in task.items),
        "computed": sum(result["computed"] for result in found),
        "computed_uncached": sum(result["computed"] + result["cached"] for result in found),
        "computed_alone": sum(alone),
        "seconds": sum(result["seconds"] for result in found),
        "compared": len(compared),
        "seconds_compared": {
            "cached": sum(result["seconds"] for result in compared),
            "uncached": sum(result["uncached"]["seconds"] for result in compared),
            "alone": sum(result["alone"]["seconds"] for result in compared),
        },
        "difference": max(differences, default=0.0),
    }
