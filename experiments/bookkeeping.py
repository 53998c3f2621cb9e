"""Question: what does the bookkeeping of the cache cost, without any keys and values?

Command: python -m experiments.bookkeeping [--json] [--peers] [--peers-python PYTHON ...] [--seconds S]
Machine: TODO
Answer:  TODO

The control plane alone (`init(config, storage=False)`): 256 rows, blocks of 16 tokens, `max_seq_len`
8,192, the free blocks in random order. Each operation is a function of state and step number, timed as
  dispatch floor  an identity jit on the same state: what any call costs
  separate call   one jitted call, `block_until_ready` after each
  in a loop       a `fori_loop` of such steps in one jitted call, divided by their number
all with the state donated, warm, a fresh copy of the prepared state made outside of the timed region
whenever the steps are used up: no figure contains the undoing of its operation. Every status must be OK,
and the state after the steps must pass `check_invariants`. Compile time stands apart.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv
from experiments.timing import machine, show_table, summary

NUM_ROWS, BLOCK_SIZE, MAX_SEQ_LEN, NUM_BLOCKS = 256, 16, 8192, 65_536
GROWTH_SIZES = (1_024, NUM_BLOCKS, 1_048_576)
LOOP, CALL, FLOOR, ABOVE = "in a loop", "separate call", "dispatch floor", "above the floor"
SOME = np.arange(64)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the rows hold before an operation; `max_blocks` and `prompt_len` bound what it needs.

    The same for every pool size when growth is measured, so it must fit the smallest pool.
    """

    max_blocks: int
    prompt_len: int
    num_steps: Callable[["Operation"], int]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One entry of the table.

    Attributes:
      name: As printed.
      lens: (workload) -> tokens that each row holds beforehand; None = idle.
      step: (cache, i, prompt_len) -> (cache, result), the operation's `i`-th step.
      num_steps: Steps from one prepared state, in the full and in the growth workload.
      bars: Figure -> most microseconds allowed, in the full workload.
    """

    name: str
    lens: Callable[[Workload], list[int | None]]
    step: Callable
    num_steps: tuple[int, int]
    bars: dict[str, float] = dataclasses.field(default_factory=dict)


FULL = Workload(max_blocks=256, prompt_len=8192, num_steps=lambda operation: operation.num_steps[0])
GROWTH = Workload(max_blocks=4, prompt_len=1024, num_steps=lambda operation: operation.num_steps[1])


def different_lens(workload: Workload) -> list[int | None]:
    """All different (full workload), and evenly spread over the offsets in a block: 16 rows of 256 cross."""
    stride = 17 if workload.max_blocks > 32 else 1
    return [1 + (stride * ((101 * row) % NUM_ROWS)) % (16 * workload.max_blocks) for row in range(NUM_ROWS)]


def some_rows(workload: Workload) -> list[int | None]:
    """The first 64 rows full but for a few tokens, the others idle."""
    return [16 * workload.max_blocks - row % 16 if row < 64 else None for row in range(NUM_ROWS)]


def extend(cache, i, prompt_len):
    return kv.extend(cache, jnp.ones(NUM_ROWS, jnp.int32), max_new=1)


def allocate(cache, i, prompt_len):
    cache, admission = kv.allocate(cache, i[None], prompt_len[None])
    return cache, admission.status


def fork(cache, i, prompt_len):
    return kv.fork(cache, jnp.asarray(SOME), 64 * (i + 1) + jnp.asarray(SOME))


def reorder(cache, i, prompt_len):
    """Beams of four: the second goes on from the first, the third from the second, the fourth from the third."""
    return kv.reorder(cache, jnp.asarray(SOME), jnp.asarray(np.maximum(SOME - 1, SOME // 4 * 4)))


def free(cache, i, prompt_len):
    return kv.free(cache, 64 * i + jnp.asarray(SOME))


def truncate(cache, i, prompt_len):
    return kv.truncate(cache, jnp.asarray(SOME), cache.context_len[: len(SOME)] - BLOCK_SIZE)


OPERATIONS = (
    Operation("extend: 256 rows, 16 take a block", different_lens, extend, (400, 16), {LOOP: 40, ABOVE: 100}),
    Operation(
        "extend: 256 rows, all take a block", lambda w: [16 * (w.max_blocks // 2)] * NUM_ROWS, extend, (1, 1)
    ),
    Operation("allocate: a prompt, uncached", lambda w: [None] * NUM_ROWS, allocate, (120, 14), {CALL: 1000}),
    Operation("fork: 64 rows", some_rows, fork, (3, 3), {CALL: 1000}),
    Operation("reorder: 64 rows in beams of 4", some_rows, reorder, (3, 3), {CALL: 2000}),
    Operation("free: 64 rows", lambda w: [16 * w.max_blocks] * NUM_ROWS, free, (4, 4), {CALL: 1500}),
    Operation("truncate: 64 rows by one block", some_rows, truncate, (200, 3)),
)


def new_config(num_blocks: int) -> kv.CacheConfig:
    return kv.CacheConfig(
        layers=[kv.FullAttention(num_kv_heads=1, head_dim=64)],
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_seqs=NUM_ROWS,
        max_seq_len=MAX_SEQ_LEN,
    )


@functools.partial(jax.jit, static_argnames="max_new")
def fill(cache, lens, max_new):
    """Starts the rows with `lens >= 0` and lets them hold that many tokens."""
    rows = jnp.where(lens < 0, cache.max_seqs, jnp.arange(cache.max_seqs))
    cache, _ = kv.allocate(cache, rows, jnp.maximum(lens, 0))
    cache, step = kv.extend(cache, jnp.maximum(lens, 0), max_new=max_new)
    return cache, step.status


def prepare(operation: Operation, workload: Workload, num_blocks: int) -> kv.Cache:
    """The state before the operation's first step, its blocks scattered over the pool."""
    cache = kv.init(new_config(num_blocks), storage=False)
    (pool,) = cache.control.block_pools
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    pool = dataclasses.replace(pool, free_stack=jnp.asarray(order))
    cache = dataclasses.replace(cache, control=dataclasses.replace(cache.control, block_pools=(pool,)))
    lens = jnp.asarray([-1 if n is None else n for n in operation.lens(workload)], jnp.int32)
    cache, status = fill(cache, lens, max_new=BLOCK_SIZE * (workload.max_blocks + 17))
    require_ok(status, f"preparing {operation.name!r}")
    return cache


