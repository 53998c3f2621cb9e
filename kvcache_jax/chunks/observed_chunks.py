"""Observation of chunks at their places, by first layers, for selectors that look at more than places."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.attention.attention_scores import attention_scores
from kvcache_jax.attention.gather import gather
from kvcache_jax.chunks.chunk_attention import chunk_attention
from kvcache_jax.chunks.chunk_reuse import ChunkReuse, Observe
from kvcache_jax.chunks.chunk_selector import selectors
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import raise_for_status
from kvcache_jax.operations.rewrite import rewrite


def observe_chunks(
    reuse: ChunkReuse,
    params: Any,
    cache: Cache,
    row: int,
    pieces: Iterable[tuple[np.ndarray, np.ndarray]],
    starts: np.ndarray,
    lengths: np.ndarray,
) -> tuple[Cache, dict[str, jax.Array]]:
    """Computes composed tokens through a model's first layers, whose keys and values are right from then on.

    `pieces` are tokens i32[1, T] and their places i32[1, T], all of the row that are not right, in order;
    `starts` and `lengths` i32[1, K] are the places of its chunks. Returns fields of `chunks.Metadata` by
    name, f32[1, max_seq_len] each: deviations of the last layer's keys and values, and, if the selector asks
    for it, the attention that tokens give there to the tokens before their chunk.
    """
    observe, layer = reuse.observe, reuse.observed_layer
    assert observe is not None
    with_attention = "attention" in selectors.find(reuse.selector).needs
    before = gather(cache, row, layer)[:2]
    found, outcomes = {}, []
    if with_attention:
        found["attention"] = jnp.zeros((1, cache.config.max_seq_len), jnp.float32)
    for tokens, indices in pieces:
        cache, outside, status = _observe_piece(
            observe, params, cache, np.array([row]), tokens, indices, starts, lengths, layer, with_attention
        )
        outcomes.append(status)
        if with_attention:
            found["attention"] += outside
    for status in outcomes:
        raise_for_status(status, "observing chunks")
    after = gather(cache, row, layer)[:2]
    for name, old, new in zip(("k_deviation", "v_deviation"), before, after, strict=True):
        found[name] = _deviation(old, new)
    return cache, found


@functools.partial(jax.jit, static_argnames=("observe", "layer", "with_attention"), donate_argnames="cache")
def _observe_piece(
    observe: Observe,
    params: Any,
    cache: Cache,
    rows: jax.Array,
    tokens: jax.Array,
    indices: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    layer: int,
    with_attention: bool,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Computes one piece; returns also f32[1, max_seq_len], attention to earlier tokens, and the status."""
    cache, step = rewrite(cache, rows, indices)
    queries, cache = _checked(observe(params, tokens, cache, step))
    if not with_attention:
        return cache, jnp.zeros((1, cache.config.max_seq_len), jnp.float32), step.status
    scores = attention_scores(cache, layer, queries, step)
    return cache, chunk_attention(scores, indices, starts, lengths), step.status


def _checked(result: Any) -> tuple[jax.Array, Cache]:
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not (is_pair and isinstance(result[0], jax.Array) and isinstance(result[1], Cache)):
        kind = ", ".join(type(part).__name__ for part in result) if is_pair else type(result).__name__
        raise TypeError(f"observe returned ({kind}), expected (queries, cache)")
    return result


@jax.jit
def _deviation(old: jax.Array, new: jax.Array) -> jax.Array:
    """Sums squared differences of keys or values [max_seq_len, heads, features], f32[1, max_seq_len]."""
    difference = new.astype(jnp.float32) - old.astype(jnp.float32)
    return jnp.sum(difference**2, axis=(1, 2))[None]
