"""Items: a context, and choices of which one belongs to it.

An item's context is its task's prefix and what the item adds to it. The prefix fills whole blocks, and the
first block after it holds the item's number: an item shares the prefix with others, and nothing else. So
what is computed for an item does not depend on which items came before it, or whether any did.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common.benchmarks import GSM8K, HUMAN_EVAL, NUM_SHOTS, Pair, gsm8k, human_eval, shots_of
from experiments.common.command import InputError
from experiments.common.corpus import held_out_files

BLOCK_SIZE = 16
NUM_CHOICES = 4


class Item(NamedTuple):
    """A question: its context after the task's prefix is `own`, and choice `right` belongs to it.

    `id` names it in any run with the same settings.
    """

    id: str
    own: bytes
    choices: tuple[bytes, ...]
    right: int


class Task(NamedTuple):
    """Items whose contexts begin alike, with a prefix of whole blocks."""

    name: str
    prefix: bytes
    items: list[Item]

    @property
    def longest(self) -> int:
        """Bytes of the longest context and choice together."""
        return len(self.prefix) + max(len(item.own) + len(c) for item in self.items for c in item.choices)


def grade_school(folder: Path, num: int, seed: int) -> Task:
    """Questions of GSM8K after eight worked ones; choices are worked answers, three of other questions."""
    pairs = gsm8k(folder)
    numbered = [Pair(f"{{}}\nQuestion: {ask}\nAnswer:", f" {answer}\n") for ask, answer in pairs[NUM_SHOTS:]]
    return _task("8-shot GSM8K", shots_of(pairs), numbered, "No. {}", num, seed, folder / GSM8K)


def programs(folder: Path, num: int, seed: int) -> Task:
    """Problems of HumanEval, which have no prefix in common; choices are solutions, one of them its own."""
    numbered = [Pair(f"{{}}\n{prompt}", solution) for prompt, solution in human_eval(folder)]
    return _task("HumanEval", "", numbered, "# No. {}", num, seed, folder / HUMAN_EVAL)


def source(num: int, seed: int, prefix_len: int = 1024, own_len: int = 160, choice_len: int = 48) -> Task:
    """Pieces of held-out source after a common one; choices are what follows this piece, and others."""
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
        own = pairs[i].text.replace("{}", number.format(i), 1).encode(code)
        items.append(Item(f"{name} {i}", own, tuple(answer.encode(code) for answer in answers), right))
    padding = -len(prefix.encode(code)) % BLOCK_SIZE
    return Task(name, prefix.encode(code) + b"\n" * padding, items)
