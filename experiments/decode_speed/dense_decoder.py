"""The decoder without a paged cache: on dense static arrays, and on none. What `decode_speed` compares with.

The layers are `models.decoder`'s; only what is between a layer's queries, keys and values and its
output differs, and that is a function here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from models.attention import Attention
from models.config import DecoderConfig
from models.decoder import Decoder, Layer, rotations, single_layers
from models.rope import Rotation, rotate

Layout = Literal["[B, S, H, D]", "[B, H, S, D]"]
LAYOUTS: tuple[Layout, ...] = ("[B, S, H, D]", "[B, H, S, D]")

# (layer, q [b, t, num_q_heads, d], k [b, t, num_kv_heads, d], v) -> out like q
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


_OPTIONS = (
    "windows",
    "latents",
    "mixers",
    "use_attention_gate",
    "use_post_norms",
    "embedding_scale",
    "residual_scale",
    "attention_scale",
    "attention_soft_cap",
    "logits_divisor",
    "final_soft_cap",
)


def missing_option(config: DecoderConfig) -> str | None:
    """An option that the model has and the layers here do not; None where all is here."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return next((name for name in _OPTIONS if getattr(config, name) != defaults[name]), None)


class Unstacked(NamedTuple):
    """A decoder and its layers, each by itself: to be taken apart before a step, which would copy slices."""

    decoder: Decoder
    layers: list[Layer]


def unstacked(decoder: Decoder) -> Unstacked:
    return Unstacked(decoder, single_layers(decoder))


class DenseCache(NamedTuple):
    """Room for `max_seq_len` tokens in every row, whatever the row holds.

    Per layer `[b, max_seq_len, num_kv_heads, d]`, or with heads before tokens; i32[b] tokens are held.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    context_len: jax.Array


def dense_cache(k: jax.Array, v: jax.Array, context_len: ArrayLike, layout: Layout) -> DenseCache:
    """Holds the first i32[b] tokens of `k` and `v` `[num_layers, b, max_seq_len, num_kv_heads, d]`."""
    if layout == "[B, H, S, D]":
        k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
    # Copies, so that the caller's arrays outlive a donation.
    return DenseCache(tuple(map(jnp.array, k)), tuple(map(jnp.array, v)), jnp.asarray(context_len, jnp.int32))


def dense_step(
    decoder: Decoder | Unstacked, tokens: jax.Array, cache: DenseCache, layout: Layout
) -> tuple[jax.Array, DenseCache]:
    """One more token i32[b] in every row: logits f32[b, vocab_size] and the cache."""
    position, rows = cache.context_len, jnp.arange(len(tokens))
    keys, values = list(cache.k), list(cache.v)
    is_head_first = layout == "[B, H, S, D]"
    heads = "bhsd" if is_head_first else "bshd"
    max_seq_len = keys[0].shape[2 if is_head_first else 1]
    is_seen = jnp.arange(max_seq_len)[None] <= position[:, None]  # [b, s]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        place = (rows, slice(None), position) if is_head_first else (rows, position)
        keys[layer] = keys[layer].at[place].set(k[:, 0])
        values[layer] = values[layer].at[place].set(v[:, 0])
        q = _by_kv_head(q[:, 0], k.shape[2])  # [b, h, g, d]
        logits = jnp.einsum(f"bhgd,{heads}->bhgs", q, keys[layer]) / math.sqrt(q.shape[-1])
        logits = jnp.where(is_seen[:, None, None], logits, -1e30)
        out = jnp.einsum(f"bhgs,{heads}->bhgd", jax.nn.softmax(logits, axis=-1), values[layer])
        return out.reshape(len(tokens), 1, -1, q.shape[-1])

    logits = run(decoder, tokens[:, None], position[:, None], attend)
    return logits[:, 0], DenseCache(tuple(keys), tuple(values), position + 1)


def recomputed_logits(decoder: Decoder | Unstacked, tokens: jax.Array, context_len: jax.Array) -> jax.Array:
    """Logits f32[b, vocab_size] after the last token of each row, i32[b, max_seq_len], from nothing."""

    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, length = row
        positions = jnp.arange(len(tokens))
        return run(decoder, tokens[None], positions[None], causal_attention, only=length - 1)[0, 0]

    # One row at a time: the scores of one row's attention are already larger than many rows' caches.
    return jax.lax.map(of_row, (tokens, context_len))


def keys_and_values(decoder: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a cache of the rows i32[b, t] holds: `[num_layers, b, t, num_kv_heads, d]` twice."""

    def of_row(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, values = [], []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys.append(k[0])
            values.append(v[0])
            return causal_attention(layer, q, k, v)

        run(decoder, row[None], jnp.arange(len(row))[None], attend)
        return jnp.stack(keys), jnp.stack(values)

    return jax.tree.map(lambda x: x.swapaxes(0, 1), jax.lax.map(of_row, tokens))


def causal_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Every token attends to those before it and to itself, without any cache."""
    q = _by_kv_head(q, k.shape[2])  # [b, t, h, g, d]
    logits = jnp.einsum("bthgd,bshd->bhgts", q, k) / math.sqrt(q.shape[-1])
    is_seen = jnp.tril(jnp.ones(logits.shape[-2:], bool), k.shape[1] - q.shape[1])
    weights = jax.nn.softmax(jnp.where(is_seen, logits, -1e30), axis=-1)
    out = jnp.einsum("bhgts,bshd->bthgd", weights, v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def no_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Uses what the layer computed, so that the compiler keeps it, and looks at no other token."""
    return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2)


def run(
    decoder: Decoder | Unstacked,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    only: jax.Array | None = None,
) -> jax.Array:
    """Logits f32[b, t, vocab_size] of tokens i32[b, t]; `only` one place i32[] of every row, if given."""
    decoder, layers = decoder if isinstance(decoder, Unstacked) else unstacked(decoder)
    x = decoder.embedding[...][tokens].astype(decoder.config.dtype)
    turns = rotations(decoder.config, positions)
    for layer_id, layer in enumerate(layers):
        assert isinstance(layer.attention, Attention)  # see `missing_option`
        assert layer.attention_norm is not None and layer.mlp_norm is not None and layer.mlp is not None
        x = x + _attention(
            layer.attention, layer.attention_norm(x), turns[layer_id], functools.partial(attend, layer_id)
        )
        x = x + layer.mlp(layer.mlp_norm(x))
    if only is not None:
        x = jax.lax.dynamic_slice_in_dim(x, only, 1, axis=1)
    unembedding = decoder.embedding if decoder.config.tie_embeddings else decoder.unembedding
    return jnp.einsum("bth,vh->btv", decoder.norm(x), unembedding[...].astype(x.dtype)).astype(jnp.float32)


def _attention(attention: Attention, x: jax.Array, rotation: Rotation | None, attend: Callable) -> jax.Array:
    heads = (*x.shape[:2], -1, attention.head_dim)
    q, k, v = (project(x).reshape(heads) for project in (attention.q, attention.k, attention.v))
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    out = attend(rotate(q, rotation), rotate(k, rotation), v)
    return attention.out(out.reshape(*x.shape[:2], -1))


def _by_kv_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    return q.reshape(*q.shape[:-2], num_kv_heads, -1, q.shape[-1])
