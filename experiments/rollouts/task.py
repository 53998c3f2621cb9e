"""The task: two or three digits, to be said in their order, asked after worked examples.

83>38;591>159;...;402>     is answered rightly by     024;
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STOP = ord(";")
NUM_EXAMPLES = 12
NUM_DIGITS = (2, 3)
MAX_PROMPT = NUM_EXAMPLES * len("321>123;") + len("321>")
MAX_ANSWER = len("123;") + 1  # room for one that is too long


class Prompts(NamedTuple):
    """Questions as arrays.

    Attributes:
      tokens: i32[n, MAX_PROMPT], bytes from the left; 0 after them.
      length: i32[n].
      answer: i32[n, MAX_ANSWER], bytes of the right answer with its `STOP`; 0 after them.
    """

    tokens: jax.Array | np.ndarray
    length: jax.Array | np.ndarray
    answer: jax.Array | np.ndarray


def questions(rng: np.random.Generator, num: int) -> Prompts:
    """Draws questions; the examples before them are right."""
    texts, answers = [], []
    for _ in range(num):
        *examples, digits = (_digits(rng) for _ in range(NUM_EXAMPLES + 1))
        texts.append("".join(f"{each}>{''.join(sorted(each))};" for each in examples) + f"{digits}>")
        answers.append("".join(sorted(digits)) + chr(STOP))
    tokens, length = _padded(texts, MAX_PROMPT)
    return Prompts(tokens, length, _padded(answers, MAX_ANSWER)[0])


def unsorted_texts(rng: np.random.Generator, num: int) -> np.ndarray:
    """Draws texts that look like the task, i32[num, MAX_PROMPT + MAX_ANSWER]: the digits in any order."""
    length = MAX_PROMPT + MAX_ANSWER
    texts = []
    for _ in range(num):
        text = ""
        while len(text) < length:
            digits = _digits(rng)
            text += f"{digits}>{''.join(rng.permutation(list(digits)))};"
        texts.append(text[:length])
    return _padded(texts, length)[0]


def rewards(tokens: jax.Array, answer: jax.Array) -> jax.Array:
    """Judges answers i32[m, MAX_ANSWER], 0 after their end, f32[m]: 1 for the right one, 0 for any other."""
    return (tokens == answer).all(axis=1).astype(jnp.float32)


def _digits(rng: np.random.Generator) -> str:
    return "".join(map(str, rng.integers(10, size=rng.choice(NUM_DIGITS))))


def _padded(texts: list[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((len(texts), length), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    return tokens, np.array([len(text) for text in texts], np.int32)
