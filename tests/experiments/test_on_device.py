"""The kernels' benchmark: its path on a CPU, its arithmetic, and what it says when something is wrong."""

import functools
import json
import math
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.on_device import cells as kernel_cells
from experiments.on_device import comparison, contests, flashinfer_modules, parts
from experiments.on_device.cells import TINY, Cell, all_cells
from experiments.on_device.comparison import absences, compare, show
from experiments.on_device.contests import (
    CASCADE,
    CHECKED,
    FAILED,
    MEASURED,
    OURS,
    SIDES,
    WRONG,
    XLA_ATTENTION,
    Contest,
    Program,
    Side,
)
from experiments.on_device.problem import TOLERANCE, error_of, expected_output, make_problem
from experiments.on_device.sides import jax_sides, looped

CELL = Cell(2, 64, 4, 16, num_kv_heads=1, head_dim=64)
pytestmark = pytest.mark.slow


# --- the path ---


@pytest.mark.contract
def test_all_of_speed_runs_interpreted(capsys):
    program = [sys.executable, "-m", "experiments.on_device.parts", "speed", "--interpret"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"machine", "date", "device", "packages", "flashinfer_modules", "xla_flags"} < set(
        lines[0]["environment"]
    )
    contests = {line["name"]: line for line in lines if "sides" in line}
    assert list(contests) == lines[0]["names"]
    status = {(name, side["side"]): side for name, each in contests.items() for side in each["sides"]}
    assert {side for _, side in status} | {CASCADE, XLA_ATTENTION} == set(SIDES)
    checked = {where for where, side in status.items() if side["status"] == CHECKED}
    tiny = [cell.name for cell in TINY]
    moves = ["append 3 tokens", "append_scaled 3 tokens"]
    moves += [*(f"{move} 2 blocks of 2 layers" for move in ("gather", "scatter", "copy"))]
    assert {(name, OURS) for name in (*tiny, *moves)} <= checked
    assert {(tiny[0], "ours, plan included"), (tiny[0], "gather + XLA"), ("read", "XLA")} <= checked

    # Who cannot run here is there too, with the reason.
    (absent,) = {line for line in absences([*contests.values()]) if line.startswith("FlashInfer XQA: failed")}
    assert "No module named 'flashinfer'" in absent and "(3 contests, " in absent

    # Nothing is measured, and nothing looks as if it were.
    assert not any(side["status"] == MEASURED for side in status.values())
    found = compare([*contests.values()])
    assert found["ceilings"] == {"read": 0, "copy": 0} and found["bars"] == []
    assert [cell["why_no_ratio"] for cell in found["cells"]] == ["ours: checked, not measured"] * len(tiny)
    show(found, 1.0)
    assert "not measured" in capsys.readouterr().out


def test_a_wrong_kernel_is_not_passed(monkeypatch):
    """The check sees a block too early, and a result that is NaN."""
    problem = make_problem(CELL, num_buffers=2)
    expected = expected_output(problem, 1)

    def shifted(problem):
        return problem._replace(block_table=problem.block_table[:, ::-1].at[0, 0].set(0))

    for wrong in (shifted(problem), problem._replace(q=problem.q * math.nan)):
        sides = [side for side in jax_sides(wrong) if side.name == "gather + XLA"]
        contest = Contest("cell", 1, lambda out: error_of(out, expected), TOLERANCE, 2)
        (record,) = contests.compete(contest, sides, None)
        assert record["status"] == WRONG and "off the reference" in record["reason"]
    assert record["error"] is None  # NaN is no JSON


def test_launches_take_turns_in_the_buffers_and_wait_for_each_other():
    program = looped(lambda x, _, buffer, zero: 10 * x + buffer + zero, jnp.int32(3), (), 3, 5)
    assert program.result(program.run()) == 30 + 4 % 3

    def nan_then_seven(x, _, buffer, zero):
        return jnp.where(zero == 1, x, jnp.nan)

    for num_launches in (1, 2):
        program = looped(nan_then_seven, jnp.float32(7), (), 1, num_launches)
        assert np.array_equal(
            program.result(program.run()), (math.nan, 7.0)[num_launches - 1], equal_nan=True
        )


LOOP = """
%body (p: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %inside = bf16[64,8]{1,0} fusion(%p), kind=kLoop, calls=%f
}
ENTRY %main (pool: bf16[64,8]) -> f32[8] {
  %while = (s32[], bf16[64,8]) while(%t), body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %last = f32[8]{0} fusion(%while), kind=kLoop, calls=%g
}
"""


