"""Question: how long does one wait for programs, and does a deeper model make one wait longer?

Command: python -m experiments.compile_time [--repeats N] [--no-demo] [--json]
Machine: 2 cores of an AMD EPYC; jax 0.12.0
Answer:  0.87 s for a decode step of 6 equal layers, 0.87 for 24 and 0.89 for 48: depth costs nothing, for
  layers are scanned (unrolled they took 1.10, 2.33 and 4.28). An operation takes 0.03 to 1.4 s, `commit`
  longest, and is one program, but for `init` and `attention`, which are two. The demo warms up for 17.5 s.
Record:  experiments/results/compile_time.json.

A decode step (`extend`, a decoder of tiny layers, the next tokens) is compiled ahead of time. An operation is
called as one calls it outside of `jit`, and JAX's own events are added up; so is the demo, which is what
`python -m experiments.decode` does before it starts. JAX's caches are emptied before each, and no compiled
programs are kept in files meanwhile. Of repeats the least total is kept: other work only adds.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvcache_jax as kv
from experiments.common import command
from experiments.common.compiled_programs import Cost, nothing_kept, watched
from experiments.common.report import add_options, at_most, deliver, table
from experiments.decode import __main__ as decode
from experiments.decode import options as decode_options
from models.decoder import Decoder, DecoderConfig, cache_config, forward

DEPTHS = (6, 24, 48)
PERIOD: tuple[int | None, ...] = (32, 32, 32, 32, 32, None)  # five windows and a full layer
NUM_PERIODS = 4
MOST_RATIO = 1.3  # of 24 equal layers to 6
NUM_ROWS = 8
LAYER: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, mlp_size=64, num_q_heads=4, num_kv_heads=2, head_dim=8
)
SIZES: dict[str, Any] = dict(max_seqs=NUM_ROWS, max_seq_len=256, num_blocks=128, block_size=16)


def least(repeats: int, measure: Callable[[], Cost]) -> Cost:
    return min((measure() for _ in range(repeats)), key=lambda cost: cost.total_s)


def decode_step(decoder: Decoder, cache: kv.Cache, tokens: jax.Array) -> tuple[kv.Cache, jax.Array]:
    """One more token i32[b] in every row."""
    cache, step = kv.extend(cache, jnp.ones_like(tokens), max_new=1)
    logits, cache = forward(decoder, tokens[:, None], cache, step)
    return cache, jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)


def step_arguments(windows: Sequence[int | None]) -> tuple[Decoder, kv.Cache, jax.ShapeDtypeStruct]:
    """Shapes of what `decode_step` takes, for a tiny model with such layers."""
    config = DecoderConfig(**LAYER, num_layers=len(windows), windows=tuple(windows))
    decoder = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: kv.init(cache_config(config, **SIZES)))
    return decoder, cache, jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32)


def step_cost(name: str, windows: Sequence[int | None]) -> Cost:
    arguments = step_arguments(windows)
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(decode_step, donate_argnums=1).trace(*arguments)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return Cost(name, *np.diff(times).tolist(), num_programs=1)


def step_name(num_layers: int) -> str:
    return f"decode step, {num_layers} equal layers"


def step_costs(repeats: int) -> list[Cost]:
    steps: dict[str, tuple[int | None, ...]] = {step_name(depth): (None,) * depth for depth in DEPTHS}
    steps[f"decode step, {NUM_PERIODS} x (5 windows, 1 full)"] = PERIOD * NUM_PERIODS
    return [least(repeats, lambda step=step: step_cost(*step)) for step in steps.items()]


def operations() -> dict[str, Callable[[], Any]]:
    """Every public operation, to be called once outside of `jit`; what they need is made here."""
    kind = kv.FullAttention(num_kv_heads=2, head_dim=8)
    plain = kv.CacheConfig([kind] * 2, **SIZES)
    indexed = dataclasses.replace(plain, enable_prefix_caching=True)
    rows, lens = np.arange(NUM_ROWS), np.full(NUM_ROWS, 40)
    tokens = np.tile(np.arange(40), (NUM_ROWS, 1))
    new = np.ones(NUM_ROWS, np.int32)
    cache = kv.allocate(kv.init(plain), rows[:4], lens[:4])[0]
    known = kv.allocate(kv.init(indexed), rows, lens, tokens=tokens)[0]
    step = kv.extend(cache, new, max_new=1)[1]
    heads = jnp.ones((NUM_ROWS, 1, 2, 8))
    return {
        "init": lambda: kv.init(plain),
        "allocate": lambda: kv.allocate(cache, rows, lens),
        "allocate, with tokens": lambda: kv.allocate(known, rows, lens, tokens=tokens),
        "extend": lambda: kv.extend(cache, new, max_new=1),
        "extend, with index": lambda: kv.extend(known, new, max_new=1, tokens=tokens[:, :1]),
        "commit": lambda: kv.commit(known, rows),
        "fork": lambda: kv.fork(cache, rows[:4], rows[4:]),
        "reorder": lambda: kv.reorder(cache, rows[:4], rows[:4]),
        "truncate": lambda: kv.truncate(cache, rows, lens),
        "free": lambda: kv.free(cache, rows),
        "touch": lambda: kv.touch(cache, rows),
        "evict": lambda: kv.evict(known, 2),
        "lookup": lambda: kv.lookup(known, tokens, lens),
        "attention": lambda: kv.attention(cache, 0, heads, heads, heads, step),
        "gather": lambda: kv.gather(cache, 0, 0),
    }


def operation_costs(repeats: int) -> list[Cost]:
    def measure(name: str, call: Callable[[], Any]) -> Cost:
        jax.clear_caches()
        with watched(name) as cost:
            jax.block_until_ready(call())
        return cost

    return [least(repeats, lambda item=item: measure(*item)) for item in operations().items()]


def demo_cost(arguments: Sequence[str] = ()) -> Cost:
    """The warm-up of `python -m experiments.decode` with these arguments."""
    parser = decode_options.make_parser(decode.__doc__)
    job = decode.prepare(decode_options.parse(parser, list(arguments)))
    jax.clear_caches()
    with watched("demo, its warm-up") as cost:
        decode.warm_up(job)
    return cost


def bars_of(costs: Sequence[Cost]) -> list[dict]:
    totals = {cost.name: cost.total_s for cost in costs}
    shallow, *deeper = (totals[step_name(depth)] for depth in DEPTHS)
    return [
        at_most(f"{depth} layers to {DEPTHS[0]}", total / shallow, MOST_RATIO)
        for depth, total in zip(DEPTHS[1:], deeper, strict=True)
    ]


COLUMNS = {
    "seconds": "{name}",
    "tracing": "{trace_s:.2f}",
    "lowering": "{lower_s:.2f}",
    "compiling": "{compile_s:.2f}",
    "total": "{total_s:.2f}",
    "programs": "{num_programs}",
}


show = table("until the programs are ready", COLUMNS)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.compile_time", __doc__)
    parser.count("--repeats", 3, "of all but the demo")
    parser.add_argument("--no-demo", action="store_true", help="leave the demo out")
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    with nothing_kept():
        steps = step_costs(options.repeats)
        costs = [*([] if options.no_demo else [demo_cost()]), *steps, *operation_costs(options.repeats)]
    report = {
        "repeats": options.repeats,
        "records": [dataclasses.asdict(cost) | {"total_s": cost.total_s} for cost in costs],
        "bars": bars_of(steps),
    }
    return deliver(report, options, show)


if __name__ == "__main__":
    command.run(main)
