"""Question: what does a step of the engine cost that admits requests, without a model?

Command: python -m experiments.admission [--requests N] [--turns N] [--json]
Machine: 2 cores of an AMD EPYC; jax 0.12.0.1
Answer:  126 and 218 us by fcfs with rows of 512 and 8,192 tokens, 150 and 223 by longest prefix, with 1.82
  admissions. All four bars are missed, the two of longest prefix by 7% and 1%.

Requests of 20 random tokens and 4 new ones keep 8 rows busy, so that a row ends and a request is admitted in
nearly every step. The model's logits are zeros, and a key and a value are one number each: what is timed is
the scheduler, its look-ups, the tables, and the host's part of a dispatch of 32 steps. Microseconds per step,
by policy and by the length of a row, whose table is gathered and hashed as far as prompts reach.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import command, timing
from experiments.common.report import add_options, at_most, deliver, table

ROWS, VOCAB, PROMPT_LEN, MAX_NEW, BLOCK_SIZE = 8, 8, 20, 4, 16
BARS = {("fcfs", 512): 100, ("fcfs", 8192): 160, ("longest prefix", 512): 140, ("longest prefix", 8192): 220}
"""Policy and tokens of a row -> microseconds per step, at most."""


def forward(params: Any, tokens: jax.Array, cache: kv.Cache, step: kv.Step) -> tuple[jax.Array, kv.Cache]:
    """A model that computes nothing."""
    return jnp.zeros((*tokens.shape, VOCAB)), cache


def make_engine(policy: str, max_seq_len: int) -> kv.Engine:
    config = kv.CacheConfig(
        [kv.FullAttention(1, 1)],
        num_blocks=ROWS * max_seq_len // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_seqs=ROWS,
        max_seq_len=max_seq_len,
        enable_prefix_caching=True,
        dtype=jnp.float32,
    )
    return kv.Engine(forward, {}, config, policy=policy)


def turn(engine: kv.Engine, prompts: np.ndarray) -> dict[str, float]:
    """Serves prompts i32[n, PROMPT_LEN]: the seconds of a step, and the requests that one admits."""

    def counts() -> np.ndarray:
        found = engine.figures().counts
        return np.array([found[kv.engine.Counter.STEPS], found[kv.engine.Counter.ADMISSIONS]])

    before, start = counts(), time.perf_counter()
    left = [kv.GenerationRequest(prompt, MAX_NEW) for prompt in prompts]
    while left or engine.num_unfinished:
        left = left[engine.push(left) :]
        engine.drain(32)
        engine.take_events()
    seconds = time.perf_counter() - start
    num_steps, num_admitted = counts() - before
    return {"seconds": seconds / num_steps, "admitted": num_admitted / num_steps}


def measure(num_requests: int, num_turns: int) -> list[dict[str, Any]]:
    rng, engines = np.random.default_rng(0), {case: make_engine(*case) for case in BARS}
    for engine in engines.values():
        turn(engine, rng.integers(0, VOCAB, (num_requests, PROMPT_LEN)))
    turns: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in engines}
    for _ in range(num_turns):
        for case, engine in engines.items():
            turns[case].append(turn(engine, rng.integers(0, VOCAB, (num_requests, PROMPT_LEN))))
    return [
        {
            "policy": policy,
            "max_seq_len": max_seq_len,
            "admitted": float(np.mean([each["admitted"] for each in found])),
            **timing.summary([each["seconds"] for each in found]),
        }
        for (policy, max_seq_len), found in turns.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.admission", __doc__)
    parser.count("--requests", 200, "of a turn", least=8)
    parser.count("--turns", 15)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    records = measure(options.requests, options.turns)
    bars = []
    for record in records:
        policy, length = record["policy"], record["max_seq_len"]
        what = f"{policy}, rows of {length:,} tokens: us per step"
        bars.append(at_most(what, record["median_us"], BARS[policy, length]))
    columns = {
        "policy": "{policy}",
        "tokens of a row": "{max_seq_len:,}",
        "us per step": timing.with_spread(),
        "admitted per step": "{admitted:.2f}",
    }
    return deliver({"records": records, "bars": bars}, options, table("median (p10 - p90)", columns))


if __name__ == "__main__":
    command.run(main)