@pytest.mark.parametrize(
    ("hlo", "alias_bytes", "found"),
    [
        (LOOP, 100, []),
        (LOOP, 150, ["50 bytes not updated in place"]),
        (LOOP.replace('"n":"4"', '"n":"5"'), 0, ["trip counts ['5'] are known, expected 4"]),
        (LOOP.replace("f32[8]{0} fusion", "f32[64,8]{1,0} fusion"), 0, ["makes [64,8] outside of the loop"]),
        (LOOP.replace("fusion(%p)", "copy(%p)"), 0, ["copies a pool 1 times"]),
    ],
)
def test_a_compiled_loop_is_judged(hlo, alias_bytes, found):
    benchmark = pytest.importorskip("tests.aot.benchmark", reason="needs flax")
    memory = types.SimpleNamespace(alias_size_in_bytes=100)
    assert benchmark.failures(hlo, memory, 512, 4, alias_bytes) == found


def test_flashinfer_is_compiled_for_every_cell(tmp_path, monkeypatch, capsys):
    """With stand-ins for FlashInfer 0.7.2, by its parameters' names; one module does not compile."""
    with pytest.raises(SystemExit):
        flashinfer_modules.main([str(tmp_path)])
    assert "flashinfer cannot be imported here" in capsys.readouterr().err
    asked = []

    attention = ("dtype_q", "dtype_kv", "dtype_o", "dtype_idx", "head_dim_qk", "head_dim_vo")
    attention += ("pos_encoding_mode", "use_sliding_window", "use_logits_soft_cap")
    xqa = ("input_dtype", "kv_cache_dtype", "page_size", "head_dim", "head_group_ratio")
    xqa += ("use_sliding_window", "output_dtype")

    def generate(names, *arguments):
        asked.append(dict(zip(names, arguments, strict=True)))
        built = tmp_path / f"built_{len(asked)}.so"

        def build():
            if len(asked) == 2:
                raise RuntimeError("ninja: build stopped\nerror: no nvcc")
            built.touch()

        return types.SimpleNamespace(name=f"module_{len(asked)}", build=build, jit_library_path=built)

    fakes = {
        "torch": dict(bfloat16="bf16", int32="i32"),
        "flashinfer": {},
        "flashinfer.jit": dict(
            gen_batch_decode_module=functools.partial(generate, attention),
            gen_batch_prefill_module=functools.partial(
                generate, ("backend", *attention, "use_fp16_qk_reduction")
            ),
        ),
        "flashinfer.jit.xqa": dict(gen_xqa_module=functools.partial(generate, xqa)),
    }
    for name, values in fakes.items():
        module = types.ModuleType(name)
        module.__dict__.update(values, __spec__=object())
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["flashinfer"].jit = sys.modules["flashinfer.jit"]
    monkeypatch.setattr(flashinfer_modules, "stub_driver", lambda folder: None)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "set anew")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    assert flashinfer_modules.main([str(tmp_path)]) == 1
    assert "module_2: FAILED, error: no nvcc" in capsys.readouterr().out
    # What `plan` of FlashInfer's wrapper asks for, given what `on_device.torch_sides` gives it.
    decode, prefill, *others = asked
    flags = [name for name in attention if name.startswith("use_")]
    wanted = dict.fromkeys(attention, "bf16") | dict.fromkeys(flags, False)
    wanted |= {"dtype_idx": "i32", "head_dim_qk": 128, "head_dim_vo": 128, "pos_encoding_mode": 0}
    assert decode == wanted and prefill == wanted | {"backend": "fa2", "use_fp16_qk_reduction": False}
    wanted = dict.fromkeys(xqa, "bf16") | {"head_dim": 128, "use_sliding_window": False}
    sizes = {(cell.block_size, cell.group_size) for cell in all_cells()}
    assert {(module.pop("page_size"), module.pop("head_group_ratio")) for module in others} == sizes
    assert all(module == {name: wanted[name] for name in module} and len(module) == 5 for module in others)
    made = {path.parent.name for path in tmp_path.glob("*/*.so")}
    assert made == {f"module_{nth}" for nth in range(1, 12)} - {"module_2"}


# --- what is asked ---


