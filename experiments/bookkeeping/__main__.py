"""Question: what does the bookkeeping of the cache cost, without any keys and values?

Command: python -m experiments.bookkeeping [--json] [--peers] [--peers-python PYTHON]
Machine: 2 cores of an Intel Xeon, shared with other work; jax 0.12.0.1
Answer:  a decode step's `extend` of 256 rows takes 14 us inside a loop (bar 40) and 158 us as a separate
  call, 117 of them above the dispatch floor (bar 150). 1 of 68 bars is missed: `commit` of a prompt takes
  1,022 us as a separate call (bar 1,000). From 1,024 blocks to 65,536 and 1,048,576 operations grow at most
  1.36x and 2.10x (bars 1.5 and 3). vLLM 0.33's manager takes 862 us for the same step, levanter's 1,114.
Record:  experiments/results/bookkeeping.json; its peers are of 25 November 2026, on 2 cores of an AMD EPYC.

The control plane alone (`init(config, storage=False)`): 256 rows, 65,536 blocks of 16 tokens in random
order, `max_seq_len` 8,192. Each operation is timed as
  dispatch floor  an identity jit on the same state: what any call costs
  separate call   one jitted call, `block_until_ready` after each
  in a loop       a jitted `fori_loop` of such steps, divided by their number; a quarter of them goes before
                  and is not timed
with the state donated and warm. When the steps that a state has room for are used up, a copy of the
prepared state takes its place outside of the timed region: no figure contains the undoing of its
operation. All figures are taken in turn. Every status must be OK; the loop must end in the very state that
separate calls end in, and `check_invariants` must find it sound.
"""

import concurrent.futures
import functools
import shutil
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv
from experiments.bookkeeping import operations
from experiments.bookkeeping.operations import CALL, FLOOR, FULL, LOOP, OPERATIONS, SMALL, Operation, Workload
from experiments.common import command
from experiments.common.report import add_options, at_most, deliver, framed
from experiments.common.timing import number, show_records, show_table, spread_columns, summary, take_turns
from experiments.peers import run_peers

FIGURES = {
    "operation": "{operation}",
    "figure": "{figure}",
    **spread_columns(),
    "calls x steps": "{num_calls} x {steps_per_call}",
    "first call (compiles)": "{first_call_s:.2f} s",
}
PEERS = {"peer": "{peer}", "operation": "{operation}", "variant": "{variant}", "figure": "{figure}"}
SMALLEST_POOL = 1_024


@framed
def show(report: dict) -> None:
    print("times in microseconds")
    records = [record for record in report["records"] if record["workload"] == FULL.name]
    title = f"{operations.NUM_ROWS} rows, {operations.NUM_BLOCKS:,} blocks of {operations.BLOCK_SIZE}; {FULL}"
    show_records(title, FIGURES, records, num_text=2)
    _show_growth([record for record in report["records"] if record["workload"] == SMALL.name])

    rows = [[field, f"{size:,}"] for field, size in report["control_bytes"].items()]
    show_table(f"control state, {operations.NUM_BLOCKS:,} blocks", ["field", "bytes"], rows)
    small, large = report["decode_step_bytes"]["N"], report["decode_step_bytes"]["8N"]
    rows = [[kind, f"{small[kind]:,}", f"{large[kind]:,}"] for kind in small]
    show_table("compiled decode step of two layers, bytes", ["", "N blocks", "8N blocks"], rows)

    _show_peers(report["peers"])


def _show_growth(records: list[dict]) -> None:
    sizes = sorted({record["num_blocks"] for record in records})
    medians: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        if record["figure"] != FLOOR:
            key = record["operation"], record["figure"]
            medians.setdefault(key, {})[record["num_blocks"]] = record["median_us"]
    rows = []
    for key, by_size in medians.items():
        first, *larger = (by_size[size] for size in sizes)
        rows.append(
            [*key, number(first), *(f"{number(median)} = {median / first:.2f}x" for median in larger)]
        )
    header = ["operation", "figure", *(f"{size:,} blocks" for size in sizes)]
    show_table(f"growth with the pool; {SMALL}", header, rows, num_text=2)


def _show_peers(peers: list[dict]) -> None:
    records = []
    for peer in peers:
        if "skipped" in peer:
            print(f"\n{peer['peer']} was skipped: {peer['skipped']}")
            print("  (install it anywhere and name that interpreter with --peers-python)")
        name = f"{peer['peer']} {peer.get('version')}"
        records += [{"peer": name, **record} for record in peer.get("records", [])]
    if records:
        show_records("peers, the same rows and blocks", {**PEERS, **spread_columns()}, records, num_text=4)


