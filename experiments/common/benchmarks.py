"""Other people's benchmarks, from the folder that --data or KVCACHE_DATA_DIR names.

text/HumanEval.jsonl.gz         openai/human-eval, MIT
text/gsm8k_test.jsonl           openai/grade-school-math (its test.jsonl), MIT
"""

import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common.command import InputError

NUM_SHOTS = 8
GSM8K, HUMAN_EVAL = Path("text", "gsm8k_test.jsonl"), Path("text", "HumanEval.jsonl.gz")


class Pair(NamedTuple):
    """A problem, and what solves it."""

    text: str
    answer: str


def gsm8k(folder: Path) -> list[Pair]:
    """Reads questions and worked answers."""
    return _read(folder / GSM8K, open, "openai's gsm8k test.jsonl", ("question", "answer"))


def human_eval(folder: Path) -> list[Pair]:
    """Reads problems and solutions."""
    keys = "prompt", "canonical_solution"
    return _read(folder / HUMAN_EVAL, gzip.open, "openai's HumanEval.jsonl.gz", keys)


def shots_of(pairs: Sequence[Pair]) -> str:
    """Writes the first pairs as worked examples, to stand in front of a question."""
    return "".join(f"Question: {ask}\nAnswer: {answer}\n\n" for ask, answer in pairs[:NUM_SHOTS])


def few_shot_prompts(folder: Path, num_prompts: int) -> list[list[int]]:
    """Makes prompts of bytes: the first questions of GSM8K as shots, and the next ones to be answered."""
    pairs, needed = gsm8k(folder), NUM_SHOTS + num_prompts
    if len(pairs) < needed:
        raise InputError(
            f"{folder / GSM8K} has {len(pairs)} examples, expected {needed}: lower --prompts or --few-shot"
        )
    shots = shots_of(pairs)
    return [list(f"{shots}Question: {ask}\nAnswer:".encode()) for ask, _ in pairs[NUM_SHOTS:needed]]


def _read(path: Path, opener: Callable[..., Any], what: str, keys: tuple[str, str]) -> list[Pair]:
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            examples = [json.loads(line) for line in itertools.islice(file, 10_000)]
        pairs = [Pair(*(example[key] for key in keys)) for example in examples]
        for pair in pairs:
            if not all(isinstance(text, str) and text.encode() for text in pair):
                raise ValueError(f"the example {pair}, expected two texts")
    except (OSError, EOFError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(f"got {path}, expected {what}: {error!r}") from None
    return pairs
