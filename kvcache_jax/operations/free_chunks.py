"""The operation `free_chunks`: chunks are forgotten."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, min_at, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.chunks import require_chunks
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
      cache: Not changed; built with `CacheConfig(num_chunks=, max_chunk_len=)`.
      chunk_ids: i32[n], `num_chunks` where there is none.

    Returns:
      The cache and status i32[n]: BAD_CHUNK_ID (no chunk is stored there, or an earlier entry names it),
      SKIPPED.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or ids that are no list of integers.
    """
    require_chunks("free_chunks", cache.control.chunks)
    chunk_ids = arguments.int_column("chunk_ids", chunk_ids)
    return on_rows(_free, cache, jnp.asarray(chunk_ids))  # a list of jax's is not padded with rows' nowhere


def _free(control: Control, chunk_ids: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    chunks = control.chunks
    assert chunks is not None
    order = jnp.arange(chunk_ids.shape[0], dtype=jnp.int32)
    named = jnp.where(chunk_ids < 0, chunks.num_chunks, chunk_ids)
    first = min_at(jnp.full_like(chunks.length, order.size), named, order)
    is_chunk = (get_at(chunks.length, chunk_ids, 0) > 0) & (get_at(first, chunk_ids, 0) == order)
    status = first_failure((chunk_ids == chunks.num_chunks, Status.SKIPPED), (~is_chunk, Status.BAD_CHUNK_ID))
    return forget(control, jnp.where(status == Status.OK, chunk_ids, chunks.num_chunks)), status


def forget(control: Control, chunk_ids: jax.Array) -> Control:
    """Forgets chunks i32[n], which differ; nowhere is skipped."""
    chunks, pools, block_ids = control.chunks, [], []
    assert chunks is not None
    for pool, ids in zip(control.block_pools, chunks.block_ids, strict=True):
        pools.append(block_pool.release(pool, get_at(ids, chunk_ids, pool.num_blocks)))
        block_ids.append(set_at(ids, chunk_ids, pool.num_blocks))
    others = dataclasses.replace(chunks, block_ids=())
    cleared = jax.tree.map(lambda values: set_at(values, chunk_ids, 0), others)
    chunks = dataclasses.replace(cleared, block_ids=tuple(block_ids))
    return dataclasses.replace(control, chunks=chunks, block_pools=tuple(pools))