def require_ok(status, what: str) -> None:
    if (np.asarray(status) != kv.Status.OK).any():
        raise RuntimeError(f"{what}: some row failed with {kv.Status(int(np.max(status))).name}")


def status_of(result) -> jax.Array:
    return getattr(result, "status", result)


@functools.cache
def jitted(step: Callable) -> dict[str, Callable]:
    """The three ways to run a step, compiled once per pool size whatever the workload."""

    def loop(cache, num_steps, prompt_len):
        def body(i, carry):
            cache, worst, checksum = carry
            cache, result = step(cache, i, prompt_len)
            for leaf in jax.tree.leaves(result):  # the loop must need everything that the operation computes
                checksum += jnp.sum(leaf, dtype=jnp.int32)
            return cache, jnp.maximum(worst, jnp.max(status_of(result))), checksum

        return lax.fori_loop(0, num_steps, body, (cache, jnp.int32(0), jnp.int32(0)))

    def identity(cache, i, prompt_len):
        return cache, i

    return {
        name: jax.jit(fn, donate_argnums=0) for name, fn in ((CALL, step), (LOOP, loop), (FLOOR, identity))
    }


class Timing:
    """The three figures of one operation on one pool size; `round` adds samples to each."""

    def __init__(self, operation: Operation, workload: Workload, num_blocks: int):
        self.operation, self.num_blocks, self.num_steps = operation, num_blocks, workload.num_steps(operation)
        self.fns = jitted(operation.step)
        self.prepared = jax.block_until_ready(prepare(operation, workload, num_blocks))
        self.prompt_len = jnp.int32(workload.prompt_len)
        self.ids = [jnp.int32(i) for i in range(self.num_steps)]
        self.seconds: dict[str, list[float]] = {FLOOR: [], CALL: [], LOOP: []}
        self.first_call_s: dict[str, float] = {}
        self.round()  # compiles
        for figure, seconds in self.seconds.items():
            self.first_call_s[figure] = seconds[0] * (self.num_steps if figure == LOOP else 1)
            seconds.clear()
        self.verify()

    def round(self) -> None:
        for figure in (FLOOR, CALL):
            cache, results = self.fresh(), []
            for i in self.ids:
                start = time.perf_counter()
                cache, result = jax.block_until_ready(self.fns[figure](cache, i, self.prompt_len))
                self.seconds[figure].append(time.perf_counter() - start)
                results.append(result)
            if figure == CALL:
                for result in results[:: max(1, len(results) // 8)]:
                    require_ok(status_of(result), self.operation.name)
        cache = self.fresh()
        start = time.perf_counter()
        cache, worst, _ = jax.block_until_ready(self.fns[LOOP](cache, self.num_steps, self.prompt_len))
        self.seconds[LOOP].append((time.perf_counter() - start) / self.num_steps)
        require_ok(worst, f"{self.operation.name} in a loop")
        self.after = cache

    def fresh(self) -> kv.Cache:
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.prepared))

    def verify(self) -> None:
        """The loop really went through its steps: same state as by separate calls, and a sound one."""
        cache = self.fresh()
        for i in self.ids:
            cache, _ = self.fns[CALL](cache, i, self.prompt_len)
        for ours, other in zip(jax.tree.leaves(cache), jax.tree.leaves(self.after), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(other), self.operation.name)
        problems = kv.check_invariants(cache)
        if problems:
            raise RuntimeError(f"{self.operation.name}: {problems[0]}")

    def median_us(self, figure: str) -> float:
        return 1e6 * float(np.median(self.seconds[figure]))

    def figures(self) -> list[str]:
        """A loop of one step says no more than the separate call."""
        return [figure for figure in self.seconds if figure != LOOP or self.num_steps > 1]

    def records(self, workload_name: str) -> list[dict]:
        used = [int(kv.stats(cache).num_blocks_used) for cache in (self.prepared, self.after)]
        return [
            {
                "operation": self.operation.name,
                "figure": figure,
                "workload": workload_name,
                "num_blocks": self.num_blocks,
                **summary(self.seconds[figure]),
                "steps_per_call": self.num_steps if figure == LOOP else 1,
                "first_call_s": self.first_call_s[figure],
                "blocks_used_before_and_after": used,
            }
            for figure in self.figures()
        ]


