"""What is compiled without a GPU (`python -m tests.aot.gpu`), mostly for H200, and what that may cost.

A case is one program, with its budget beside it: what the kernels were designed to use, not what they happen
to use, so that a compiler or a change that spills, falls off the tensor cores or copies a pool is noticed.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.eight_bits import WIDENED, Scaling
from pallas_kernels.mosaic_gpu import prefill
from pallas_kernels.mosaic_gpu.decode import paged_decode
from pallas_kernels.mosaic_gpu.decode_budget import (
    max_registers,
    max_shared_memory,
    num_stages,
    programs_per_sm,
)
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS, Tiling, tiling_of
from pallas_kernels.mosaic_gpu.lanes import num_query_copies
from pallas_kernels.mosaic_gpu.merge import merge_attention
from pallas_kernels.mosaic_gpu.prefill import paged_prefill
from pallas_kernels.mosaic_gpu.prefill_mask import QUERY_ROWS
from tests.aot.budget import Budget, CompileCase, i32, pool
from tests.aot.move_cases import MOVE_CASES
from tests.aot.target import A100, B200, H200, L4, RTX_5090, Target


def _decode_budget(
    tiling: Tiling, head_dim: int, is_split: bool, target: Target, num_arrays: int, **changes: int
) -> Budget:
    """What the kernel's module states, and what its products and copies are; with the merge, if it may split.

    A tile has two products of 64 keys, head_dim / 16 wgmma each, or as many mma for every 8 lanes. Copied are
    queries, and the pieces of K and V of each stage before the loop, and of one in it, of 8 bits also their
    scales and offsets. Fences are before tensor cores read queries and weights, after each mma, and before
    results are copied out, of whole rows and of parts; of 8 bits there are three more, after K and V are
    widened and after the second product. Parts are at most three for each program that runs side by side with
    others, float32.
    """
    gpu = target.gpu
    num_programs = target.num_sms * programs_per_sm(tiling, head_dim, gpu)
    num_products, num_tiles = head_dim // 8, num_stages(tiling, head_dim, gpu) + 1
    products = dict(min_wgmma=num_products)
    if not gpu.has_wgmma:
        products = dict(min_mma=num_products * tiling.num_lanes // 8)
    if not gpu.has_copy_engine:  # a thread copies 16 bytes
        products["min_thread_copies"] = 2 * num_tiles * head_dim * 2 * TILE_ROWS // (16 * 128)
    merge_tma, merge_fences = (10, 3) if is_split else (0, 0)
    num_copies = num_arrays * num_tiles * tiling.pieces_per_tile
    budget = Budget(
        registers=max_registers(tiling, head_dim, gpu),
        shared_memory=max_shared_memory(tiling, head_dim, gpu),
        min_tma=num_query_copies(tiling, head_dim) + num_copies + merge_tma,
        min_fences=(3 if gpu.has_wgmma else 5) + merge_fences + 3 * (num_arrays > 2),
        temporary_bytes=1_000_000 + 3 * num_programs * tiling.num_lanes * head_dim * 4,
        **products,
    )
    if not gpu.has_copy_engine:
        budget = dataclasses.replace(budget, min_tma=0, min_fences=0)
    return dataclasses.replace(budget, **changes)


def _decode_case(
    name: str,
    *,
    is_split: bool = True,
    limits: Mapping[str, int] = MappingProxyType({}),
    num_rows: int = 32,
    group_size: int = 4,
    head_dim: int = 128,
    block_size: int = 16,
    num_queries: int = 1,
    max_len: int = 8192,
    dtype: str = "bfloat16",
    has_sink_logits: bool = False,
    out_dtype: str = "bfloat16",
    target: Target = H200,
    **options: Any,
) -> CompileCase:
    num_layers, num_kv_heads = 4, 8
    num_blocks = num_rows * max_len // block_size

    def arguments() -> tuple:
        kv_pool = pool(num_layers * num_blocks, num_kv_heads, block_size, head_dim, dtype)
        q_shape = (num_rows, num_queries, num_kv_heads, group_size, head_dim)
        rows = DecodeRows(*[i32(num_rows)] * 5)
        table = i32(num_rows, max_len // block_size)
        q = jax.ShapeDtypeStruct(q_shape, WIDENED if beside else kv_pool.dtype)
        sink_logits = jax.ShapeDtypeStruct((num_kv_heads, group_size), jnp.float32)
        scaling = _scaling(kv_pool)
        return q, kv_pool, kv_pool, table, rows, i32(), sink_logits if has_sink_logits else None, scaling

    def function(q, k_pool, v_pool, table, rows, layer, sink_logits, scaling):
        decode_options = DecodeOptions(num_blocks, head_dim**-0.5, **options)
        return paged_decode(
            q,
            k_pool,
            v_pool,
            table,
            rows,
            decode_options,
            layer=layer,
            sink_logits=sink_logits,
            scaling=scaling,
            out_dtype=out_dtype,
        )

    beside = BESIDE.get(dtype, ())
    tiling = tiling_of(num_queries, group_size, head_dim, block_size, jnp.dtype(dtype).itemsize)
    budget = _decode_budget(tiling, head_dim, is_split, target, 2 + 2 * len(beside), **limits)
    if not target.gpu.has_copy_engine:  # queries and results, turned by XLA
        num_lanes = num_rows * num_kv_heads * tiling.num_lane_tiles * tiling.num_lanes
        turned = 2 * num_lanes * head_dim * jnp.dtype(out_dtype).itemsize
        budget = dataclasses.replace(budget, temporary_bytes=budget.temporary_bytes + turned)
    kernels = ("paged_decode", "merge_attention") if is_split else ("paged_decode",)
    return CompileCase(name, function, arguments, budget, kernels, pools=(1, 2), target=target)


def _scaling(kv_pool: jax.ShapeDtypeStruct) -> Scaling | None:
    of_each = [jax.ShapeDtypeStruct(kv_pool.shape[:3], each) for each in BESIDE.get(kv_pool.dtype.name, ())]
    return Scaling(*(each for each in of_each for _ in "kv")) if of_each else None


# `limits` are where a case needs less than its tiling may have, or its results are larger.
_CASES = {
    "decode_32_rows_group_4": dict(),
    "decode_1_row_32k": dict(num_rows=1, group_size=8, max_len=32768),
    "decode_128_rows_group_1": dict(num_rows=128, group_size=1),
    "decode_group_16": dict(group_size=16, limits=dict(registers=144)),
    "decode_head_64": dict(head_dim=64),
    "decode_head_64_block_24": dict(head_dim=64, block_size=24, max_len=8160),
    "decode_head_64_group_16": dict(head_dim=64, group_size=16),
    "decode_head_64_8_queries": dict(head_dim=64, num_queries=8),
    "decode_sink_logits": dict(has_sink_logits=True),
    "decode_70000_rows": dict(
        num_rows=70_000, max_len=16, is_split=False, limits=dict(temporary_bytes=20_000_000)
    ),
    "decode_head_256": dict(head_dim=256),
    "decode_block_8": dict(block_size=8),
    "decode_block_24": dict(block_size=24, max_len=8160),
    "decode_block_64": dict(block_size=64),
    "decode_block_128": dict(block_size=128),
    "decode_float16": dict(dtype="float16", out_dtype="float16"),
    "decode_float32_results": dict(out_dtype="float32"),
    "decode_group_7": dict(group_size=7),
    "decode_8_queries_group_8": dict(group_size=8, num_queries=8),
    "decode_8_queries_head_256": dict(head_dim=256, num_queries=8),
    "decode_window": dict(
        num_queries=4, window=1024, num_sink_tokens=20, soft_cap=30.0, has_sink_logits=True
    ),
    "decode_int8": dict(dtype="int8"),
    "decode_fp8": dict(dtype="uint8"),
    "decode_int8_head_64": dict(dtype="int8", head_dim=64),
    "decode_fp8_head_64_block_64": dict(dtype="uint8", head_dim=64, block_size=64),
    "decode_int8_block_8": dict(dtype="int8", block_size=8),
    "decode_int8_8_queries_group_8": dict(dtype="int8", group_size=8, num_queries=8),
    "decode_fp8_group_16": dict(dtype="uint8", group_size=16, block_size=128),
    "decode_int8_window": dict(
        dtype="int8",
        block_size=24,
        max_len=8160,
        num_queries=4,
        window=1024,
        num_sink_tokens=20,
        soft_cap=30.0,
        has_sink_logits=True,
    ),
}
BESIDE = {"int8": (jnp.uint16, jnp.float32), "uint8": (jnp.float32,)}
"""What lies beside numbers of 8 bits: scales, and offsets."""
# Of the GPUs without wgmma.
_OTHER_GPUS = {
    "b200_decode_32_rows_group_4": dict(target=B200),
    "b200_decode_8_queries_group_8": dict(target=B200, group_size=8, num_queries=8),
    "b200_decode_head_256": dict(target=B200, head_dim=256, block_size=24, max_len=8160),
    "rtx_decode_32_rows_group_4": dict(target=RTX_5090, dtype="float16", out_dtype="float16"),
    "rtx_decode_head_64": dict(target=RTX_5090, head_dim=64, block_size=128, has_sink_logits=True),
    "rtx_decode_8_queries_head_256": dict(target=RTX_5090, head_dim=256, num_queries=8, window=1024),
    "b200_decode_int8": dict(target=B200, dtype="int8"),
    "b200_decode_fp8_8_queries_group_8": dict(target=B200, dtype="uint8", group_size=8, num_queries=8),
    "rtx_decode_fp8_head_64": dict(target=RTX_5090, dtype="uint8", head_dim=64, block_size=64),
    "a100_decode_32_rows_group_4": dict(target=A100),
    "a100_decode_8_queries_group_8": dict(target=A100, group_size=8, num_queries=8),
    "a100_decode_head_64_block_8": dict(target=A100, head_dim=64, block_size=8, dtype="float16"),
    "a100_decode_window": dict(
        target=A100, num_queries=4, window=1024, num_sink_tokens=20, soft_cap=30.0, has_sink_logits=True
    ),
    "a100_decode_head_256": dict(target=A100, head_dim=256, block_size=24, max_len=8160),
    "l4_decode_32_rows_group_4": dict(target=L4, dtype="float16", out_dtype="float16"),
    "l4_decode_head_64": dict(target=L4, head_dim=64, block_size=128, has_sink_logits=True),
    "l4_decode_8_queries_head_256": dict(target=L4, head_dim=256, num_queries=8, window=1024),
    "rtx_decode_int8_8_queries": dict(target=RTX_5090, dtype="int8", num_queries=8),
}


def _prefill_case(
    name: str,
    *,
    num_rows: int = 2,
    num_queries: int = 2048,
    group_size: int = 4,
    head_dim: int = 128,
    block_size: int = 64,
    max_len: int = 8192,
    dtype: str = "bfloat16",
    has_sink_logits: bool = False,
    target: Target = H200,
    spill_bytes: int = 0,
    **options: Any,
) -> CompileCase:
    """Of registers a thread has what 384 may have at most; the kernel deals them out anew.

    A tile has a product of its keys and one with its values, 64 rows and so many columns each. Copied are the
    queries, and the pieces of K and V in one place, where the ring is filled and refilled; of 8 bits in a
    loop over pieces, with their scales and offsets, and there are fences where these are widened.
    """
    beside = BESIDE.get(dtype, ())
    num_layers, num_kv_heads = 4, 8
    num_blocks = num_rows * max_len // block_size

    def arguments() -> tuple:
        kv_pool = pool(num_layers * num_blocks, num_kv_heads, block_size, head_dim, dtype)
        q_shape = (num_rows, num_queries, num_kv_heads, group_size, head_dim)
        table = i32(num_rows, max_len // block_size)
        sink_logits = jax.ShapeDtypeStruct((num_kv_heads, group_size), jnp.float32)
        rows = DecodeRows(*[i32(num_rows)] * 5)
        q = jax.ShapeDtypeStruct(q_shape, WIDENED if beside else kv_pool.dtype)
        more = dict(sink_logits=sink_logits if has_sink_logits else None, scaling=_scaling(kv_pool))
        return q, kv_pool, kv_pool, table, rows, i32(), more

    def function(q, k_pool, v_pool, table, rows, layer, more):
        prefill_options = DecodeOptions(num_blocks, head_dim**-0.5, **options)
        return paged_prefill(q, k_pool, v_pool, table, rows, prefill_options, layer=layer, **more)

    a_pool = pool(1, 1, block_size, head_dim, dtype)
    tile_len = prefill.tile_len_for(a_pool, target.gpu)
    num_copies = 2 * (1 + len(beside)) * (1 if beside else tile_len // math.gcd(block_size, tile_len))
    products = dict(min_wgmma=(head_dim + tile_len) // 16)
    if not target.gpu.has_wgmma:
        products = dict(min_mma=2 * head_dim // 16 * tile_len // 8)
    padded_len = -(-num_queries // QUERY_ROWS) * QUERY_ROWS
    budget = Budget(
        registers=168,
        spill_bytes=spill_bytes,
        shared_memory=prefill.max_shared_memory(a_pool, target.gpu),
        min_tma=1 + num_copies,
        min_fences=(2 if target.gpu.has_wgmma else 5) + 2 * bool(beside) - (dtype == "int8"),
        # The logs of sums once more, and where queries are no whole tiles, queries and results.
        temporary_bytes=num_rows * padded_len * num_kv_heads * group_size * (4 + 4 * head_dim) + 1000,
        **products,
    )
    return CompileCase(name, function, arguments, budget, ("paged_prefill",), pools=(1, 2), target=target)


_PREFILL_CASES = {
    "prefill_2048": dict(),
    "prefill_8k": dict(num_rows=1, num_queries=8192),
    "prefill_head_64": dict(head_dim=64),
    "prefill_100_queries_block_16": dict(num_queries=100, block_size=16),
    "prefill_block_48": dict(block_size=48, max_len=8160, dtype="float16", group_size=1),
    "prefill_block_128": dict(block_size=128, group_size=7),
    "prefill_window": dict(window=1024, num_sink_tokens=20, soft_cap=30.0, has_sink_logits=True),
    "prefill_int8": dict(dtype="int8"),
    "prefill_fp8": dict(dtype="uint8"),
    # Beside a soft cap, numbers that a program needs before and after all its tiles.
    "prefill_fp8_window": dict(
        dtype="uint8", window=1024, num_sink_tokens=20, soft_cap=30.0, spill_bytes=104
    ),
    "prefill_fp8_head_64_block_128": dict(dtype="uint8", head_dim=64, block_size=128),
    "prefill_int8_head_64_block_16": dict(dtype="int8", head_dim=64, block_size=16, soft_cap=30.0),
    "prefill_int8_block_16": dict(dtype="int8", block_size=16),
    "prefill_int8_window": dict(
        dtype="int8",
        block_size=16,
        window=1024,
        num_sink_tokens=20,
        soft_cap=30.0,
        has_sink_logits=True,
        spill_bytes=56,
    ),
}

_OTHER_PREFILLS = {
    "b200_prefill_2048": dict(target=B200),
    "b200_prefill_window": dict(
        target=B200, block_size=16, window=1024, num_sink_tokens=20, soft_cap=30.0, has_sink_logits=True
    ),
    "rtx_prefill_head_64": dict(
        target=RTX_5090, head_dim=64, block_size=48, max_len=8160, dtype="float16", group_size=1
    ),
    "b200_prefill_int8": dict(target=B200, dtype="int8"),
    "rtx_prefill_fp8_head_64": dict(target=RTX_5090, dtype="uint8", head_dim=64, block_size=16),
}


def _merge_case(num_lanes: int, head_dim: int, budget: Budget) -> CompileCase:
    def arguments() -> tuple:
        outs = jax.ShapeDtypeStruct((3, num_lanes, head_dim), jnp.float32)
        return outs, jax.ShapeDtypeStruct(outs.shape[:-1], outs.dtype)

    name = f"merge_{num_lanes}_lanes_head_{head_dim}"
    return CompileCase(name, merge_attention, arguments, budget, ("merge_attention",))


# A ring of four parts, and of their logs, and the result.
_MERGE_CASES = (
    _merge_case(
        5, 192, Budget(registers=64, shared_memory=32_000, min_tma=10, min_fences=2, temporary_bytes=40_000)
    ),
    _merge_case(
        20, 64, Budget(registers=96, shared_memory=32_000, min_tma=10, min_fences=2, temporary_bytes=40_000)
    ),
    _merge_case(
        40,
        256,
        Budget(registers=208, shared_memory=166_000, min_tma=10, min_fences=2, temporary_bytes=600_000),
    ),
    # More programs than CUDA starts along any but the first axis.
    _merge_case(
        2_200_000,
        64,
        Budget(registers=96, shared_memory=42_500, min_tma=10, min_fences=2, temporary_bytes=4_000_000_000),
    ),
)
_HOPPER_CASES = (
    *(_decode_case(name, **options) for name, options in _CASES.items()),
    *(_prefill_case(name, **options) for name, options in _PREFILL_CASES.items()),
    *_MERGE_CASES,
    *MOVE_CASES,
)


def _elsewhere(name: str, prefix: str, target: Target, **limits: int) -> CompileCase:
    """The case of that name for another GPU."""
    [case] = [case for case in _HOPPER_CASES if case.name == name]
    budget = dataclasses.replace(case.budget, **limits)
    return dataclasses.replace(case, name=f"{prefix}_{name}", target=target, budget=budget)


CASES = (
    *_HOPPER_CASES,
    *(_decode_case(name, **options) for name, options in _OTHER_GPUS.items()),
    *(_prefill_case(name, **options) for name, options in _OTHER_PREFILLS.items()),
    _elsewhere("copy_blocks_bf16_16x128", "a100", A100, registers=128, min_tma=0, min_fences=0),
    _elsewhere("gather_blocks_f16_24x64", "l4", L4, registers=128, min_tma=0),
    _elsewhere("copy_blocks_bf16_16x128", "b200", B200),
    # An SM has memory for one ring, where two share one of Hopper's registers; the oldest jax takes 53.
    _elsewhere("copy_blocks_bf16_16x128", "rtx", RTX_5090, registers=64),
    _elsewhere("append_4096_f32", "rtx", RTX_5090),
    _elsewhere("append_int8_64", "b200", B200),
    _elsewhere("append_fp8_4096_head_64", "rtx", RTX_5090),
    # Of 32 lanes two parts fit beside the result.
    _elsewhere("merge_40_lanes_head_256", "rtx", RTX_5090, shared_memory=99 * 1024, min_tma=6),
)
"""In the order of the table."""
