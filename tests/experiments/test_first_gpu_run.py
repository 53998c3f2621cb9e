"""The quarter of an hour on a GPU: it runs whole without one, and its verdicts can be either."""

import json
import types
from typing import Any

import jax
import numpy as np
import pytest

from experiments.first_gpu_run import __main__ as first_gpu_run
from experiments.first_gpu_run import parts
from experiments.first_gpu_run.__main__ import ENDED, KERNELS, OVER, Part, records_of, run_part, verdict
from experiments.kernel_speed.timing import CHECKED, MEASURED, WRONG
from kvcache_jax.core import verdicts
from kvcache_jax.core.backends import TargetDevice
from pallas_kernels.versions import digest


def side(status=CHECKED, is_ours=True):
    return {"side": "ours", "is_ours": is_ours, "status": status, "reason": "", "error": 0.0, "note": ""} | {
        "first_call_s": 1.0,
        "median_us": 10.0 if status == MEASURED else None,
    }


def made_up(*checked, how=ENDED):
    environment = {"environment": {"device": {"name": "H100", "driver": "1"}, "jax": "0.12"}}
    found = [environment, *({"name": name, "num_bytes": 10**6, "sides": sides} for name, *sides in checked)]
    part = {"name": "kernels", "title": "kernels", "flags": "", "how": how, "seconds": 1.0, "said": ""}
    return {"is_interpreted": False, "code": "abc", "parts": [part | {"found": found}]}


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
    report["parts"][0]["found"].append(
        {"device": {"name": "H100"}, "decodes": [{"name": "8 x 8k", "num_bytes": 7, "sides": [side()]}]}
    )
    assert [record["name"] for record in records_of(report)] == ["decode: plain", "step", "step", "8 x 8k"]
    first_gpu_run.show(report | {"verdict": verdict(report)})
    said = capsys.readouterr().out
    assert (
        "paged_decode: WRONG" in said and "merge_attention: not tried" in said and "not all is right" in said
    )
    assert "H100, driver 1, jax 0.12" in said and " 100 " in said  # GB/s


def test_a_part_that_hangs_is_killed_and_one_that_fails_is_named(tmp_path):
    options: Any = types.SimpleNamespace(interpret=False, output=tmp_path)
    hangs = Part("hangs", "hangs", ("http.server", "--bind", "127.0.0.1", "0"), 1)
    assert run_part(hangs, options, 1.0)["how"] == OVER
    fails = run_part(Part("fails", "fails", ("no_such_module",), 9), options, 9)
    assert fails["how"] == "ended with exit status 1" and "no_such_module" in fails["said"]
    assert not [*tmp_path.iterdir()]


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
def test_the_path_runs_without_a_gpu(tmp_path, capsys):
    arguments = ["--interpret", "--output", str(tmp_path), "--json"]
    assert first_gpu_run.main([*arguments, "--only", "kernels", "--only", "serving"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "first_gpu_run_cpu_interpreted.json").read_text()) == report
    assert set(report["verdict"]["kernels"].values()) == {True} and report["verdict"]["is_right"]
    assert [part["how"] for part in report["parts"]] == [ENDED] * 2
    names = {record["name"].split(":")[0] for record in records_of(report) if record["is_ours"]}
    assert {"decode", "merge", "generate", "engine"} <= names