def measure(timings: list[Timing], seconds: float) -> None:
    """Rounds in turn, so that what else the machine does hits all alike."""
    end = time.perf_counter() + seconds
    num_rounds = 0
    while num_rounds < 5 or time.perf_counter() < end:
        for timing in timings:
            timing.round()
        num_rounds += 1


def temporary_bytes(num_blocks: int) -> tuple[int, int]:
    """(temporary bytes, pool bytes) of a compiled decode step of two layers over real pools."""
    config = kv.CacheConfig(
        layers=[kv.FullAttention(num_kv_heads=2, head_dim=64)] * 2,
        num_blocks=num_blocks,
        max_seqs=8,
        max_seq_len=512,
    )

    @kv.donate
    def decode_step(cache, q, k, v):
        cache, step = kv.extend(cache, jnp.ones(8, jnp.int32), max_new=1)
        outs = []
        for layer in range(config.num_layers):
            cache, out = kv.attention(cache, layer, q, k, v, step)
            outs.append(out)
        return cache, jnp.stack(outs), step.status

    q, k = jnp.zeros((8, 1, 4, 64)), jnp.zeros((8, 1, 2, 64))
    compiled = decode_step.lower(kv.init(config), q, k, k).compile()
    return compiled.memory_analysis().temp_size_in_bytes, kv.memory_bytes(config)


