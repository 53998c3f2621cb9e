"""The attention that chunks of rows give to each other, from the weights of a layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, get_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.core import arguments
from kvcache_jax.core.chunk_stats import ChunkStats


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

    def stats(self, starts: Any, lengths: Any, digests: Any, max_chunk_len: int) -> ChunkStats:
        """Computes what `store_chunk(stats=)` keeps of chunks, of means over layers.

        Args:
          starts: i32[n, K], as in `chunk_attention`, like `lengths`.
          lengths: i32[n, K].
          digests: u32[n, K, 2], of `chunk_digests`; 0 for none.
          max_chunk_len: Most tokens of a chunk.

        Returns:
          `ChunkStats` with arrays `[n, K, ...]`: `jax.tree.map(lambda x: x[row], stats)` are those of a row.
        """
        starts, lengths = (
            jnp.asarray(arguments.saturated(name, x))
            for name, x in (("starts", starts), ("lengths", lengths))
        )
        digests = arguments.as_array("digests", digests)
        shape = self.intra.shape
        if starts.shape != shape or lengths.shape != shape or digests.shape != (*shape, 2):
            raise ValueError(
                f"starts, lengths and digests have shapes {starts.shape}, {lengths.shape} and "
                f"{digests.shape}, expected {shape}, {shape} and {(*shape, 2)}"
            )
        return _stats(self, starts, lengths, jnp.asarray(digests), max_chunk_len=max_chunk_len)


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


@functools.partial(jax.jit, static_argnames="max_chunk_len")
def _stats(
    attention: ChunkAttention, starts: jax.Array, lengths: jax.Array, digests: jax.Array, max_chunk_len: int
) -> ChunkStats:
    # In the order in which they stand: what is in front of a chunk is then the first of them.
    order = jnp.argsort(jnp.where(lengths > 0, starts, jnp.iinfo(jnp.int32).max), axis=1)
    row = lax.broadcasted_iota(jnp.int32, order.shape, 0)
    in_order = get_at(starts, (row, order))
    is_before = (in_order[:, None] < starts[..., None]) & (get_at(lengths, (row, order), 0) > 0)[:, None]
    is_before &= (lengths > 0)[..., None]
    inter = jnp.where(is_before, jnp.take_along_axis(attention.inter, order[:, None], axis=2), 0)
    sizes = jnp.maximum(lengths, 1).astype(jnp.float32)
    nth = lax.broadcasted_iota(jnp.int32, (*order.shape, max_chunk_len), 2)
    places = jnp.where(nth < lengths[..., None], starts[..., None] + nth, attention.outside.shape[1])
    return ChunkStats(
        a=jnp.sum(inter / get_at(sizes, (row, order))[:, None], axis=-1) / sizes,
        b=attention.intra / sizes**2,
        attention=get_at(attention.outside, (row[..., None], places), 0),
        before=jnp.where(is_before[..., None], get_at(digests, (row, order))[:, None], 0),
        inter=inter,
    )
