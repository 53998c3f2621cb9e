"""The kernels' benchmark: its path on a CPU, its arithmetic, and what it says when something is wrong."""

import functools
import json
import math
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernel_speed import __main__ as kernel_speed
from experiments.kernel_speed import cells as kernel_speed_cells
from experiments.kernel_speed import entries as kernel_speed_entries
from experiments.kernel_speed import flashinfer_modules, timing
from experiments.kernel_speed import report as kernel_speed_report
from experiments.kernel_speed.cells import Cell, all_cells
from experiments.kernel_speed.names import CUDNN_PAGED, OURS, SIDES, XLA_ATTENTION
from experiments.kernel_speed.problem import TOLERANCE, error_of, expected_output, make_problem
from experiments.kernel_speed.sides import jax_sides, looped
from experiments.kernel_speed.timing import CHECKED, FAILED, MEASURED, WRONG, Contest, Program, Side
from tests.experiments import kernel_speed_fakes
from tests.experiments.kernel_speed_fakes import CELL

pytestmark = pytest.mark.slow


# --- the path ---


@pytest.mark.contract
def test_the_whole_path_runs_interpreted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernel_speed, "make_entries", lambda _: kernel_speed_fakes.interpreted)
    assert kernel_speed.main(["--interpret", "--output", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads((tmp_path / "cpu_interpreted.json").read_text())
    assert json.loads(printed.out) == report
    assert (tmp_path / "cpu_interpreted.png").read_bytes().startswith(b"\x89PNG")
    assert {"machine", "date", "device", "packages", "flashinfer_modules", "xla_flags"} < set(report)

    status = {
        (entry["name"], side["side"]): side["status"]
        for kind in ("entries", "decodes", "moves", "steps")
        for entry in report[kind]
        for side in entry["sides"]
    }
    assert {side for _, side in status} | {XLA_ATTENTION} == set(SIDES)
    checked = {where for where, verdict in status.items() if verdict == CHECKED}
    names = {entry["name"] for entry in report["moves"] + report["steps"]}
    ours = {(name, OURS) for name in names | {CELL.name}}
    assert (
        ours | {(CELL.name, "ours, plan included"), (CELL.name, "gather + XLA"), ("read", "XLA")} <= checked
    )
    assert {
        "append 3 tokens",
        *(f"{move} 2 blocks of 2 layers" for move in ("gather", "scatter", "copy")),
    } <= names
    # The decoder needs flax, which the oldest jax is tested without.
    assert len(report["steps"]) + len(report["skipped"]) == 1
    for side in (side for entry in report["steps"] for side in entry["sides"]):
        assert side["status"] == CHECKED and 1e-3 < side["error"] < 1e-2  # bfloat16, from float32

    # Who cannot run here is there too, with the reason.
    (decode,) = report["decodes"]
    (triton,) = (side for side in decode["sides"] if side["side"] == "JAX Triton")
    assert triton["status"] == FAILED and "CPU" in triton["reason"]
    absent = kernel_speed_report.absences(report["decodes"])
    assert {"JAX Triton", "gather + cuDNN", "FlashInfer XQA"} <= {absence["side"] for absence in absent}

    # Nothing is measured, and nothing looks as if it were.
    assert "median_us" in triton and not any(verdict == MEASURED for verdict in status.values())
    assert report["ceilings"] == {"read": None, "copy": None}
    assert decode["comparison"]["gb_per_s"] is None
    assert [bar["holds"] for bar in report["summary"]["bars"]] == [None] * 3
    kernel_speed_report.show(report)
    shown = capsys.readouterr().out
    assert "nothing is measured" in shown and "GB/s" not in shown


def test_a_wrong_kernel_is_not_passed(monkeypatch):
    """The check sees a block too early, and a result that is NaN."""
    problem = make_problem(CELL, num_buffers=2)
    expected = expected_output(problem, 1)

    def shifted(problem):
        return problem._replace(block_table=problem.block_table[:, ::-1].at[0, 0].set(0))

    for wrong in (shifted(problem), problem._replace(q=problem.q * math.nan)):
        sides = [side for side in jax_sides(wrong) if side.name == "gather + XLA"]
        contest = Contest("cell", 1, lambda out: error_of(out, expected), TOLERANCE, 2)
        (record,) = timing.compete(contest, sides, None)
        assert record["status"] == WRONG and "off the reference" in record["reason"]
    assert record["error"] is None  # NaN is no JSON


def test_cudnn_is_asked_for_the_same(monkeypatch):
    """A stand-in computes what JAX's function is asked for, behind that function's check of the shapes."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lowered = []

    def stand_in(query, key, value, q_seqlen, kv_seqlen, page_table_k, page_table_v, **options):
        assert options.pop("mask_type") is cudnn.MaskType.PADDING and options.pop("qkv_layout") == "BNTH"
        layout = cudnn.AttentionLayout.BNTH
        cudnn.check_layout(
            query, key, value, None, q_seqlen, kv_seqlen, None, None, page_table_k, page_table_v, layout
        )

        def keys_of(pool, table):
            blocks = jnp.moveaxis(pool[table[:, 0, :, 0]], 3, 2)
            return blocks.reshape(query.shape[0], -1, *blocks.shape[3:])

        out = jax.nn.dot_product_attention(
            jnp.swapaxes(query, 1, 2),
            keys_of(key, page_table_k),
            keys_of(value, page_table_v),
            query_seq_lengths=q_seqlen,
            key_value_seq_lengths=kv_seqlen,
            implementation="xla",
            **options,
        )
        return jnp.swapaxes(out, 1, 2)

    def for_cuda(function, *arguments):
        lowered.append(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())
        raise RuntimeError("there is no cuDNN to compile with")

    versions = types.SimpleNamespace(cudnn_get_version=lambda: 91200)
    monkeypatch.setattr(cudnn, "cuda_versions", versions)
    problem = make_problem(CELL, num_buffers=2)
    sides = [side for side in jax_sides(problem) if side.name == CUDNN_PAGED]
    with monkeypatch.context() as patch:
        patch.setattr(timing, "compiled", for_cuda)
        timing.compete(Contest("cell", 1, lambda _: 0.0, 0.0, 3), sides, None)
    (text,) = lowered
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == 3
    monkeypatch.setattr(cudnn, "paged_attention", stand_in)
    expected = expected_output(problem, 1)
    contest = Contest("cell", 1, lambda out: error_of(out, expected), TOLERANCE, 2)
    (record,) = timing.compete(contest, sides, None)
    assert record["status"] == CHECKED, record


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
    # What `plan` of FlashInfer's wrapper asks for, given what `kernel_speed_torch` gives it.
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


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        kernel_speed.main(["--output", str(tmp_path)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "jax runs on cpu here, expected an NVIDIA Hopper GPU" in said and "--interpret" in said
    assert len(said.splitlines()) == 1


def test_every_cell_is_there_once_and_the_important_ones_first():
    cells = all_cells()
    assert len(cells) == len(set(cells)) == 4 * 3 * 3 * 3 + 5
    equal = [cell for cell in cells if cell not in kernel_speed_cells.PLANNED]
    assert {cell.batch for cell in equal} == {1, 8, 32, 128}
    assert {cell.context for cell in equal} == {1024, 8192, 32768}
    assert {(cell.group_size, cell.block_size) for cell in cells[:4]} == {(4, 16)}
    is_small = [cell.kv_bytes < kernel_speed_cells.LARGE_BYTES for cell in cells]
    assert is_small == sorted(is_small) and sum(is_small) == 4 * 3 * 3 * 3 // 2 + 1
    assert set(kernel_speed_cells.QUICK) <= set(cells)


def test_the_bytes_of_a_cell_by_hand():
    cell = Cell(32, 8192, 4, 16)
    assert cell.kv_bytes == 2 * 32 * 8192 * 8 * 128 * 2 == 1_073_741_824
    assert (cell.num_columns, cell.num_blocks, cell.num_buffers) == (512, 32 * 512 + 2, 1)
    small = Cell(1, 1024, 4, 16)
    assert small.kv_bytes == 4_194_304 and small.num_buffers == 239  # just over 1 GB
    assert small.needed_bytes == 3 * 239 * 4_194_304 + 2 * 4_194_304


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
    step = pytest.importorskip("experiments.kernel_speed.step", reason="needs flax")
    sizes = step.StepSizes(batch=3, context=100, num_steps=4)
    assert sizes.start_len == 96  # steps read 97 to 100 tokens
    assert step.kv_bytes(step.LLAMA_1B, sizes) == round(3 * 98.5 * 2 * 16 * 8 * 64 * 2)
    decoder = step.make_decoder(step.TINY)
    layer = 64 * (2 + 1 + 1 + 2) * 64 + 3 * 64 * 32 + 2 * 64
    assert step.param_bytes(decoder) == 2 * (32 * 64 + layer + 64)


def test_a_step_is_checked_whether_or_not_xla_runs(monkeypatch):
    step = pytest.importorskip("experiments.kernel_speed.step", reason="needs flax")
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
        records = timing.compete(*step.step_contest(decoder, *kernel_speed_cells.TINY_STEPS), None)
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
    records = {record["side"]: record for record in timing.compete(contest, sides, 0.0)}
    assert list(records) == [side.name for side in sides]
    ours, slow = records[OURS], records["slow"]
    assert ours["status"] == slow["status"] == MEASURED
    assert ours["num_calls"] == timing.MIN_ROUNDS and ours["launches_per_sample"] == 4
    assert 1000 <= ours["median_us"] < slow["median_us"]  # of a launch, not of a sample
    assert 3000 <= slow["median_us"] < 12_000
    assert records["wrong"]["status"] == records["not a number"]["status"] == WRONG
    assert records["wrong"]["reason"] == "off the reference by 1, at most 0.1 expected"
    for name in ("breaks at once", "breaks later"):
        assert (records[name]["status"], records[name]["reason"]) == (FAILED, "RuntimeError: it broke")
    assert records["missing"]["reason"] == "ModuleNotFoundError: No module named 'peer'"
    assert all(records[name]["median_us"] is None for name in records if name not in (OURS, "slow"))


def test_a_sample_is_long_whatever_a_launch_takes():
    assert timing.launches_for(0) == timing.MAX_LAUNCHES
    assert timing.launches_for(3.5e9) == 10  # 1 ms and 10 us each
    assert timing.launches_for(10**12) == 2


# --- the run ---


class FakeDevice:
    device_kind, platform = "NVIDIA H200", "gpu"
    compute_capability = "9.0"

    class client:  # noqa: N801
        platform_version = "CUDA 13"

    def memory_stats(self):
        return {"bytes_limit": 60 * 10**9}


def test_every_entry_has_a_name_before_anything_is_made():
    """Nothing here has a GPU; and what does not fit is not tried."""
    jobs = kernel_speed_entries.Entries(FakeDevice(), is_quick=False, interpret=False)
    names = jobs.names
    assert len(names) == len(set(names)) == 3 + 4 * 3 * 3 * 3 + 5 + 6 + 2
    first = [kind for kind, _ in names[:17]]
    assert first == ["entries"] * 3 + ["decodes"] * 6 + ["moves"] * 6 + ["steps"] * 2
    with pytest.raises(kernel_speed_entries.NoRoomError, match="needs 86 GB, and 60 GB may be used"):
        jobs.make("decodes", Cell(128, 32768, 4, 16).name)  # 17 GB, five times
    assert jobs.environment["device"]["compute_capability"] == "9.0"


def test_a_timed_run_from_end_to_end(tmp_path, monkeypatch, capsys):
    """On a CPU, where ours does not run: the peers' times, and what follows from them."""
    pytest.importorskip("flax")
    monkeypatch.setattr(kernel_speed, "make_entries", lambda _: kernel_speed_fakes.timed)
    monkeypatch.setattr(kernel_speed, "QUICK_SECONDS", 0.0)
    assert kernel_speed.main(["--quick", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "cpu_quick.json").read_text())
    (decode,), (taken,) = report["decodes"], report["steps"]
    assert decode["num_buffers"] == 6 and decode["comparison"]["best_peer"] == "gather + XLA"
    assert decode["comparison"]["why_no_ratio"].startswith("ours: failed: ")
    rates = report["ceilings"]
    assert 0 < rates["read"] and 0 < rates["copy"]
    (xla, ours) = taken["sides"]
    assert xla["status"] == MEASURED and taken["of_ceiling"] == {
        "XLA attention": pytest.approx(taken["num_bytes"] / xla["median_us"] / 1e3 / rates["read"])
    }
    assert ours["status"] == FAILED and "it is for cuda devices, and this is cpu" in ours["reason"]
    assert [entry["name"] for entry in report["moves"]][0] == "append 128 tokens"
    assert "gather + XLA" in shown and "0 of 1 cells compared with a peer" in shown
