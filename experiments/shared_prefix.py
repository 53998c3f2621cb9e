"""Question: what does attention take in rows that share a prompt, read once and read by each row?

Command: python -m experiments.shared_prefix [--turns N] [--json]
Machine: 2 cores of an AMD EPYC; jax 0.12.0.1
Answer:  64 samples of 768 tokens: 2.7 times less together (bar 3: missed), with 8 heads of 32 too. 8 full
  rows of 4,096 tokens that share nothing: 1.04 times the time apart (bar: 1.05).
Record:  experiments/results/shared_prefix.json

Rows of a cache in float32 decode a token. A step is `extend`, attention of four layers and `truncate`, in one
program that donates the cache. "together" is the default; "apart" has `tile_tokens=256`, which makes each row
read its own tiles, of the length that they have there anyway. The sides take turns, and must give the same
results. Times are of a layer.
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import command, timing
from experiments.common.report import add_options, at_least, at_most, deliver, table

NUM_LAYERS, HEAD_DIM, OWN, PIECE = 4, 64, 32, 128
MOST_DIFFERENCE = 1e-5
LEAST_GAIN, MOST_LOSS = 3.0, 1.05


class Case(NamedTuple):
    """Rows to decode: `shared` tokens that all begin with, and `own` tokens of each."""

    name: str
    rows: int
    shared: int
    own: int
    kv_heads: int = 2
    q_heads: int = 4


SAMPLES = Case("64 samples of 768 tokens", 64, 768, OWN)
FULL = Case("8 full rows of 4,096 tokens, nothing shared", 8, 0, 4095)
CASES = (
    SAMPLES,
    Case("64 samples of 768 tokens, 8 heads of 32", 64, 768, OWN, 8, 32),
    Case("8 samples of 768 tokens", 8, 768, OWN),
    FULL,
    Case("64 rows of 800 tokens, nothing shared", 64, 0, 800),
)


class Side:
    """A cache, and a step on it that is undone again, so that all turns are alike."""

    def __init__(self, case: Case, tile_tokens: int | None):
        layers = [kv.FullAttention(case.kv_heads, HEAD_DIM)] * NUM_LAYERS
        max_len = case.shared + case.own + 1
        self.cache = kv.init(
            kv.CacheConfig(layers, max_seqs=case.rows, max_seq_len=max_len, tile_tokens=tile_tokens)
        )
        self.rng = np.random.default_rng(0)
        first = [0] if case.shared else [*range(case.rows)]
        self.cache, admitted = kv.allocate(self.cache, first, [case.shared + case.own] * len(first))
        kv.raise_for_status(admitted.status, "allocate")
        if case.shared:
            self._append(case, [case.shared] + [0] * (case.rows - 1))
            others = [*range(1, case.rows)]
            self.cache, status = kv.fork(self.cache, [0] * len(others), others)
            kv.raise_for_status(status, "fork")
        self._append(case, [case.own] * case.rows)
        self.q = self._random(case.rows, 1, case.q_heads, HEAD_DIM)
        self.k = self._random(case.rows, 1, case.kv_heads, HEAD_DIM)
        self.seconds: list[float] = []
        self.turn()
        self.seconds.clear()

    def _random(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape), jnp.float32)

    def _append(self, case: Case, lengths: list[int]) -> None:
        left = np.asarray(lengths)
        new = self._random(NUM_LAYERS, case.rows, PIECE, case.kv_heads, HEAD_DIM)
        while left.any():
            num_new = np.minimum(left, PIECE)
            self.cache, step = _append(self.cache, new, num_new)
            kv.raise_for_status(step.status, "append")
            left = left - num_new

    def turn(self) -> None:
        start = time.perf_counter()
        self.cache, self.out = jax.block_until_ready(_step(self.cache, self.q, self.k))
        self.seconds.append((time.perf_counter() - start) / NUM_LAYERS)


@kv.donate
def _append(cache: kv.Cache, new: jax.Array, num_new: jax.Array) -> tuple[kv.Cache, kv.Step]:
    return kv.append(cache, new, new, num_new)


@kv.donate
def _step(cache: kv.Cache, q: jax.Array, k: jax.Array) -> tuple[kv.Cache, jax.Array]:
    cache, step = kv.extend(cache, jnp.ones(cache.max_seqs, jnp.int32), max_new=1)

    def layer(i: jax.Array, carry: tuple[kv.Cache, jax.Array]) -> tuple[kv.Cache, jax.Array]:
        cache, total = carry
        cache, out = kv.attention(cache, i, q, k, k, step)
        assert not isinstance(out, tuple)
        return cache, total + out

    cache, total = jax.lax.fori_loop(0, NUM_LAYERS, layer, (cache, jnp.zeros_like(q)))
    cache, _ = kv.truncate(cache, jnp.arange(cache.max_seqs), cache.context_len - 1)
    return cache, total


def measure(case: Case, num_turns: int) -> dict[str, Any]:
    """Times both sides in turns; raises where their results differ."""
    together, apart = (Side(case, tile_tokens) for tile_tokens in (None, 256))
    difference = float(jnp.abs(together.out - apart.out).max())
    if not difference <= MOST_DIFFERENCE:
        raise RuntimeError(f"{case.name}: results differ by {difference:.2g}")
    for _ in range(num_turns):
        together.turn()
        apart.turn()
    low, median, high = timing.ratios(apart.seconds, together.seconds)
    return {
        "case": case.name,
        "together": timing.summary(together.seconds),
        "apart": timing.summary(apart.seconds),
        "times": {"p10": low, "median": median, "p90": high},
        "difference": difference,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.shared_prefix", __doc__)
    parser.count("--turns", 41)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    records = [measure(case, options.turns) for case in CASES]
    times = {record["case"]: record["times"]["median"] for record in records}
    bars = [
        at_least(f"{SAMPLES.name}: times less time together", times[SAMPLES.name], LEAST_GAIN),
        at_most(f"{FULL.name}: times the time apart", 1 / times[FULL.name], MOST_LOSS),
    ]
    return deliver({"records": records, "bars": bars}, options, show)


COLUMNS = {
    "rows": "{case}",
    "together": timing.with_spread("together"),
    "apart": timing.with_spread("apart"),
    "times": "{times[median]:.2f} ({times[p10]:.2f} - {times[p90]:.2f})",
}
show = table("microseconds of a layer, median (p10 - p90)", COLUMNS)


if __name__ == "__main__":
    command.run(main)
