"""The operation `chunks.free`: forgets chunks."""

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, min_at
from kvcache_jax.chunks.stored_chunks import chunks_of, forget_chunks, require_chunks
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.operations.rows import on_rows


@takes_one
@jax.named_scope("kvcache.free_chunks")
def free_chunks(cache: Cache, chunk_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Forgets chunks; their blocks are free again where no row holds them, too.

    Rows that were composed of them stay as they are.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      chunk_ids: i32[n], `num_chunks` where there is none.

    Returns:
      The cache and status i32[n]: BAD_CHUNK_ID (no chunk is stored there, or an earlier entry names it),
      SKIPPED.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or ids that are no list of integers.
    """
    require_chunks("free_chunks", cache)
    chunk_ids = arguments.int_column("chunk_ids", chunk_ids)
    return on_rows(_free, cache, jnp.asarray(chunk_ids))  # a list of jax's is not padded with rows' nowhere


def _free(control: Control, chunk_ids: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    chunks = chunks_of(control)
    order = jnp.arange(chunk_ids.shape[0], dtype=jnp.int32)
    named = jnp.where(chunk_ids < 0, chunks.num_chunks, chunk_ids)
    first = min_at(jnp.full_like(chunks.length, order.size), named, order)
    is_chunk = (get_at(chunks.length, chunk_ids, 0) > 0) & (get_at(first, chunk_ids, 0) == order)
    status = first_failure((chunk_ids == chunks.num_chunks, Status.SKIPPED), (~is_chunk, Status.BAD_CHUNK_ID))
    return forget_chunks(control, jnp.where(status == Status.OK, chunk_ids, chunks.num_chunks)), status
