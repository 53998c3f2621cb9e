"""The TPU's movement of blocks and tokens, interpreted with race detection, against its references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_tpu, reference
from tests.kernels.tpu_interpreter import run_interpreted

pytestmark = pytest.mark.contract

NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS = 3, 24, 2


def pools(block_size: int = 16, dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    """Pools in which no two numbers of bf16 bits are easily taken for each other, some of them NaN."""
    rng = np.random.default_rng(0)
    shape = (NUM_LAYERS * NUM_BLOCKS, NUM_KV_HEADS, block_size, 128)
    k, v = (rng.standard_normal(shape, np.float32) for _ in "kv")
    k[3], v[7, 1, 5] = np.nan, np.nan
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype)


def random_like(shape: tuple[int, ...], dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in "kv")
    return k, v


def ids(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def check(name: str, *arguments: object, **traced: object) -> tuple[jax.Array, jax.Array]:
    """The kernel's results, which are the reference's bit for bit."""
    kernel = functools.partial(getattr(mosaic_tpu, name), num_blocks=NUM_BLOCKS, interpret=True)
    results = run_interpreted(kernel, *arguments, **traced)
    expected = getattr(reference, name)(*arguments, num_blocks=NUM_BLOCKS, **traced)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result.astype(jnp.float32), wanted.astype(jnp.float32))
    return results


# 12 is more than are in flight at once; entries that do not count, and some between them, are no blocks.
PERMUTED = ids(5, 0, 23, 11, 2, 19, 7, 13, 1, 17, 3, 22, 10**6, -(10**6))
OTHERS = ids(4, 6, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 10**6, -(10**6))
COUNTS = [0, 1, 12]


SOME = jnp.where(jnp.arange(PERMUTED.size) % 3 == 1, NUM_BLOCKS, PERMUTED)


@pytest.mark.quick_cases("some")
@pytest.mark.parametrize("block_ids", [SOME, PERMUTED, 0 * PERMUTED - 1], ids=["some", "most", "none"])
def test_gather(block_ids):
    check("gather_blocks", *pools(), block_ids)


@pytest.mark.quick_cases("some")
@pytest.mark.parametrize("block_ids", [SOME, PERMUTED, 0 * PERMUTED - 1], ids=["some", "most", "none"])
def test_scatter(block_ids):
    blocks = random_like((PERMUTED.size, NUM_LAYERS, NUM_KV_HEADS, 16, 128), "float32")
    check("scatter_blocks", *pools(), *blocks, block_ids)


@pytest.mark.quick_cases("12")
@pytest.mark.parametrize("count", COUNTS)
def test_copy(count):
    check("copy_blocks", *pools(), PERMUTED, OTHERS, jnp.int32(count))


@pytest.mark.slow
def test_one_block_copied_to_many():
    """More than all are all."""
    check("copy_blocks", *pools(8, "float32"), jnp.zeros(10, jnp.int32), OTHERS[:10], jnp.int32(12))


@pytest.mark.slow
def test_a_source_may_be_overwritten_by_a_later_copy():
    """Of those 8 and 7 before it, of two and of the one before; earlier copies see the block as it was."""
    src = ids(22, 16, 2, 5, 5, 16, 16, 16, 16, 16, 0, 23)
    dst = ids(4, 6, 8, 9, 10, 12, 14, 15, 22, 2, 5, 0)
    check("copy_blocks", *pools(), src, dst, jnp.int32(src.size))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_in_any_order_and_nowhere(dtype):
    """Several of one tile, one after the other and apart, in blocks of several tiles."""
    block_size = 48
    row = np.arange(100, 107)
    slots = np.r_[7, -1, row, NUM_BLOCKS * block_size, 15, 0, 2**30, NUM_BLOCKS * block_size - 1, 8]
    values = random_like((slots.size, NUM_KV_HEADS, 128), "float32")
    check("append_kv", *pools(block_size, dtype), *values, ids(*slots), layer=jnp.int32(1))


@pytest.mark.slow
def test_more_tokens_than_one_chunk(monkeypatch):
    """A tile takes tokens of two chunks."""
    monkeypatch.setattr(mosaic_tpu.append, "MAX_CHUNK", 4)
    values = random_like((11, NUM_KV_HEADS, 128))
    check("append_kv", *pools(), *values, jnp.arange(29, 40, dtype=jnp.int32), layer=jnp.int32(2))


def test_no_tokens():
    check("append_kv", *pools(), *random_like((0, NUM_KV_HEADS, 128)), jnp.zeros(0, jnp.int32))
