"""Attention on caches of 8 bits by the GPU's kernels, interpreted, against XLA's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu  # noqa: F401  imported later, it would make jax trace anew

import kvcache_jax as kv
from kvcache_jax import testing
from pallas_kernels import mosaic_gpu
from tests.kernels import gpu_interpreter

SIZES = dict(num_blocks=9, block_size=8, max_seqs=3, max_seq_len=24, max_query_len=11, dtype="bfloat16")
LONG = dict(num_blocks=9, block_size=16, max_seqs=3, max_seq_len=80, max_query_len=66, dtype="bfloat16")
NUM_HEADS, GROUP_SIZE, HEAD_DIM = 2, 2, 64


def chunks_of(config):
    """Of each call the width, and the new tokens of each row."""
    width = config.max_query_len
    return (width, [width, 5, 0]), (2, [1, 2, 2])


def poisoned(cache):
    """What was never written is NaN, or as large as can be."""

    def poison(array):
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.full_like(array, jnp.nan if is_float else jnp.iinfo(array.dtype).max)

    return dataclasses.replace(cache, pools=jax.tree.map(poison, cache.pools))


@functools.partial(jax.jit, static_argnums=0)
def steps(config, chunks):
    """A prompt that is longer than a decode's queries, a row that shares a block with another, idle rows."""
    cache, _ = kv.allocate(poisoned(kv.init(config)), [0, 1], [config.max_query_len, 5])
    outs = []
    for (width, num_new), (q, k, v) in zip(chunks_of(config), chunks, strict=True):
        cache, step = kv.extend(cache, num_new, max_new=width)
        for layer in range(2):
            cache, out = kv.attention(cache, layer, q, k + layer, v - layer, step, soft_cap=20.0)
            outs.append(out)
        if len(outs) == 2:
            cache, _ = kv.fork(cache, [0], [2])
    return cache, outs


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SIZES, LONG], ids=["decoded", "prefilled"])
@pytest.mark.parametrize(("format", "rotate"), [("int8", False), ("fp8", True)])
def test_kernels_give_what_xla_gives(format, rotate, sizes, monkeypatch):
    rng, calls = np.random.default_rng(0), []

    def count(name, kernel, *args, **options):
        calls.append(name)
        return kernel(*args, **options)

    for name in ("paged_decode", "paged_prefill"):
        monkeypatch.setattr(mosaic_gpu, name, functools.partial(count, name, getattr(mosaic_gpu, name)))

    def draw(width, num_heads):
        # Numbers of one sign, and of other sizes in each head: scales and offsets all differ.
        x = rng.standard_normal((3, width, num_heads, HEAD_DIM)) + rng.standard_normal((3, width, 1, 1))
        return jnp.asarray(x * np.linspace(0.5, 1.5, num_heads)[:, None], jnp.bfloat16)

    heads = NUM_HEADS * GROUP_SIZE, NUM_HEADS, NUM_HEADS
    layer = kv.Quantised(kv.FullAttention(NUM_HEADS, HEAD_DIM), format, rotate)
    configs = [kv.CacheConfig([layer] * 2, implementation=name, **sizes) for name in ("xla", "mosaic_gpu")]
    chunks = [[draw(width, num_heads) for num_heads in heads] for width, _ in chunks_of(configs[0])]
    by_xla, ours = (functools.partial(steps, config, chunks) for config in configs)

    def interpreted():
        with testing.interpreted():
            return ours()

    cache, outs = gpu_interpreter.run_interpreted(interpreted)
    expected_cache, expected_outs = by_xla()
    assert set(calls) == {"paged_decode"} | ({"paged_prefill"} if sizes is LONG else set())
    assert int(kv.stats(cache).num_copies) == 1
    for pool, expected in zip(cache.pools, expected_cache.pools, strict=True):
        jax.tree.map(np.testing.assert_array_equal, pool.arrays, expected.arrays)
    for out, expected in zip(outs, expected_outs, strict=True):
        out, expected = (np.asarray(x, np.float32) for x in (out, expected))
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_new_tokens_are_written_by_one_kernel_with_all_that_lies_beside_them(format):
    """Not by XLA's scatters, which are one for each array."""
    layer = kv.Quantised(kv.FullAttention(NUM_HEADS, HEAD_DIM), format)
    config = kv.CacheConfig([layer], implementation="mosaic_gpu", **SIZES)
    cache = jax.eval_shape(functools.partial(kv.init, config))
    k = jax.ShapeDtypeStruct((3, 1, NUM_HEADS, HEAD_DIM), jnp.bfloat16)

    def step(cache, k):
        cache, step = kv.extend(cache, [1, 0, 1], max_new=1)
        return kv.write(cache, 0, k, k, step)

    with testing.interpreted():
        program = str(jax.make_jaxpr(step)(cache, k))
    assert program.count("name=append_scaled") == 1


def test_what_the_kernels_do_not_multiply_is_named():
    layer = kv.Quantised(kv.FullAttention(NUM_HEADS, HEAD_DIM), "int8")
    config = kv.CacheConfig([layer], implementation="mosaic_gpu", **SIZES | {"dtype": "float32"})
    cache = jax.eval_shape(functools.partial(kv.init, config))
    expected = r"multiply numbers of 8 bits in bfloat16, and Quantised\(FullAttention, int8\) .* in float32"
    with testing.interpreted(), pytest.raises(NotImplementedError, match=expected):
        jax.eval_shape(lambda cache: kv.extend(cache, [1, 0, 0], max_new=1), cache)
