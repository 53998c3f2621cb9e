"""Question: what does a decode step cost with paging, beside a dense static cache and beside none?

Command: python -m experiments.decode_speed [--json] [--picture FILE] [--data DIR]
Machine: 2 virtual cores of an AMD EPYC, idle; jax 0.12.0; results/decode_speed.json and .png
Answer:  8 full rows of 4,096 tokens: 24.5 ms a step, 0.77 times a dense cache [B, S, H, D] (Flax's layout)
  and 1.8 times one in [B, H, S, D], which misses the bar of 1.2. 8 rows at 3-7% of the table: 4.1 ms, 7.3 and
  3.0 times faster (bar: 5). No cache: 169 ms for the short rows, 21 s for the full ones.

One model, float32, in one run: `models.decoder` on the paged cache, whose blocks lie scattered; the same
layers on a dense cache with room for a table of tokens in every row, in both layouts that JAX code has; and
with no cache, over the whole context again. All get the same contexts and must give the same logits before
anything is timed.

A step is timed as a decode loop runs it: NUM_STEPS of them in a jitted scan, each fed with the token that the
one before it chose, the cache donated. The sides take turns, and rows are rolled back between the turns,
outside of the timed region. The share of attention (bookkeeping and writes with it) is what a step takes
longer than the same layers looking at no other token.
"""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.common import byte_model, command, timing
from experiments.common.report import add_options, at_least, at_most, deliver
from experiments.decode_speed import dense_decoder
from experiments.decode_speed.memory import memory_report
from experiments.decode_speed.report import draw, medians_ms, show
from experiments.decode_speed.sides import (
    ALONE_SIDE,
    BATCHES,
    BLOCK_SIZE,
    DENSE,
    FILLS,
    FULL,
    NUM_STEPS,
    PAGED,
    SHORT,
    SIDES,
    UNCACHED,
    Case,
    Contexts,
    Side,
    make_contexts,
)
from models.decoder import Decoder

MAX_DIFFERENCE = 1e-4  # of logits between any two sides


@functools.cache
def in_a_loop(side: Side) -> Callable:
    """The steps of a side; compiles once per shape, however full the rows are."""

    def loop(decoder, tokens, state):
        def body(carry, _):
            logits, state = side.step(decoder, *carry)
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), state), logits

        (_, state), logits = lax.scan(body, (tokens, state), length=NUM_STEPS)
        return logits, state

    return jax.jit(loop, donate_argnums=2)


class Timing:
    """The times of one side on one case; each `round` adds one."""

    def __init__(self, side: Side, case: Case, decoder: Decoder, contexts: Contexts):
        self.side, self.case, self.decoder = side, case, side.prepare(decoder)
        self.tokens = contexts.tokens[np.arange(len(case.lens)), case.start_lens]
        self.state = side.start(decoder.config, case, contexts)
        self.seconds: list[float] = []
        self.round()
        self.first_call_s = self.seconds.pop()

    def round(self) -> None:
        state = jax.block_until_ready(self.side.rewind(self.state, self.case.start_lens))
        start = time.perf_counter()
        found = in_a_loop(self.side)(self.decoder, self.tokens, state)
        self.logits, self.state = jax.block_until_ready(found)  # [NUM_STEPS, b, vocab_size], the state
        self.seconds.append(time.perf_counter() - start)

    def record(self) -> dict:
        times = timing.summary([seconds / NUM_STEPS for seconds in self.seconds])
        return record_of(self.case, self.side.name, times, self.first_call_s)


def record_of(case: Case, side: str, times: dict[str, float], first_call_s: float) -> dict:
    return {"case": case._asdict(), "side": side, **times, "first_call_s": first_call_s}


def measure(
    case: Case, decoder: Decoder, contexts: Contexts, seconds: float, *, with_others: bool = False
) -> list[dict]:
    """Times the sides in turn, once their logits agree; others are no attention, and no cache."""
    contexts = contexts.cut(case)
    sides = (*SIDES, ALONE_SIDE) if with_others else SIDES
    timings = [Timing(side, case, decoder, contexts) for side in sides]
    paged, *others = timings[: len(SIDES)]
    for other in others:
        check_equal(other.logits, paged.logits, f"{case.name}: {other.side.name}")
    timing.take_turns([timed.round for timed in timings], seconds)
    records = [timed.record() for timed in timings]
    if with_others:
        records.append(measure_uncached(case, decoder, contexts, paged.logits[0], seconds))
    return records


def measure_uncached(
    case: Case, decoder: Decoder, contexts: Contexts, expected: jax.Array, seconds: float
) -> dict:
    """One more token from the whole context again; as many calls as fit into `seconds`, at least one."""
    lens = jnp.asarray(case.start_lens + 1)
    inputs = dense_decoder.unstacked(decoder), contexts.tokens[:, : int(lens.max())], lens
    start = time.perf_counter()
    recompute = jax.jit(dense_decoder.recomputed_logits).lower(*inputs).compile()
    compile_s, calls = time.perf_counter() - start, []
    while not calls or sum(calls) < seconds:
        start = time.perf_counter()
        logits = jax.block_until_ready(recompute(*inputs))
        calls.append(time.perf_counter() - start)
        check_equal(logits, expected, f"{case.name}: {UNCACHED}")
    return record_of(case, UNCACHED, timing.summary(calls), compile_s + calls[0])


def check_equal(logits: jax.Array, expected: jax.Array, what: str) -> None:
    difference = float(jnp.abs(logits - expected).max())
    if not difference <= MAX_DIFFERENCE:  # NaN neither
        raise RuntimeError(f"{what}: logits differ by {difference:.2g} from the paged cache's")


def bars_of(records: Sequence[dict], memory: dict) -> list[dict]:
    bars, medians = [], [medians_ms(records, case) for case in (FULL, SHORT)]
    for side in DENSE:
        full, short = (of_case[PAGED] / of_case[side] for of_case in medians)
        bars.append(at_most(f"{FULL.name}: times a step's time, {side}", full, 1.2))
        bars.append(at_least(f"{SHORT.name}: times faster than a step, {side}", 1 / short, 5))
    for record in memory["padding"]:
        if record["block_size"] == BLOCK_SIZE:
            bars.append(at_most(f"slots without a token, blocks of {BLOCK_SIZE}", record["median"], 0.04))
    errors = [abs(record["saved"] - record["closed_form"]) for record in memory["sharing"]]
    bars.append(at_most("blocks saved by samples, off the closed form", max(errors), 1e-9))
    return bars


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.decode_speed", __doc__)
    add_options(parser)
    command.add_data_folder(parser, "the Azure trace")
    byte_model.add_option(parser)
    options = parser.parse_args(arguments)
    decoder = byte_model.load(parser, options.checkpoint, beside="the dense cache beside it", reads=False)
    with parser.refusing():
        memory = memory_report(options.data)
    contexts, records = make_contexts(decoder), []
    for case in (FULL, SHORT):
        records += measure(case, decoder, contexts, 10.0, with_others=True)
    for case in (*FILLS, *BATCHES):
        records += measure(case, decoder, contexts, 5.0)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(decoder))
    report = {
        "model": {"checkpoint": options.checkpoint.name, "num_parameters": num_parameters},
        "records": records,
        "memory": memory,
        "bars": bars_of(records, memory),
    }
    return deliver(report, options, show, draw)


if __name__ == "__main__":
    command.run(main)
