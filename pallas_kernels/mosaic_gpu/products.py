"""Products of matrices in shared memory, by the tensor cores that a GPU has."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.interpret import touch


class Multiply(Protocol):
    """A product of 16-bit numbers, f32 in the layout `plgpu.Layout.WGMMA`."""

    def __call__(
        self,
        a: Any,
        b: Any,
        *,
        total: Callable[[], jax.Array] | None = None,
        begun: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> jax.Array:
        """Returns `total() + a @ b`.

        Args:
          a: In shared memory, rows a multiple of 64; what threads stored there came before a `commit_smem`.
            By wgmma also in registers.
          b: Likewise, in shared memory.
          total: What is added to, or None.
          begun: Is called when a product that runs on by itself has begun, or before it begins.
          ended: Is called when the factors have been read, so that copies may take their place.
        """
        ...


def multiply_on(gpu: Gpu, is_interpreted: bool) -> Multiply:
    """Returns the product for a GPU; jax's interpreter knows wgmma alone."""
    if is_interpreted or gpu.has_wgmma:
        return functools.partial(_by_wgmma, is_interpreted)
    return functools.partial(_by_mma, commit_on(gpu, is_interpreted))


def commit_on(gpu: Gpu, is_interpreted: bool) -> Callable[[], None]:
    """Returns what passes stores of threads on to the copy engine and to wgmma, and their loads to copies.

    Where threads copy, the barriers that Mosaic puts around stores and before copies are enough.
    """
    return plgpu.commit_smem if gpu.has_copy_engine or is_interpreted else _nothing


def _nothing() -> None:
    pass


def _by_wgmma(
    is_interpreted: bool, a: Any, b: Any, *, total=None, begun=_nothing, ended=_nothing
) -> jax.Array:
    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        begun()
        if is_interpreted:
            touch(a)
            touch(b)
        return acc_ref[...]

    accumulator = plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    product = pl.run_scoped(multiply, accumulator)
    ended()
    return product if total is None else total() + product


def _by_mma(
    commit: Callable[[], None], a: Any, b: Any, *, total=None, begun=_nothing, ended=_nothing
) -> jax.Array:
    of_a, of_b = (layout(a.dtype) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS))
    begun()
    zeros = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    result = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) if total is None else total()
    result = plgpu.mma(result, plgpu.load(a, layout=of_a), plgpu.load(b, layout=of_b))
    commit()  # a copy that overwrites a factor comes after all warps' loads of it
    ended()
    return result
