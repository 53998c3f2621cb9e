"""What compiling costs: a deeper model's program is no longer, and the tool that times it counts right."""

import jax
import jax.numpy as jnp
import pytest

from experiments import compile_time
from experiments.compile_time import PERIOD, Cost, decode_step, step_arguments, step_name
from models.layer_runs import Run, layer_runs


def program_length(windows):
    """Characters of a decode step's StableHLO."""
    return len(jax.jit(decode_step).lower(*step_arguments(windows)).as_text())


def test_a_deeper_model_has_no_longer_program():
    assert program_length((None,) * 24) <= 1.1 * program_length((None,) * 6)
    assert program_length(PERIOD * 4) <= 1.1 * program_length(PERIOD * 2)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("a", [(0, 1, 1)]),
        ("ab", [(0, 1, 1), (1, 1, 1)]),
        ("a" * 24, [(0, 1, 24)]),
        ("aaaaab" * 4, [(0, 6, 4)]),
        ("aaaaab" * 4 + "aa", [(0, 6, 4), (24, 1, 2)]),
        ("b" + "a" * 9, [(0, 1, 1), (1, 1, 9)]),
        ("aaabbb", [(0, 1, 3), (3, 1, 3)]),
        ("ababa", [(0, 2, 2), (4, 1, 1)]),
    ],
)
def test_runs_are_the_layers_whose_kinds_repeat(kinds, runs):
    assert layer_runs(tuple(kinds)) == tuple(Run(*run) for run in runs)


@pytest.mark.slow
def test_programs_are_counted_anew_each_time():
    x, function = jnp.ones(3), jax.jit(lambda x: x + 1)
    costs = []
    for _ in range(2):
        jax.clear_caches()
        with compile_time.watched("two") as cost:
            function(x)
            function(x)
            jax.jit(lambda x: x * 2)(x)
        assert min(cost.trace_s, cost.lower_s, cost.compile_s) > 0
        costs.append(cost)
    function(jnp.ones(4))  # it is no longer watched
    assert [cost.num_programs for cost in costs] == [2, 2]


def test_a_bar_can_fail():
    depths = compile_time.DEPTHS
    costs = [
        Cost(step_name(depth), 1.0, 1.0, seconds) for depth, seconds in zip(depths, (2, 3, 4), strict=True)
    ]
    bars = compile_time.bars_of(costs)
    assert [bar["measured"] for bar in bars] == [1.25, 1.5]
    assert [bar["holds"] for bar in bars] == [True, False]


@pytest.mark.slow
def test_the_command_times_and_records(monkeypatch, capsys, report_of):
    monkeypatch.setattr(compile_time, "DEPTHS", (1, 2))
    monkeypatch.setattr(compile_time, "PERIOD", (8, None))
    monkeypatch.setattr(compile_time, "NUM_PERIODS", 2)
    all_operations = compile_time.operations()
    few = {name: all_operations[name] for name in ("init", "touch", "fork")}
    monkeypatch.setattr(compile_time, "operations", lambda: few)
    report = report_of(compile_time, "--repeats", "1", "--no-demo")
    compile_time.show(report)
    printed = capsys.readouterr().out
    names = [row["name"] for row in report["records"]]
    assert names == [step_name(1), step_name(2), "decode step, 2 x (5 windows, 1 full)", *few]
    for row in report["records"]:
        assert row["name"] in printed
        assert row["total_s"] == pytest.approx(row["trace_s"] + row["lower_s"] + row["compile_s"])
        assert row["compile_s"] > 0 and row["num_programs"] >= 1
    assert [bar["bar"] for bar in report["bars"]] == ["2 layers to 1"]
