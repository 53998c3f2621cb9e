"""Chunks that are forgotten: by their ids, or chunks of least value."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, get_at, min_at, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.chunks.stored_chunks import Chunks, chunks_of, forget_chunks, require_chunks
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Cache, Control
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


@takes_one
@jax.named_scope("kvcache.evict_chunks")
def evict_chunks(
    cache: Cache, num_places: Any, *, num_blocks: Any = 0, keep: Any = ()
) -> tuple[Cache, jax.Array]:
    """Makes room for chunks: forgets the chunks with the least uses times tokens, as few as suffice.

    A use is a `compose`; of equal chunks the one stored or used longest ago is forgotten first. Where all
    that may go would not suffice, none goes.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      num_places: i32[], places of the store to be empty.
      num_blocks: i32[], blocks to be free or cached in each layer group.
      keep: i32[any], chunks that are not forgotten, such as chunks that a row is about to be composed of.

    Returns:
      The cache and i32[], the number of chunks that were forgotten.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> sizes = dict(num_blocks=8, max_seqs=2, max_seq_len=64, extras=[kv.chunks.Store(3, 40)])
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes))
      >>> cache, _ = kv.allocate(cache, [0, 1], [30, 1])
      >>> cache, _ = kv.extend(cache, [30, 1], max_new=30)
      >>> cache, _ = kv.chunks.store(cache, [0], [0], [30], [range(30)])
      >>> cache, _ = kv.chunks.store(cache, [0], [0], [30], [range(1, 31)])
      >>> cache, num_evicted = kv.chunks.evict(cache, 2)             # one place of three is empty
      >>> int(num_evicted), cache.control.extras["chunks"].length.tolist()
      (1, [0, 30, 0])

    References:
      Cache-Craft (Agarwal et al.; arXiv:2502.15734), for use times tokens saved.
    """
    require_chunks("evict_chunks", cache)
    asked = [
        arguments.int_scalar(name, x) for name, x in (("num_places", num_places), ("num_blocks", num_blocks))
    ]
    keep = arguments.int_column("keep", keep) if len(keep) else jnp.zeros(0, jnp.int32)
    return on_rows(_evict, cache, jnp.asarray(keep), *map(jnp.asarray, asked))


def _evict(
    control: Control, keep: jax.Array, num_places: jax.Array, num_blocks: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    chunks = chunks_of(control)
    may_go = set_at(chunks.length > 0, keep, False)
    rank = _ranks(chunks, may_go, control.clock)
    num_going = jnp.arange(chunks.num_chunks + 1, dtype=jnp.int32)
    suffices = jnp.sum(chunks.length == 0, dtype=jnp.int32) + num_going >= num_places
    for pool, ids in zip(control.block_pools, chunks.block_ids, strict=True):
        freed = jnp.cumsum(_num_freed(pool, ids, rank), dtype=jnp.int32)
        suffices &= block_pool.num_available(pool) + jnp.pad(freed, (1, 0)) >= num_blocks
    suffices &= num_going <= jnp.sum(may_go, dtype=jnp.int32)
    num_evicted = jnp.min(jnp.where(suffices, num_going, chunks.num_chunks + 1))
    num_evicted = jnp.where(num_evicted > chunks.num_chunks, 0, num_evicted)
    going = jnp.where(rank < num_evicted, num_going[:-1], chunks.num_chunks)
    return forget_chunks(control, going), num_evicted


def _ranks(chunks: Chunks, mask: jax.Array, clock: jax.Array) -> jax.Array:
    """Ranks the masked chunks by value, the least first, i32[num_chunks]; of others `num_chunks`."""
    ids = jnp.arange(chunks.num_chunks, dtype=jnp.int32)
    value = chunks.num_uses.astype(jnp.float32) * chunks.length.astype(jnp.float32)
    age = clock - chunks.last_used  # modulo 2**32
    *_, order = lax.sort(((~mask).astype(jnp.int32), value, ~age, ids), num_keys=4)
    rank = set_at(ids, order, ids)
    return jnp.where(mask, rank, chunks.num_chunks)


def _num_freed(pool: BlockPool, block_ids: jax.Array, rank: jax.Array) -> jax.Array:
    """Counts the blocks that become free as the chunk of each rank is forgotten, i32[num_chunks].

    Chunks with `block_ids` i32[num_chunks, columns] are forgotten in the order of `rank` i32[num_chunks],
    where `num_chunks` is for those that stay.
    """
    ranks = jnp.broadcast_to(rank[:, None], block_ids.shape).reshape(-1)
    ids, ranks = lax.sort((block_ids.reshape(-1), ranks), num_keys=2)
    # Equal ids are a run, whose last entry is the last chunk forgotten and counts the chunks of the run.
    places = jnp.arange(ids.shape[0], dtype=jnp.int32)
    is_first = (ids != jnp.roll(ids, 1)) | (places == 0)
    is_last = jnp.roll(is_first, -1)
    num_holding = places + 1 - lax.cummax(jnp.where(is_first, places, 0))
    is_theirs = is_last & (num_holding == block_pool.ref_counts(pool, ids))
    return add_at(jnp.zeros_like(rank), jnp.where(is_theirs, ranks, rank.shape[0]), 1)
