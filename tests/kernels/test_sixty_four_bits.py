"""With `jax_enable_x64` kernels are made as without it: they count in 32 bits."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import mosaic_gpu, mosaic_tpu
from tests.support.wide import made

i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
POOL = bf16((12, 2, 16, 128))
ARGUMENTS = {
    "gather_blocks": [POOL, POOL, i32((3,))],
    "scatter_blocks": [POOL, POOL, bf16((3, 3, 2, 16, 128)), bf16((3, 3, 2, 16, 128)), i32((3,))],
    "copy_blocks": [POOL, POOL, i32((3,)), i32((3,)), i32(())],
    "append_kv": [POOL, POOL, bf16((5, 2, 128)), bf16((5, 2, 128)), i32((5,))],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_blocks_and_tokens_are_moved(name):
    """For TPUs up to the program that their compiler gets."""
    for kernels, platforms in ((mosaic_gpu, None), (mosaic_tpu, ("tpu",))):
        kernel = jax.jit(functools.partial(getattr(kernels, name), num_blocks=4))
        traced = made(kernel.trace, *ARGUMENTS[name])
        assert platforms is None or made(functools.partial(traced.lower, lowering_platforms=platforms))
