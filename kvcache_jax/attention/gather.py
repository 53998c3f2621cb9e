"""A row's keys and values as contiguous arrays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.blocks import storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, Control


@takes_one
@jax.named_scope("kvcache.gather")
def gather(cache: Cache, seq_id: ArrayLike, layer: Layer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A row's keys and values as contiguous arrays.

    Args:
      cache: Not changed.
      seq_id: i32[], a row.
      layer: As in `attention`.

    Returns:
      `(k, v, length)`: `[max_seq_len, num_kv_heads, head_dim]` twice and i32[]. Zero past the length
      and, in a window group, where tokens were given back; length 0 for idle rows, and for ids and
      traced layers out of range.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [3])
      >>> cache, _ = kv.append(cache, jnp.ones((1, 2, 3, 1, 8)), jnp.ones((1, 2, 3, 1, 8)), [3, 0])
      >>> k, v, length = kv.gather(cache, 0, layer=0)
      >>> k.shape, int(length), float(k.sum())
      ((64, 1, 8), 3, 24.0)
    """
    group_id, index = arguments.locate_layer(cache.config, layer)
    pool = arguments.pool_of(cache, group_id)
    seq_id = arguments.int_scalar("seq_id", seq_id)
    return _gather(
        pool, cache.control, seq_id, index, group_id=group_id, max_seq_len=cache.config.max_seq_len
    )


@functools.partial(jax.jit, static_argnames=("group_id", "max_seq_len"))
def _gather(
    pool: Any, control: Control, seq_id: jax.Array, index: jax.Array, group_id: int, max_seq_len: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    block_pool = control.block_pools[group_id]
    is_layer = index < pool.k.shape[0] // block_pool.num_blocks
    length = jnp.where(is_layer, get_at(control.context_len, seq_id, 0), 0)
    ids = get_at(block_pool.block_table, seq_id)
    block = storage.block_rows(ids, index, block_pool.num_blocks, pool.k.shape[0])
    k, v = storage.load_row(pool, block, length, max_seq_len)
    return k, v, length
