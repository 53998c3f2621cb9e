"""What is compiled for H200 without a GPU (`python -m tests.aot.gpu`), and what that may cost.

A case is one program, with its budget beside it: what the kernels were designed to use, not what they happen
to use, so that a compiler or a change that spills, falls off the tensor cores or copies a pool is noticed.
"""

from typing import Any

import jax

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.mosaic_gpu.budget import Budget, CompileCase, i32, pool
from pallas_kernels.mosaic_gpu.compile_cases_move import MOVE_CASES
from pallas_kernels.mosaic_gpu.decode import paged_decode


def _decode_case(
    name: str,
    *,
    num_rows: int,
    group_size: int,
    budget: Budget,
    head_dim: int = 128,
    block_size: int = 16,
    num_queries: int = 1,
    max_len: int = 8192,
    dtype: str = "bfloat16",
    **options: Any,
) -> CompileCase:
    num_layers, num_kv_heads = 4, 8
    num_blocks = num_rows * max_len // block_size

    def arguments() -> tuple:
        kv_pool = pool(num_layers * num_blocks, num_kv_heads, block_size, head_dim, dtype)
        q_shape = (num_rows, num_queries, num_kv_heads, group_size, head_dim)
        rows = DecodeRows(*[i32(num_rows)] * 5)
        table = i32(num_rows, max_len // block_size)
        return jax.ShapeDtypeStruct(q_shape, kv_pool.dtype), kv_pool, kv_pool, table, rows, i32()

    def function(q, k_pool, v_pool, table, rows, layer):
        decode_options = DecodeOptions(num_blocks, head_dim**-0.5, **options)
        return paged_decode(q, k_pool, v_pool, table, rows, decode_options, layer=layer)

    return CompileCase(name, function, arguments, budget, pools=(1, 2))


CASES = (
    _decode_case(
        "decode_32_rows_group_4",
        num_rows=32,
        group_size=4,
        budget=Budget(
            registers=128, shared_memory=80_000, min_wgmma=16, min_tma=9, temporary_bytes=9_000_000
        ),
    ),
    *MOVE_CASES,
)
"""In the order of the table."""
