"""The GPU's append to pools of 8 bits, interpreted with race detection, against its reference, bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_gpu, reference
from pallas_kernels.eight_bits import Scaling
from pallas_kernels.mosaic_gpu import append
from tests.kernels.gpu_interpreter import run_interpreted

pytestmark = pytest.mark.contract

NUM_LAYERS, NUM_BLOCKS = 2, 5
NOWHERE = 2**30
# (num_kv_heads, block_size, head_dim, dtype); a token of 64 bytes, of more, and scales that need no padding.
POOLS = {
    "int8_16x64": (1, 16, 64, "int8"),
    "fp8_24x128": (3, 24, 128, "uint8"),
    "int8_8x128": (8, 8, 128, "int8"),
}


def random(rng, dtype, *shape):
    """Of any bits."""
    dtype = jnp.dtype(dtype)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape, dtype=np.uint64)
    return jnp.asarray(bits.astype(f"u{dtype.itemsize}").view(dtype))


def scaling(rng, dtype, *shape):
    """int8 with an offset, fp8 with a scale alone."""
    if dtype == "uint8":
        return Scaling(*(random(rng, "float32", *shape) for _ in "kv"))
    return Scaling(*(random(rng, each, *shape) for each in ("uint16", "uint16", "float32", "float32")))


def arguments_for(name, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    num_heads, block_size, head_dim, dtype = POOLS[name]
    shape = (NUM_LAYERS * NUM_BLOCKS, num_heads, block_size)
    pools = [random(rng, dtype, *shape, head_dim) for _ in "kv"]
    new = [random(rng, dtype, num_tokens, num_heads, head_dim) for _ in "kv"]
    slots = jnp.asarray(1 + rng.permutation(NUM_BLOCKS * block_size - 2)[:num_tokens], jnp.int32)
    of_pools, of_new = (scaling(rng, dtype, *each) for each in (shape, (num_tokens, num_heads)))
    return [*pools, of_pools, *new, of_new, slots]


@functools.partial(jax.jit, static_argnames="module")
def append_by(module, arguments, layer=0):
    options = dict(interpret=True) if module is mosaic_gpu else {}
    return module.append_scaled(*arguments, num_blocks=NUM_BLOCKS, layer=layer, **options)


def check(arguments, layer=0):
    results = run_interpreted(append_by, mosaic_gpu, arguments, jnp.int32(layer))
    expected = append_by(reference, arguments, jnp.int32(layer))
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for result, array in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert result.dtype == array.dtype
        result, array = (np.asarray(x).view(np.uint8) for x in (result, array))
        np.testing.assert_array_equal(result, array)


@pytest.mark.quick_cases("3-int8_16x64")
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("cta_tokens", [1, 3])
def test_append(name, cta_tokens, monkeypatch):
    """Of 8 tokens: with 3 in a CTA the last one reads tokens of its predecessor. Five go somewhere."""
    monkeypatch.setattr(append, "_tokens_per_cta", lambda *_: cta_tokens)
    arguments = arguments_for(name, 8)
    end = NUM_BLOCKS * POOLS[name][1]
    arguments[-1] = (
        arguments[-1].at[jnp.array([0, 1, 4, 5, 6])].set(jnp.array([0, -1, end, end - 1, NOWHERE]))
    )
    for layer in range(NUM_LAYERS):
        check(arguments, layer)


def test_tokens_whose_rows_a_transfer_cannot_read_side_by_side_have_a_cta_each(monkeypatch):
    """The copy engine wants addresses at multiples of 128 bytes."""
    monkeypatch.setattr(append, "_tokens_per_cta", lambda *_: 4)
    launched = []
    monkeypatch.setattr(
        append, "launch", lambda body, **options: launched.append(options["grid"]) or (lambda *_: None)
    )
    for name in POOLS:
        mosaic_gpu.append_scaled(*arguments_for(name, 8), num_blocks=NUM_BLOCKS)
    assert launched == [(8,), (2,), (2,)]


def test_no_tokens_change_nothing():
    arguments = arguments_for("int8_16x64", 0)
    for result, array in zip(
        mosaic_gpu.append_scaled(*arguments, num_blocks=NUM_BLOCKS), arguments, strict=False
    ):
        assert result is array or result == array


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: "bfloat16", 1: "bfloat16"}, r"the pools are bfloat16 and scaling is given"),
        ({3: "int32"}, r"k is int32\(2, 1, 64\), expected int8\(2, 1, 64\)"),
    ],
)
def test_refused(changes, message):
    arguments = arguments_for("int8_16x64", 2)
    for place, dtype in changes.items():
        arguments[place] = arguments[place].astype(dtype)
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.append_scaled(*arguments, num_blocks=NUM_BLOCKS)


def test_refused_scales():
    arguments = arguments_for("int8_16x64", 2)
    arguments[5] = arguments[5]._replace(v_offset=None)
    with pytest.raises(ValueError, match=r"v_offset is None, expected float32\(2, 1\)"):
        mosaic_gpu.append_scaled(*arguments, num_blocks=NUM_BLOCKS)
    arguments[5] = arguments[5]._replace(v_offset=jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"v_offset is float32\(3, 1\), expected float32\(2, 1\)"):
        mosaic_gpu.append_scaled(*arguments, num_blocks=NUM_BLOCKS)


def test_pools_of_wide_heads_are_refused():
    pool = jnp.zeros((5, 1, 16, 256), jnp.int8)
    beside = Scaling(*(jnp.zeros((5, 1, 16)) for _ in "kv"))
    k, of_new = jnp.zeros((2, 1, 256), jnp.int8), Scaling(*(jnp.zeros((2, 1)) for _ in "kv"))
    with pytest.raises(ValueError, match="head_dim is 256 with numbers of 8 bits"):
        mosaic_gpu.append_scaled(pool, pool, beside, k, k, of_new, jnp.arange(2), num_blocks=NUM_BLOCKS)
