"""One process of a team, which a test starts: `python -m tests.processes.team_worker PORT RANK SIZE MODE`.

The mesh has a scheduler in each process, and heads over its two devices. Modes are the functions below, with
a word after a colon; what happened is printed as JSON.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any
from unittest import mock

# Where the model of a process raises, the leader waits so long for it.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_collective_timeout_seconds="
) + ("15" if sys.argv[-1] == "raising:" else "50")
os.environ["JAX_ENABLE_RECOVERABILITY"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler, distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvcache_jax as kv
from kvcache_jax.arrays.sharding import put
from models import checkpoint
from tests.engine import exact_model
from tests.engine.exact_engine import SIZES, expect, num_cached, serve
from tests.engine.exact_model import DIM, make_params, random_request
from tests.engine.exact_model import forward_of_halves as forward
from tests.processes import rounding_model
from tests.processes.router import Told
from tests.processes.same_calls import CALLED, CALLS

TIMEOUT_S, LONG_TIMEOUT_S = 5.0, 60.0


def make_engine(
    size,
    make_team: Any = kv.processes.DistributedTeam,
    model=forward,
    params=None,
    axes=("rows", "heads"),
    timeout_s=TIMEOUT_S,
    **options,
):
    """The first of the axes has the processes, the second their devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(size, 2), axes)
    config = kv.CacheConfig(
        [kv.FullAttention(2, DIM)],
        num_blocks=11,
        block_size=4,
        max_seqs=4,
        max_seq_len=48,
        enable_prefix_caching=True,
        head_axis="heads" if "heads" in axes else None,
        context_axis="context" if "context" in axes else None,
    )
    with contextlib.suppress(ValueError):
        kv.engine.Placement(mesh, "rows")
        raise AssertionError("a mesh of several processes needs a team")
    team = make_team(timeout_s=timeout_s)
    placement = kv.engine.Placement(mesh, "rows", team=team)
    return team, kv.Engine(model, params or make_params(), config, **SIZES | options, placement=placement)


def mixes(size, num):
    """Mixes one after the other; weights change, memory is given back and taken, requests are cancelled."""
    team, engine = make_engine(size, timeout_s=LONG_TIMEOUT_S)
    rng, num_done, num_cancelled = np.random.default_rng(5), 0, []
    for round_ in range(int(num)):
        shift = round_ // 2 % 2
        if round_ % 2 == 0 and round_:
            engine.set_params(make_params(shift))

        def lead(shift=shift, round_=round_):
            requests = [random_request(rng, (round_, i)) for i in range(int(rng.integers(1, 9)))]
            num_before = int(rng.integers(0, 4))  # pushed before what happens to the engine
            if round_ % 8 in (1, 5):
                engine.release(keep=round_ % 8 == 5)
                engine.push(requests[:num_before])
                engine.restore()
            elif round_ % 8 == 3:
                engine.push(requests[:num_before])
                engine.drain(2)
                engine.reset()
            elif round_ % 8 == 7:
                engine.push(requests[:num_before])
                engine.drain(2)
                engine.take_events()
                num_cancelled.append(sum(engine.cancel(request.id) for request in requests[:num_before]))
                del requests[:num_before]
                num_before = 0
            else:
                num_before = 0
            expect(serve(engine, requests[num_before:]), requests, shift=shift)
            return len(requests)

        num_done += team.run(lead) or 0
    if team.is_leader:
        counts = engine.figures().counts
        preemptions = counts[kv.engine.Counter.PREEMPTIONS]
        print(json.dumps({"requests": num_done, "preemptions": preemptions, "cancelled": sum(num_cancelled)}))
    invariant = functools.partial(make_engine, size, lambda **_: team, rounding_model.forward)
    engine = invariant(params=rounding_model.make_params(), batch_invariant=True)[1]
    said = team.run(lambda: rounding_model.bits_of(engine, rounding_model.REQUESTS))
    if team.is_leader:
        print(json.dumps({"bits": said}))


class Doomed(kv.processes.DistributedTeam):
    """A team whose process 1 does something before orders with certain numbers; the first is to compile."""

    at, deed = (0,), staticmethod(lambda: None)
    num_obeyed = 0

    def join(self, obey):
        def obey_or(*order):
            self.num_obeyed += 1
            if self.num_obeyed in self.at:
                self.deed()
            obey(*order)

        return super().join(obey_or if jax.process_index() == 1 else obey)


def send_signal(name):
    print(json.dumps({"at": time.time()}), flush=True)
    os.kill(os.getpid(), getattr(signal, f"SIG{name}"))


