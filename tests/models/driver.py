"""The decoder on a cache, fed piece by piece, beside what transformers computed: committed fixtures.

python -m tests.models.driver [FAMILY ...]

prints by family and number of tokens how far logits are apart, and whether greedy tokens are equal; it ends
with 1 if logits of one are farther apart than `ATOL` or a token differs.
"""

import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

import kvcache_jax as kv
from models import checkpoint
from models.decoder import Decoder, cache_config, forward
from tests.models.checkpoint_files import FAMILIES, FIXTURES, LONG

ATOL = 1e-4
NUM_ROWS, ROW = 3, 1
# One program of a model takes prompts, pieces and single tokens of all fixtures.
WIDTH, MAX_LEN = 59, 320


@functools.cache
def load(family: str, dtype=jnp.float32) -> Decoder:
    return checkpoint.load(FIXTURES / family, dtype=dtype)


@functools.cache
def expected(family: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / family / "expected.safetensors")


def all_tokens(family: str, prompt: str = "") -> np.ndarray:
    return np.concatenate([expected(family)[f"{part}{prompt}"] for part in ("prompt", "greedy")])


@functools.partial(jax.jit, donate_argnums=1)
def step_fn(decoder, cache, tokens, num_new):
    cache, step = kv.extend(kv.testing.poison(cache), num_new, max_new=tokens.shape[1], tokens=tokens)
    logits, cache = forward(decoder, tokens, cache, step)
    return cache, logits, step.status


class Driver:
    """Feeds pieces of sequences to rows of one cache; every slot without a token holds NaN."""

    def __init__(
        self, decoder: Decoder, lengths: dict[int, int], block_size: int = 16, max_seq_len: int = MAX_LEN
    ):
        sizes = dict(max_seqs=NUM_ROWS, max_seq_len=max_seq_len, block_size=block_size)
        self.decoder = decoder
        cache = kv.init(cache_config(decoder.config, **sizes))
        # One program whatever the rows: the others are skipped.
        seq_ids = np.array([row if row in lengths else NUM_ROWS for row in range(NUM_ROWS)], np.int32)
        num_tokens = np.array([lengths.get(row, 0) for row in range(NUM_ROWS)], np.int32)
        self.cache, admission = kv.allocate(cache, seq_ids, num_tokens)
        kv.raise_for_status(admission.status, "allocate")

    def feed(self, pieces: dict[int, np.ndarray], width: int = WIDTH) -> dict[int, np.ndarray]:
        tokens, num_new = np.zeros((NUM_ROWS, width), np.int32), np.zeros(NUM_ROWS, np.int32)
        for row, piece in pieces.items():
            tokens[row, : len(piece)], num_new[row] = piece, len(piece)
        self.cache, logits, status = step_fn(self.decoder, self.cache, tokens, num_new)
        kv.raise_for_status(status, "extend")
        return {row: np.asarray(logits)[row, : len(piece)] for row, piece in pieces.items()}


def check_generation(driver: Driver, family: str, prompt_len: int, width: int, piece_len: int) -> None:
    """Feeds a prompt of `family` in pieces, then the model's own choices one by one, in `ROW`."""
    names = (f"{name}_{prompt_len}" for name in ("prompt", "greedy", "logits"))
    prompt, greedy, want = (expected(family)[name] for name in names)
    pieces = [prompt[start:][:piece_len] for start in range(0, prompt_len, piece_len)]
    logits = np.concatenate([driver.feed({ROW: piece}, width)[ROW] for piece in pieces])
    num_known = len(want) - len(greedy)  # of a prompt's last tokens
    assert_close(logits[-num_known:], want[:num_known])
    last, chosen = logits[-1], []
    for i in range(len(greedy)):
        chosen.append(int(last.argmax()))
        [last] = driver.feed({ROW: np.array(chosen[-1:])}, width)[ROW]
        assert_close(last, want[num_known + i])
    assert chosen == greedy.tolist()


@functools.partial(jax.jit, donate_argnums=1)
def packed_step_fn(decoder, cache, tokens, num_new):
    cache, step = kv.extend(cache, num_new, num_tokens=tokens.shape[0], seq_ids=jnp.array([2, 0, 1]))
    logits, cache = forward(decoder, tokens, cache, step)
    return cache, logits


def check_packed(decoder: Decoder, family: str, pieces: list[list[int]], num_tokens: int, **sizes) -> None:
    """Feeds the same text to three rows in packed steps, of which each takes so many of the next tokens."""
    tokens, want = all_tokens(family), expected(family)["logits"]
    cache = kv.init(cache_config(decoder.config, max_seqs=NUM_ROWS, max_seq_len=64, **sizes))
    cache, _ = kv.allocate(cache, [0, 1, 2], [0, 0, 0])
    starts = np.zeros(NUM_ROWS, int)
    for num_new in pieces:
        spans = [*zip(starts, starts + num_new, strict=True)]
        packed = np.concatenate([tokens[start:end] for start, end in spans])
        packed = np.pad(packed, (0, num_tokens - len(packed)))
        cache, logits = packed_step_fn(decoder, cache, packed, np.array(num_new, np.int32))
        wanted = np.concatenate([want[start:end] for start, end in spans])
        assert_close(np.asarray(logits)[: len(wanted)], wanted)
        starts += num_new


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == np.float32 and got.shape == want.shape
    difference = np.abs(got - want).max()
    assert difference <= ATOL, f"logits differ by {difference}"  # NaN fails too


class Comparison(NamedTuple):
    """One call that takes a whole sequence, beside what transformers computed.

    Attributes:
      num_tokens: Of the sequence.
      worst: The largest difference of a logit; NaN if there is one.
      is_greedy: Whether after the prompt each token is the one that the logits before it put first.
    """

    num_tokens: int
    worst: float
    is_greedy: bool

    @property
    def is_equal(self) -> bool:
        return self.worst <= ATOL and self.is_greedy


def compare(family: str) -> list[Comparison]:
    """Compares all sequences of a fixture."""
    found, decoder = [], load(family)
    for prompt in ("", "_1", "_300") if family in LONG else ("",):
        tokens, want = all_tokens(family, prompt), expected(family)[f"logits{prompt}"]
        greedy = expected(family)[f"greedy{prompt}"]
        logits = Driver(decoder, {ROW: len(tokens)}).feed({ROW: tokens}, max(len(tokens), WIDTH))[ROW]
        worst = float(np.abs(logits[-len(want) :] - want).max())
        chosen = logits[-len(greedy) - 1 : -1].argmax(axis=-1)
        found.append(Comparison(len(tokens), worst, np.array_equal(chosen, greedy)))
    return found


def main(families: Sequence[str]) -> int:
    """Prints a line for each family; returns 1 if one differs."""
    compared = {}
    for name in families:
        found = compared[name] = compare(name)
        words = [f"{each.num_tokens:4} tokens {each.worst:.1e}" for each in found]
        tokens = "equal" if all(each.is_greedy for each in found) else "DIFFER"
        print(f"{name:20}", *words, f" greedy tokens {tokens}", flush=True)
    missed = [name for name in compared if not all(each.is_equal for each in compared[name])]
    worst = max(each.worst for found in compared.values() for each in found)
    print(f"{len(compared)} families, logits within {worst:.1e}; not equal: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FAMILIES))
