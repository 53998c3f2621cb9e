"""The attention of Flax NNX that decodes on a cache, against Flax's own causal forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from kvcache_jax.integrations.flax_nnx import MultiHeadAttention

LENGTH, WIDTH = 7, 12
SIZES = dict(num_heads=4, in_features=WIDTH, qkv_features=16)


def pair(decode=True, **options):
    """Flax's layer and this one, with the same parameters, none of them zero."""
    theirs = nnx.MultiHeadAttention(**SIZES, decode=False, rngs=nnx.Rngs(1), **options)
    ours = MultiHeadAttention(**SIZES, decode=decode, rngs=nnx.Rngs(2), **options)
    state = nnx.state(theirs, nnx.Param)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 0.3, x.shape).astype(x.dtype), state)
    nnx.update(theirs, state)
    nnx.update(ours, state)
    return theirs, ours


@nnx.jit
def causal(layer, *inputs):
    """What Flax's layer computes, and this one where it is not to decode."""
    return layer(*inputs, is_causal=True, decode=False)


@nnx.jit
def decode(ours, *inputs):
    return ours(*inputs)


def inputs(*batch, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*batch, LENGTH, WIDTH)), dtype)


@pytest.mark.quick_cases("options0-batch0-float32-1e-05")
@pytest.mark.parametrize(
    ("options", "batch", "dtype", "tolerance"),
    [
        ({"num_kv_heads": 2, "normalize_qk": True}, (3,), jnp.float32, 1e-5),
        (
            {"use_bias": False, "out_features": 5, "deterministic": True, "dropout_rate": 0.1},
            (2, 2),
            jnp.float32,
            1e-5,
        ),
        ({"dtype": jnp.bfloat16}, (2,), jnp.bfloat16, 0.1),
    ],
)
def test_pieces_equal_a_causal_call(options, batch, dtype, tolerance):
    theirs, ours = pair(**options)
    x = inputs(*batch)
    with jax.numpy_dtype_promotion("standard"):  # Flax promotes bfloat16
        whole = causal(theirs, x)
    ours.init_cache(x.shape, dtype)
    found = [decode(ours, x[..., first:last, :]) for first, last in ((0, 3), (3, 4), (4, 7))]
    found = jnp.concatenate(found, axis=-2)
    assert found.dtype == whole.dtype and found.shape == whole.shape
    np.testing.assert_allclose(found.astype(np.float32), whole.astype(np.float32), atol=tolerance)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(causal(ours, x), whole)


def test_a_step_under_jit_is_causal_and_compiled_once():
    theirs, ours = pair()
    x, num_traced = inputs(2), []

    @nnx.jit
    def step(layer, x):
        num_traced.append(1)
        return layer(x, is_causal=True)

    for seed in (0, 5):  # a new cache begins again
        x = inputs(2, seed=seed)
        ours.init_cache(x.shape)
        found = jnp.concatenate([step(ours, x[:, i : i + 1]) for i in range(LENGTH)], axis=1)
        np.testing.assert_allclose(found, causal(theirs, x), atol=1e-5)
    assert len(num_traced) == 1
    assert kv.check_invariants(ours.kv_cache.get_value()) == []


def test_keys_and_values_may_come_from_elsewhere():
    theirs, ours = pair()
    q, k, v = (inputs(2, seed=seed) for seed in range(3))
    ours.init_cache(q.shape)
    found = [decode(ours, q[:, part], k[:, part], v[:, part]) for part in (slice(0, 4), slice(4, LENGTH))]
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), causal(theirs, q, k, v), atol=1e-5)


def test_a_row_that_is_full_has_no_answer_and_the_others_go_on():
    theirs, ours = pair()
    x = inputs(2)
    ours.init_cache((2, 5, WIDTH))
    decode(ours, x[:, :5])
    before = ours.kv_cache.get_value()
    cache, _ = kv.truncate(before, [1], [3])
    ours.kv_cache.set_value(cache)
    out = decode(ours, x[:, 3:4])
    assert np.isnan(out[0]).all() and ours.kv_cache.get_value().context_len.tolist() == [5, 4]
    np.testing.assert_allclose(out[1], causal(theirs, x)[1, 3:4], atol=1e-5)


def test_what_the_cache_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match="attention_fn"):
        MultiHeadAttention(**SIZES, attention_fn=print, rngs=nnx.Rngs(0))
    _, ours = pair(dropout_rate=0.5)
    x = inputs(2)
    with pytest.raises(ValueError, match="call init_cache first"):
        ours(x, deterministic=True)
    for shape in ((8,), 5):
        found = ""
        try:
            ours.init_cache(shape)
        except (ValueError, TypeError) as error:
            found = str(error)
        assert found.endswith(f"is {shape}, expected (*batch, max_length, features)")
    ours.init_cache(x.shape)
    for num_tokens in (0, LENGTH + 1):
        found = ""
        try:
            ours(jnp.ones((2, num_tokens, x.shape[-1])), deterministic=True)
        except (ValueError, ArithmeticError) as error:
            found = str(error)
        assert found.startswith(f"max_new is {num_tokens}, expected 1 <= max_new <= max_query_len = {LENGTH}")
    with pytest.raises(ValueError, match="dropout_rate is 0.5 while decoding"):
        ours(x, deterministic=False, rngs=nnx.Rngs(0))
    ours(x, deterministic=True, rngs=nnx.Rngs(0), mask=None, sow_weights=False)
    for name, value in (("mask", jnp.ones((1, 1, 1, LENGTH))), ("sow_weights", True), ("input_positions", x)):
        with pytest.raises(ValueError, match=f"^{name} is given, expected none while decoding"):
            ours(x, deterministic=True, **{name: value})
    with pytest.raises(ValueError, match="inputs_v is given without inputs_k"):
        ours(x, None, x, deterministic=True)
    with pytest.raises(ValueError, match=r"the batch \(3,\), expected init_cache's 2 rows"):
        ours(inputs(3), deterministic=True)