def serve_one_mix(team, engine, num_resets=0):
    """Ends as it should, or says why not, and ends the process at once, for a collective may hang."""
    requests = [random_request(np.random.default_rng(7), i) for i in range(20)]

    def lead():
        for num_left in reversed(range(1 + num_resets)):
            try:
                expect(serve(engine, requests if num_left == num_resets else []), requests)
            except kv.engine.EngineFailed as error:
                cause = repr(error.__cause__)
                print(json.dumps({"failed": str(error), "cause": cause, "at": time.time()}), flush=True)
                if not num_left:
                    os._exit(3)
                engine.reset()
        return len(requests)

    print(json.dumps({"requests": team.run(lead)}))


def between(size, name):
    """Process 1 gets a signal between two dispatches."""
    Doomed.at, Doomed.deed = (4,), staticmethod(lambda: send_signal(name))
    serve_one_mix(*make_engine(size, Doomed))


def within(size, name):
    """Process 1 gets a signal while it computes a dispatch."""

    def wait_and_send():
        while all(flight.reports.is_ready() for flight in tuple(engine._device._in_flight)):
            time.sleep(1e-4)
        send_signal(name)

    Doomed.at, Doomed.deed = (4,), staticmethod(lambda: threading.Thread(target=wait_and_send).start())
    team, engine = make_engine(size, Doomed)
    serve_one_mix(team, engine)


def late(size, seconds):
    """Process 1 is late, by more than silence would be excused: with its program, and with a dispatch."""
    Doomed.at, Doomed.deed = (1, 4), staticmethod(lambda: time.sleep(float(seconds)))
    serve_one_mix(*make_engine(size, Doomed))


def raising(size, _):
    """A callback in the model of process 1 raises, in a step with a collective."""
    serve_one_mix(*make_engine(size, model=forward_with_callback), num_resets=1)


num_calls = 0


def forward_with_callback(params, tokens, cache, step):
    """The model with a step in which a disk of process 1 is full."""

    def call(values):
        global num_calls
        num_calls += 1
        if num_calls == 40 and jax.process_index() == 1:
            raise OSError("a disk is full")
        return values

    tokens = jax.pure_callback(call, jax.ShapeDtypeStruct(tokens.shape, tokens.dtype), tokens)
    return forward(params, tokens, cache, step)


def attached(size, path, run):
    """New processes compute of prompts that others committed what a warm engine would, by a store.

    Process 1 of the first ones is killed. The second ones have the tokens of each block, and so the context,
    in all processes.
    """
    store, prompts = kv.tiers.DirectoryStore(path), [[i, *range(1, 12)] for i in range(4)]
    requests = [kv.GenerationRequest(prompt, 5, id=i) for i, prompt in enumerate(prompts)]
    others = [random_request(np.random.default_rng(7), (0, i)) for i in range(12)]
    if run == "first":
        mixes, (team, engine) = [requests, requests, others], make_engine(size, timeout_s=15.0)
    else:
        mixes, axes = [requests, others], ("context", "rows")
        team, engine = make_engine(size, model=exact_model.forward, axes=axes, timeout_s=LONG_TIMEOUT_S)

    def lead():
        publisher, link = Told(), kv.tiers.AttachedStore(store, weights="w", timeout=60.0)
        engine.attach(link)
        engine.attach(publisher)
        cached = [num_cached(engine, mix) for mix in mixes]
        publisher.check(engine)
        assert publisher.num_removed > 0
        link.flush()
        assert not link.report().reasons and link.num_dropped == 0
        hits = int(engine.metrics()["vllm:external_prefix_cache_hits"])
        print(json.dumps({"cached": cached, "hits": hits}), flush=True)

    team.run(lead)
    if not team.is_leader:
        with contextlib.suppress(RuntimeError):
            engine.attach(kv.engine.Attachment())
            raise AssertionError("the leader alone has attachments")
    if run == "first":
        if not team.is_leader:
            send_signal("KILL")
        serve_one_mix(team, engine)