def bar(name: str, measured: float, limit: float, unit: str) -> dict:
    return {"bar": name, "measured": measured, "limit": limit, "unit": unit, "holds": measured <= limit}


def bars_of(
    full: list[Timing], growth: dict[str, list[Timing]], memory: dict, peers: list[dict]
) -> list[dict]:
    bars = []
    for timing in full:
        for figure, limit in timing.operation.bars.items():
            measured = (
                timing.median_us(CALL) - timing.median_us(FLOOR)
                if figure == ABOVE
                else timing.median_us(figure)
            )
            bars.append(bar(f"{timing.operation.name}, {figure}", measured, limit, "us"))
    for name, timings in growth.items():
        for timing, limit in zip(timings[1:], (1.5, 3.0), strict=True):
            ratio, figure = max(
                (timing.median_us(figure) / timings[0].median_us(figure), figure)
                for figure in timing.figures()
                if figure != FLOOR
            )
            what = f"growth {timings[0].num_blocks:,} -> {timing.num_blocks:,} blocks, {figure} (the worse figure)"
            bars.append(bar(f"{name}, {what}", ratio, limit, "x"))
    bars.append(
        bar("temporary bytes that grow with the pool, of the pool's growth", memory["share"], 0.01, "")
    )
    for peer in peers:
        for record in peer.get("records", []):
            if peer["peer"] == "vllm" and record["operation"] == "extend":
                ours = full[0].median_us(LOOP)
                name = f"{full[0].operation.name}, {LOOP}, against vLLM's {record['what'].split('; ')[1]}"
                bars.append(bar(name, ours, record["median_us"] / 10, "us"))
    return bars


def measure_memory() -> dict:
    small, large = temporary_bytes(256), temporary_bytes(8 * 256)
    return {
        "temporary_bytes": [small[0], large[0]],
        "pool_bytes": [small[1], large[1]],
        "share": (large[0] - small[0]) / (large[1] - small[1]),
    }


def run_peers(pythons: list[str]) -> list[dict]:
    """Each peer in a process of its own, under the first interpreter that can import it."""
    sizes = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_seq_len": MAX_SEQ_LEN,
        "prompt_len": FULL.prompt_len,
        "context_lens": OPERATIONS[0].lens(FULL),
    }
    results = []
    for module in ("vllm_manager", "levanter_pager"):
        reasons = []
        for python in [sys.executable, *pythons]:
            command = [python, "-m", f"experiments.peers.{module}", json.dumps(sizes)]
            root = Path(__file__).resolve().parents[1]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            lines = done.stdout.strip().splitlines()
            if done.returncode == 0 and lines:
                result = json.loads(lines[-1])
            else:
                result = {"skipped": (done.stderr.strip().splitlines() or ["no output"])[-1]}
            if "skipped" not in result:
                results.append(result)
                break
            reasons.append(f"{python}: {result['skipped']}")
        else:
            results.append({"peer": module.partition("_")[0], "skipped": "; ".join(reasons)})
    return results


