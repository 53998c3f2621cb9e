"""The prompts of `experiments.chunks`: passages one behind the other, and the question behind them."""

from typing import NamedTuple

import numpy as np

from experiments.common import corpus

NUM_FILES, NUM_CHUNKS, CHUNK_LEN = 12, 4, 160
SAME, MIXED = "same", "mixed"
_SKIPPED, _LEAST_LEN = 2500, 5800  # what a file begins with is alike in many


class Prompts(NamedTuple):
    """Prompts of equal lengths.

    Attributes:
      name: "same": the passages follow one another in a file, and the question is what comes next. "mixed":
        they are of several files, and the question begins as the second one does, and goes on with it.
      chunks: i32[n, NUM_CHUNKS, chunk_len].
      question: i32[n, question_len].
      first_scored: The first place of the question whose prediction counts.
      others: i32[n, chunk_len], a passage of another file.
    """

    name: str
    chunks: np.ndarray
    question: np.ndarray
    first_scored: int
    others: np.ndarray

    @property
    def num_rows(self) -> int:
        """Prompts."""
        return len(self.chunks)

    @property
    def chunk_len(self) -> int:
        """Tokens of a passage."""
        return self.chunks.shape[2]

    @property
    def tokens(self) -> np.ndarray:
        """i32[n, NUM_CHUNKS * chunk_len], the passages."""
        return self.chunks.reshape(self.num_rows, -1)

    @property
    def starts(self) -> np.ndarray:
        """i32[n, NUM_CHUNKS], where the passages begin."""
        return np.tile(self.chunk_len * np.arange(self.chunks.shape[1], dtype=np.int32), (self.num_rows, 1))


def read_prompts(num_files: int = NUM_FILES, chunk_len: int = CHUNK_LEN) -> list[Prompts]:
    """Makes the prompts, one of each kind for each of the first held-out files that are long enough."""
    length, asked_len = NUM_CHUNKS * chunk_len, chunk_len // 4
    files = [file for file in corpus.held_out_files().values() if len(file) > _LEAST_LEN][:num_files]
    files = [np.frombuffer(file, np.uint8).astype(np.int32) for file in files]

    def piece(i: int, start: int, length: int = chunk_len) -> np.ndarray:
        return files[i % len(files)][_SKIPPED + start :][:length]

    each = range(len(files))
    passages = np.stack([piece(i, 0, length).reshape(NUM_CHUNKS, chunk_len) for i in each])
    others = np.stack([piece(i + 5, 1000) for i in each])
    asked = np.stack([piece(i, 500) for i in each])
    mixed = np.stack([[piece(i + 3, 0), asked[i], piece(i + 7, 0), piece(i + 3, 1500)] for i in each])
    return [
        Prompts(SAME, passages, np.stack([piece(i, length) for i in each]), 0, others),
        Prompts(MIXED, mixed, asked, asked_len, others),
    ]
