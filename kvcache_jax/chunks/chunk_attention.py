"""The attention that tokens of chunks give to the tokens before their chunk, from the weights of a layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at
from kvcache_jax.core import arguments


@jax.named_scope("kvcache.chunk_attention")
def chunk_attention(scores: jax.Array, places: Any, starts: Any, lengths: Any) -> jax.Array:
    """Sums the attention of each token of a chunk to all tokens before the chunk, from a layer's weights.

    Tokens of no chunk count as tokens before, too. Results of several steps add up, and of layers too.

    Args:
      scores: f32[n, num_q_heads, w, max_seq_len], of `attention_scores`.
      places: i32[n, w], places of the queries in their rows, `Step.cache_positions`.
      starts: i32[n, K], first places of the rows' chunks, which do not overlap.
      lengths: i32[n, K], their tokens, 0 for none.

    Returns:
      f32[n, max_seq_len], means over heads by the tokens' places, for `chunks.Metadata`; 0 elsewhere.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> scores = jnp.array([[[[1.0, 0, 0], [0.75, 0.25, 0], [0.5, 0.25, 0.25]]]])    # of three tokens
      >>> kv.chunks.attention(scores, [[0, 1, 2]], [[0, 2]], [[2, 1]]).tolist()
      [[0.0, 0.0, 0.75]]
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
def _sums(scores: jax.Array, places: jax.Array, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    num_rows, _, _, num_places = scores.shape
    weights = scores.astype(jnp.float32).mean(axis=1)
    keys = lax.broadcasted_iota(jnp.int32, (num_rows, num_places), 1)
    behind = places[..., None] - starts[:, None]
    is_in = (behind >= 0) & (behind < lengths[:, None])
    first = jnp.sum(jnp.where(is_in, starts[:, None], 0), axis=-1, dtype=jnp.int32)
    in_front = jnp.where(keys[:, None] < first[..., None], weights, 0).sum(axis=-1)
    order = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    return add_at(jnp.zeros_like(weights, shape=keys.shape), (order, places), in_front)
