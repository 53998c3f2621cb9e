"""The kernels' benchmark survives what its sides do to their process: it ends, hangs, or loses the device.

And a later call goes on from where it ended.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from experiments.kernel_speed import __main__ as kernel_speed
from experiments.kernel_speed import process
from experiments.kernel_speed.timing import FAILED, MEASURED
from tests.experiments.kernel_speed_fakes import ENTRIES, SIDES, Jobs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
FAKES = ("-m", "tests.experiments.kernel_speed_fakes")


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """(scenario, *arguments) -> exit status and report, as it was saved."""
    limits = {step: 10.0 for step in process.LIMIT_S}
    monkeypatch.setattr(process, "LIMIT_S", limits)
    monkeypatch.setattr(kernel_speed, "PAUSE_S", 0.0)
    monkeypatch.setattr(kernel_speed, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(kernel_speed, "draw", lambda report, path: path.touch())

    def run(scenario, *arguments, limit_s=10.0):
        limits.update(dict.fromkeys(limits, limit_s), starting=10.0)
        scenario = {"starts": str(tmp_path / "starts"), **scenario}
        monkeypatch.setattr(process, "COMMAND", (*FAKES, json.dumps(scenario)))
        code = kernel_speed.main(["--output", str(tmp_path), "--quick", *arguments])
        path = tmp_path / f"fake_gpu_quick{'_only' * ('--only' in arguments)}.json"
        assert path.with_suffix(".png").exists() and not list(tmp_path.glob("*.unfinished"))
        return code, json.loads(path.read_text())

    return run


def statuses(report):
    """By entry and side."""
    return {
        entry["name"]: {record["side"]: record["status"] for record in entry["sides"]}
        for entry in report["decodes"]
    }


def reason(report, name, side):
    (entry,) = (entry for entry in report["decodes"] if entry["name"] == name)
    (record,) = (record for record in entry["sides"] if record["side"] == side)
    return record["reason"]


ALL_MEASURED = dict.fromkeys(SIDES, MEASURED)
WITHOUT_PEER = {**ALL_MEASURED, "peer": FAILED}


def test_nothing_happens(measure):
    code, report = measure({})
    assert code == 0 and report["crashes"] == [] and report["stopped"] == ""
    assert statuses(report) == dict.fromkeys(ENTRIES, ALL_MEASURED)
    assert len({entry["pid"] for entry in report["decodes"]}) == 1  # starting one takes long
    assert all(entry["comparison"]["ratio"] for entry in report["decodes"])


@pytest.mark.parametrize(
    ("act", "step", "how"),
    [
        ("abort", "preparing", "ended by SIGABRT: what():  CUDA error: no kernel image"),
        ("leave", "the first launches", "ended with exit status 0"),
        ("lose", "a sample", "RuntimeError: CUDA error: an illegal memory access was encountered; then the"),
    ],
)
def test_a_side_ends_the_process(measure, act, step, how):
    """The entry is measured again without it, and all others with it."""
    on = {"preparing": "prepare", "the first launches": "run", "a sample": "sample"}[step]
    code, report = measure({"sides": {"peer": {"two": f"{act}@{on}"}}})
    assert code == 0 and report["skipped"] == report["left_out"] == []
    assert statuses(report) == dict.fromkeys(ENTRIES, ALL_MEASURED) | {"two": WITHOUT_PEER}
    assert [entry["name"] for entry in report["decodes"]] == list(ENTRIES)
    (crash,) = report["crashes"]
    assert (crash["entry"], crash["side"], crash["step"]) == ("two", "peer", step)
    assert crash["how"].startswith(how)
    assert reason(report, "two", "peer") == f"{step}: {crash['how']}"
    pids = [entry["pid"] for entry in report["decodes"]]
    assert pids[0] != pids[1] == pids[2] == pids[3]
    printed = "\n".join(crash["last_words"])
    assert "the data of two" in printed and "the data of one" not in printed
    if act == "abort":  # Python says where it was
        assert any("prepare" in line and "kernel_speed_fakes" in line for line in crash["last_words"])


@pytest.mark.parametrize("step", ["prepare", "run", "sample"])
def test_a_side_hangs(measure, step):
    start = time.monotonic()
    code, report = measure({"sides": {"peer": {"two": f"hang@{step}"}}}, limit_s=0.5)
    assert time.monotonic() - start < 30
    assert code == 0 and statuses(report) == dict.fromkeys(ENTRIES, WITHOUT_PEER) | {"one": ALL_MEASURED}
    (crash,) = report["crashes"]
    assert crash["how"] == "no answer within 0.5 s"
    assert any("in act" in line for line in crash["last_words"])  # where it hung
    # A hang costs so much that there is no second one.
    assert reason(report, "three", "peer") == "left out after its crash on two: no answer within 0.5 s"


@pytest.mark.parametrize(("act", "said"), [("exit", "SystemExit: the peer does"), ("raise", "RuntimeError")])
@pytest.mark.parametrize("step", ["prepare", "sample"])
def test_what_can_be_caught_needs_no_new_process(measure, act, said, step):
    code, report = measure({"sides": {"peer": {"*": f"{act}@{step}"}}})
    assert code == 0 and statuses(report) == dict.fromkeys(ENTRIES, WITHOUT_PEER)
    assert reason(report, "four", "peer").startswith(said)
    assert report["crashes"] == [] and len({entry["pid"] for entry in report["decodes"]}) == 1


def test_who_crashes_repeatedly_is_left_out(measure):
    """Ours has one more chance: it is what is measured."""
    crashing = {"ours": {"*": "abort@run"}, "peer": {"*": "abort@prepare"}}
    code, report = measure({"sides": crashing})
    assert code == 0
    crashes = [(crash["entry"], crash["side"]) for crash in report["crashes"]]
    assert crashes == [("one", "ours"), ("one", "peer"), ("two", "ours"), ("two", "peer"), ("three", "ours")]
    only_other = {"ours": FAILED, "peer": FAILED, "other peer": MEASURED}
    assert statuses(report) == dict.fromkeys(ENTRIES, only_other)
    assert reason(report, "three", "peer").startswith("left out after its crash on two: ended by SIGABRT")
    assert report["decodes"][3]["comparison"]["why_no_ratio"].startswith("ours: failed: left out after")


@pytest.mark.parametrize("act", ["abort", "raise", "exit", "hang"])
def test_an_entry_whose_data_cannot_be_made_is_skipped(measure, act):
    code, report = measure({"data": {"two": act}}, limit_s=0.5 if act == "hang" else 10)
    assert code == 0 and statuses(report) == dict.fromkeys(("one", "three", "four"), ALL_MEASURED)
    (skipped,) = report["skipped"]
    assert skipped["cell"] == "two"
    assert len(report["crashes"]) == (act in ("abort", "hang"))


@pytest.mark.parametrize("act", ["abort", "raise", "exit", "hang", "leave"])
def test_what_was_measured_is_kept_if_the_memory_cannot_be_freed(measure, act):
    code, report = measure({"clean": {"two": act}}, limit_s=0.5 if act == "hang" else 10)
    assert code == 0 and statuses(report) == dict.fromkeys(ENTRIES, ALL_MEASURED)
    assert report["skipped"] == report["crashes"] == []


def test_a_device_that_does_not_come_back_ends_the_run_in_order(measure, capsys):
    crash = {"sides": {"peer": {"two": "abort@run"}}}
    code, report = measure({**crash, "start": ["", "refuse"]})
    assert code == 1 and statuses(report) == {"one": ALL_MEASURED}
    assert report["stopped"] == "after a crash nothing can be measured any more: jax runs on cpu here"
    assert report["left_out"] == ["two", "three", "four"]
    assert "stopped early: after a crash" in capsys.readouterr().out


def test_a_device_may_need_a_moment(measure):
    crash = {"sides": {"peer": {"two": "abort@run"}}}
    code, report = measure({**crash, "start": ["", "refuse", "abort", ""]})
    assert code == 0 and statuses(report) == dict.fromkeys(ENTRIES, ALL_MEASURED) | {"two": WITHOUT_PEER}


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [("refuse", 2, "jax runs on cpu here"), ("abort", 1, "nothing was measured, ended by SIGABRT")],
)
def test_what_does_not_start_is_one_sentence(measure, capsys, act, code, said):
    with pytest.raises(SystemExit) as stopped:
        measure({"start": [act]})
    error = capsys.readouterr().err
    assert stopped.value.code == code and said in error and len(error.splitlines()) == 1


def test_the_time_ends_a_side_that_hangs(measure, monkeypatch):
    """It is not its fault, so that it is no crash; what does not fit is listed."""
    monkeypatch.setattr(kernel_speed, "GRACE_S", 0.2)
    code, report = measure({"sides": {"peer": {"two": "hang@run"}}}, "--minutes", "0.04")
    assert code == 0 and statuses(report) == {"one": ALL_MEASURED}
    assert report["left_out"] == ["two", "three", "four"] and report["crashes"] == []


@pytest.mark.parametrize(
    ("crash_s", "num_done", "num_crashes"),
    [(None, 38, 0), (90, 29, 1), (370, 6, 1), (400, 4, 1)],
)
def test_the_time(tmp_path, monkeypatch, crash_s, num_done, num_crashes):
    """480 s, entries of 12 and starts of 15; what the crash in the fifth took is the time of no entry."""
    clock = types.SimpleNamespace(now=0.0)
    fake_time = types.SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr(kernel_speed, "time", fake_time)
    names = [f"entry {nth}" for nth in range(100)]
    asked = []

    class Worker:
        hello = {"environment": Jobs.environment, "names": [("moves", name) for name in names]}

        def __init__(self, *_):
            self.is_alive = True
            clock.now += 15

        def ask(self, job, end):
            asked.append(job["name"])
            assert end == 480 + kernel_speed.GRACE_S
            if crash_s is not None and job["name"] == "entry 4" and not job["without"]:
                self.is_alive = False
                clock.now += crash_s
                raise process.CrashError("no answer", "peer", "preparing", True, [])
            clock.now += 12
            return {"entry": {"name": job["name"], "num_bytes": 1, "sides": []}}

        def kill(self):
            self.is_alive = False

    monkeypatch.setattr(kernel_speed, "Worker", Worker)
    options = dict(
        interpret=False, quick=True, minutes=8.0, output=tmp_path, only=[], without=[], resume=False
    )
    run = kernel_speed.Run(kernel_speed.argparse.Namespace(**options))
    run.measure()
    done = [entry["name"] for entry in run.report["moves"]]
    assert done == names[: len(done)] and run.report["left_out"] == names[len(done) :]
    assert len(run.report["crashes"]) == num_crashes and len(asked) == len(done) + num_crashes
    assert clock.now <= 480 and len(done) == num_done


def test_sides_and_cells_by_hand(measure, capsys):
    code, report = measure({}, "--without", "ours", "--only", "t", "--only", "one")
    assert code == 0 and (report["without"], report["only"]) == (["ours"], ["t", "one"])
    without_ours = {**ALL_MEASURED, "ours": FAILED}
    assert statuses(report) == dict.fromkeys(("one", "two", "three"), without_ours)
    assert reason(report, "one", "ours") == "left out by --without"
    capsys.readouterr()
    for arguments in (["--without", "theirs"], ["--only", "five"]):
        with pytest.raises(SystemExit) as stopped:
            measure({}, *arguments)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and f"got {arguments[0]} {arguments[1]!r}, expected" in said
        assert len(said.splitlines()) == 1


# --- several calls ---

CRASHES = {"ceilings": ["read"], "sides": {"peer": {"one": "abort@run", "three": "abort@run"}}}


def test_calls_complete_what_one_measures(measure, tmp_path, capsys):
    """The first ends in the third entry; that the peer is not asked again is known in the second."""
    _, whole = measure(CRASHES, "--resume")  # there is nothing to go on from yet
    assert statuses(whole) == dict.fromkeys(ENTRIES, WITHOUT_PEER) | {"two": ALL_MEASURED}
    assert len(whole["calls"]) == 1

    code, first = measure({**CRASHES, "start": ["", "", "refuse"]})
    assert code == 1 and first["left_out"] == ["three", "four"]
    assert "2 left out: the same command with --resume measures them" in capsys.readouterr().out
    code, both = measure(CRASHES | {"environment": {"revision": "def"}}, "--resume")  # its results committed
    assert [call["revision"] for call in both["calls"]] == ["abc", "def"]
    assert code == 0 and both["stopped"] == "" and both["left_out"] == []
    assert statuses(both) == statuses(whole) and len(both["crashes"]) == len(whole["crashes"]) == 2
    assert reason(both, "three", "peer").startswith("left out after its crash on three: ended by SIGABRT")
    assert [entry["call"] for entry in both["decodes"]] == [0, 0, 1, 1]
    assert both["decodes"][:2] == first["decodes"]

    assert [(entry["name"], entry["call"]) for entry in both["entries"]] == [("read", 0), ("read", 1)]
    rates = [call["ceilings"]["read"] for call in both["calls"]]
    for entry in both["decodes"]:
        compared = entry["comparison"]
        assert compared["of_ceiling"] == compared["gb_per_s"] / rates[entry["call"]]
    assert both["seconds"] == sum(call["seconds"] for call in both["calls"])
    log = (tmp_path / "kernel_speed.log").read_text()
    assert log.count("the data of two") == 1 and log.count("the data of four") == 1

    code, again = measure(CRASHES, "--resume")
    assert code == 0 and again == both
    assert "4 of 4 cells compared" in capsys.readouterr().out
    assert log == (tmp_path / "kernel_speed.log").read_text()  # nothing ran


def test_what_was_skipped_is_not_tried_again(measure):
    measure({"ceilings": ["read"], "data": {"two": "raise"}})
    _, report = measure({"ceilings": ["read"]}, "--resume")
    assert [entry["name"] for entry in report["decodes"]] == ["one", "three", "four"]
    assert len(report["skipped"]) == len(report["calls"]) == 1


@pytest.mark.parametrize(
    ("environment", "arguments", "said"),
    [
        ({"device": {"name": "Fake GPU", "driver": "2"}}, [], "device was {'name': 'Fake GPU', 'platform'"),
        ({"jax": "1"}, [], "otherwise: jax was '0' and is '1': begin anew without --resume"),
        ({"sources": "changed", "jax": "1"}, [], "sources was None and is 'changed'; jax was '0' and is '1'"),
        ({}, ["--without", "ours"], "without was [] and is ['ours']"),
    ],
)
def test_what_was_measured_otherwise_is_not_mixed(measure, tmp_path, capsys, environment, arguments, said):
    measure({})
    before = (tmp_path / "fake_gpu_quick.json").read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        measure({"environment": environment}, "--resume", *arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and len(error.splitlines()) == 1
    assert (tmp_path / "fake_gpu_quick.json").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"device": {"name"', "cannot be read (Expecting"),
        ("[]", "is no report that calls can be added to"),
        ('{"decodes": []}', "is no report that calls can be added to"),
    ],
)
def test_a_file_that_is_no_report_is_left_alone(measure, tmp_path, monkeypatch, capsys, text, said):
    path = tmp_path / "fake_gpu_quick.json"
    path.write_text(text)
    killed = []
    kill = process.Worker.kill
    monkeypatch.setattr(process.Worker, "kill", lambda worker: killed.append(kill(worker)))
    with pytest.raises(SystemExit) as stopped:
        measure({}, "--resume")
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and str(path) in error and len(error.splitlines()) == 1
    assert path.read_text() == text and killed


def test_the_results_are_never_half_written(measure, tmp_path, monkeypatch):
    _, report = measure({})
    writes = itertools.count()
    write_text = Path.write_text

    def half(path, text):
        if "json" not in path.name or next(writes) == 0:
            return write_text(path, text)
        write_text(path, text[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError):
        measure({})
    monkeypatch.undo()
    assert len(json.loads((tmp_path / "fake_gpu_quick.json").read_text())["decodes"]) == 1


# --- signals ---


@pytest.fixture
def hanging(tmp_path):
    """A run that has measured one entry and hangs in the second; (process, pid of its worker)."""
    command = (*FAKES, json.dumps({"sides": {"peer": {"two": "hang@run"}}}))
    program = (
        "import signal\n"
        "from experiments.common import command\n"
        "from experiments.kernel_speed import __main__ as kernel_speed, process as kernel_speed_process\n"
        # Ignored in what a shell runs in the background, which is inherited.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"kernel_speed_process.COMMAND = {command!r}\n"
        "kernel_speed.SECONDS = 0.0\n"
        f"command.run(lambda: kernel_speed.main(['--output', {str(tmp_path)!r}, '--json']))"
    )
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        path = tmp_path / "fake_gpu.json"
        wait_for(path.exists)
        (entry,) = json.loads(path.read_text())["decodes"]
        try:
            yield run, path, entry["pid"]
        finally:
            run.kill()


def wait_for(is_so):
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(pid):
    """A process that ended is; one that nobody waited for is too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_in_order(hanging, number):
    run, path, worker = hanging
    assert not is_gone(worker)
    run.send_signal(number)
    out, _ = run.communicate(timeout=20)
    report = json.loads(path.read_text())
    assert run.returncode == 1 and json.loads(out) == report
    assert report["stopped"] == f"ended by {'SIGTERM' if number == signal.SIGTERM else 'Ctrl-C'}"
    assert statuses(report) == {"one": ALL_MEASURED} and report["left_out"] == ["two", "three", "four"]
    assert path.with_suffix(".png").exists()
    wait_for(lambda: is_gone(worker))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_nothing_is_left_behind_when_the_run_is_killed(hanging):
    run, path, worker = hanging
    os.kill(worker, signal.SIGTERM)  # a whole group may be told to end, and the worker is not who saves
    time.sleep(0.3)
    assert not is_gone(worker)
    run.kill()
    run.wait(20)
    wait_for(lambda: is_gone(worker))
    assert statuses(json.loads(path.read_text())) == {"one": ALL_MEASURED}


def test_who_holds_the_worker_imports_no_jax():
    """Else it could hold the device, or end with it."""
    program = "import sys, experiments.kernel_speed; print('jax' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