def test_every_cell_is_there_once_and_the_important_ones_first():
    cells = all_cells()
    assert len(cells) == len(set(cells)) == 4 * 3 * 3 * 3 + 5 + 4
    equal = [cell for cell in cells if cell not in kernel_cells.PLANNED]
    assert {cell.batch for cell in equal} == {1, 8, 32, 128}
    assert {cell.context for cell in equal} == {1024, 8192, 32768}
    assert {(cell.group_size, cell.block_size) for cell in cells[:4]} == {(4, 16)}
    is_small = [cell.kv_bytes < kernel_cells.LARGE_BYTES for cell in cells]
    assert is_small == sorted(is_small) and sum(is_small) == 4 * 3 * 3 * 3 // 2 + 1
    assert set(kernel_cells.QUICK) <= set(cells)


def test_the_bytes_of_a_cell_by_hand():
    cell = Cell(32, 8192, 4, 16)
    assert cell.kv_bytes == 2 * 32 * 8192 * 8 * 128 * 2 == 1_073_741_824
    assert (cell.num_columns, cell.num_blocks, cell.num_buffers) == (512, 32 * 512 + 2, 1)
    small = Cell(1, 1024, 4, 16)
    assert small.kv_bytes == 4_194_304 and small.num_buffers == 239  # just over 1 GB


def test_rows_of_a_cell_may_be_unequal():
    cell = Cell(2, 96, 4, 16, unequal="16 and 96")
    assert cell.name == "16 and 96, group 4, block 16" and cell.lens == (16, 96)
    assert (cell.kv_bytes, cell.num_columns, cell.num_blocks) == (2 * 112 * 8 * 128 * 2, 6, 7 + 2)
    problem = make_problem(cell, num_buffers=1)
    held = problem.held_blocks
    assert problem.rows.num_columns.tolist() == [1, 6] and len(set(held.tolist())) == 7
    assert problem.block_table[:, 0].tolist() == [held[0], held[1]]
    with pytest.raises(NotImplementedError, match="rows of one length alone"):
        problem.require_equal_rows()
    make_problem(Cell(2, 32, 4, 16), num_buffers=1).require_equal_rows()
    long = [cell for cell in all_cells() if cell.unequal]
    assert {len(cell.lens) for cell in long} == {64, 128}
    assert all(length % 128 == 0 and max(cell.lens) == cell.context for cell in long for length in cell.lens)


def test_the_bytes_of_a_step_by_hand():
    step = pytest.importorskip("experiments.on_device.step", reason="needs flax")
    sizes = step.StepSizes(batch=3, context=100, num_steps=4)
    assert sizes.start_len == 96  # steps read 97 to 100 tokens
    assert step.kv_bytes(step.LLAMA_1B, sizes) == round(3 * 98.5 * 2 * 16 * 8 * 64 * 2)
    decoder = step.make_decoder(step.TINY)
    layer = 64 * (2 + 1 + 1 + 2) * 64 + 3 * 64 * 32 + 2 * 64
    assert step.param_bytes(decoder) == 2 * (32 * 64 + layer + 64)


def test_a_step_is_compared_with_float32():
    step = pytest.importorskip("experiments.on_device.step", reason="needs flax")
    contest, (xla, _) = step.step_contest(step.make_decoder(step.TINY), *step.TINY_STEPS)
    (record,) = contests.compete(contest, [xla], None)
    assert record["status"] == CHECKED and 1e-3 < record["error"] < 1e-2  # bfloat16


def test_a_step_is_checked_whether_or_not_xla_runs(monkeypatch):
    step = pytest.importorskip("experiments.on_device.step", reason="needs flax")
    expected = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)
    monkeypatch.setattr(step, "expected_logits", lambda *_: expected)
    for factor, status in ((1.02, CHECKED), (1.04, WRONG)):

        def prepare(decoder, sizes, implementation, *_, factor=factor):
            if implementation == step.XLA:
                raise RuntimeError("no room")
            return Program(lambda: None, lambda _: None, lambda _: factor * expected)

        monkeypatch.setattr(step, "_prepare", prepare)
        monkeypatch.setattr(step, "param_bytes", lambda _: 0)
        decoder = types.SimpleNamespace(config=step.TINY)
        records = contests.compete(*step.step_contest(decoder, *step.TINY_STEPS), None)
        assert [record["status"] for record in records] == [FAILED, status]


