"""What the TPU kernels do not take, and how they are run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

NUM_LANES = 128
NUM_SUBLANES = 8
DTYPES = ("bfloat16", "float32")
MAX_SCALARS = 960 * 2**10 // 4
"""Of 32 bits, in SMEM, which has 1024 KiB."""


def why_not(k_pool: jax.Array, group_size: int = 1) -> str | None:
    """Why the kernels do not take a pool, with any number of query heads per key/value head; None if they do.

    Blocks are moved as they are, in whole tiles of the TPU's memory.
    """
    del group_size
    block_size, head_dim = k_pool.shape[2:]
    if k_pool.dtype.name not in DTYPES:
        return f"the pools are {k_pool.dtype}, expected {' or '.join(DTYPES)} on a TPU: cast the cache"
    if head_dim % NUM_LANES:
        return (
            f"head_dim is {head_dim}, expected a multiple of {NUM_LANES} on a TPU, whose memory is tiled so: "
            "pad the heads, or use the XLA implementation"
        )
    if block_size % sublanes(k_pool.dtype):
        return (
            f"block_size is {block_size}, expected a multiple of {sublanes(k_pool.dtype)} for {k_pool.dtype} "
            "on a TPU"
        )
    return None


def check_tpu_pool(pool: jax.Array) -> None:
    """Raises if the kernels do not take the pool."""
    if reason := why_not(pool):
        raise ValueError(reason)


def check_scalars(name: str, num_scalars: int) -> None:
    """Raises unless so many integers fit into the memory of the scalar core."""
    if num_scalars > MAX_SCALARS:
        raise ValueError(
            f"{name} has {num_scalars} entries, expected at most {MAX_SCALARS} on a TPU: split the call, "
            "or use larger blocks"
        )


def sublanes(dtype: jnp.dtype) -> int:
    """Rows of one tile of the TPU's memory."""
    return NUM_SUBLANES * (4 // dtype.itemsize)


def tiled_bytes(rows: int, columns: int, dtype: jnp.dtype) -> int:
    """Bytes of a matrix in whole tiles of the TPU's memory."""
    rows, columns = (-(-n // to) * to for n, to in ((rows, sublanes(dtype)), (columns, NUM_LANES)))
    return rows * columns * dtype.itemsize


def pallas_call(kernel: Callable[..., None], *, interpret: bool, **options: Any) -> Callable[..., Any]:
    """`pl.pallas_call`; `interpret` runs it in the interpreter that looks for races.

    Under `vmap` the elements run one after the other: Pallas has no batched form of arrays that stay in HBM.
    With `jax_enable_x64` the kernel counts in 32 bits all the same, by which alone a TPU finds its memory.
    """
    interpreter = pltpu.InterpretParams(detect_races=True, vector_clock_size=_CLOCKS) if interpret else False
    call = sequential_vmap(pl.pallas_call(kernel, interpret=interpreter, **options))

    def of_32_bits(*arguments: jax.Array) -> Any:
        with jax.enable_x64(False):
            return call(*arguments)

    return of_32_bits


# Copies take random ones of that many clocks, less one for each device. With jax's default they share a
# single one, and copies that do not wait for each other look ordered.
_CLOCKS = 127
