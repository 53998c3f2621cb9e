# pyright: reportMissingImports=false
"""The peers of `experiments.first_gpu_run` that run in PyTorch: FlashInfer's ways to decode.

They read JAX's own buffers, without a copy. Launches are captured into one CUDA graph, so that the host's
part costs nothing; where that does not work they are enqueued one by one, and the record says so.

FlashInfer's modules are compiled per shape, which takes minutes: `experiments.on_device.flashinfer_modules`
does that before, without a GPU, into a folder that --flashinfer or KVCACHE_FLASHINFER_DIR names; if it has
FlashInfer itself, that is imported from there. A module that is missing is reported, not compiled, unless
the environment has FLASHINFER_DISABLE_JIT set to nothing. Its plan is made before, as ours is.
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.on_device import contests
from experiments.on_device.contests import Program, Side

if TYPE_CHECKING:
    from experiments.on_device.problem import Problem

FLASHINFER_DIR = "KVCACHE_FLASHINFER_DIR"
_WORKSPACE_BYTES = 256 << 20


def torch_sides(problem: "Problem") -> list[Side]:
    """Those that cannot be imported raise when they are prepared."""
    if problem.scaling is not None:  # none has scales of each token
        return []
    return [
        Side(contests.FA2, functools.partial(_flashinfer, problem, "fa2", False)),
        Side(contests.FA2_TENSOR_CORES, functools.partial(_flashinfer, problem, "fa2", True)),
        Side(contests.FLASHINFER_CUDNN, functools.partial(_flashinfer, problem, "cudnn", False)),
        Side(contests.XQA, functools.partial(_xqa, problem)),
    ]


def _flashinfer(problem: "Problem", backend: str, use_tensor_cores: bool, num_launches: int) -> Program:
    flashinfer, torch = _import_flashinfer()
    cell, table = problem.cell, as_tensor(problem.block_table)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=table.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=use_tensor_cores, backend=backend
    )
    num_held = [length // cell.block_size for length in cell.lens]
    # cuDNN reads the table itself, which must stay where a graph found it.
    options = {"block_tables": table} if backend == "cudnn" else {}
    wrapper.plan(
        torch.tensor([0, *itertools.accumulate(num_held)], dtype=torch.int32),
        as_tensor(problem.held_blocks),
        torch.full((cell.batch,), cell.block_size, dtype=torch.int32),
        cell.num_kv_heads * cell.group_size,
        cell.num_kv_heads,
        cell.head_dim,
        cell.block_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        sm_scale=problem.scale,
        **options,
    )
    q = as_tensor(problem.q).reshape(cell.batch, -1, cell.head_dim)
    out = torch.empty_like(q)
    return _launches(problem, lambda k, v: wrapper.run(q, (k, v), out=out), num_launches)


def _xqa(problem: "Problem", num_launches: int) -> Program:
    flashinfer, torch = _import_flashinfer()
    cell = problem.cell
    q = as_tensor(problem.q).reshape(cell.batch, -1, cell.head_dim)
    table, lens, out = as_tensor(problem.block_table), as_tensor(problem.lens), torch.empty_like(q)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)

    def call(k_pool: Any, v_pool: Any) -> Any:
        return flashinfer.decode.xqa_batch_decode_with_kv_cache(
            q,
            (k_pool, v_pool),
            workspace,
            table,
            lens,
            cell.context,
            bmm1_scale=problem.scale,
            bmm2_scale=1.0,
            kv_layout="HND",
            out=out,
        )

    return _launches(problem, call, num_launches)


def _import_flashinfer() -> tuple[Any, Any]:
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    folder = os.environ.get(FLASHINFER_DIR)
    if folder and folder not in sys.path and (Path(folder) / "flashinfer").is_dir():
        sys.path.insert(0, folder)
    import flashinfer
    import flashinfer.decode
    import flashinfer.jit
    import torch

    if folder:
        flashinfer.jit.env.FLASHINFER_AOT_DIR = Path(folder)
    return flashinfer, torch


def as_tensor(array: Any) -> Any:
    """The same memory."""
    import torch

    return torch.from_dlpack(array)


def _launches(problem: "Problem", call: Callable[[Any, Any], Any], num_launches: int) -> Program:
    """`call(k_pool, v_pool)` on buffer after buffer."""
    cell = problem.cell
    pools = [as_tensor(pool) for pool in (problem.k_pool, problem.v_pool)]
    buffers = [pool.reshape(problem.num_buffers, cell.num_blocks, *pool.shape[1:]) for pool in pools]
    program = captured(lambda nth: call(*(pool[nth % problem.num_buffers] for pool in buffers)), num_launches)
    return program._replace(
        result=lambda out: program.result(out).reshape(problem.q.shape)  # whatever the order of its axes
    )


def captured(call: Callable[[int], Any], num_launches: int) -> Program:
    """`call(0)`, `call(1)`, ... as one CUDA graph."""
    import torch

    def all_calls() -> Any:
        out = None
        for nth in range(num_launches):
            out = call(nth)
        return out

    def wait(_) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def result(out: Any) -> Any:
        return out.float().cpu().numpy()

    call(0)  # compiles, and allocates what it keeps
    wait(None)
    if not torch.cuda.is_available():
        return Program(all_calls, wait, result)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = all_calls()
    except Exception as failure:
        wait(None)
        return Program(
            all_calls, wait, result, f"launched one by one, no CUDA graph: {contests.one_line(failure)}"
        )

    def replay() -> Any:
        graph.replay()
        return out

    return Program(replay, wait, result)


def settle() -> None:
    """Where PyTorch was imported, gives back what it keeps and waits; raises if the device is lost."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