GROWTH = {
    operations.NUM_BLOCKS: 1.5,
    1_048_576: 3.0,
}  # blocks -> at most this many times the smallest pool's time


@functools.partial(jax.jit, donate_argnums=0)
def identity(cache, i, prompt_len):
    return cache, i


@functools.cache
def jitted(step: Callable) -> dict[str, Callable]:
    """The three ways to run a step; compiled once per pool size, whatever the workload."""

    def loop(cache, span, prompt_len):
        def body(i, carry):
            cache, worst, _ = carry
            cache, result = step(cache, i, prompt_len)
            return cache, jnp.maximum(worst, operations.status_of(result)), result

        # The last step's result comes out, so that every step computes all of it.
        _, result = jax.eval_shape(step, cache, jnp.int32(0), prompt_len)
        result = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
        first, end = span
        return lax.fori_loop(first, end, body, (cache, operations.status_of(result), result))

    return {FLOOR: identity} | {
        figure: jax.jit(fn, donate_argnums=0) for figure, fn in ((CALL, step), (LOOP, loop))
    }


class Timing:
    """The figures of one operation on one pool; each `round` adds samples to all of them."""

    def __init__(self, operation: Operation, workload: Workload, num_blocks: int):
        self.operation, self.workload, self.num_blocks = operation, workload, num_blocks
        self.num_steps = operation.steps_of(workload)
        self.num_warm_up = self.num_steps // 4
        self.prepared = jax.block_until_ready(operations.prepare(operation, workload, num_blocks))
        self.prompt_len = jnp.int32(workload.prompt_len)
        self.ids = [jnp.int32(i) for i in range(self.num_steps)]
        self.figures = (FLOOR, CALL, LOOP) if self.num_steps > 1 else (FLOOR, CALL)
        self.seconds: dict[str, list[float]] = {figure: [] for figure in self.figures}
        self.first_call_s = self.round()
        for seconds in self.seconds.values():
            seconds.clear()
        self._verify()

    def round(self) -> dict[str, float]:
        """Adds samples; returns how long the first call of each figure took."""
        first_call_s = {}
        ends = jnp.array([0, self.num_warm_up, self.num_steps], jnp.int32)
        for figure in self.figures:
            fn, cache, statuses, seconds = jitted(self.operation.step)[figure], self._fresh(), [], []
            for steps in self.ids if figure != LOOP else ((ends[0], ends[1]), (ends[1], ends[2])):
                start = time.perf_counter()
                cache, *results = jax.block_until_ready(fn(cache, steps, self.prompt_len))
                seconds.append(time.perf_counter() - start)
                statuses.append(operations.status_of(results[0]))
            first_call_s[figure] = seconds[0]
            self.seconds[figure] += seconds if figure != LOOP else seconds[1:]
            if figure != FLOOR:
                operations.require_ok(jnp.stack(statuses), f"{self.operation.name}, {figure}")
                self.after = cache
        return first_call_s

    def _fresh(self) -> kv.Cache:
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.prepared))

    def _verify(self) -> None:
        """The last figure's state is sound, and the one that separate calls lead to."""
        cache = self._fresh()
        for i in self.ids:
            cache, _ = jitted(self.operation.step)[CALL](cache, i, self.prompt_len)
        for leaf, expected in zip(jax.tree.leaves(self.after), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected), err_msg=self.operation.name)
        if problems := kv.check_invariants(cache):
            raise RuntimeError(f"{self.operation.name}: {problems[0]}")

    def steps_per_call(self, figure: str) -> int:
        return self.num_steps - self.num_warm_up if figure == LOOP else 1

    def median_us(self, figure: str) -> float:
        if figure == operations.ABOVE_FLOOR:
            return self.median_us(CALL) - self.median_us(FLOOR)
        return 1e6 * float(np.median(self.seconds[figure])) / self.steps_per_call(figure)

    def records(self) -> list[dict]:
        blocks_used = [int(kv.stats(cache).num_blocks_used) for cache in (self.prepared, self.after)]
        records = []
        for figure in self.figures:
            steps_per_call = self.steps_per_call(figure)
            records.append(
                {
                    "operation": self.operation.name,
                    "figure": figure,
                    "workload": self.workload.name,
                    "num_blocks": self.num_blocks,
                    **summary([seconds / steps_per_call for seconds in self.seconds[figure]]),
                    "steps_per_call": steps_per_call,
                    "first_call_s": self.first_call_s[figure],
                    "blocks_used_before_and_after": blocks_used,
                }
            )
        return records


def prepared(operations: Sequence[tuple[Operation, Workload, int]]) -> list[Timing]:
    """What is to be measured together; most of the time goes to compilation, so two at a time."""
    for operation, _, _ in operations:
        jitted(operation.step)  # there is one, whichever thread comes first
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        return list(executor.map(lambda arguments: Timing(*arguments), operations))


