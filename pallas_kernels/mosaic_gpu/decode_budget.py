"""What a program of the decode may use of an SM, to which `make aot` holds it, and how many share one."""

import math

import jax
from jax.experimental import pallas as pl

from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS, Tiling
from pallas_kernels.mosaic_gpu.limits import REGISTERS
from pallas_kernels.mosaic_gpu.rings import beside_bytes

_MAX_STAGES = 2
_THREADS = 128
_SMALL_BUFFERS = 3328
"""Bytes for numbers per lane, barriers and alignment."""


def programs_per_sm(tiling: Tiling, head_dim: int, gpu: Gpu) -> int:
    """How many programs shared memory and registers leave room for."""
    by_registers = REGISTERS // (_THREADS * max_registers(tiling, head_dim, gpu))
    # Of the memory that all share the system takes 1 KB for each, and one alone gets all but that.
    by_memory = (gpu.shared_memory + 1024) // (max_shared_memory(tiling, head_dim, gpu) + 1024)
    return min(by_memory, by_registers)


def num_stages(tiling: Tiling, head_dim: int, gpu: Gpu) -> int:
    """Tiles of keys, and of values, that are in shared memory at a time: two, where there is room."""
    room = gpu.shared_memory - _beside_rings(tiling, head_dim)
    return min(_MAX_STAGES, room // _stage_bytes(tiling, head_dim))


def max_registers(tiling: Tiling, head_dim: int, gpu: Gpu) -> int:
    """Of a thread."""
    by_lanes = {64: (96, 168, 168, 168), 128: (128, 160, 208, 208), 256: (224, 255)}[head_dim]
    if not gpu.has_wgmma:  # factors are in registers too
        by_lanes = {64: (112, 168, 168, 192), 128: (128, 160, 208, 248), 256: (224, 255)}[head_dim]
    if not gpu.has_copy_engine:  # and addresses of what a thread copies
        by_lanes = {64: (128, 168, 192, 224), 128: (168, 192, 224, 248), 256: (255, 255)}[head_dim]
    if tiling.number_bytes == 1:
        by_lanes = {64: (128, 168, 255, 255), 128: (168, 255, 255, 255), 256: (255, 255)}[head_dim]
    registers = by_lanes[tiling.num_lanes // 8 - 1]
    of_small_pieces = 112 if tiling.number_bytes > 1 else 255
    return max(registers, of_small_pieces) if tiling.piece_len < 16 else registers


def max_shared_memory(tiling: Tiling, head_dim: int, gpu: Gpu) -> int:
    """Bytes of a program; the system takes 1 KB beside them."""
    return num_stages(tiling, head_dim, gpu) * _stage_bytes(tiling, head_dim) + _beside_rings(
        tiling, head_dim
    )


def cost(q: jax.Array, of_keys: tuple[jax.Array, ...], block_table: jax.Array) -> pl.CostEstimate:
    """What XLA is told, at full tables; as much as is stored `of_keys` is of values."""
    num_rows, num_queries, num_heads, group_size, head_dim = q.shape
    num_keys = num_rows * num_heads * block_table.shape[1] * of_keys[0].shape[2]
    return pl.CostEstimate(
        flops=4 * num_keys * num_queries * group_size * head_dim,
        transcendentals=num_keys * num_queries * group_size,
        bytes_accessed=2 * num_keys * key_bytes(of_keys),
    )


def key_bytes(of_keys: tuple[jax.Array, ...]) -> int:
    """Of one key of one head."""
    return sum(math.prod(x.shape[3:]) * x.dtype.itemsize for x in of_keys)


def _stage_bytes(tiling: Tiling, head_dim: int) -> int:
    is_scaled = tiling.number_bytes == 1
    return 2 * (TILE_ROWS * head_dim * tiling.number_bytes + is_scaled * beside_bytes(tiling))


def _beside_rings(tiling: Tiling, head_dim: int) -> int:
    widened = TILE_ROWS * head_dim * 2 * (tiling.number_bytes == 1)
    return tiling.num_lanes * (head_dim * (2 + 4) + TILE_ROWS * 2) + widened + _SMALL_BUFFERS
