"""Engines on a mesh of several processes: they say what one says, and nothing hangs when one is lost."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed

import kvcache_jax as kv
from kvcache_jax.core.team import marks_of
from tests.engine import exact_model
from tests.engine.exact_engine import SIZES
from tests.engine.exact_model import DIM, make_params
from tests.processes import rounding_model
from tests.processes.same_calls import CALLED, CALLS

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/processes.md"
SILENT = "process 1 has given no sign of life for 5 s"
LEADER, DOOMED, OTHER = 0, 1, 2
PLAIN = kv.CacheConfig(
    [kv.FullAttention(2, DIM)],
    num_blocks=11,
    block_size=4,
    max_seqs=4,
    max_seq_len=48,
    enable_prefix_caching=True,
)


def free_port():
    """Finds one among the ports that JAX chooses from under Slurm."""
    for port in random.sample(range(2**16 - 2**12, 2**16), 100):
        with contextlib.suppress(OSError), socket.socket() as opened:
            opened.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def run_processes(num, arguments, variables=lambda *place: {}, limit_s=400, doomed=DOOMED):
    """Runs a command in `num` processes; returns their exit statuses, what each printed as JSON, and stderr.

    The doomed one may be stopped for ever: it is killed once the others have ended.
    """
    port, cache = free_port(), jax.config.jax_compilation_cache_dir
    known = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    environment = os.environ | known | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments(port, rank, num)],
            cwd=ROOT,
            env=environment | variables(port, rank, num),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num)
    ]
    found = {}
    try:
        for rank in (*(rank for rank in range(num) if rank != doomed), doomed):
            if rank == doomed and len(found) == num - 1 and any(code for code, *_ in found.values()):
                processes[rank].kill()
            out, err = processes[rank].communicate(timeout=limit_s)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            found[rank] = processes[rank].returncode, lines, err
    finally:
        for process in processes:
            process.kill()
    return found


def run_workers(num, mode, **options):
    words = ["-m", "tests.processes.team_worker"]
    return run_processes(
        num, lambda port, rank, num: [*words, str(port), str(rank), str(num), mode], **options
    )


@pytest.mark.slow
def test_random_mixes_say_what_each_request_says_alone():
    """Between them weights change, memory is given back and taken, the engine is reset, requests are ended.

    In batch-invariant mode the bits are the same as in one process, where the requests come in another order.
    """
    found = run_workers(2, "mixes:200")
    assert [code for code, *_ in found.values()] == [0, 0], found
    counts, said = found[LEADER][1]
    assert counts["requests"] > 800 and counts["preemptions"] > 100 and counts["cancelled"] > 20, counts
    assert found[DOOMED][1] == []
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "heads"))
    engine = kv.Engine(
        rounding_model.forward,
        rounding_model.make_params(),
        dataclasses.replace(PLAIN, head_axis="heads"),
        **SIZES,
        batch_invariant=True,
        placement=kv.engine.Placement(mesh, "rows"),
    )
    bits = rounding_model.bits_of(engine, rounding_model.REQUESTS[::-1])[::-1]
    assert json.loads(json.dumps(bits)) == said["bits"]
    assert len({logprob for _, logprobs, _ in bits for logprob in logprobs}) > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "mode"), [(3, "between:KILL"), (3, "between:STOP"), (2, "within:KILL"), (2, "within:STOP")]
)
def test_all_others_end_with_a_sentence_that_names_the_lost_process(num, mode):
    found = run_workers(num, mode)
    code, [said], _ = found[LEADER]
    assert code == 3 and said["failed"].startswith(SILENT), said
    [deed] = found[DOOMED][1]
    assert 0 < said["at"] - deed["at"] < 20
    if num == 3:
        code, _, err = found[OTHER]
        assert code == 70 and SILENT in err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["guarded:KILL", "guarded:STOP"])
def test_a_call_of_all_processes_ends_with_a_sentence_that_names_the_lost_process(mode):
    """By an error, where the collective has one; where it hangs the processes are ended."""
    found = run_workers(3, mode, limit_s=60)
    [deed] = found[DOOMED][1]
    assert time.time() - deed["at"] < 20
    for rank in (LEADER, OTHER):
        code, _, err = found[rank]
        assert code in (1, 70) and SILENT in err.splitlines()[-1], found


@pytest.mark.slow
def test_new_processes_find_in_a_store_what_others_committed(tmp_path):
    """Process 1 was killed. Heads of blocks are split within each process, then tokens over both."""
    found = run_workers(2, f"attached:{tmp_path}:first")
    code, (first, failed), _ = found[LEADER]
    assert code == 3 and "process 1 has given no sign of life for 15 s" in failed["failed"]
    found = run_workers(2, f"attached:{tmp_path}:again")
    assert [code for code, *_ in found.values()] == [0, 0], found
    [again] = found[LEADER][1]
    (cold, warm, _), (restarted, _) = first["cached"], again["cached"]
    assert (cold, warm, restarted) == (0, 4 * 8, 4 * 8) and again["hits"] >= restarted
    prompts, store = [[i, *range(1, 12)] for i in range(4)], kv.tiers.DirectoryStore(tmp_path)
    cache, report = kv.tiers.load(store, kv.init(PLAIN), weights="w", prompts=prompts)
    assert report.num_loaded == 4 * 2 and not report.reasons
    hits = [int(kv.lookup(cache, np.array([prompt]), [12])[0]) for prompt in prompts]
    assert hits == [8] * 4


@pytest.mark.slow
def test_calls_in_all_processes_give_what_one_process_gets():
    """Of a mesh that splits heads over the processes and tokens of blocks over their devices."""
    found = run_workers(2, "calls:")
    assert [code for code, *_ in found.values()] == [0, 0], found
    [said], [other] = found[LEADER][1], found[DOOMED][1]
    assert said == other
    scored = said.pop("scored")
    for name, results in said.items():
        assert results == CALLS[name](exact_model.forward, make_params(), CALLED)
    alone = CALLS["scored"](exact_model.forward, make_params(), CALLED)
    np.testing.assert_allclose(np.array(scored), np.array(alone), rtol=1e-6)


@pytest.mark.slow
def test_a_process_that_is_late_is_not_lost():
    found = run_workers(2, "late:8")
    assert [(code, said) for code, said, _ in found.values()] == [
        (0, [{"requests": 20}]),
        (0, [{"requests": None}]),
    ]


@pytest.mark.slow
def test_all_processes_end_well_where_one_takes_long_to_sign_off():
    """The leader's end would abort it."""
    found = run_workers(2, "leaving:3")
    assert [code for code, *_ in found.values()] == [0, 0], found
    text = (
        "--xla_cpu_collective_timeout_seconds is 50: where a process is slow for as long, and not lost, the"
    )
    assert text in found[LEADER][2] and "RECOVERABILITY" not in found[LEADER][2]


