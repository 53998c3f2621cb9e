"""What is compiled for H200 without a GPU (`python -m tests.aot.gpu`), and what that may cost.

A case is one program, with its budget beside it: what the kernels were designed to use, not what they happen
to use, so that a compiler or a change that spills, falls off the tensor cores or copies a pool is noticed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.mosaic_gpu.append import append_kv
from pallas_kernels.mosaic_gpu.budget import Budget, CompileCase
from pallas_kernels.mosaic_gpu.decode import paged_decode


def pool(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str = "bfloat16"):
    """The shape of a pool."""
    return jax.ShapeDtypeStruct((num_blocks, num_kv_heads, block_size, head_dim), jnp.dtype(dtype))


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _append_case(
    name: str, num_tokens: int, *, block_size: int, head_dim: int, dtype: str, budget: Budget
) -> CompileCase:
    num_layers, num_blocks, num_kv_heads = 4, 4096, 8

    def arguments() -> tuple:
        kv_pool = pool(num_layers * num_blocks, num_kv_heads, block_size, head_dim, dtype)
        values = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), kv_pool.dtype)
        return kv_pool, kv_pool, values, values, i32(num_tokens), i32()

    def function(k_pool, v_pool, k, v, slots, layer):
        return append_kv(k_pool, v_pool, k, v, slots, num_blocks=num_blocks, layer=layer)

    return CompileCase(name, function, arguments, budget, pools=(0, 1), in_place=(0, 1))


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


append_bf16 = functools.partial(_append_case, block_size=16, head_dim=128, dtype="bfloat16")

CASES = (
    _decode_case(
        "decode_32_rows_group_4",
        num_rows=32,
        group_size=4,
        budget=Budget(registers=96, shared_memory=80_000, min_wgmma=16, min_tma=9, temporary_bytes=9_000_000),
    ),
    append_bf16("append_1", 1, budget=Budget(registers=32, shared_memory=5_000, min_tma=2)),
    append_bf16("append_64", 64, budget=Budget(registers=32, shared_memory=5_000, min_tma=2)),
)
"""In the order of the table."""
