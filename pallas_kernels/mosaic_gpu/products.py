"""Products of matrices in shared memory, by the tensor cores that a GPU has."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.interpret import touch

Multiply = Callable[[Any, Any], jax.Array]
"""`(a, b) -> f32 a @ b` in the layout `plgpu.Layout.WGMMA`.

The factors are references to 16-bit numbers in shared memory, `a` with a multiple of 64 rows; whatever
threads stored there has been followed by `commit_smem`. Afterwards copies may take their place.
"""


def multiply_on(gpu: Gpu, is_interpreted: bool) -> Multiply:
    """Returns the product for a GPU; jax's interpreter knows wgmma alone."""
    if is_interpreted or gpu.has_wgmma:
        return functools.partial(_by_wgmma, is_interpreted)
    return _by_mma


def _by_wgmma(is_interpreted: bool, a: Any, b: Any) -> jax.Array:
    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        if is_interpreted:
            touch(a)
        return acc_ref[...]

    accumulator = plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, accumulator)


def _by_mma(a: Any, b: Any) -> jax.Array:
    of_a, of_b = (layout(a.dtype) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS))
    total = plgpu.layout_cast(jnp.zeros((a.shape[0], b.shape[1]), jnp.float32), plgpu.Layout.WGMMA)
    total = plgpu.mma(total, plgpu.load(a, layout=of_a), plgpu.load(b, layout=of_b))
    plgpu.commit_smem()  # a copy that overwrites a factor comes after all warps' loads of it
    return total
