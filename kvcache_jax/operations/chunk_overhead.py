"""The question `chunk_overhead`: how much of stored chunks is to be computed again behind other chunks."""

from typing import Any

import jax
from jax.typing import ArrayLike

from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.chunk_arguments import checked_before
from kvcache_jax.core.chunk_stats import overheads
from kvcache_jax.core.chunks import Chunks, require_chunks
from kvcache_jax.core.state import Cache


@takes_one
@jax.named_scope("kvcache.chunk_overhead")
def chunk_overhead(
    cache: Cache, chunk_ids: IntRows, before: ArrayLike, *, alpha: ArrayLike = 1.0
) -> jax.Array:
    """Computes Cache-Craft's CFO of chunks, the share of their tokens to compute again; changes nothing.

    `num_of_share` makes numbers of tokens of it, for `select_tokens`.

    Args:
      cache: Not changed; built with `CacheConfig(max_chunks_before=)`.
      chunk_ids: i32[n], `num_chunks` for none.
      before: u32[n, J, 2], digests of the chunks that stand in front, in order; see `chunks_before`.
      alpha: f32[], see `fix_overhead`.

    Returns:
      f32[n]; 1 where nothing is known, of nowhere too.

    Raises:
      ValueError, TypeError: a cache without such a store, or shapes or dtypes that do not fit.
    """
    chunks = require_chunks("chunk_overhead", cache.control.chunks)
    chunk_ids = arguments.int_column("chunk_ids", chunk_ids)
    before = checked_before(before, chunk_ids.shape[0], chunks.stats)
    return _overhead(chunks, chunk_ids, before, alpha)


@jax.jit
def _overhead(chunks: Chunks, chunk_ids: jax.Array, before: jax.Array, alpha: Any) -> jax.Array:
    return overheads(chunks.stats_of(chunk_ids), before, alpha)[0]
