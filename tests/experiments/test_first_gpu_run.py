"""The quarter of an hour on a GPU: it runs whole without one, and its verdicts can be either."""

import inspect
import json
import re
import types
from typing import Any

import jax
import numpy as np
import pytest

from experiments import first_gpu_run
from experiments.first_gpu_run import ENDED, KERNELS, OVER, Part, contests_of, run_part, verdict
from experiments.on_device import parts
from experiments.on_device.comparison import compare
from experiments.on_device.contests import CHECKED, MEASURED, WRONG
from kvcache_jax.core import verdicts
from kvcache_jax.core.backends import TargetDevice
from pallas_kernels import mosaic_gpu
from pallas_kernels.versions import digest


def side(status=CHECKED, is_ours=True):
    return {"side": "ours", "is_ours": is_ours, "status": status, "reason": "", "error": 0.0, "note": ""} | {
        "first_call_s": 1.0,
        **dict.fromkeys(("median_us", "p10_us", "p90_us"), 10.0 if status == MEASURED else None),
    }


def made_up(*checked, how=ENDED):
    environment = {"environment": {"device": {"name": "H100", "driver": "1"}, "jax": "0.12"}}
    shared = {"num_bytes": 10**6, "is_cell": False}
    found = [environment, *({"name": name, "sides": sides} | shared for name, *sides in checked)]
    part = {"name": "kernels", "title": "kernels", "flags": "", "how": how, "seconds": 1.0, "said": ""}
    part |= {"found": found, "left_out": ["decode: last"]}
    return {"is_interpreted": False, "code": "abc", "parts": [part]}


def test_a_kernel_is_right_if_all_its_shapes_are():
    report = made_up(
        ("decode: plain", side(WRONG)),
        ("decode: long", side()),
        ("append 1 token", side(), side(WRONG, False)),
    )
    found = verdict(report)
    assert found["kernels"] == dict.fromkeys(KERNELS.values()) | {"paged_decode": False, "append_kv": True}
    assert (found["device"]["name"], found["jax"], found["code"]) == ("H100", "0.12", "abc")
    assert not found["is_right"] and not verdict(made_up())["is_right"]
    assert verdict(made_up(("append 1 token", side(), side(WRONG, False))))["is_right"]
    assert not verdict(made_up(("append 1 token", side()), how=OVER))["is_right"]


def test_every_kernel_is_checked():
    """All that is launched, but for plans, which XLA makes."""
    functions = {name: getattr(mosaic_gpu, name) for name in mosaic_gpu.__all__}
    launched = [
        name
        for name, each in functions.items()
        if inspect.isfunction(each) and "interpret" in inspect.signature(each).parameters
    ]
    assert sorted(KERNELS.values()) == sorted({*launched} - {"plan_for"})
    checked = {re.split("[: ]", name)[0] for name in parts.kernels(True, [])}
    assert checked == {*KERNELS} == {re.split("[: ]", name)[0] for name in parts.kernels(False, [])}


def test_a_gpu_without_a_copy_engine_needs_no_kernel_that_wants_one(monkeypatch):
    report = made_up(("decode: plain", side()))
    device = {"name": "NVIDIA A100-SXM4-80GB", "driver": "1", "compute_capability": "8.0"}
    report["parts"][0]["found"][0]["environment"]["device"] = device
    moves = dict.fromkeys(("merge_attention", "gather_blocks", "scatter_blocks", "copy_blocks"))
    assert verdict(report)["kernels"] == {"paged_decode": True, **moves}
    device = types.SimpleNamespace(device_kind=device["name"], compute_capability="8.0", core_count=108)
    monkeypatch.setattr(parts.jax, "devices", lambda: [device])
    checked = {re.split("[: ]", name)[0] for name in parts.kernels(False, [])}
    assert checked == {"decode", "merge", "gather", "scatter", "copy"}
    assert not any("int8" in name or "append" in name for name in parts.kernels(False, []))


