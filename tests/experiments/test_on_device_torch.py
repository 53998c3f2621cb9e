"""What the benchmark of the kernels asks of FlashInfer, on stand-ins that compute with NumPy."""

import math
import sys

import ml_dtypes
import numpy as np
import pytest

from experiments.on_device import torch_sides
from experiments.on_device.cells import Cell
from experiments.on_device.contests import (
    CHECKED,
    FA2,
    FA2_TENSOR_CORES,
    FLASHINFER_CUDNN,
    XQA,
    Contest,
    compete,
)
from experiments.on_device.problem import TOLERANCE, Problem, error_of
from tests.experiments import torch_fakes

CELL = Cell(3, 32, 2, 8, num_kv_heads=4, head_dim=16)
NUM_BUFFERS = 2


@pytest.fixture
def install(monkeypatch):
    """Puts stand-ins where PyTorch and FlashInfer are imported from."""
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.delenv(torch_sides.FLASHINFER_DIR, raising=False)

    def put():
        torch = torch_fakes.make_torch()
        flashinfer = torch_fakes.make_flashinfer(torch)
        for module in (torch, flashinfer, flashinfer.decode, flashinfer.jit):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return torch, flashinfer

    return put


def problem_and_result(buffer):
    """Tokens in a row first, then cut into scattered blocks; all others hold NaN."""
    random = np.random.default_rng(0)
    bf16 = ml_dtypes.bfloat16
    q = random.standard_normal((CELL.batch, CELL.num_kv_heads, CELL.group_size, CELL.head_dim)).astype(bf16)
    tokens = (2, NUM_BUFFERS, CELL.batch, CELL.context, CELL.num_kv_heads, CELL.head_dim)
    k, v = random.standard_normal(tokens).astype(bf16)
    table = random.permutation(CELL.num_blocks)[: CELL.batch * CELL.num_columns].reshape(CELL.batch, -1)
    pools = np.full(
        (2, NUM_BUFFERS, CELL.num_blocks, CELL.num_kv_heads, CELL.block_size, CELL.head_dim), math.nan, bf16
    )
    for pool, rows in zip(pools, (k, v), strict=True):
        blocks = rows.reshape(NUM_BUFFERS, *table.shape, CELL.block_size, CELL.num_kv_heads, CELL.head_dim)
        pool[:, table] = blocks.swapaxes(3, 4)
    pools = pools.reshape(2, -1, *pools.shape[3:])
    problem = Problem(CELL, NUM_BUFFERS, q, *pools, table.astype(np.int32))
    flat_q = q.reshape(CELL.batch, -1, CELL.head_dim)
    out = torch_fakes.attended(flat_q, k[buffer], v[buffer], CELL.head_dim**-0.5)
    return problem, out.astype(np.float32).reshape(q.shape)


def records_of(problem, expected, num_launches):
    contest = Contest("cell", 1, lambda out: error_of(out, expected), TOLERANCE, num_launches)
    records = compete(contest, torch_sides.torch_sides(problem), None)
    return {record["side"]: record for record in records}


@pytest.mark.parametrize("num_launches", [1, 2])
def test_flashinfer_is_asked_for_the_same(install, num_launches):
    """In a graph whose last launch reads the first buffer, and the second."""
    _, flashinfer = install()
    problem, expected = problem_and_result(num_launches - 1)
    records = records_of(problem, expected, num_launches)
    for side in (FA2, FA2_TENSOR_CORES, FLASHINFER_CUDNN, XQA):
        assert (records[side]["status"], records[side]["note"]) == (CHECKED, ""), records[side]
    asked = [(wrapper.backend, wrapper.use_tensor_cores) for wrapper in flashinfer.wrappers]
    assert asked == [("fa2", False), ("fa2", True), ("cudnn", False)]


def test_a_side_that_no_graph_can_hold_is_launched_one_by_one(install, monkeypatch):
    torch, _ = install()

    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    record = records_of(*problem_and_result(1), 2)[FA2]
    assert record["status"] == CHECKED
    assert record["note"].startswith("launched one by one, no CUDA graph: RuntimeError: operation not perm")


def test_compiled_modules_are_taken_from_the_folder(install, monkeypatch, tmp_path):
    """And FlashInfer itself, if it is there: before one that is installed."""
    _, flashinfer = install()
    (tmp_path / "flashinfer").mkdir()
    monkeypatch.setenv(torch_sides.FLASHINFER_DIR, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert records_of(*problem_and_result(0), 1)[FA2]["status"] == CHECKED
    assert flashinfer.jit.env.FLASHINFER_AOT_DIR == tmp_path and sys.path[0] == str(tmp_path)