def calls(size, _):
    """All processes call the same; heads of blocks are split over them, tokens over their devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(size, 2), ("heads", "context"))
    team = kv.processes.DistributedTeam(timeout_s=LONG_TIMEOUT_S)
    load_over(mesh)
    config, said = dataclasses.replace(CALLED, head_axis="heads", context_axis="context"), {}
    with jax.set_mesh(mesh):
        assert not kv.init(config).pools[0].k.is_fully_addressable
        params = put(make_params(), NamedSharding(mesh, PartitionSpec()))
        for name, call in CALLS.items():
            with team.guard(name):
                said[name] = call(exact_model.forward, params, config)
    print(json.dumps(said))


def guarded(size, name):
    """Process 1 gets a signal within a call that all processes make."""
    team = kv.processes.DistributedTeam(timeout_s=TIMEOUT_S)
    mesh, add = Mesh(jax.devices(), "rows"), jax.jit(jnp.sum)
    values = put(np.ones(2 * size), NamedSharding(mesh, PartitionSpec("rows")))
    end_after(40)
    with team.guard("add"):
        for i in range(100):
            if jax.process_index() == 1 and i == 20:
                send_signal(name)
            assert add(values) == 2 * size


def load_over(mesh):
    """Each device has its part of a checkpoint."""
    whole = checkpoint.load(STDLIB)
    split = checkpoint.load(STDLIB, sharding=lambda path, shape: NamedSharding(mesh, spec_of(shape)))
    assert sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(split)) > 5
    for leaf, full in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        for shard in leaf.addressable_shards:
            assert (np.asarray(shard.data) == np.asarray(full)[shard.index]).all()


def spec_of(shape):
    return PartitionSpec("heads") if shape and shape[0] % 2 == 0 else PartitionSpec()


STDLIB = pathlib.Path(__file__).parents[2] / "models/stdlib_bytes"


def leaving(size, seconds):
    """Process 1 takes long to sign off, at its end; of two teams, which are forgotten by then."""
    for _ in range(2):
        kv.processes.DistributedTeam(timeout_s=LONG_TIMEOUT_S)
    if jax.process_index() == 1:
        shutdown = jax.distributed.shutdown
        jax.distributed.shutdown = lambda: (time.sleep(float(seconds)), shutdown())


def differing(size, _):
    """Process 1 has other parameters, sizes, options or calls, or fails: each is named, and nothing runs."""
    is_other = jax.process_index() == 1
    requests = [random_request(np.random.default_rng(7), 0)]

    def raising(*arguments, **named):
        if is_other:
            raise OSError("a file of the model is missing")
        return forward(*arguments, **named)

    def calls():
        team, engine = make_engine(size, functools.partial(kv.processes.DistributedTeam, exits=False))
        if not is_other:
            engine.set_params(make_params(1))
        team.run(lambda: serve(engine, requests))

    def told(**options):
        team, engine = make_engine(size, **options)
        team.run(lambda: serve(engine, requests))

    def exits():
        if is_other:
            team = kv.processes.DistributedTeam()
            raise OSError(f"process 1 ends by an error of its own, of which {team} is not told")
        make_engine(size)

    def absent():  # the other one is gone
        end_after(60)
        make_engine(size, timeout_s=0.4)

    limits = dataclasses.replace(SIZES["limits"], max_requests=7 + is_other)
    deeds = {
        "params": lambda: make_engine(size, params=make_params(int(is_other))),
        "program": lambda: told(token_budget=12 + 4 * is_other),
        "sizes": lambda: told(limits=limits),
        "failure": lambda: told(model=raising),
        "calls": calls,
        "exit": exits,
        "absent": absent,
    }
    for what, do in deeds.items():
        begun = time.monotonic()
        try:
            do()
        except (ValueError, RuntimeError) as error:
            print(json.dumps({what: str(error), "seconds": time.monotonic() - begun}), flush=True)
    if not is_other:
        os._exit(0)


def stopped(size, _):
    """The leader is stopped, and the store with it: process 1 waits for an order, process 2 is within one."""
    team = kv.processes.DistributedTeam(timeout_s=TIMEOUT_S)
    team.join(lambda order: time.sleep(1000 if jax.process_index() == 2 else 0))

    if not team.is_leader:
        end_after(40)

    def lead():
        team.tell(0, "sleep")
        time.sleep(2)
        send_signal("STOP")

    team.run(lead)


def headless(size, _):
    """The leader is killed: the coordination service was in it."""
    team = kv.processes.DistributedTeam()
    if team.is_leader:
        send_signal("KILL")
    team.run(lambda: None)


def keep_compiled():
    """Lets followers keep compiled programs for the next test, too; by jax the leader alone does."""
    write = compiler._cache_write

    def write_as_leader(*args):
        with mock.patch.object(distributed.global_state, "process_id", 0):
            write(*args)

    compiler._cache_write = write_as_leader


def end_after(seconds):
    """Ends this process, where it waits for ever."""
    timer = threading.Timer(seconds, os._exit, [8])
    timer.daemon = True
    timer.start()


def end_with(parent):
    """Ends this process, which may hang, once the test that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(9)


def main(port, rank, size, mode):
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, heartbeat_timeout_seconds=60)
    keep_compiled()
    name, *words = mode.split(":")
    globals()[name](size, *words)


if __name__ == "__main__":
    port, rank, size, mode = sys.argv[1:]
    main(int(port), int(rank), int(size), mode)
