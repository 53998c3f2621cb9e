"""The attention that chunks of rows give to each other, from the weights of a layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.core import arguments


@pytree_dataclass()
class ChunkAttention:
    """Attention between the K chunks of n rows, sums over tokens and means over heads.

    All are sums over queries: those of several steps add up, and so do layers, whose mean Cache-Craft takes
    (`jax.tree.map`).

    Attributes:
      inter: f32[n, K, K], what the tokens of a row's chunk give to those of a column's before it.
      intra: f32[n, K], what they give to their own chunk.
      outside: f32[n, max_seq_len], what each token of a chunk gives to all that stands in front of the chunk,
        tokens of no chunk included.
    """

    inter: jax.Array
    intra: jax.Array
    outside: jax.Array


@jax.named_scope("kvcache.chunk_attention")
def chunk_attention(scores: jax.Array, places: Any, starts: Any, lengths: Any) -> ChunkAttention:
    """Sums what tokens of chunks give to each other, from the weights of a layer.

    Args:
      scores: f32[n, num_q_heads, w, max_seq_len], of `attention_scores`.
      places: i32[n, w], places of the queries in their rows, `Step.cache_positions`.
      starts: i32[n, K], first places of the rows' chunks, which do not overlap.
      lengths: i32[n, K], their tokens, 0 for none.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> scores = jnp.array([[[[1.0, 0, 0], [0.75, 0.25, 0], [0.5, 0.25, 0.25]]]])    # of three tokens
      >>> found = kv.chunk_attention(scores, [[0, 1, 2]], [[0, 2]], [[2, 1]])
      >>> found.inter.tolist(), found.intra.tolist(), found.outside.tolist()
      ([[[0.0, 0.0], [0.75, 0.0]]], [[2.0, 0.25]], [[0.0, 0.0, 0.75]])
    """
    arguments.require_floats("scores", scores)
    if scores.ndim != 4:
        raise ValueError(f"scores has shape {scores.shape}, expected [n, num_q_heads, w, max_seq_len]")
    num_rows, _, num_queries, _ = scores.shape
    places, starts, lengths = (
        arguments.saturated(name, values)
        for name, values in (("places", places), ("starts", starts), ("lengths", lengths))
    )
    if places.shape != (num_rows, num_queries):
        raise ValueError(f"places has shape {places.shape}, expected {(num_rows, num_queries)} as scores")
    if starts.ndim != 2 or starts.shape[0] != num_rows or lengths.shape != starts.shape:
        raise ValueError(
            f"starts and lengths have shapes {starts.shape} and {lengths.shape}, expected ({num_rows}, K)"
        )
    return _sums(scores, places, starts, lengths)


@functools.partial(jax.jit, inline=True)
def _sums(scores: jax.Array, places: jax.Array, starts: jax.Array, lengths: jax.Array) -> ChunkAttention:
    num_rows, _, _, num_places = scores.shape
    weights = scores.astype(jnp.float32).mean(axis=1)
    keys = lax.broadcasted_iota(jnp.int32, (num_rows, num_places), 1)
    key_in, query_in = _within(keys, starts, lengths), _within(places, starts, lengths)
    product = functools.partial(jnp.einsum, precision="highest")
    given = product("nws,nsk->nwk", weights, key_in)  # by each query to each chunk
    pairs = product("nwi,nwj->nij", query_in, given)
    is_own = jnp.eye(starts.shape[1], dtype=bool)
    first = jnp.sum(jnp.where(query_in > 0, starts[:, None], 0), axis=-1, dtype=jnp.int32)
    in_front = jnp.where(keys[:, None] < first[..., None], weights, 0).sum(axis=-1)
    order = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    return ChunkAttention(
        inter=jnp.where(is_own, 0, pairs),
        intra=jnp.diagonal(pairs, axis1=1, axis2=2),
        outside=add_at(jnp.zeros_like(weights, shape=keys.shape), (order, places), in_front),
    )


def _within(places: jax.Array, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    """Tells which places i32[n, p] lie within which chunk, f32[n, p, K] of ones and zeros."""
    behind = places[..., None] - starts[:, None]
    return ((behind >= 0) & (behind < lengths[:, None])).astype(jnp.float32)
