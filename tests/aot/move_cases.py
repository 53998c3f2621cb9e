"""What is compiled of the kernels that move blocks and append tokens; see `kernel_cases`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.eight_bits import Scaling
from pallas_kernels.mosaic_gpu.append import append_kv, append_scaled
from pallas_kernels.mosaic_gpu.move_blocks import (
    MAX_CHUNK_BYTES,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
)
from tests.aot.budget import Budget, CompileCase, i32, pool


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Pools, and how many blocks of a layer are moved at most."""

    num_kv_heads: int = 8
    block_size: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    num_blocks: int = 2048
    num_layers: int = 8
    num_ids: int = 128

    def pool(self) -> jax.ShapeDtypeStruct:
        num_blocks = self.num_layers * self.num_blocks
        return pool(num_blocks, self.num_kv_heads, self.block_size, self.head_dim, self.dtype)

    def values(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_tokens, self.num_kv_heads, self.head_dim), jnp.dtype(self.dtype))

    def blocks(self) -> jax.ShapeDtypeStruct:
        shape = (self.num_ids, self.num_layers, self.num_kv_heads, self.block_size, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))


# Of a ring, two may share an SM. What is temporary is the table of the two results.
RING = Budget(registers=48, shared_memory=98_400, min_tma=2, temporary_bytes=16)


def _move_cases(name: str, **shape: Any) -> tuple[CompileCase, ...]:
    of = _Shape(**shape)
    ids = i32(of.num_ids)

    def case(kernel: Callable, arguments: tuple, in_place: tuple[int, ...], **limits: int) -> CompileCase:
        def function(*arguments):
            return kernel(*arguments, num_blocks=of.num_blocks)

        budget = dataclasses.replace(RING, **limits)
        kernels = (kernel.__name__,)
        return CompileCase(
            f"{kernels[0]}_{name}", function, lambda: arguments, budget, kernels, (0, 1), in_place
        )

    pools, blocks = (of.pool(), of.pool()), (of.blocks(), of.blocks())
    return (
        case(gather_blocks, (*pools, ids), (), temporary_bytes=MAX_CHUNK_BYTES + 256),  # a chunk of zeros
        case(scatter_blocks, (*pools, *blocks, ids), (0, 1)),
        case(copy_blocks, (*pools, ids, ids, i32()), (0, 1), min_fences=2),
    )


def _append_case(name: str, num_tokens: int, budget: Budget, **shape: Any) -> CompileCase:
    of = _Shape(**shape)

    def arguments() -> tuple:
        values = of.values(num_tokens)
        return of.pool(), of.pool(), values, values, i32(num_tokens), i32()

    def function(k_pool, v_pool, k, v, slots, layer):
        return append_kv(k_pool, v_pool, k, v, slots, num_blocks=of.num_blocks, layer=layer)

    return CompileCase(f"append_{name}", function, arguments, budget, ("append_kv",), (0, 1), (0, 1))


def _append_scaled_case(name: str, num_tokens: int, budget: Budget, **shape: Any) -> CompileCase:
    of = _Shape(**shape)
    beside = (jnp.uint16, jnp.uint16, jnp.float32, jnp.float32) if of.dtype == "int8" else (jnp.float32,) * 2

    def arguments() -> tuple:
        values = of.values(num_tokens)
        scaling, new = (
            Scaling(*(jax.ShapeDtypeStruct(array.shape[:-1], each) for each in beside))
            for array in (of.pool(), values)
        )
        return of.pool(), of.pool(), *scaling[: len(beside)], values, values, new, i32(num_tokens), i32()

    def function(k_pool, v_pool, *rest):
        scaling, (k, v, new, slots, layer) = Scaling(*rest[: len(beside)]), rest[len(beside) :]
        own = dict(num_blocks=of.num_blocks, layer=layer)
        return append_scaled(k_pool, v_pool, scaling, k, v, new, slots, **own)

    pools = tuple(range(2 + len(beside)))
    return CompileCase(f"append_{name}", function, arguments, budget, ("append_scaled",), pools, pools)


MOVE_CASES = (
    *_move_cases("bf16_16x128"),
    *_move_cases("bf16_512x256", num_kv_heads=16, block_size=512, head_dim=256, num_blocks=32, num_layers=2),
    *_move_cases("f16_24x64", num_kv_heads=2, block_size=24, head_dim=64, dtype="float16"),
    *_move_cases("f32_8x256", block_size=8, head_dim=256, dtype="float32"),
    # One token a CTA: K and V, and a barrier.
    _append_case("1", 1, Budget(registers=32, shared_memory=4_104, min_tma=2)),
    _append_case("64", 64, Budget(registers=32, shared_memory=4_104, min_tma=2)),
    _append_case("4096", 4096, Budget(registers=64, shared_memory=32_776, min_tma=2)),
    _append_case("4096_f32", 4096, Budget(registers=64, shared_memory=65_544, min_tma=2), dtype="float32"),
    # Numbers of a token, and a row of each array beside them, each array 1 KB apart.
    _append_scaled_case(
        "int8_64", 64, Budget(registers=40, shared_memory=6_152, min_tma=6, temporary_bytes=64), dtype="int8"
    ),
    _append_scaled_case(
        "fp8_4096_head_64",
        4096,
        Budget(registers=64, shared_memory=10_248, min_tma=4, temporary_bytes=64),
        dtype="uint8",
        head_dim=64,
    ),
    _append_scaled_case(
        "int8_5_heads",
        8192,
        Budget(registers=64, shared_memory=16_000, min_tma=6, temporary_bytes=1_000_000),
        num_kv_heads=5,
        block_size=24,
        dtype="int8",
    ),
    # As large as a token may be.
    _append_case(
        "widest",
        64,
        Budget(registers=32, shared_memory=227 * 1024, min_tma=2),
        num_kv_heads=113,
        head_dim=256,
        dtype="float32",
        num_blocks=64,
    ),
    _append_case(
        "8192_16x256",
        8192,
        Budget(registers=64, shared_memory=65_544, min_tma=2),
        num_kv_heads=16,
        block_size=8,
        head_dim=256,
    ),
)
