"""The kernels' benchmark survives what its sides do to their process: it ends, hangs, or loses the device."""

import json
import subprocess
import sys

import pytest

from experiments.kernel_speed import __main__ as kernel_speed
from experiments.kernel_speed import isolated
from experiments.kernel_speed.timing import FAILED, MEASURED
from tests.experiments import kernel_speed_fakes
from tests.experiments.kernel_speed_fakes import ENTRIES, Fakes

pytestmark = pytest.mark.slow

ALL_MEASURED = dict.fromkeys(kernel_speed_fakes.SIDES, MEASURED)
WITHOUT_PEER = {**ALL_MEASURED, "peer": FAILED}


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """(acts, *arguments) -> exit status, the report as it was saved, and by entry each side's status."""
    monkeypatch.setattr(kernel_speed, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(kernel_speed, "draw", lambda report, path: path.touch())

    def run(acts, *arguments, starts=("",)):
        fakes = Fakes(acts, tmp_path / "counter", starts)
        monkeypatch.setattr(kernel_speed, "make_entries", lambda _: fakes)
        code = kernel_speed.main(["--output", str(tmp_path), "--quick", *arguments])
        path = tmp_path / f"fake_gpu_quick{'_only' * ('--only' in arguments)}.json"
        assert path.with_suffix(".png").exists() and not list(tmp_path.glob("*.unfinished"))
        report = json.loads(path.read_text())
        statuses = {
            entry["name"]: {record["side"]: record["status"] for record in entry["sides"]}
            for entry in report["decodes"]
        }
        return code, report, statuses

    return run


def reason(report, name, side):
    (entry,) = (entry for entry in report["decodes"] if entry["name"] == name)
    (record,) = (record for record in entry["sides"] if record["side"] == side)
    return record["reason"]


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("abort prepare", "preparing: ended by SIGABRT"),
        ("leave launch", "the first launches: ended with exit status 3"),
        ("lose sample", "a sample: RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("hang sample", "a sample: no answer within 3 s"),
    ],
)
def test_a_side_ends_or_hangs_its_process(measure, monkeypatch, act, how):
    """The entry is measured again without it, and all others with it."""
    monkeypatch.setattr(isolated, "LIMIT_S", 3.0 if act.startswith("hang") else 60.0)
    monkeypatch.setattr(isolated, "START_S", 60.0)
    code, report, statuses = measure({"peer": f"two {act}"})
    assert code == 0 and report["skipped"] == report["left_out"] == []
    assert statuses == dict.fromkeys(ENTRIES, ALL_MEASURED) | {"two": WITHOUT_PEER}
    assert list(statuses) == list(ENTRIES) and reason(report, "two", "peer") == how
    pids = [entry["pid"] for entry in report["decodes"]]
    assert pids[0] != pids[1] == pids[2] == pids[3]


@pytest.mark.parametrize("act", ["exit prepare", "raise sample"])
def test_what_can_be_caught_needs_no_new_process(measure, act):
    code, report, statuses = measure({"peer": f"* {act}"})
    assert code == 0 and statuses == dict.fromkeys(ENTRIES, WITHOUT_PEER)
    assert len({entry["pid"] for entry in report["decodes"]}) == 1


def test_who_crashes_repeatedly_is_left_out(measure):
    code, report, statuses = measure({"peer": "* abort launch", "other peer": "one leave launch"})
    only_ours = {**WITHOUT_PEER, "other peer": FAILED}
    assert code == 0 and statuses == dict.fromkeys(ENTRIES, WITHOUT_PEER) | {"one": only_ours}
    assert reason(report, "three", "peer").startswith("left out after its crash on two: the first launches:")


@pytest.mark.parametrize("act", ["abort", "raise"])
def test_an_entry_whose_data_cannot_be_made_is_skipped(measure, act):
    code, report, statuses = measure({None: f"two {act} data"})
    assert code == 0 and statuses == dict.fromkeys(("one", "three", "four"), ALL_MEASURED)
    assert [skipped["cell"] for skipped in report["skipped"]] == ["two"]


def test_what_was_measured_is_kept_if_the_memory_cannot_be_freed(measure):
    code, report, statuses = measure({None: "two abort clean"})
    assert code == 0 and statuses == dict.fromkeys(ENTRIES, ALL_MEASURED) and report["skipped"] == []


def test_a_device_that_does_not_come_back_ends_the_run_in_order(measure, capsys):
    code, report, statuses = measure({"peer": "two abort launch"}, starts=("", "refuse"))
    assert code == 1 and statuses == {"one": ALL_MEASURED}
    assert report["stopped"] == "after a crash nothing can be measured any more: jax runs on cpu here"
    assert report["left_out"] == ["two", "three", "four"]
    assert "stopped early: after a crash" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [("refuse", 2, "jax runs on cpu here"), ("abort", 1, "nothing was measured, starting: ended by SIGABRT")],
)
def test_what_does_not_start_is_one_sentence(measure, capsys, act, code, said):
    with pytest.raises(SystemExit) as stopped:
        measure({}, starts=(act,))
    error = capsys.readouterr().err.splitlines()
    assert stopped.value.code == code and said in error[-1]
    assert len(error) == 1 or act == "abort"  # whose stack the process prints


def test_the_time_ends_a_side_that_hangs(measure, monkeypatch):
    """It is not its fault; what does not fit is listed."""
    monkeypatch.setattr(kernel_speed, "GRACE_S", 0.2)
    code, report, statuses = measure({"peer": "two hang launch"}, "--minutes", "0.2")
    assert code == 0 and statuses == {"one": ALL_MEASURED}
    assert report["left_out"] == ["two", "three", "four"]


def test_sides_and_cells_by_hand(measure, capsys):
    code, report, statuses = measure({}, "--without", "ours", "--only", "t", "--only", "one")
    assert code == 0 and (report["without"], report["only"]) == (["ours"], ["t", "one"])
    assert statuses == dict.fromkeys(("one", "two", "three"), {**ALL_MEASURED, "ours": FAILED})
    assert reason(report, "one", "ours") == "left out by --without"
    for arguments in (["--without", "theirs"], ["--only", "five"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            measure({}, *arguments)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and f"got {arguments[0]} {arguments[1]!r}, expected" in said
        assert len(said.splitlines()) == 1


def test_who_holds_the_process_imports_no_jax():
    """Else it could hold the device, or end with it."""
    program = (
        "import sys, experiments.kernel_speed.__main__; print('jax' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