def test_a_problem_is_random_and_poisoned():
    problem = make_problem(CELL, num_buffers=2)
    pools = np.asarray(problem.k_pool.astype(np.float32)).reshape(2, CELL.num_blocks, -1)
    owned = np.zeros(CELL.num_blocks, bool)
    owned[problem.block_table] = True
    assert np.isnan(pools[:, ~owned]).all() and np.isfinite(pools[:, owned]).all()
    assert (~owned).sum() == 2 and problem.block_table.size == owned.sum()
    assert len(np.unique(pools[:, owned, 0])) > 4  # blocks and buffers differ
    assert not np.array_equal(np.sort(problem.block_table, axis=None), problem.block_table.ravel())


# --- timing ---


def fake(name, seconds=0.0, result=1.0, fails_on=None, is_ours=False):
    """A side that sleeps; its `fails_on`-th sample raises."""
    calls = []

    def run():
        calls.append(None)
        if len(calls) == fails_on:
            raise RuntimeError("it broke\nin many lines")
        time.sleep(seconds)

    return Side(name, lambda _: Program(run, lambda _: None, lambda _: result), is_ours)


def test_sides_take_turns_and_the_broken_ones_are_reported():
    contest = Contest("work", 1000, lambda result: abs(result - 1), 0.1, num_launches=4)

    def missing(_):
        raise ModuleNotFoundError("No module named 'peer'")

    sides = [
        fake(OURS, 0.004, is_ours=True),
        fake("slow", 0.012),
        fake("wrong", result=2.0),
        fake("not a number", result=math.nan),
        fake("breaks at once", fails_on=1),
        fake("breaks later", fails_on=3),
        Side("missing", missing),
    ]
    records = {record["side"]: record for record in contests.compete(contest, sides, 0.0)}
    assert list(records) == [side.name for side in sides]
    ours, slow = records[OURS], records["slow"]
    assert ours["status"] == slow["status"] == MEASURED
    assert ours["num_calls"] == contests.MIN_ROUNDS and ours["launches_per_sample"] == 4
    assert 1000 <= ours["median_us"] < slow["median_us"]  # of a launch, not of a sample
    assert 3000 <= slow["median_us"] < 12_000
    assert records["wrong"]["status"] == records["not a number"]["status"] == WRONG
    assert records["wrong"]["reason"] == "off the reference by 1, at most 0.1 expected"
    for name in ("breaks at once", "breaks later"):
        assert (records[name]["status"], records[name]["reason"]) == (FAILED, "RuntimeError: it broke")
    assert records["missing"]["reason"] == "ModuleNotFoundError: No module named 'peer'"
    assert all(records[name]["median_us"] is None for name in records if name not in (OURS, "slow"))


def test_a_sample_is_long_whatever_a_launch_takes():
    assert contests.launches_for(0) == contests.MAX_LAUNCHES
    assert contests.launches_for(3.5e9) == 10  # 1 ms and 10 us each
    assert contests.launches_for(10**12) == 2


# --- the run ---


def test_every_contest_has_a_name_before_anything_is_made():
    """Nothing here has a GPU."""
    names = [*parts.speed(False, [""])]
    assert len(names) == len(set(names)) == 3 + 4 * 3 * 3 * 3 + 5 + 4 + 9
    moves = {name for name in names if name.startswith(comparison.MOVES)}
    assert names[:3] == ["one tiny kernel", "read", "copy"] and set(names[9:18]) == moves
    assert set(parts.speed(False, [])) < set(names)
    assert [*parts.speed(False, ["50 x 8k", "read"])] == ["read", "50 x 8k, group 4, block 16"]
    assert parts.speed(False, ["51 x 8k"]) == {}


