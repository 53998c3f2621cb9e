"""`models.matmul`: the product and the gradient of `@`, in the dtype that was asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from models.decoder import Decoder, DecoderConfig, cache_config, forward
from models.matmul import matmul

SHAPES = {"packed": (7, 5), "padded": (2, 3, 5)}


def operands(shape):
    keys = jax.random.split(jax.random.key(3), 3)
    return [jax.random.normal(k, s) for k, s in zip(keys, (shape, (5, 4), (*shape[:-1], 4)), strict=True)]


@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_product_and_gradient_are_those_of_the_operator(shape, dtype, rtol):
    x, kernel, dy = operands(shape)

    @jax.jit
    def both(x, kernel, dy):
        y, pull = jax.vjp(lambda x, kernel: matmul(x, kernel, dtype), x, kernel)
        want, want_pull = jax.vjp(jnp.matmul, x, kernel)
        return (y, *pull(dy)), (want, *want_pull(dy))

    for got, want in zip(*both(x, kernel, dy), strict=True):
        assert got.dtype == jnp.float32
        difference = np.abs(got - want).max() / np.abs(want).max()
        assert difference <= rtol
        assert dtype == jnp.float32 or difference > 1e-5, "nothing was rounded"


def test_narrow_operands_have_narrow_gradients():
    x, kernel, dy = (value.astype(jnp.bfloat16) for value in operands((2, 3, 5)))
    y, pull = jax.vjp(lambda x, kernel: matmul(x, kernel, jnp.float32), x, kernel)
    assert {value.dtype for value in (y, *pull(dy))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_matmul_dtype_of_a_decoder_changes_precision_alone():
    config = DecoderConfig(
        vocab_size=13, hidden_size=12, mlp_size=10, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=6
    )

    @jax.jit
    def logits_of(decoder, tokens):
        cache = kv.init(cache_config(decoder.config, max_seqs=1, max_seq_len=16, block_size=8))
        cache, _ = kv.allocate(cache, [0], [9])
        cache, step = kv.extend(cache, jnp.full(1, 9, jnp.int32), max_new=9)
        logits, cache = forward(decoder, tokens, cache, step)
        return logits, cache

    tokens = jnp.arange(9, dtype=jnp.int32)[None]
    found = {}
    for dtype in (None, jnp.float32, jnp.bfloat16):
        decoder = Decoder(dataclasses.replace(config, matmul_dtype=dtype), rngs=nnx.Rngs(0))
        logits, cache = logits_of(decoder, tokens)
        assert {leaf.dtype for leaf in jax.tree.leaves((decoder, logits, cache.pools))} == {np.dtype("f4")}
        found[dtype] = np.asarray(logits)
    np.testing.assert_array_equal(found[None], found[jnp.float32])
    error = np.sqrt(np.mean((found[jnp.bfloat16] - found[jnp.float32]) ** 2)) / found[jnp.float32].std()
    assert 1e-4 < error < 0.03


def test_matmul_dtype_must_be_a_float_of_the_decoder():
    sizes = dict(vocab_size=13, hidden_size=12, mlp_size=10, num_layers=2)
    sizes |= dict(num_q_heads=4, num_kv_heads=2, head_dim=6)
    with pytest.raises(ValueError, match="matmul_dtype is float16, expected float32 or bfloat16"):
        DecoderConfig(**sizes, matmul_dtype=jnp.float16)
    follows = dataclasses.replace(DecoderConfig(**sizes), dtype=jnp.bfloat16)
    assert follows == DecoderConfig(**sizes, dtype=jnp.bfloat16)
