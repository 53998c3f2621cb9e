"""The operation `chunks.metadata`: describes the tokens of chunks at their places in rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.chunks.chunk_selector import ChunkMetadata
from kvcache_jax.chunks.stored_chunks import Chunks, require_chunks
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache


@takes_one
@jax.named_scope("kvcache.chunk_metadata")
def chunk_metadata(cache: Cache, chunk_ids: Any, starts: Any) -> ChunkMetadata:
    """Describes the tokens of chunks at their places in rows, for `select_tokens`; changes nothing.

    A chunk that was computed at place 0 and is composed there is exact: no token needs computing again.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      chunk_ids: i32[n, K], as in `compose`; `num_chunks` for none.
      starts: i32[n, K], as in `compose`.

    Returns:
      `chunks.Metadata`, each of `[n, max_seq_len]`. Attention, deviations and a key are added with
      `_replace`.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> sizes = dict(num_blocks=8, max_seqs=2, max_seq_len=64, extras=[kv.chunks.Store(3, 40)])
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes))
      >>> cache, _ = kv.allocate(cache, [0, 1], [30, 1])
      >>> cache, _ = kv.extend(cache, [30, 1], max_new=30)
      >>> cache, stored = kv.chunks.store(cache, [0], [0], [30], [range(30)])
      >>> chunks = kv.chunks.metadata(cache, [[0, 0]], [[0, 30]])      # of which the first is exact
      >>> kv.chunks.select_tokens("first", chunks, [2], max_select=3).tolist()
      [[30, 31, 64]]
    """
    chunks = require_chunks("chunk_metadata", cache)
    chunk_ids = arguments.saturated("chunk_ids", chunk_ids)
    starts = arguments.saturated("starts", starts)
    if chunk_ids.ndim != 2 or starts.shape != chunk_ids.shape:
        raise ValueError(
            f"chunk_ids and starts have shapes {chunk_ids.shape} and {starts.shape}, expected one (n, K)"
        )
    return _described(chunks, chunk_ids, starts, cache.config.max_seq_len)


@functools.partial(jax.jit, static_argnames="max_seq_len")
def _described(chunks: Chunks, chunk_ids: jax.Array, starts: jax.Array, max_seq_len: int) -> ChunkMetadata:
    lengths = get_at(chunks.length, chunk_ids, 0)
    shape = chunk_ids.shape[0], max_seq_len, chunk_ids.shape[1]
    behind = lax.broadcasted_iota(jnp.int32, shape, 1) - starts[:, None]
    covers = (behind >= 0) & (behind < lengths[:, None])

    def of_chunk(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(covers, values, 0), axis=-1, dtype=jnp.int32)

    is_exact = (starts == 0) & (get_at(chunks.start, chunk_ids, 0) == 0)
    return ChunkMetadata(
        is_token=(covers & ~is_exact[:, None]).any(axis=-1),
        nth_chunk=of_chunk(lax.broadcasted_iota(jnp.int32, shape, 2)),
        place_in_chunk=of_chunk(behind),
        chunk_len=of_chunk(lengths[:, None]),
    )