@pytest.mark.slow
def test_an_error_in_the_model_of_one_process_is_named():
    """A reset is of no use then, and it is said what is."""
    found = run_workers(2, "raising:")
    code, (said, again), _ = found[LEADER]
    assert code == 3 and said["failed"] == "process 1 failed: OSError: a disk is full"
    assert "expected engine.reset() where all failed alike; else that all processes are s" in again["failed"]
    assert "Traceback" in found[DOOMED][2] and "OSError: a disk is full" in found[DOOMED][2]


@pytest.mark.slow
def test_processes_that_differ_are_told_so():
    """All of it before anything is compiled, and within half a minute."""
    found = run_workers(2, "differing:")
    code, lines, _ = found[LEADER]
    seconds = [line.pop("seconds") for line in lines]
    assert max(seconds[-3:]) < 30, lines  # the others trace a program, and wait for nothing
    said, other = ({what: line[what] for line in found[rank][1] for what in line} for rank in (0, 1))
    program = "process 1 has other program than process 0, expected Engine with equal arguments, of equal"
    order = "expected the same calls in the same order in all processes"
    assert code == 0 and said == {
        "params": "process 1 has other params at ['shift'] () than process 0, expected Engine with equal "
        "arguments, of equal code, in all processes",
        "program": f"{program} code, in all processes",
        "sizes": f"{program} code, in all processes",
        "failure": "process 1 fails in Engine, and this one does not: a file of the model is missing",
        "calls": f"process 1 calls run where process 0 calls set_params, {order}",
        "exit": f"process 1 calls exit where process 0 calls Engine, {order}",
        "absent": f"process 1 has made no team for 4 s, {order}: it has ended, or is to make its team sooner",
    }
    assert other["program"].startswith("process 0 has other program than process 1, expected Engine")


@pytest.mark.slow
def test_the_others_end_with_a_sentence_where_the_leader_is_stopped():
    """The store, which one asks for an order, answers no more; the other one sleeps, as if it compiled."""
    found = run_workers(3, "stopped:", doomed=LEADER, limit_s=60)
    [deed] = found[LEADER][1]
    assert time.time() - deed["at"] < 30
    for rank in (DOOMED, OTHER):
        code, _, err = found[rank]
        assert code == 70 and "process 0 has given no sign of life for 5 s, and what the others" in err, found


