"""What tensor cores read, and how numbers lie in the registers of a warp."""

import re

import numpy as np

from tests.aot.emulator.copies import swizzled
from tests.aot.emulator.memory import NUM_THREADS, NUM_WARPS, UnknownError

_SHAPE = re.compile(r"m64n(\d+)k16")
_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32")
ROWS, _DEPTH = 64, 16
_SWIZZLES = {1: 128, 2: 64, 3: 32}


def operand_places(descriptor: int, num_rows: int, is_transposed: bool) -> np.ndarray:
    """Addresses of the 16-bit numbers `[rows, 16]` of a factor in shared memory, by its descriptor."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    swizzle = _SWIZZLES.get(descriptor >> 62)
    if swizzle is None or descriptor >> 49 & 7:
        raise UnknownError(f"the descriptor {descriptor:#x} of a factor, without a swizzle or with an offset")
    row, column = np.arange(num_rows)[:, None], np.arange(_DEPTH)[None]
    if not is_transposed:
        places = row // 8 * stride + row % 8 * swizzle + column * 2
    else:
        in_row = swizzle // 2
        places = column // 8 * stride + column % 8 * swizzle + row % in_row * 2 + row // in_row * leading
    return swizzled(start + places, swizzle)


def product_shape(words: tuple[str, ...]) -> tuple[int, str]:
    """Columns and dtype of a wgmma of 64 rows and a depth of 16, accumulated in float32."""
    shape = _SHAPE.fullmatch(words[4]) if len(words) == 8 else None
    if shape is None or words[5] != "f32" or words[6] != words[7]:
        raise UnknownError("a product")
    return int(shape[1]), words[6]


def mma_dtype(words: tuple[str, ...]) -> str:
    """Dtype of the factors of an mma of 16 rows a warp, 8 columns and a depth of 16, in float32."""
    name = _MMA.fullmatch(".".join(words))
    if name is None:
        raise UnknownError("a product")
    return name[1]


def numbers(data: np.ndarray, places: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of 16-bit numbers in memory."""
    return _as_float32(data[places].astype(np.uint16) | data[places + 1].astype(np.uint16) << 8, dtype)


def _as_float32(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def accumulator_place(nth: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of the nth accumulator register of each thread."""
    thread = np.arange(NUM_THREADS)
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (nth >> 1 & 1)
    return row, 8 * (nth // 4) + 2 * (thread % 4) + (nth & 1)


def factor_of_registers(registers: np.ndarray, dtype: str) -> np.ndarray:
    """float32[64, 16] of the left factor in 4 registers of each thread, uint32[4, threads]."""
    factor, halves = np.zeros((ROWS, _DEPTH), np.float32), registers.view(np.uint16).reshape(4, -1, 2)
    thread = np.arange(NUM_THREADS)
    for nth, half in np.ndindex(4, 2):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (nth & 1)
        column = 2 * (thread % 4) + 8 * (nth >> 1) + half
        factor[row, column] = _as_float32(halves[nth, :, half], dtype)
    return factor


def product_of_registers(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """float32[64, 8], 16 rows a warp, of the factors of an mma: uint32[4, threads] and uint32[2, threads]."""
    left = factor_of_registers(a, dtype).reshape(NUM_WARPS, -1, _DEPTH)
    right, halves = np.zeros((NUM_WARPS, _DEPTH, 8), np.float32), b.view(np.uint16).reshape(2, -1, 2)
    thread = np.arange(NUM_THREADS)
    for nth, half in np.ndindex(2, 2):
        row = 2 * (thread % 4) + 8 * nth + half
        right[thread // 32, row, thread % 32 // 4] = _as_float32(halves[nth, :, half], dtype)
    return (left @ right).reshape(ROWS, -1)


def row_addresses(addresses: np.ndarray, num_matrices: int) -> np.ndarray:
    """(threads, addresses) of rows of 16 bytes of the warps' matrices: `[4 warps * matrices * 8]` each."""
    threads = np.arange(NUM_THREADS).reshape(NUM_WARPS, 32)[:, : 8 * num_matrices].reshape(-1)
    return np.stack([threads, addresses[threads]])


def to_registers(rows: np.ndarray, num_matrices: int, is_transposed: bool) -> np.ndarray:
    """uint32[matrices, threads] of 8x8 matrices of 16 bits, uint8[4 warps * matrices * 8, 16]."""
    matrices = rows.view(np.uint16).reshape(NUM_WARPS, num_matrices, 8, 8)
    matrices = matrices.swapaxes(2, 3) if is_transposed else matrices
    pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(NUM_WARPS, num_matrices, 32)
    return pairs.swapaxes(0, 1).reshape(num_matrices, NUM_THREADS)


def from_registers(registers: np.ndarray, is_transposed: bool) -> np.ndarray:
    """The inverse of `to_registers`."""
    num_matrices = registers.shape[0]
    pairs = registers.reshape(num_matrices, NUM_WARPS, 32).swapaxes(0, 1)
    matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(NUM_WARPS, num_matrices, 8, 8)
    matrices = matrices.swapaxes(2, 3) if is_transposed else matrices
    return np.ascontiguousarray(matrices).reshape(-1, 8).view(np.uint8)
