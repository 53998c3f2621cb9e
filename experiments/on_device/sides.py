"""The decodes of `experiments.first_gpu_run` that JAX compiles: ours, and the blocks gathered, then
`jax.nn.dot_product_attention` by XLA, and by cuDNN.

Each side's launches are a loop in one compiled program. Gathering is timed: it is what these ways cost on a
paged cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.on_device import contests
from experiments.on_device.contests import GATHER_CUDNN, GATHER_XLA, OURS, WITH_PLAN, Program, Side
from experiments.on_device.problem import Problem
from pallas_kernels.eight_bits import meant


def jax_sides(problem: Problem, interpret: bool = False) -> list[Side]:
    """Ours first; `interpret` runs it on the CPU."""
    by_cudnn = Side(GATHER_CUDNN, functools.partial(_gathered, problem, "cudnn"))
    return [
        Side(OURS, functools.partial(_ours, problem, True, interpret), is_ours=True),
        Side(WITH_PLAN, functools.partial(_ours, problem, False, interpret), is_ours=True),
        *([by_cudnn] if problem.scaling is None else []),
        Side(GATHER_XLA, functools.partial(_gathered, problem, "xla")),
    ]


def _ours(problem: Problem, is_planned: bool, interpret: bool, num_launches: int) -> Program:
    from pallas_kernels import mosaic_gpu

    cell, options = problem.cell, problem.options
    q_shape = (cell.batch, 1, cell.num_kv_heads, cell.group_size, cell.head_dim)

    def plan_of(rows):
        dtype, columns = problem.k_pool.dtype, cell.num_columns
        return mosaic_gpu.plan_for(rows, q_shape, columns, cell.block_size, dtype=dtype, interpret=interpret)

    plan = jax.jit(plan_of)(problem.rows) if is_planned else None

    def call(inputs, pools, buffer, zero):
        (q, table, rows, plan), (k_pool, v_pool, scaling) = inputs, pools
        if plan is None:
            plan = plan_of(rows._replace(num_columns=rows.num_columns + zero))
        arrays = (q + zero.astype(q.dtype)).reshape(q_shape), k_pool, v_pool, table, rows
        more: Any = dict(layer=buffer, plan=plan, scaling=scaling, interpret=interpret)
        out, _ = mosaic_gpu.paged_decode(*arrays, options, **more)
        return out.reshape(problem.q.shape)

    inputs = problem.q, problem.block_table, problem.rows, plan
    pools = problem.k_pool, problem.v_pool, problem.scaling
    return looped(call, inputs, pools, problem.num_buffers, num_launches, interpret)


def _gathered(problem: Problem, implementation: Any, num_launches: int) -> Program:
    problem.require_equal_rows()
    cell = problem.cell

    def call(inputs, pools, buffer, zero):
        q, table = inputs
        table = table + (buffer * cell.num_blocks + zero)

        def keys_of(arrays):
            blocks, *beside = (array.at[table].get(mode="promise_in_bounds") for array in arrays)
            if beside:
                blocks = meant(blocks, *beside).astype(q.dtype)
            # [b, columns, h, block_size, d]
            return blocks.swapaxes(2, 3).reshape(cell.batch, cell.context, cell.num_kv_heads, cell.head_dim)

        q = q.reshape(cell.batch, 1, -1, cell.head_dim)
        with jax.numpy_dtype_promotion("standard"):  # it promotes, whatever the caller's setting
            out = jax.nn.dot_product_attention(
                q, *map(keys_of, pools), scale=problem.scale, implementation=implementation
            )
        return out.reshape(problem.q.shape)

    inputs, pools = (problem.q, problem.block_table), problem.pools
    return looped(call, inputs, pools, problem.num_buffers, num_launches)


def looped(
    call: Callable[..., jax.Array],
    inputs: Any,
    pools: Any,
    num_buffers: int,
    num_launches: int,
    interpret: bool = False,
) -> Program:
    """`call(inputs, pools, buffer, zero)` in a loop, buffer after buffer.

    `zero` is an i32 that comes out of the launch before: a compiler may move what all launches have in common
    out of the loop, but nothing that depends on it.
    """

    def loop(inputs, pools):
        def body(nth, out):
            zero = jnp.isnan(out.reshape(-1)[0]).astype(jnp.int32)
            return call(inputs, pools, lax.rem(nth, jnp.int32(num_buffers)), zero)

        zero = jnp.int32(0)
        out = jax.eval_shape(call, inputs, pools, zero, zero)
        return lax.fori_loop(0, num_launches, body, jnp.zeros(out.shape, out.dtype))

    program = contests.compiled(loop, inputs, pools)

    return contests.jax_program(lambda: program(inputs, pools), interpret)
