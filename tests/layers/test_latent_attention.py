"""Latent attention: absorbed, expanded and dense give the same, gradients too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.dense_reference import dense_attention
from tests.support.helpers import ROOMY

LATENT, ROPE, NOPE, VALUE, HEADS, WIDTH = 12, 4, 6, 10, 3, 7
SCALE = (NOPE + ROPE) ** -0.5
CONFIG = kv.CacheConfig([kv.LatentAttention(LATENT, ROPE)] * 2, **ROOMY)
CHUNKS = ([7, 0, 3, 0], [5, 2, 0, 0], [1, 7, 1, 0], [7, 1, 1, 0])


@functools.cache
def numbers():
    rng = np.random.default_rng(4)
    shapes = {
        "w_k": (LATENT, HEADS, NOPE),
        "w_v": (LATENT, HEADS, VALUE),
        "latent": (len(CHUNKS), 4, WIDTH, 1, LATENT + ROPE),
        "q_nope": (len(CHUNKS), 4, WIDTH, HEADS, NOPE),
        "q_rope": (len(CHUNKS), 4, WIDTH, HEADS, ROPE),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def run(params, cache, *, is_absorbed):
    """The results of layer 1 in each of the chunks `[chunks, 4, WIDTH, HEADS, VALUE]`."""

    def step_fn(cache, inputs):
        num_new, latent, q_nope, q_rope = inputs
        cache, step = kv.extend(cache, num_new, max_new=WIDTH)
        cache = kv.write(cache, 0, -latent, None, step)
        if is_absorbed:
            q = jnp.concatenate([jnp.einsum("nthp,lhp->nthl", q_nope, params["w_k"]), q_rope], axis=-1)
            cache, out = kv.attention(cache, 1, q, latent, None, step, scale=SCALE)
            return cache, jnp.einsum("nthl,lhv->nthv", out, params["w_v"])
        weights = {"k": params["w_k"], "v": params["w_v"]}
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        return kv.attention(cache, 1, q, latent, None, step, scale=SCALE, weights=weights)

    inputs = jnp.array(CHUNKS), params["latent"], params["q_nope"], params["q_rope"]
    return jax.lax.scan(step_fn, cache, inputs)[1]


def dense(params):
    outs = []
    for row in range(3):
        lengths = [chunk[row] for chunk in CHUNKS]

        def tokens(name, row=row, lengths=lengths):
            return jnp.concatenate([params[name][i, row, :length] for i, length in enumerate(lengths)])

        latent = tokens("latent")[:, 0]
        k, v = (jnp.einsum("tl,lhd->thd", latent[:, :LATENT], params[name]) for name in ("w_k", "w_v"))
        rotated = jnp.broadcast_to(latent[:, None, LATENT:], (*k.shape[:2], ROPE))
        q = jnp.concatenate([tokens("q_nope"), tokens("q_rope")], axis=-1)
        outs.append(dense_attention(q, jnp.concatenate([k, rotated], axis=-1), v)[0])
    return outs


def rows_of(out):
    """The results `[tokens, HEADS, VALUE]` of each row."""
    return [
        jnp.concatenate([out[i, row, : chunk[row]] for i, chunk in enumerate(CHUNKS)]) for row in range(3)
    ]


def started():
    cache, _ = kv.allocate(kv.init(CONFIG), [2, 0, 1], [0, 0, 0])
    return testing.poison(cache)


@pytest.mark.quick_cases("absorbed")
@pytest.mark.parametrize("is_absorbed", [True, False], ids=["absorbed", "expanded"])
def test_it_is_dense_attention(is_absorbed):
    def of_cache(params, cache):
        return rows_of(run(params, cache, is_absorbed=is_absorbed))

    for got, want in zip(jax.jit(of_cache)(numbers(), started()), jax.jit(dense)(numbers()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_absorbed", [True, False], ids=["absorbed", "expanded"])
def test_its_gradients_are_those_of_dense_attention(is_absorbed):
    """Of queries, latents and the layer's own weights."""

    def loss(rows):
        return sum(jnp.sin(out).sum() for out in rows)

    def of_cache(params):
        return loss(rows_of(run(params, started(), is_absorbed=is_absorbed)))

    got, want = (jax.jit(jax.grad(f))(numbers()) for f in (of_cache, lambda p: loss(dense(p))))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-4, atol=2e-4, err_msg=name)


def test_a_token_stores_what_deepseek_v3_s_does():
    config = kv.CacheConfig([kv.LatentAttention(512, 64)] * 61, num_blocks=8192, dtype="bfloat16")
    assert kv.memory_bytes(config) == 61 * 576 * 2 * 131_072


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"k": np.ones((5, 3, 2))},
            r"weights are \{'k': \(5, 3, 2\)\}, expected \{'k': \(12, heads, nope_dim\)",
        ),
        ({"k": np.ones((12, 3, 2)), "v": np.ones((12, 2, 2))}, "weights are .*, expected"),
        (np.ones(3), "weights are .*, expected"),
    ],
)
def test_weights_of_other_shapes_are_refused(weights, message):
    q, latent = (
        np.ones((4, 1, heads, width), np.float32)
        for heads, width in ((HEADS, NOPE + ROPE), (1, LATENT + ROPE))
    )

    def trace(function):
        jax.eval_shape(lambda: function(*kv.extend(kv.init(CONFIG), [1, 0, 0, 0], max_new=1)))

    with pytest.raises(ValueError, match=message):
        trace(lambda cache, step: kv.attention(cache, 0, q, latent, None, step, weights=weights))
    with pytest.raises(TypeError, match=r"v is a .*, expected None: LatentAttention\(12 \+ 4\) layers"):
        trace(lambda cache, step: kv.write(cache, 0, latent, latent, step))
