"""The GPU's kernels where threads copy, load and store, as on an A100: interpreted, and what is refused.

The interpreter knows copies of the copy engine alone, so that rings of keys and values are filled by it here;
the emulator (`python -m tests.aot.emulated a100`) runs those that threads fill.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_gpu, reference
from pallas_kernels.mosaic_gpu import limits, move_blocks
from pallas_kernels.shapes import DECODE_SHAPES, EIGHT_BIT_SHAPES
from tests.aot.h200 import abstract_device
from tests.aot.target import A100
from tests.kernels import test_mosaic_gpu_decode as of_decode
from tests.kernels.gpu_interpreter import run_interpreted

SHAPES = {shape.name: shape for shape in (*DECODE_SHAPES, *EIGHT_BIT_SHAPES)}
REASON = "a GPU like A100"


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    monkeypatch.setattr(limits, "_traced_for", lambda: abstract_device(A100))


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("name", ["plain", "long", "head_256_f16", "drafts_7x16", "all"])
def test_decode(name):
    """Of rows that are split and of whole ones, of one lane tile and of several."""
    of_decode.check(SHAPES[name].problem())


def test_merge():
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 2, 5, 64)), rng.standard_normal((3, 2, 5))
    lses[0, 0], outs[0, 0], lses[:, 1, 1] = -np.inf, np.nan, -np.inf
    arrays = jnp.asarray(outs, jnp.float32), jnp.asarray(lses, jnp.float32)
    found = run_interpreted(jax.jit(lambda *x: mosaic_gpu.merge_attention(*x, interpret=True)), *arrays)
    for each, expected in zip(found, reference.merge_attention(*arrays), strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["gather_blocks", "scatter_blocks", "copy_blocks"])
def test_moves(kernel):
    """Of ids that are no blocks, too; of 11 * 8 rows of 64 numbers, of which a chunk has an even number."""
    rng = np.random.default_rng(1)
    pools = [jnp.asarray(rng.standard_normal((2 * 7, 11, 8, 64)), jnp.float16) for _ in "kv"]
    ids, blocks = jnp.asarray([5, 7, 0, -1], jnp.int32), []
    if kernel == "scatter_blocks":
        blocks = [jnp.asarray(rng.standard_normal((4, 2, 11, 8, 64)), jnp.float16) for _ in "kv"]
    more = (jnp.asarray([1, 2, 3, 4], jnp.int32), jnp.int32(1)) if kernel == "copy_blocks" else ()

    def call(module, **options):
        def run(*arrays):
            return getattr(module, kernel)(*arrays, num_blocks=7, **options)

        return jax.jit(run)

    arrays = (*pools, *blocks, ids, *more)
    found = run_interpreted(call(mosaic_gpu, interpret=True), *arrays)
    for each, expected in zip(found, call(reference)(*arrays), strict=True):
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize(
    ("rows_of_block", "head_dim", "rows"), [(8 * 127, 64, 8), (8 * 61, 64, 122), (8, 256, 8), (88, 64, 88)]
)
def test_chunks_are_whole_vectors_for_all_threads(rows_of_block, head_dim, rows):
    pool = jax.ShapeDtypeStruct((6, rows_of_block // 8, 8, head_dim), jnp.bfloat16)
    cut = move_blocks._cut(pool, 3, jax.ShapeDtypeStruct((512,), jnp.int32))
    assert (cut.rows, cut.stages) == (rows, 0) and cut.rows * cut.chunks == rows_of_block


def test_what_threads_do_not_do_is_refused():
    pool = jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((3, 2, 64), jnp.bfloat16)
    assert mosaic_gpu.why_not(pool, 4) is None
    assert REASON in mosaic_gpu.why_not(jax.ShapeDtypeStruct(pool.shape, jnp.int8), 4)
    assert REASON in mosaic_gpu.why_not_prefill(pool, jnp.bfloat16)
    with pytest.raises(ValueError, match=f"{REASON} has no copy engine: let XLA write new tokens"):
        jax.eval_shape(
            lambda *x: mosaic_gpu.append_kv(*x, num_blocks=4),
            pool,
            pool,
            new,
            new,
            jax.ShapeDtypeStruct((3,), jnp.int32),
        )