def test_a_verdict_is_kept_where_the_library_looks(monkeypatch, tmp_path):
    monkeypatch.setenv(verdicts.FOLDER, str(tmp_path / "new"))
    monkeypatch.setattr(verdicts, "_verdicts", verdicts._verdicts.__wrapped__)
    names = [*KERNELS][:3], [f"{kind} 1 block" for kind in [*KERNELS][3:]]
    report = made_up(*((name, side()) for name in (*names[0], *names[1])))
    report["code"] = digest()
    report["parts"][0]["found"][0]["environment"] = {
        "device": {"name": "NVIDIA H200", "driver": "1"},
        "jax": jax.__version__,
    }
    device = TargetDevice("cuda", "NVIDIA H200")
    for found, expected in (
        (report, ("mosaic_gpu",)),
        (report | {"is_interpreted": True}, ()),
        (report | {"parts": [report["parts"][0] | {"how": OVER}]}, ()),
        (report | {"parts": [report["parts"][0] | {"found": report["parts"][0]["found"][:-1]}]}, ()),
    ):
        first_gpu_run.keep(verdict(found))
        assert verdicts.proven(device) == expected
    first_gpu_run.keep(verdict(report | {"code": "of before"}))
    first_gpu_run.keep(verdict(made_up() | {"parts": []}))  # found no device
    assert len([*(tmp_path / "new").iterdir()]) == 2


def test_the_tables_have_all_sides_and_the_verdict_in_words(capsys):
    report = made_up(("decode: plain", side(WRONG)), ("step", side(MEASURED), side(MEASURED, False)))
    report["parts"][0]["found"].append({"name": "huge", "skipped": "no room"})
    first_gpu_run.show(report | {"verdict": verdict(report), "comparison": compare(contests_of(report))})
    said = capsys.readouterr().out
    assert "skipped huge: no room" in said and "left out, no time: decode: last" in said
    assert (
        "paged_decode: WRONG" in said and "merge_attention: not tried" in said and "not all is right" in said
    )
    assert "H100, driver 1, jax 0.12" in said and " 100 " in said  # GB/s


def test_a_report_of_a_few_parts_does_not_replace_one_of_all(tmp_path):
    for is_whole in (True, False):
        report = made_up() | {"is_whole": is_whole}
        first_gpu_run.save(report | {"verdict": verdict(report)}, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["first_gpu_run_h100.json", "first_gpu_run_h100_only.json"]


def test_a_part_that_hangs_is_killed_and_one_that_fails_is_named(tmp_path):
    options: Any = types.SimpleNamespace(
        interpret=False, output=tmp_path, cell=[], without=[], flashinfer=None
    )
    hangs = Part("hangs", "hangs", ("tests.experiments.on_device_fakes", str(tmp_path), "start=hang"), 1)
    assert run_part(hangs, options, 1.0)["how"] == OVER
    fails = run_part(Part("fails", "fails", ("no_such_module",), 9), options, 9)
    assert fails["how"] == "ended with exit status 1" and "no_such_module" in fails["said"]
    assert [path.name for path in tmp_path.iterdir()] in (["starts"], [])


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 1.0])
def test_an_output_that_is_not_a_number_is_wrong(spoilt):
    out, lse = np.ones((2, 3), np.float32), np.array([-np.inf, 2.0], np.float32)
    contest, _ = parts._checked("a: b", "none", print, None, (out, lse), 0.1, False)
    assert contest.error_of((out, lse)) == 0
    out = out.copy()
    out[1, 2] += spoilt
    assert not contest.error_of((out, lse)) <= 0.1
    assert not contest.error_of((np.ones_like(out), np.array([0.0, 2.0], np.float32))) <= 0.1


def test_interpreted_figures_never_go_to_the_results(capsys):
    with pytest.raises(SystemExit):
        first_gpu_run.main(["--interpret"])
    assert "expected a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    for arguments, words in (
        ((), "jax runs on cpu here, expected an NVIDIA GPU"),
        (("--interpret", "--only", "speed", "--cell", "five"), "got --cell ['five'], expected the beginning"),
    ):
        with pytest.raises(SystemExit) as stopped:
            first_gpu_run.main(["--output", str(tmp_path), *arguments])
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and words in said and len(said.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_path_runs_without_a_gpu(tmp_path, capsys):
    arguments = ["--interpret", "--output", str(tmp_path), "--json"]
    assert first_gpu_run.main([*arguments, "--only", "kernels", "--only", "serving"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "first_gpu_run_cpu_interpreted_only.json").read_text()) == report
    assert set(report["verdict"]["kernels"].values()) == {True} and report["verdict"]["is_right"]
    assert [part["how"] for part in report["parts"]] == [ENDED] * 2
    names = {contest["name"].split(":")[0] for contest in contests_of(report)}
    assert {"decode", "merge", "generate", "engine", "samples"} <= names
