"""A two-layer decoder of plain functions, and the same without a cache."""

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from tests.support.helpers import ROOMY

VOCAB, WIDTH, HEADS, DIM, LAYERS = 16, 8, 2, 4, 2
PREFILL_LEN = 12  # of `generate` and its like: calls of one width share their programs


def make_params(seed=6, scale=1.0):
    return _make_params(seed, scale)


@jax.jit  # one program for the many files that are imported with parameters
def _make_params(seed, scale):
    keys = jax.random.split(jax.random.key(seed), 2 + LAYERS)
    return {
        "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "layers": [jax.random.normal(key, (WIDTH, 4 * WIDTH)) * 0.9 for key in keys[1:-1]],
        "head": jax.random.normal(keys[-1], (WIDTH, VOCAB)) * scale,
        "after": jnp.zeros((VOCAB, VOCAB)),  # what is added to the logits after each token
    }


def config(**sizes):
    layers = [kv.FullAttention(HEADS, DIM)] * LAYERS
    return kv.CacheConfig(layers, **ROOMY | sizes)


def _embed(params, tokens, positions):
    scales = jnp.arange(1, WIDTH + 1, dtype=jnp.float32).reshape(*[1] * positions.ndim, WIDTH)
    angle = positions[..., None].astype(jnp.float32) * scales * 0.3
    return 0.7 * params["embedding"][tokens] + jnp.sin(angle)


def _heads(x, weights):
    h = x @ weights
    q, k, v = jnp.split(h, [2 * WIDTH, 3 * WIDTH], axis=-1)
    shape = x.shape[:-1]
    return q.reshape(*shape, 2 * HEADS, DIM), k.reshape(*shape, HEADS, DIM), v.reshape(*shape, HEADS, DIM)


def forward(params, tokens, cache, step, attention=kv.attention):
    x = _embed(params, tokens, step.positions)
    for layer, weights in enumerate(params["layers"]):
        q, k, v = _heads(x, weights)
        cache, out = attention(cache, layer, q, k, v, step)
        out = out.reshape(*x.shape[:-1], -1)
        x = x + 2 * jnp.tanh(out[..., :WIDTH] - out[..., WIDTH:])
    return x @ params["head"] + params["after"][tokens], cache


def dense_logits(params, tokens):
    """Logits [tokens, vocab] of one sequence, recomputed from scratch."""
    tokens = jnp.asarray(tokens)
    n = len(tokens)
    x = _embed(params, tokens, jnp.arange(n))
    causal = jnp.tril(jnp.ones((n, n), bool))
    for weights in params["layers"]:
        q, k, v = _heads(x, weights)
        k, v = jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)
        logits = jnp.where(causal, jnp.einsum("thd,shd->hts", q, k) / np.sqrt(DIM), -jnp.inf)
        out = jnp.einsum("hts,shd->thd", jax.nn.softmax(logits, axis=-1), v).reshape(n, -1)
        x = x + 2 * jnp.tanh(out[..., :WIDTH] - out[..., WIDTH:])
    return x @ params["head"] + params["after"][tokens]
