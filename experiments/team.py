"""Question: what does an engine on a mesh of two processes cost a dispatch?

Command: python -m experiments.team [--attached] [--dispatches N] [--rounds N] [--json]
Machine: 2 virtual cores of an Intel Xeon, with nothing else on them; jax 0.12.0.1
Answer:  6.2 ms on 11.2 (bar 10), where each device has rows of its own; 39 ms on 12.0 where heads are over
  two devices, for a step's sum over them goes by Gloo then. What is attached waits 6 ms for a gather of two
  processes' control state, and 0.6 in one (an AMD EPYC beside much other work); 36 ms while each array had a
  collective of its own.

The same mesh of four devices in one process and in two with two devices each, by turns. All rows decode, and
each dispatch is of 32 steps: its median time, report included, and the difference, which is the order, the
report of all shards, and processes that wait for each other. Once each device has rows of its own, so that no
step has a collective; and once the heads are over the two devices of a process, which add up in each step, by
Gloo where there are two processes.

--attached: what it costs that something is attached, which sees each shard's index after each dispatch. No
other dispatch is under way then; all control state is gathered, and the index is looked through for changes.
Each device has rows of its own, and all prefixes are published.
"""

import collections
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from experiments.common import command, timing
from experiments.common.report import add_options, at_most, deliver, table

NUM_ROWS, NUM_STEPS, DIM, MOST_MS = 4, 32, 16, 10.0
DEVICES = {"rows on a device": (0, -1), "heads on a device": (1, -1)}
ATTACHED = {"nothing attached": (0, 0), "a follower of the index": (0, 1)}
"""Whether heads are split, and how many are attached; -1 for none, and no index."""


def serve(
    splits_heads: int, num_attached: int, num_processes: int, rank: int, port: int, num_dispatches: int
) -> dict[str, list[float]]:
    """Serves rows that decode for long in one process of several, and times the leader.

    Returns seconds of each dispatch, each gather, and each look at a shard of what was gathered.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import kvcache_jax as kv
    from kvcache_jax.core.attachment import shard_of

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
        enable_prefix_caching=num_attached >= 0,
    )
    options = {"team": team} if team else {}
    placement = kv.engine.Placement(mesh, "rows", **options)
    engine = kv.Engine(forward, {}, config, steps_per_dispatch=NUM_STEPS, placement=placement)

    seconds: dict[str, list[float]] = {"dispatch": [], "gather": [], "look": []}

    class Follower(kv.engine.Attachment):
        """Finds what changed in each shard's index."""

        def __init__(self):
            self.followers = [kv.processes.IndexFollower() for _ in devices]

        def check_shards(self, config: kv.CacheConfig) -> None:
            pass

        def look(self, cache: kv.Cache) -> None:
            begun = time.perf_counter()
            self.followers[shard_of(cache)].update(cache)
            seconds["look"].append(time.perf_counter() - begun)

    def lead() -> dict[str, list[float]]:
        for _ in range(num_attached):
            engine.attach(Follower())
        engine.push([kv.GenerationRequest([i + 1], num_new) for i in range(len(devices) * NUM_ROWS)])
        engine.drain(NUM_STEPS)
        engine.drain(NUM_STEPS)
        seconds["look"].clear()
        for _ in range(num_dispatches - 2):
            begun = time.perf_counter()
            engine.drain(NUM_STEPS)
            seconds["dispatch"].append(time.perf_counter() - begun)
        for _ in range(num_dispatches * num_attached):
            begun = time.perf_counter()
            engine._device.controls()
            seconds["gather"].append(time.perf_counter() - begun)
        return seconds

    return (team.run(lead) or {}) if team else lead()


def run_processes(
    splits_heads: int, num_attached: int, num_processes: int, num_dispatches: int, folder: str
) -> dict[str, list[float]]:
    """Runs all processes of a side, and returns what the leader does of `serve`."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // num_processes}",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_RECOVERABILITY": "1",
        "JAX_COMPILATION_CACHE_DIR": folder,
    }
    side = splits_heads, num_attached, num_processes
    command_line = [sys.executable, "-m", "experiments.team", "--process"]
    options: Any = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    words = [[*side, rank, port, num_dispatches] for rank in range(num_processes)]
    processes = [subprocess.Popen([*command_line, *map(str, each)], **options) for each in words]
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
    parser.add_argument("--attached", action="store_true", help="what it costs that something is attached")
    parser.count("--dispatches", 40, least=4)
    parser.count("--rounds", 2)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    names = ATTACHED if options.attached else DEVICES
    found: dict[tuple[str, str, int], list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name, num in itertools.product(names, (1, 2)):
                for what, seconds in run_processes(*names[name], num, options.dispatches, folder).items():
                    found[what, name, num] += seconds
    records: list[dict[str, Any]] = [
        {"what": what, "side": name, "processes": num} | timing.summary(seconds)
        for (what, name, num), seconds in sorted(found.items())
        if seconds
    ]
    report: dict[str, Any] = {"records": records}
    if not options.attached:
        medians = [record["median_us"] / 1e3 for record in records if record["side"] == "rows on a device"]
        more_ms = medians[1] - medians[0]
        report["bars"] = [at_most("ms more for a dispatch in two processes, rows", more_ms, MOST_MS)]
    columns = {"": "{what}", "with": "{side}", "processes": "{processes}", **timing.ms_columns()}
    return deliver(report, options, table("dispatches of 32 steps, all rows decoding", columns))


if __name__ == "__main__":
    command.run(main)
