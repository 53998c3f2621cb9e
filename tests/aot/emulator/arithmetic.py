"""What a thread computes by itself: one result of registers and numbers, for all threads at once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.aot.emulator.memory import UnknownError

TYPES: dict[str, Any] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "pred": np.dtype(bool),
}
Read = Callable[[str, np.dtype], np.ndarray]
"""(operand, dtype) -> a value for each thread."""

_SIMPLE: dict[str, Callable] = {
    "cvta": lambda a: a,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
}
_COMPARISONS: dict[str, Callable] = {
    **dict(lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, eq=np.equal, ne=np.not_equal),
    **dict(lo=np.less, ls=np.less_equal, hi=np.greater, hs=np.greater_equal),
}
_NARROW: dict[str, Any] = {"bf16": jnp.bfloat16, "e4m3x2": jnp.float8_e4m3fn}
_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compute(words: Sequence[str], operands: Sequence[str], read: Read) -> np.ndarray:
    """The result of an instruction, by its name and the operands after the result."""
    kind, dtype = words[0], TYPES.get(words[-1])
    if words[-1] == "f32x2" and kind in _SIMPLE:  # a pair in a register of 64 bits
        pairs = (read(operand, TYPES["b64"]).view(np.float32) for operand in operands)
        return _SIMPLE[kind](*pairs).view(np.uint64)
    if words[-1] == "bf16x2" and kind in _SIMPLE:
        pairs = (read(operand, TYPES["b32"]).view(jnp.bfloat16).astype(np.float32) for operand in operands)
        return _bits16(_SIMPLE[kind](*pairs), "bf16").view(np.uint32)
    if kind == "cvt" and words[-1] in _NARROW:
        return _widened(words[-2], words[-1], operands, read)
    if dtype is None:
        raise UnknownError("a type")
    if kind == "setp":
        return _compared(words, operands, read)
    if kind == "selp":
        chosen = read(operands[2], TYPES["pred"])
        return np.where(chosen, read(operands[0], dtype), read(operands[1], dtype))
    if kind == "cvt":
        return _converted(words, operands, read)
    if kind in ("shl", "shr"):
        return _shifted(kind, read(operands[0], dtype), read(operands[1], TYPES["u32"]))
    if kind == "prmt" and len(words) == 2:
        return _permuted(*(read(operand, dtype) for operand in operands))
    if kind in ("mul", "mad") and "lo" not in words and dtype.kind != "f":
        return _wide(words, operands, read, dtype)
    values = [read(operand, dtype) for operand in operands]
    if kind in ("min", "max") and dtype.kind == "f" and "NaN" not in words:
        return (np.fmin if kind == "min" else np.fmax)(*values)
    if kind in ("div", "rem"):
        return _divided(kind, *values)
    if kind not in _SIMPLE:
        raise UnknownError("an instruction")
    return _SIMPLE[kind](*values)


def _compared(words: Sequence[str], operands: Sequence[str], read: Read) -> np.ndarray:
    comparison, dtype = words[1], TYPES[words[-1]]
    a, b = (read(operand, dtype) for operand in operands[:2])
    result = _COMPARISONS[comparison](a, b)
    if words[2] not in _COMBINED:
        return result
    other = read(operands[2].removeprefix("!"), TYPES["pred"])
    return _COMBINED[words[2]](result, ~other if operands[2].startswith("!") else other)


def _converted(words: Sequence[str], operands: Sequence[str], read: Read) -> np.ndarray:
    to, source = words[-2:]
    values = [read(operand, TYPES[source]) for operand in operands]
    if to in ("bf16x2", "f16x2"):
        high, low = (_bits16(value, to[:-2]).astype(np.uint32) for value in values)
        return high << 16 | low
    [value] = values
    if to == "bf16":
        return _bits16(value, to)
    if value.dtype.kind == "f" and TYPES[to].kind != "f":
        raise UnknownError("a conversion")
    return value.astype(TYPES[to])


def _widened(to: str, source: str, operands: Sequence[str], read: Read) -> np.ndarray:
    """Of one number, or of two in a register."""
    values = read(operands[0], TYPES["b16"]).view(_NARROW[source]).astype(np.float32)
    return values if to == "f32" else _bits16(values, to.removesuffix("x2")).view(np.uint32)


def _bits16(values: np.ndarray, dtype: str) -> np.ndarray:
    """uint16 of float32, rounded to the nearest even."""
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _shifted(kind: str, values: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = values.dtype.itemsize * 8
    shift = np.left_shift if kind == "shl" else np.right_shift
    shifted = shift(values, np.minimum(by, bits - 1).astype(values.dtype))
    is_all = (by >= bits) & (kind == "shl" or values.dtype.kind == "u")
    return np.where(is_all, 0, shifted).astype(values.dtype)


def _permuted(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """Four bytes of b:a. A selector is a number of one of its eight; with 8 added, that byte's sign alone."""
    both, result = b.astype(np.uint64) << np.uint64(32) | a, np.zeros_like(a)
    for position in range(0, 32, 8):
        selector = selectors >> position // 2
        byte = (both >> (selector & 7).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & 0xFF
        result |= np.where(selector & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32) << position
    return result


def _wide(words: Sequence[str], operands: Sequence[str], read: Read, dtype: np.dtype) -> np.ndarray:
    """The whole product, or its upper half."""
    wider = np.dtype(object) if dtype.itemsize == 8 else np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    a, b = (read(operand, dtype).astype(wider) for operand in operands[:2])
    if "hi" in words:
        return (a * b >> 8 * dtype.itemsize).astype(dtype)
    return a * b + read(operands[2], wider) if words[0] == "mad" else a * b


def _divided(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    quotient = np.abs(a) // np.where(b == 0, 1, np.abs(b))
    quotient = np.where((a < 0) != (b < 0), -quotient, quotient)
    return quotient if kind == "div" else a - quotient * b
