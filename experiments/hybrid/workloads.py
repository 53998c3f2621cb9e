"""The requests of `experiments.hybrid`: random tokens that repeat one another as prompts do."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """The tokens of a prompt, and the answer that its row goes on with."""

    prompt: list[int]
    answer: list[int]


class Writer:
    """Texts of random tokens from a seed, below `vocab_size`; 0 is none of them."""

    def __init__(self, seed: int, vocab_size: int = 1000):
        self.rng, self.vocab_size = np.random.default_rng(seed), vocab_size

    def text(self, shortest: int, longest: int | None = None) -> list[int]:
        """Draws a text of a length from `shortest` to `longest`."""
        length = int(self.rng.integers(shortest, (longest or shortest) + 1))
        return self.rng.integers(1, self.vocab_size, size=length).tolist()


def few_shot(writer: Writer, num_prompts: int = 64, prefix_len: int = 1003) -> list[Request]:
    """One prefix, questions of 40 to 160 tokens, and answers of 8."""
    prefix = writer.text(prefix_len)
    return [Request(prefix + writer.text(40, 160), writer.text(8)) for _ in range(num_prompts)]


def chats(
    writer: Writer,
    num_chats: int = 6,
    num_turns: int = 6,
    system_len: int = 213,
    lengths: tuple[int, int] = (30, 130),
) -> list[Request]:
    """Chats of one system prompt, one after the other; a turn repeats all before it, its answer included."""
    system, requests = writer.text(system_len), []
    for _ in range(num_chats):
        text = list(system)
        for _ in range(num_turns):
            text = text + writer.text(*lengths)
            answer = writer.text(*lengths)
            requests.append(Request(text, answer))
            text = text + answer
    return requests


def two_levels(writer: Writer, num_subjects: int = 8, num_questions: int = 8) -> list[Request]:
    """A system prompt of 213 tokens, subjects of 300 to 900, questions to each, in random order."""
    system = writer.text(213)
    subjects = [writer.text(300, 900) for _ in range(num_subjects)]
    order = writer.rng.permutation(num_subjects * num_questions)
    return [Request(system + subjects[i % num_subjects] + writer.text(40, 160), []) for i in order]


def repeated_prefix(writer: Writer, prefix_len: int, num_prompts: int = 4) -> list[Request]:
    """Prompts of one prefix and questions of 50 tokens."""
    prefix = writer.text(prefix_len)
    return [Request(prefix + writer.text(50), []) for _ in range(num_prompts)]


def num_prompt_tokens(requests: Sequence[Request]) -> int:
    """Counts the tokens of all prompts."""
    return sum(len(request.prompt) for request in requests)
