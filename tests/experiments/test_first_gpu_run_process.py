"""The run on a GPU survives what sides do to their process: it ends, hangs, or loses the device."""

import types
from typing import Any

import pytest

from experiments import first_gpu_run
from experiments.first_gpu_run import ENDED, OVER, REFUSED, Part, run_part, verdict
from experiments.on_device.contests import FAILED, MEASURED
from tests.experiments.on_device_fakes import ENTRIES, SIDES

ALL_MEASURED = dict.fromkeys(SIDES, MEASURED)
WITHOUT_PEER = {**ALL_MEASURED, "peer": FAILED}


@pytest.fixture
def measure(tmp_path):
    """(acts, seconds) -> what came of a part, and by contest each side's status."""

    def run(*acts, seconds=60.0, without=()):
        options: Any = types.SimpleNamespace(
            interpret=False, output=tmp_path, cell=[], without=without, flashinfer=None
        )
        arguments = ("tests.experiments.on_device_fakes", str(tmp_path), *acts)
        part = run_part(Part("fakes", "fakes", arguments, 60), options, seconds)
        assert [path.name for path in tmp_path.iterdir()] == ["starts"]
        statuses = {
            each["name"]: {record["side"]: record["status"] for record in each["sides"]}
            for each in part["found"]
            if "sides" in each
        }
        return part, statuses

    return run


def record_of(part, name, side):
    (contest,) = (each for each in part["found"] if each.get("name") == name)
    (record,) = (record for record in contest["sides"] if record["side"] == side)
    return record


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("abort,prepare", "preparing: ended by SIGABRT"),
        ("leave,launch", "the first launches: ended with exit status 3"),
        ("lose,sample", "a sample: RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("hang,sample", "a sample: no sign for 3 s"),
    ],
)
def test_a_side_ends_or_hangs_its_process(measure, monkeypatch, act, how):
    """The contest is held again without it, and all others with it."""
    monkeypatch.setattr(first_gpu_run, "LIMIT_S", 3.0 if act.startswith("hang") else 60.0)
    part, statuses = measure(f"peer=two,{act}")
    assert part["how"] == ENDED and part["left_out"] == []
    assert statuses == dict.fromkeys(ENTRIES, ALL_MEASURED) | {"two": WITHOUT_PEER}
    assert list(statuses) == list(ENTRIES) and record_of(part, "two", "peer")["reason"] == how
    pids = [record_of(part, name, "ours")["note"] for name in ENTRIES]
    assert pids[0] != pids[1] == pids[2] == pids[3]
    assert verdict({"is_interpreted": False, "code": "abc", "parts": [part]})["is_right"]


@pytest.mark.parametrize("act", ["exit,prepare", "raise,sample"])
def test_what_can_be_caught_needs_no_new_process(measure, act):
    part, statuses = measure(f"peer=*,{act}")
    assert part["how"] == ENDED and statuses == dict.fromkeys(ENTRIES, WITHOUT_PEER)
    assert len({record_of(part, name, "ours")["note"] for name in ENTRIES}) == 1


def test_who_crashes_repeatedly_is_left_out(measure):
    part, statuses = measure("peer=*,abort,launch", "other peer=one,leave,launch")
    only_ours = {**WITHOUT_PEER, "other peer": FAILED}
    assert part["how"] == ENDED and statuses == dict.fromkeys(ENTRIES, WITHOUT_PEER) | {"one": only_ours}
    reason = record_of(part, "three", "peer")["reason"]
    assert reason.startswith("left out after its crash on two: the first launches:")


@pytest.mark.parametrize("act", ["abort", "raise"])
def test_a_contest_whose_data_cannot_be_made_is_skipped(measure, act):
    part, statuses = measure(f"data=two,{act},data")
    assert part["how"] == ENDED and statuses == dict.fromkeys(("one", "three", "four"), ALL_MEASURED)
    assert [each["name"] for each in part["found"] if "skipped" in each] == ["two"]
    assert not verdict({"is_interpreted": False, "code": "abc", "parts": [part]})["is_right"]


def test_what_was_measured_is_kept_if_the_memory_cannot_be_freed(measure):
    part, statuses = measure("data=two,abort,clean")
    assert part["how"] == ENDED and statuses == dict.fromkeys(ENTRIES, ALL_MEASURED)


def test_a_device_that_does_not_come_back_ends_the_part_in_order(measure):
    part, statuses = measure("peer=two,abort,launch", "start=,refuse")
    assert part["how"] == REFUSED and statuses == {"one": ALL_MEASURED}
    assert part["left_out"] == ["two", "three", "four"] and "jax runs on cpu here" in part["said"]


def test_what_does_not_start_is_tried_once(measure):
    part, statuses = measure("start=abort")
    assert (part["how"], statuses) == ("ended by SIGABRT", {})


def test_the_time_ends_a_side_that_hangs(measure):
    """It is not its fault; what does not fit is listed."""
    part, statuses = measure("peer=two,hang,launch", seconds=8.0)
    assert part["how"] == OVER and statuses == {"one": ALL_MEASURED}
    assert part["left_out"] == ["two", "three", "four"]


def test_a_side_is_left_out_by_hand(measure):
    part, statuses = measure(without=["ours"])
    assert statuses == dict.fromkeys(ENTRIES, {**ALL_MEASURED, "ours": FAILED})
    assert record_of(part, "one", "ours")["reason"] == "left out by --without"