@pytest.mark.slow
def test_the_end_of_the_leader_ends_all():
    """As the guide says: an abort of jax, for the coordination service was in it."""
    found = run_workers(2, "headless:", doomed=LEADER)
    assert found[LEADER][0] == -signal.SIGKILL and found[DOOMED][0] == -signal.SIGABRT, found


def slurm_variables(port, rank, num):
    """What Slurm says to a task; JAX takes the coordinator's port from the number of the job."""
    values = {"JOB_ID": port - (2**16 - 2**12), "STEP_NODELIST": "127.0.0.1", "NTASKS": num}
    values |= {"PROCID": rank, "LOCALID": rank}
    return {"JAX_PLATFORMS": "cpu"} | {f"SLURM_{name}": str(value) for name, value in values.items()}


LAUNCHERS = {
    "by hand": (lambda port, rank, num: [str(port), str(rank)], lambda *place: {}),
    "by Slurm": (lambda *place: [], slurm_variables),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_program_of_the_guide_runs(launcher, tmp_path):
    program = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    (tmp_path / "program.py").write_text(program)
    words, variables = LAUNCHERS[launcher]
    found = run_processes(2, lambda *place: [str(tmp_path / "program.py"), *words(*place)], variables)
    assert [code for code, *_ in found.values()] == [0, 0], found
    assert found[LEADER][1] == [{"0": [3, 4, 5], "1": [5, 6, 7, 8]}] and found[DOOMED][1] == []
    # Neither setting was made, and each is explained.
    for text in (
        "JAX_ENABLE_RECOVERABILITY is off: where a process ends, jax aborts all others before the team can",
        "XLA_FLAGS has no --xla_cpu_collective_timeout_seconds: where a process is lost, calls outside of an",
    ):
        assert all(err.count(text) == 1 for *_, err in found.values()), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool"])
def test_marks_tell_arrays_apart(dtype):
    """By each bit, and by its place."""
    values = jnp.asarray(np.arange(12).reshape(3, 4) % 5, dtype)
    params = {"a": values, "b": [jnp.int32(3)]}
    marks = marks_of(params)
    assert marks == marks_of(jax.tree.map(jnp.copy, params)) and len(marks) == 2
    assert marks != marks_of(params | {"a": values[::-1]})
    assert marks != marks_of(params | {"a": values.at[2, 3].set(values[0, 0])})
    [a, _] = marks.values()
    assert [*marks_of({"a": values}).values()] == [a]


def test_a_coordinator_that_cannot_be_there_is_named():
    """Before jax would abort the process."""
    check = kv.processes.check_coordinator
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"the coordinator's port {port} cannot be used .*, expected a fre"):
            check(f"127.0.0.1:{port}", LEADER)
        check(f"127.0.0.1:{port}", DOOMED)
    with pytest.raises(TimeoutError, match=f"process 1 found no coordinator at 127.0.0.1:{port} in 0.2 s"):
        check(f"127.0.0.1:{port}", DOOMED, timeout_s=0.2)
    check(f"127.0.0.1:{free_port()}", LEADER)
    for address in ("host0", "host0:", ":1234", "host0:0", "host0:65536"):
        with pytest.raises(
            ValueError, match=f"address is '{address}', expected a host and a port such as 'h"
        ):
            check(address, LEADER)


def test_a_coordinator_is_looked_for_no_longer_than_asked(monkeypatch):
    """Also where the host refuses at first, and then answers nothing."""

    def connect(address, timeout):
        asked.append(timeout)
        time.sleep(0.2)
        raise ConnectionRefusedError("refused")

    asked = []
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(TimeoutError, match="found no coordinator at host0:1 in 1 s"):
        kv.processes.check_coordinator("host0:1", DOOMED, timeout_s=1.0)
    assert len(asked) > 2 and max(asked) <= 1 and asked[-1] < 0.9 and asked == sorted(asked)[::-1], asked


class Board:
    """The coordination service's store, of one process."""

    def __init__(self):
        self.values = {}

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        self.values[key] = value

    def key_value_delete(self, key):
        self.values.pop(key, None)

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        return self.values[key]

    def key_value_dir_get_bytes(self, folder):
        return [(key, value) for key, value in [*self.values.items()] if key.startswith(folder)]


def team_of_one(monkeypatch, timeout_s, **options):
    """A team in this process, which takes what is put on the board for signs of others."""
    assert jax.devices()  # with this client no backend would start
    monkeypatch.setattr(distributed.global_state, "client", board := Board())
    return kv.processes.DistributedTeam(timeout_s=timeout_s, **options), board


