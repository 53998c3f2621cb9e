"""Question: what does an engine on a mesh of two processes cost a dispatch?

Command: python -m experiments.team [--dispatches N] [--rounds N] [--json]
Machine: 2 virtual cores of an Intel Xeon, other work beside it; jax 0.12.0.1
Answer:  8.3 ms on 27.9 (bar 10), where each device has rows of its own; 48 ms on 25.6 where heads are over
  two devices, for a step's sum over them goes by Gloo then.

The same mesh of four devices in one process and in two with two devices each, by turns. All rows decode, and
each dispatch is of 32 steps: its median time, report included, and the difference, which is the order, the
report of all shards, and processes that wait for each other. Once each device has rows of its own, so that no
step has a collective; and once the heads are over the two devices of a process, which add up in each step, by
Gloo where there are two processes.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from experiments.common import command, timing
from experiments.common.report import add_options, at_most, deliver, show_bars, show_provenance

NUM_ROWS, NUM_STEPS, DIM, MOST_MS = 4, 32, 16, 10.0


def serve(splits_heads: int, num_processes: int, rank: int, port: int, num_dispatches: int) -> list[float]:
    """Serves rows that decode for long in one process of several; seconds of each dispatch, in the leader."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import kvcache_jax as kv

    team = None
    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
        team = kv.processes.DistributedTeam()

    def forward(params: Any, tokens: jax.Array, cache: kv.Cache, step: kv.Step) -> Any:
        shape = *tokens.shape, 2 // mesh.shape["heads"], DIM
        values = jnp.broadcast_to(jnp.sin(tokens[..., None, None].astype(jnp.float32)), shape)
        cache, out = kv.attention(cache, 0, values, values, values, step)
        total = jnp.sum(out, axis=(2, 3))  # type: ignore
        total = jax.lax.psum(total, "heads") if splits_heads else total
        return jax.nn.one_hot((tokens + 1) % 64, 64) + 1e-3 * jnp.tanh(total)[..., None], cache

    num_new = (num_dispatches + 2) * NUM_STEPS
    devices = np.array(jax.devices()).reshape((2, 2) if splits_heads else (4, 1))
    mesh = jax.sharding.Mesh(devices, ("rows", "heads"))
    config = kv.CacheConfig(
        [kv.FullAttention(2, DIM)],
        max_seqs=NUM_ROWS,
        max_seq_len=num_new + 8,
        head_axis="heads" if splits_heads else None,
    )
    options = {"team": team} if team else {}
    placement = kv.engine.Placement(mesh, "rows", **options)
    engine = kv.Engine(forward, {}, config, steps_per_dispatch=NUM_STEPS, placement=placement)

    def lead() -> list[float]:
        engine.push([kv.GenerationRequest([i + 1], num_new) for i in range(len(devices) * NUM_ROWS)])
        engine.drain(NUM_STEPS)
        engine.drain(NUM_STEPS)
        seconds = []
        for _ in range(num_dispatches - 2):
            begun = time.perf_counter()
            engine.drain(NUM_STEPS)
            seconds.append(time.perf_counter() - begun)
        return seconds

    return (team.run(lead) or []) if team else lead()


def run_processes(splits_heads: int, num_processes: int, num_dispatches: int, folder: str) -> list[float]:
    """Runs all processes of a side, and returns the leader's seconds."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // num_processes}",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_RECOVERABILITY": "1",
        "JAX_COMPILATION_CACHE_DIR": folder,
    }
    words = [[splits_heads, num_processes, rank, port, num_dispatches] for rank in range(num_processes)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "experiments.team", "--process", *map(str, each)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for each in words
    ]
    try:
        out = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return json.loads(out[0].splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--process"]:
        print(json.dumps(serve(*map(int, arguments[1:]))))
        return 0
    parser = command.Parser("experiments.team", __doc__)
    parser.add_argument("--dispatches", type=command.integer(4), default=40, metavar="N")
    parser.add_argument("--rounds", type=command.integer(1), default=2, metavar="N")
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    sides: dict[tuple[int, int], list[float]] = {(heads, num): [] for heads in (0, 1) for num in (1, 2)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for side, seconds in sides.items():
                seconds += run_processes(*side, options.dispatches, folder)
    records: list[dict[str, Any]] = [
        {"a device has": ("rows", "heads")[heads], "processes": num} | timing.summary(seconds)
        for (heads, num), seconds in sides.items()
    ]
    more_ms = (records[1]["median_us"] - records[0]["median_us"]) / 1e3
    bars = [at_most("ms more for a dispatch in two processes, rows", more_ms, MOST_MS)]
    deliver({"records": records, "bars": bars}, options, show)
    return 0


def show(report: dict[str, Any]) -> None:
    show_provenance(report)

    columns = {"a device has": "{a device has}", "processes": "{processes}", **timing.ms_columns()}
    timing.show_records("a dispatch of 32 steps, all rows decoding", columns, report["records"])
    show_bars(report)


if __name__ == "__main__":
    command.run(main)