def decode_step_bytes(num_blocks: int) -> dict[str, int]:
    """Bytes of the pools and of the temporaries of a compiled decode step: two layers, eight rows."""
    layers = [kv.FullAttention(num_kv_heads=2, head_dim=64)] * 2
    config = kv.CacheConfig(layers=layers, num_blocks=num_blocks, max_seqs=8, max_seq_len=512)

    def decode_step(cache, q, k, v):
        cache, step = kv.extend(cache, jnp.ones(8, jnp.int32), max_new=1)
        outs = []
        for layer in range(config.num_layers):
            cache, out = kv.attention(cache, layer, q, k, v, step)
            outs.append(out)
        return cache, jnp.stack(outs), step.status

    q, k = jnp.zeros((8, 1, 4, 64)), jnp.zeros((8, 1, 2, 64))
    lowered = jax.jit(decode_step, donate_argnums=0).lower(kv.init(config), q, k, k)
    memory = lowered.compile().memory_analysis()
    assert memory is not None, "this platform's compiler does not report memory"
    return {"pools": kv.memory_bytes(config), "temporaries": memory.temp_size_in_bytes}


def control_bytes(cache: kv.Cache) -> dict[str, int]:
    fields = jax.tree_util.tree_leaves_with_path(cache.control)
    sizes = {jax.tree_util.keystr(path).lstrip("."): leaf.nbytes for path, leaf in fields}
    return {"total": sum(sizes.values()), **sizes}


def bars_of(full: Sequence[Timing], growth: Sequence[Sequence[Timing]], memory: dict) -> list[dict]:
    bars = [
        at_most(f"{timing.operation.name}, {figure}, us", timing.median_us(figure), limit)
        for timing in full
        for figure, limit in timing.operation.bars.items()
    ]
    for smallest, *larger in growth:
        for timing in larger:
            for figure in smallest.figures[1:]:
                ratio = timing.median_us(figure) / smallest.median_us(figure)
                pools = f"{smallest.num_blocks:,} -> {timing.num_blocks:,} blocks"
                bar = f"{timing.operation.name}, {figure}, {pools}, times"
                bars.append(at_most(bar, ratio, GROWTH[timing.num_blocks]))
    grown = {kind: memory["8N"][kind] - memory["N"][kind] for kind in memory["N"]}
    bar = "growth of a decode step's temporaries, per growth of the pools"
    return [*bars, at_most(bar, grown["temporaries"] / grown["pools"], 0.01)]


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.bookkeeping", __doc__)
    add_options(parser, draws=False)
    parser.add_argument("--peers", action="store_true", help="time vLLM's manager and levanter's pager too")
    parser.add_argument(
        "--peers-python", action="append", default=[], metavar="PYTHON", help="where a peer is installed"
    )
    text, positive = "time for one operation's figures, per pool", command.number(0, is_above=True)
    parser.add_argument("--seconds", type=positive, default=0.5, help=text)
    options = parser.parse_args(arguments)
    if options.peers_python and not options.peers:
        parser.error("got --peers-python without --peers, expected both: add --peers")
    for python in options.peers_python:
        if shutil.which(python) is None:
            parser.error(f"got --peers-python {python}, expected a Python interpreter")

    full = prepared([(operation, FULL, operations.NUM_BLOCKS) for operation in OPERATIONS])
    take_turns([timing.round for timing in full], options.seconds * len(full))
    growth = []
    for operation in OPERATIONS:
        if operation.index == operations.EVERYTHING:
            continue  # with the pool grows what there is to evict
        timings = prepared([(operation, SMALL, size) for size in (SMALLEST_POOL, *GROWTH)])
        take_turns([timing.round for timing in timings], options.seconds * len(timings))
        growth.append(timings)
    memory = {"N": decode_step_bytes(256), "8N": decode_step_bytes(8 * 256)}
    sizes = {
        "num_blocks": operations.NUM_BLOCKS,
        "block_size": operations.BLOCK_SIZE,
        "max_seq_len": operations.MAX_SEQ_LEN,
        "prompt_len": FULL.prompt_len,
        "context_lens": OPERATIONS[0].lens(FULL).tolist(),
    }
    peers = run_peers(sizes, options.peers_python) if options.peers else []
    report = {
        "control_bytes": control_bytes(full[0].prepared),
        "decode_step_bytes": memory,
        "records": [
            record for timings in (full, *growth) for timing in timings for record in timing.records()
        ],
        "peers": peers,
        "bars": bars_of(full, growth, memory),
    }
    return deliver(report, options, show)


if __name__ == "__main__":
    command.run(main)