def wait_for(is_there):
    end = time.monotonic() + 5
    while not is_there() and time.monotonic() < end:
        time.sleep(0.02)
    assert is_there()


@pytest.mark.filterwarnings("ignore:.*(RECOVERABILITY|collective_timeout)")
def test_a_follower_that_fails_prints_its_traceback(monkeypatch, capsys):
    """The leader is told the last line, and the follower goes on."""

    def obey(order, path):
        done.append(order)
        pathlib.Path(path).read_bytes()

    (team, board), done = team_of_one(monkeypatch, timeout_s=30.0), []
    team.join(obey)
    for order in ((0, "first", ("/nowhere",)), (0, "second", (__file__,)), None):
        team._send(order)
    team._num_orders = 0
    team._follow()
    err = capsys.readouterr().err
    assert "Traceback" in err and "in obey" in err and err.endswith("directory: '/nowhere'\n")
    [failure] = [value for key, value in board.values.items() if "failed" in key]
    assert failure.startswith(b"1 0 0 [Errno 2]") and done == ["first", "second"]


@pytest.mark.filterwarnings("ignore:.*(RECOVERABILITY|collective_timeout)")
def test_a_guarded_call_is_lost_where_another_process_has_failed_in_it(monkeypatch):
    """By no error of a device: the others wait for it, and it goes on. An earlier call's failure is past."""
    team, board = team_of_one(monkeypatch, timeout_s=0.2, exits=False)

    def fail_elsewhere():
        team._note_failure(OSError("a disk is full"))
        board.values[f"{team._key}failed/1"] = board.values[f"{team._key}failed/0"]

    def wait_long(num_looks=team._grace_looks + 3):
        wait_for(lambda until=team._num_looks + num_looks: team._num_looks > until)

    with pytest.raises(OSError, match="a disk is full"), team.guard("load"):  # all fail alike
        fail_elsewhere()
        wait_for(lambda: team._failed)
        wait_long(3)
        raise OSError("a disk is full")
    wait_long()
    assert team._lost is None
    with team.guard("load"):
        wait_long()
        assert team._lost is None
    team._check()
    with team.guard("load"):
        fail_elsewhere()
        wait_for(lambda: team._lost)
    sentence = "process 1 failed in load, for which this process waits: a disk is full"
    with pytest.raises(kv.processes.ProcessLost, match=sentence), team.guard("load"):
        raise AssertionError("a team that is lost begins no call")


@pytest.mark.filterwarnings("ignore:.*(RECOVERABILITY|collective_timeout)")
def test_guards_within_one_another_and_their_names(monkeypatch):
    """The outer one explains, once. A name is any text: it comes to the others with each sign of life."""
    (team, board), explained = team_of_one(monkeypatch, timeout_s=1.0), []

    def explain(error):
        explained.append((str(error), team._is_guarded))
        return error

    monkeypatch.setattr(team, "explained", explain)
    for name in ("inner", "outer"):
        with pytest.raises(jax.errors.JaxRuntimeError, match=name), team.guard("all"):
            with team.guard("a part"):
                if name == "inner":
                    raise jax.errors.JaxRuntimeError(name)
            raise jax.errors.JaxRuntimeError(name)
    assert explained == [("inner", True), ("outer", True)] and not team._is_guarded
    with team.guard("load all weights"):
        alive = f"{team._key}alive/"
        wait_for(lambda: b"load all weights" in board.values[f"{alive}0"])
        board.values[f"{alive}1"] = board.values[f"{alive}0"]
        wait_for(lambda looks=team._num_looks + 2: team._num_looks > looks)
    assert team._lost is None
    with pytest.raises(TypeError, match="call is 3, expected the name of a call, a string"), team.guard(3):  # type: ignore
        pass


def test_a_team_needs_several_processes():
    with pytest.raises(
        RuntimeError, match="there is no team of one process, expected a call of jax.distribu"
    ):
        kv.processes.DistributedTeam()
    with pytest.raises(ValueError, match="timeout_s is 0, expected a positive number of seconds"):
        kv.processes.DistributedTeam(timeout_s=0)
    for value in ("5", float("inf"), None):
        with pytest.raises(ValueError, match=f"timeout_s is {value!r}, expected a finite number"):
            kv.processes.DistributedTeam(timeout_s=value)  # type: ignore
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("rows",))
    with pytest.raises(TypeError, match="team is 3, expected a kv.processes.DistributedTeam"):
        kv.engine.Placement(mesh, "rows", team=3)  # type: ignore