def test_a_timed_run_from_end_to_end(monkeypatch, capsys):
    """On a CPU, where ours does not run: the peers' times, and what follows from them."""
    monkeypatch.setattr(parts, "QUICK", (CELL._replace(batch=1),))
    monkeypatch.setattr(kernel_cells, "ROTATED_BYTES", 3 * CELL.kv_bytes)
    monkeypatch.setattr(parts, "ceiling_makers", functools.partial(parts.ceiling_makers, 1 << 12))
    monkeypatch.setattr(parts, "_moves", lambda *_: parts.move_makers(parts.TINY_POOLS, (3,), 2))
    contests.hold(parts.speed(False, []), 0.0, {}, parts.check_device, lambda: None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    held = [line for line in lines if "sides" in line]
    found = compare(held)
    (cell,) = found["cells"]
    assert (cell["best_peer"], cell["ratio"]) == ("gather + XLA", None)
    assert cell["why_no_ratio"].startswith("ours: failed: ")
    assert 0 < found["ceilings"]["read"] and 0 < found["ceilings"]["copy"] and found["bars"] == []
    (append,) = (each for each in held if each["name"] == "append 3 tokens")
    rate = append["num_bytes"] / comparison.medians_us(append)["XLA"] / 1e3
    assert comparison.of_ceiling(append, "XLA", found["ceilings"]) == pytest.approx(
        rate / found["ceilings"]["copy"]
    )
    show(found, 1.0)
    assert "gather + XLA" in capsys.readouterr().out


# --- what the figures mean ---


def contest(name, num_bytes, sides):
    """`sides`: medians in microseconds, or a reason."""
    records = [
        {"side": side, "is_ours": side.startswith("ours"), "error": None}
        | (
            {"status": FAILED, "reason": value, "median_us": None}
            if isinstance(value, str)
            else {"status": MEASURED, "reason": "", "median_us": value}
        )
        for side, value in sides.items()
    ]
    return {"name": name, "num_bytes": num_bytes, "is_cell": OURS in sides and "a" in sides, "sides": records}


HELD = [
    contest("one tiny kernel", 0, {"XLA": 4.0}),
    contest("read", 4_000_000, {"XLA": 1.25, "PyTorch": 1.0}),  # 4,000 GB/s
    contest("copy", 4_000_000, {"XLA": 1.0}),
    # 1,000 us for 3.8 GB: 95% of reading; a peer takes 1.2 times as long, another three times.
    contest("won", 3_800_000_000, {OURS: 1000.0, "ours, plan included": 1010.0, "a": 3000.0, "b": 1200.0}),
    contest("lost", 400_000_000, {OURS: 125.0, "ours, plan included": 120.0, "a": 100.0, "b": "no room"}),
    contest("nearly", 4_000_000, {OURS: 10.0, "a": 9.5, "b": "no room"}),
    contest("ours failed", 4_000_000, {OURS: "it broke", "a": 9.5}),
    contest("alone", 4_000_000, {OURS: 10.0, "a": "no room"}),
    contest("append 1 token", 1_000_000, {OURS: 2.0, "XLA": 4.0}),
]


def test_ratios_and_bars():
    found = compare(HELD)
    assert found["ceilings"] == {"read": pytest.approx(4000), "copy": pytest.approx(4000)}
    assert comparison.of_ceiling(HELD[-1], OURS, {"copy": 1000, "read": 1}) == pytest.approx(0.5)
    won, lost, nearly, failed, alone = found["cells"]
    assert won["of_ceiling"] == pytest.approx(0.95)
    assert (won["best_peer"], won["ratio"]) == ("b", pytest.approx(1.2))
    assert (lost["best_peer"], lost["ratio"]) == ("a", pytest.approx(0.8))
    assert nearly["ratio"] == pytest.approx(0.95)
    assert (failed["ratio"], failed["why_no_ratio"]) == (None, "ours: failed: it broke")
    assert (alone["ratio"], alone["why_no_ratio"]) == (None, "no peer was measured")
    share, mean, least = found["bars"]
    assert share["measured"] == pytest.approx(0.8) and not share["holds"]  # 0.4 GB count, 0.004 do not
    assert mean["measured"] == pytest.approx((1.2 * 0.8 * 0.95) ** (1 / 3)) and not mean["holds"]
    assert least["measured"] == pytest.approx(0.8) and not least["holds"]
    assert absences(HELD) == [
        "b: failed: no room (2 contests, lost and others)",
        "ours: failed: it broke (ours failed)",
        "a: failed: no room (alone)",
    ]


def test_bars_hold_when_they_do():
    won = contest("won", 10**9, {OURS: 100.0, "a": 110.0})
    read = contest("read", 10_500_000, {"XLA": 1.0})
    assert [bar["holds"] for bar in compare([read, won])["bars"]] == [True, True, True]
    assert compare([])["bars"] == []


def test_the_table_says_what_was_lost(capsys):
    show(compare(HELD), 1.0)
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("1,000.0 1,010.0 95% b 1,200.0 1.20x", "0.80x", "3 of 3 bars do not hold"):
        assert words in shown, words
