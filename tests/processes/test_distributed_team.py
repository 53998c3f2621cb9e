"""Engines on a mesh of several processes: they say what one says, and nothing hangs when one is lost."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core.team import marks_of
from tests.engine import exact_model
from tests.engine.exact_model import make_params
from tests.processes.same_calls import CALLED, CALLS

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/processes.md"
SILENT = "process 1 has given no sign of life for 5 s"
LEADER, DOOMED, OTHER = 0, 1, 2


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def run_processes(num, arguments, limit_s=400):
    """Runs a command in `num` processes; returns their exit statuses, what each printed as JSON, and stderr.

    Process 1 may be stopped for ever: it is killed once the others have ended.
    """
    port, cache = free_port(), jax.config.jax_compilation_cache_dir
    known = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    environment = os.environ | known | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments(port, rank, num)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num)
    ]
    found = {}
    try:
        for rank in (*(rank for rank in range(num) if rank != DOOMED), DOOMED):
            if rank == DOOMED and len(found) == num - 1 and any(code for code, *_ in found.values()):
                processes[rank].kill()
            out, err = processes[rank].communicate(timeout=limit_s)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            found[rank] = processes[rank].returncode, lines, err
    finally:
        for process in processes:
            process.kill()
    return found


def run_workers(num, mode):
    module = "tests.processes.team_worker"
    return run_processes(num, lambda port, rank, num: ["-m", module, str(port), str(rank), str(num), mode])


@pytest.mark.slow
def test_random_mixes_say_what_each_request_says_alone():
    """Between them weights change, the memory is given back and taken, and the engine is reset."""
    found = run_workers(2, "mixes")
    assert [code for code, *_ in found.values()] == [0, 0], found
    [counts] = found[LEADER][1]
    assert counts["requests"] == 200 and counts["preemptions"] > 10
    assert found[DOOMED][1] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "mode"), [(3, "between:KILL"), (3, "between:STOP"), (2, "within:KILL"), (2, "within:STOP")]
)
def test_all_others_end_with_a_sentence_that_names_the_lost_process(num, mode):
    found = run_workers(num, mode)
    code, [said], _ = found[LEADER]
    assert code == 3 and said["failed"].startswith(SILENT)
    [deed] = found[DOOMED][1]
    assert 0 < said["at"] - deed["at"] < 20
    if num == 3:
        code, _, err = found[OTHER]
        assert code == 70 and SILENT in err


@pytest.mark.slow
def test_a_new_engine_finds_in_a_store_what_an_earlier_one_committed(tmp_path):
    """Heads of blocks are split within each process, then tokens over both; one device reads them too."""
    found = run_workers(2, f"attached:{tmp_path}")
    assert [code for code, *_ in found.values()] == [0, 0], found
    [said] = found[LEADER][1]
    first, warm, _, again, _ = said["cached"]
    assert (first, warm, again, said["hits"][3]) == (0, 4 * 8, 4 * 8, 4 * 8)
    config = kv.CacheConfig(
        [kv.FullAttention(2, 8)],
        num_blocks=11,
        block_size=4,
        max_seqs=4,
        max_seq_len=48,
        enable_prefix_caching=True,
    )
    prompts, store = [[i, *range(1, 12)] for i in range(4)], kv.tiers.DirectoryStore(tmp_path)
    cache, report = kv.tiers.load(store, kv.init(config), weights="w", prompts=prompts)
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


@pytest.mark.slow
def test_an_error_in_the_model_of_one_process_is_named():
    code, [said], _ = run_workers(2, "raising:")[LEADER]
    assert code == 3 and said["failed"] == "process 1 failed: OSError: a disk is full"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "params",
            r"process 1 has other params at \['shift'\] \(\) than process 0, expected Engine with equal",
        ),
        (
            "program",
            "process 1 has other program than process 0, expected Engine with equal arguments, of equal",
        ),
        (
            "calls",
            "process 1 calls run where process 0 calls set_params, expected the same calls in the same",
        ),
    ],
)
def test_processes_that_differ_are_told_so(what, message):
    code, [said], _ = run_workers(2, f"differing:{what}")[LEADER]
    assert code == 0 and re.match(message, said["said"])


@pytest.mark.slow
def test_the_program_of_the_guide_runs(tmp_path):
    [program] = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    found = run_processes(2, lambda port, rank, num: [str(tmp_path / "program.py"), str(port), str(rank)])
    assert [code for code, *_ in found.values()] == [0, 0], found
    assert found[LEADER][1] == [{"0": [3, 4, 5], "1": [5, 6, 7, 8]}] and found[DOOMED][1] == []


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
    with pytest.raises(ValueError, match="address is 'host0', expected a host and a port such as 'host0:12"):
        check("host0", LEADER)


def test_a_team_needs_several_processes():
    with pytest.raises(
        RuntimeError, match="there is no team of one process, expected a call of jax.distribu"
    ):
        kv.processes.DistributedTeam()
    with pytest.raises(ValueError, match="timeout_s is 0, expected seconds above 0"):
        kv.processes.DistributedTeam(timeout_s=0)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("rows",))
    with pytest.raises(TypeError, match="team is 3, expected a kv.processes.DistributedTeam"):
        kv.engine.Placement(mesh, "rows", team=3)  # type: ignore