def show(report: dict, full: list[Timing], growth: dict[str, list[Timing]]) -> None:
    def us(value: float) -> str:
        return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"

    host = report["machine"]
    print(
        f"{host['cpu']}, {host['num_cores']} cores, {report['platform']}, jax {report['jax']}; microseconds"
    )
    rows = []
    for timing in full:
        for record in timing.records("full"):
            spread = f"{us(record['p10_us'])} - {us(record['p90_us'])}"
            calls = f"{record['num_calls']} x {record['steps_per_call']}"
            rows.append([record["operation"], record["figure"], us(record["median_us"]), spread, calls,
                         f"{record['first_call_s']:.2f} s"])  # fmt: skip
    show_table(f"{NUM_ROWS} rows, {NUM_BLOCKS:,} blocks of {BLOCK_SIZE}",
               ["operation", "figure", "median", "p10 - p90", "calls x steps", "first call"], rows)  # fmt: skip

    rows = []
    for name, timings in growth.items():
        for figure in timings[0].figures():
            medians = [timing.median_us(figure) for timing in timings]
            ratios = [f"{us(median)}  ({median / medians[0]:.2f}x)" for median in medians[1:]]
            rows.append([name, figure, us(medians[0]), *ratios])
    sizes = [f"{size:,} blocks" for size in GROWTH_SIZES]
    show_table(
        "the same rows (at most 4 blocks each) in a larger pool", ["operation", "figure", *sizes], rows
    )

    rows = [[name, f"{size:,}"] for name, size in report["control_bytes"].items()]
    show_table(f"bytes of control state, {NUM_BLOCKS:,} blocks", ["field", "bytes"], rows)
    memory = report["memory"]
    rows = [[kind, *(f"{size:,}" for size in memory[kind])] for kind in ("pool_bytes", "temporary_bytes")]
    show_table("compiled decode step of two layers", ["", "N = 256 blocks", "8 N"], rows)

    rows = []
    for peer in report["peers"]:
        if "skipped" in peer:
            print(f"\n{peer['peer']} was skipped: {peer['skipped']}")
        for record in peer.get("records", []):
            spread = f"{us(record['p10_us'])} - {us(record['p90_us'])}"
            title = f"{peer['peer']} {peer['version']}, {record['operation']}: {record['what']}"
            rows.append([title, record["figure"], us(record["median_us"]), spread])
    if rows:
        show_table("peers, same rows and blocks", ["peer", "figure", "median", "p10 - p90"], rows)

    rows = [
        [b["bar"], f"{b['measured']:.3g} {b['unit']}", f"{b['limit']:.3g} {b['unit']}",
         "holds" if b["holds"] else "does not hold"]
        for b in report["bars"]
    ]  # fmt: skip
    show_table("bars", ["bar", "measured", "at most", ""], rows)


def control_bytes(cache: kv.Cache) -> dict[str, int]:
    sizes = {
        jax.tree_util.keystr(path).lstrip("."): leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache.control)
    }
    return {"total": sum(sizes.values()), **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--peers", action="store_true", help="time vLLM's manager and levanter's pager too")
    parser.add_argument(
        "--peers-python", action="append", default=[], metavar="PYTHON", help="interpreter to try for peers"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="time for the figures of one operation")
    args = parser.parse_args()

    start = time.perf_counter()
    full, growth = [], {}
    for operation in OPERATIONS:
        timing = Timing(operation, FULL, NUM_BLOCKS)
        measure([timing], args.seconds)
        full.append(timing)
        growth[operation.name] = [Timing(operation, GROWTH, num_blocks) for num_blocks in GROWTH_SIZES]
        measure(growth[operation.name], 2 * args.seconds)
    memory = measure_memory()
    peers = run_peers(args.peers_python) if args.peers else []
    report = {
        "machine": machine(),
        "jax": jax.__version__,
        "platform": jax.devices()[0].device_kind,
        "seconds": time.perf_counter() - start,
        "control_bytes": control_bytes(full[0].prepared),
        "memory": memory,
        "records": [r for timing in full for r in timing.records("full")]
        + [r for timings in growth.values() for timing in timings for r in timing.records("growth")],
        "peers": peers,
        "bars": bars_of(full, growth, memory, peers),
    }
    if args.json:
        print(json.dumps(report))
    else:
        show(report, full, growth)
        print(f"\n{report['seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
