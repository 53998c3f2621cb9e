"""The decodes of `experiments.kernel_speed` that JAX compiles: ours, and peers.

Each side's launches are a loop in one compiled program, unless it says otherwise. The peers of JAX:
  * its Triton kernel, deprecated. It wants the heads outermost, so it gets a pool of its own, and has no
    scale, so its queries are scaled before. Its splits are chosen so that they fill a GPU;
  * cuDNN's paged attention, by a function that is not public. It takes a pool of exactly the rows' blocks, so
    each buffer is copied into an array of its own before, without the blocks that nobody owns. A loop would
    copy the array that it takes from among them, so the launches stand one behind the other in the program;
  * the blocks gathered, then `jax.nn.dot_product_attention` by XLA, and by cuDNN. Gathering is timed: it is
    what these ways cost on a paged cache.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.kernel_speed import timing
from experiments.kernel_speed.names import (
    CUDNN_PAGED,
    GATHER_CUDNN,
    GATHER_XLA,
    JAX_TRITON,
    OURS,
    WITH_PLAN,
)
from experiments.kernel_speed.problem import Problem
from experiments.kernel_speed.timing import Program, Side

NUM_SMS = 132


def jax_sides(problem: Problem, interpret: bool = False) -> list[Side]:
    """Ours first; `interpret` runs it on the CPU."""
    return [
        Side(OURS, functools.partial(_ours, problem, True, interpret), is_ours=True),
        Side(WITH_PLAN, functools.partial(_ours, problem, False, interpret), is_ours=True),
        Side(JAX_TRITON, functools.partial(_triton, problem)),
        Side(CUDNN_PAGED, functools.partial(_cudnn_paged, problem)),
        Side(GATHER_CUDNN, functools.partial(_gathered, problem, "cudnn")),
        Side(GATHER_XLA, functools.partial(_gathered, problem, "xla")),
    ]


def _ours(problem: Problem, is_planned: bool, interpret: bool, num_launches: int) -> Program:
    from pallas_kernels import mosaic_gpu

    cell, options = problem.cell, problem.options
    q_shape = (cell.batch, 1, cell.num_kv_heads, cell.group_size, cell.head_dim)

    def plan_of(rows):
        return mosaic_gpu.plan_for(rows, q_shape, cell.num_columns, cell.block_size, interpret=interpret)

    plan = jax.jit(plan_of)(problem.rows) if is_planned else None

    def call(inputs, pools, buffer, zero):
        (q, table, rows, plan), (k_pool, v_pool) = inputs, pools
        if plan is None:
            plan = plan_of(rows._replace(num_columns=rows.num_columns + zero))
        q = (q + zero.astype(q.dtype)).reshape(q_shape)
        out, _ = mosaic_gpu.paged_decode(
            q, k_pool, v_pool, table, rows, options, layer=buffer, plan=plan, interpret=interpret
        )
        return out.reshape(problem.q.shape)

    inputs = problem.q, problem.block_table, problem.rows, plan
    return looped(
        call, inputs, (problem.k_pool, problem.v_pool), problem.num_buffers, num_launches, interpret
    )


def _triton(problem: Problem, num_launches: int) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    cell = problem.cell
    pages_per_step = max(1, min(cell.num_columns, 128 // cell.block_size))
    splits = 1
    while (
        splits < 16
        and cell.num_columns % (2 * splits * pages_per_step) == 0
        and cell.batch * cell.num_kv_heads * splits < 4 * NUM_SMS
    ):
        splits *= 2
    heads_first = jax.jit(lambda pool: jnp.swapaxes(pool, 0, 1))
    pages = heads_first(problem.k_pool), heads_first(problem.v_pool)
    q = problem.q.reshape(cell.batch, -1, cell.head_dim)
    q = (q.astype(jnp.float32) * problem.scale).astype(q.dtype)

    def call(inputs, pages, buffer, zero):
        q, table, lens = inputs
        q = q + zero.astype(q.dtype)
        table = table + buffer * cell.num_blocks
        with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("ignore", DeprecationWarning)
            out = paged_attention(
                q, *pages, table, lens, k_splits=splits, pages_per_compute_block=pages_per_step
            )
        return out.reshape(problem.q.shape)

    return looped(call, (q, problem.block_table, problem.lens), pages, problem.num_buffers, num_launches)


def _cudnn_paged(problem: Problem, num_launches: int) -> Program:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    problem.require_equal_rows()
    cudnn.check_cudnn_version()  # raises before anything is copied
    cell = problem.cell
    owned = jnp.sort(problem.block_table.reshape(-1))
    table = jnp.searchsorted(owned, problem.block_table)[:, None, :, None]
    blocks_of = jax.jit(lambda pool, first: pool[first + owned])
    buffers = [
        tuple(blocks_of(pool, nth * cell.num_blocks) for pool in (problem.k_pool, problem.v_pool))
        for nth in range(problem.num_buffers)
    ]
    q = problem.q.reshape(cell.batch, -1, 1, cell.head_dim)

    def launches(q, table, lens, buffers):
        out = jnp.zeros_like(q)
        for nth in range(num_launches):
            zero = jnp.isnan(out.reshape(-1)[0]).astype(q.dtype)  # as in `looped`
            with jax.numpy_dtype_promotion("standard"):
                out = cudnn.paged_attention(
                    q + zero,
                    *buffers[nth % problem.num_buffers],
                    q_seqlen=jnp.ones_like(lens),
                    kv_seqlen=lens,
                    page_table_k=table,
                    page_table_v=table,
                    scale=problem.scale,
                    mask_type=cudnn.MaskType.PADDING,
                    qkv_layout="BNTH",
                )
        return out.reshape(problem.q.shape)

    inputs = q, table, problem.lens, buffers
    program = timing.compiled(launches, *inputs)
    return Program(lambda: program(*inputs), jax.block_until_ready, np.asarray)


def _gathered(problem: Problem, implementation: Any, num_launches: int) -> Program:
    problem.require_equal_rows()
    cell = problem.cell

    def call(inputs, pools, buffer, zero):
        q, table = inputs
        table = table + (buffer * cell.num_blocks + zero)

        def keys_of(pool):
            blocks = pool.at[table].get(mode="promise_in_bounds")  # [b, columns, h, block_size, d]
            return blocks.swapaxes(2, 3).reshape(cell.batch, cell.context, cell.num_kv_heads, cell.head_dim)

        q = q.reshape(cell.batch, 1, -1, cell.head_dim)
        with jax.numpy_dtype_promotion("standard"):  # it promotes, whatever the caller's setting
            out = jax.nn.dot_product_attention(
                q, *map(keys_of, pools), scale=problem.scale, implementation=implementation
            )
        return out.reshape(problem.q.shape)

    inputs, pools = (problem.q, problem.block_table), (problem.k_pool, problem.v_pool)
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

    program = timing.compiled(loop, inputs, pools)

    def run() -> jax.Array:
        if not interpret:
            return program(inputs, pools)
        from pallas_kernels.mosaic_gpu.interpret import run_interpreted

        return run_interpreted(program, inputs, pools)

    return Program(run, jax.block_until_ready, np.asarray)
