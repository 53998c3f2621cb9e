"""The attention that queries give to chunks in their rows, and how far keys and values deviate."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, get_at, read_first, set_at
from kvcache_jax.attention.gather import gather
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, Step


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


@takes_one
@jax.named_scope("kvcache.chunk_deviation")
def chunk_deviation(
    cache: Cache, layer: Layer, k: jax.Array, v: jax.Array, step: Step
) -> tuple[Cache, tuple[jax.Array, jax.Array]]:
    """Computes how far composed keys and values of a layer are from values computed with all tokens before.

    CacheBlend computes the first layers of all tokens again, and of the others those that are furthest off
    there: `k_deviation` and `v_deviation` of `chunks.Metadata`. Call it before `write` or `attention` of the
    layer.

    Args:
      cache: Not changed.
      layer: As in `attention`.
      k: `[n, T, num_kv_heads, head_dim]`, the step's keys.
      v: The step's values, shaped like `k`.
      step: Padded, from `rewrite`.

    Returns:
      The cache, to go on with, so that a donated step reads before it writes; and f32[n, max_seq_len] twice,
      squared differences of keys and of values, summed over heads and features, at the places of the step's
      tokens; 0 elsewhere.

    Raises:
      ValueError, TypeError: the layer, shapes or dtypes do not fit, or the step is packed.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [3])
      >>> cache, _ = kv.append(cache, jnp.ones((1, 2, 3, 1, 8)), jnp.ones((1, 2, 3, 1, 8)), [3, 0])
      >>> cache, step = kv.rewrite(cache, [0], [[1, 2]])
      >>> new = jnp.array([1.0, 3.0])[None, :, None, None] * jnp.ones((1, 2, 1, 8))
      >>> cache, (of_keys, _) = kv.chunks.deviation(cache, 0, new, new, step)
      >>> of_keys[0, :4].tolist()
      [0.0, 0.0, 32.0, 0.0]

    References:
      CacheBlend (Yao et al.; arXiv:2405.16444).
    """
    place = arguments.located_to_store(cache, layer, step)
    if step.cu_query_lens is not None:
        raise ValueError("chunk_deviation got a packed step, expected a padded one, of rewrite")
    new = arguments.layer_inputs(cache, place, {"k": k, "v": v}, step.positions.shape)
    old = jax.vmap(lambda row: gather(cache, row, layer)[:2])(step.seq_ids)
    deviations = tuple(_at_places(x, of_rows, step) for x, of_rows in zip(new.values(), old, strict=True))
    (of_keys, of_values), cache = read_first(deviations, cache)
    return cache, (of_keys, of_values)


@jax.jit
def _at_places(new: jax.Array, old: jax.Array, step: Step) -> jax.Array:
    """Computes deviations f32[n, S] of the step's `new` [n, T, ...] from `old` [n, S, ...]."""
    places = step.cache_positions
    nth = lax.broadcasted_iota(jnp.int32, places.shape, 1)
    places = jnp.where(nth < step.query_len[:, None], places, old.shape[1])
    order = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    # Stored values were rounded: the same values differ by nothing.
    difference = new.astype(old.dtype).astype(jnp.float32) - get_at(old, (order, places)).astype(jnp.float32)
    squared = jnp.sum(difference**2, axis=(-2, -1))
    return set_at(jnp.zeros(old.shape[:2], jnp.float32), (order, places), squared)
