"""Items: a context, and choices of which one belongs to it.

Other people's files, in the folder that --data or KVCACHE_DATA_DIR names:
  text/HumanEval.jsonl.gz         openai/human-eval, MIT
  text/gsm8k_test.jsonl           openai/grade-school-math (its test.jsonl), MIT

An item's context is its task's prefix and what the item adds to it. The prefix fills whole blocks, and the
first block behind it holds the item's number: an item shares the prefix with others, and nothing else. So
what is computed for an item does not depend on which items came before it, or whether any did.
"""

import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.common.command import InputError
from experiments.common.corpus import held_out_files

BLOCK_SIZE = 16
NUM_CHOICES = 4
NUM_SHOTS = 8
GSM8K, HUMAN_EVAL = Path("text", "gsm8k_test.jsonl"), Path("text", "HumanEval.jsonl.gz")


class Item(NamedTuple):
    """A question.

    Attributes:
      id: Names it, in any run with the same settings.
      own: Bytes of the context behind the task's prefix.
      choices: Bytes of each.
      right: The one that belongs to the context.
    """

    id: str
    own: bytes
    choices: tuple[bytes, ...]
    right: int


class Task(NamedTuple):
    """Items whose contexts begin alike.

    Attributes:
      name: As printed.
      prefix: Bytes that all contexts begin with, whole blocks.
      items: Items.
    """

    name: str
    prefix: bytes
    items: list[Item]

    @property
    def longest(self) -> int:
        """Bytes of the longest context and choice together."""
        return len(self.prefix) + max(len(item.own) + len(c) for item in self.items for c in item.choices)


class Pair(NamedTuple):
    """A text, and what belongs behind it."""

    text: str
    answer: str


def grade_school(folder: Path, num: int, seed: int) -> Task:
    """Questions of GSM8K behind eight worked ones; choices are worked answers, three of other questions.

    Raises:
      InputError: there is no such file, or it has too few examples.
    """
    pairs = _read(folder / GSM8K, open, "openai's gsm8k test.jsonl", ("question", "answer"))
    shots = "".join(f"Question: {ask}\nAnswer: {answer}\n\n" for ask, answer in pairs[:NUM_SHOTS])
    numbered = [Pair(f"{{}}\nQuestion: {ask}\nAnswer:", f" {answer}\n") for ask, answer in pairs[NUM_SHOTS:]]
    return _task("8-shot GSM8K", shots, numbered, "No. {}", num, seed, folder / GSM8K)


def programs(folder: Path, num: int, seed: int) -> Task:
    """Problems of HumanEval, which have no prefix in common; choices are solutions, three of other problems.

    Raises:
      InputError: likewise.
    """
    keys = "prompt", "canonical_solution"
    pairs = _read(folder / HUMAN_EVAL, gzip.open, "openai's HumanEval.jsonl.gz", keys)
    numbered = [Pair(f"{{}}\n{prompt}", solution) for prompt, solution in pairs]
    return _task("HumanEval", "", numbered, "# No. {}", num, seed, folder / HUMAN_EVAL)


def source(num: int, seed: int, prefix_len: int = 1024, own_len: int = 160, choice_len: int = 48) -> Task:
    """Pieces of held-out source behind a common one; choices are what follows this piece, and others."""
    text = b"".join(held_out_files().values()).decode("latin-1")
    starts = np.random.default_rng([seed, 3]).integers(prefix_len, len(text) - own_len - choice_len, 4 * num)
    pieces = [text[start : start + own_len + choice_len] for start in starts]
    pairs = [Pair(f"{{}}\n{piece[:own_len]}", piece[own_len:]) for piece in pieces]
    return _task("source", text[:prefix_len], pairs, "# No. {}", num, seed, None)


def _task(
    name: str, prefix: str, pairs: Sequence[Pair], number: str, num: int, seed: int, path: Path | None
) -> Task:
    if len(pairs) < max(num, NUM_CHOICES):
        raise InputError(f"{path} has {len(pairs)} items, expected {max(num, NUM_CHOICES)}: lower --items")
    rng = np.random.default_rng(seed)
    code = "latin-1" if path is None else "utf-8"
    items = []
    for i in rng.permutation(len(pairs))[:num].tolist():
        others = (pairs[k].answer for k in rng.permutation(len(pairs)).tolist())
        answers = [*dict.fromkeys([pairs[i].answer, *others])][:NUM_CHOICES]  # each once, the right one first
        if len(answers) < NUM_CHOICES:
            raise InputError(f"{path} has {len(answers)} different answers, expected at least {NUM_CHOICES}")
        right = int(rng.integers(NUM_CHOICES))
        answers.insert(right, answers.pop(0))
        own = pairs[i].text.replace("{}", number.format(i), 1)
        items.append(
            Item(f"{name} {i}", own.encode(code), tuple(answer.encode(code) for answer in answers), right)
        )
    padding = -len(prefix.encode(code)) % BLOCK_SIZE
    return Task(name, prefix.encode(code) + b"\n" * padding, items)


def _read(path: Path, opener: Callable[..., Any], what: str, keys: tuple[str, str]) -> list[Pair]:
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            examples: Iterable[Any] = [json.loads(line) for line in itertools.islice(file, 10_000)]
        pairs = [Pair(*(example[key] for key in keys)) for example in examples]
    except (OSError, EOFError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(f"got {path}, expected {what}: {error!r}") from None
    if wrong := [pair for pair in pairs if not all(isinstance(text, str) and text for text in pair)]:
        raise InputError(f"{path} has the example {wrong[0]}, expected two texts")
    return pairs
