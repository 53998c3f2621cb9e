"""A hybrid of recurrent and full layers, with random weights and tiny widths."""

from typing import Any

import jax
import jax.numpy as jnp

import kvcache_jax as kv

RECURRENT = kv.GatedDeltaNet(2, 8, key_dim=8)
FULL = kv.FullAttention(2, 8)
WIDTH, VOCAB_SIZE = 32, 1000
NUM_LAYERS = 6
Params = dict[str, Any]


def random_params(seed: int = 0) -> Params:
    """Draws the weights: each layer has the weights of a recurrent and of a full one, and uses its own."""
    channels, heads = RECURRENT.num_channels, RECURRENT.num_kv_heads
    shapes = {
        "x": (WIDTH, channels),
        "gates": (WIDTH, 2 * heads),
        "conv": (RECURRENT.kernel, channels),
        "qkv": (WIDTH, 3 * FULL.num_kv_heads * FULL.head_dim),
        "out": (heads * RECURRENT.head_dim, WIDTH),
    }
    keys = iter(jax.random.split(jax.random.key(seed), len(shapes) + 1))
    params = {
        name: jax.random.normal(next(keys), (NUM_LAYERS, *shape)) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }
    return params | {"embedding": jax.random.normal(next(keys), (VOCAB_SIZE, WIDTH))}


def forward(params: Params, tokens: jax.Array, cache: kv.Cache, step: kv.Step) -> tuple[kv.Cache, jax.Array]:
    """Computes logits f32[n, T, vocab] of tokens i32[n, T]."""
    x = params["embedding"][tokens]
    for layer, kind in enumerate(cache.config.layers):
        weights = {name: value[layer] for name, value in params.items() if name != "embedding"}
        mixed = _recurrent if isinstance(kind, kv.Recurrent) else _full
        cache, out = mixed(weights, _normalised(x), cache, layer, step)
        x = x + out.reshape(*tokens.shape, -1) @ weights["out"]
    return cache, _normalised(x) @ params["embedding"].T


def _recurrent(
    weights: Params, x: jax.Array, cache: kv.Cache, layer: int, step: kv.Step
) -> tuple[kv.Cache, jax.Array]:
    decay, beta = jnp.split(x @ weights["gates"], 2, axis=-1)
    new = {"x": x @ weights["x"], "g": jax.nn.log_sigmoid(decay + 3), "beta": jax.nn.sigmoid(beta)}
    return kv.recurrence(cache, layer, new, step, weights={"conv": weights["conv"]})


def _full(
    weights: Params, x: jax.Array, cache: kv.Cache, layer: int, step: kv.Step
) -> tuple[kv.Cache, jax.Array]:
    qkv = (x @ weights["qkv"]).reshape(*x.shape[:2], 3, FULL.num_kv_heads, FULL.head_dim)
    cache, out = kv.attention(cache, layer, qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], step)
    assert isinstance(out, jax.Array)
    return cache, out


def _normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
