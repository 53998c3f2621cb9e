"""The operation `gather`: a row's keys and values as contiguous arrays."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.blocks import storage
from kvcache_jax.blocks.split_blocks import require_whole
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, Control, KVPool, row_len
from kvcache_jax.layers.layer_group import LayerGroup


@takes_one
@jax.named_scope("kvcache.gather")
def gather(cache: Cache, seq_id: ArrayLike, layer: Layer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads a row's keys and values as contiguous arrays.

    Args:
      cache: Not changed.
      seq_id: i32[], a row.
      layer: As in `attention`.

    Returns:
      `(k, v, length)`: `[max_seq_len, num_kv_heads, head_dim]` twice and i32[]. Zero past the length,
      where dropped tokens are hidden and, in a window group, where tokens were released; length 0 for idle
      rows, and for ids and traced layers out of range. Of a kind that stores something else, keys and
      values as its `keys_values` gives them without weights, scaled and with their offsets; a rotated kind's
      keys have the basis of its rotated queries. Of a layer that reads sources, the row's source,
      `[max_source_len, ...]`.

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
    arguments.require_keys(cache.config, layer, group_id)
    cache = cache.config.keeper.settle(cache)
    pool = arguments.pool_of(cache, group_id)
    seq_id = arguments.int_scalar("seq_id", seq_id)
    group = cache.config.groups[group_id]
    require_whole("gather", pool, group)
    pool = storage.refuse_derivatives(group, pool)
    return _gather(pool, cache.control, seq_id, index, group=group, group_id=group_id)


@functools.partial(jax.jit, static_argnames=("group", "group_id"))
def _gather(
    pool: KVPool,
    control: Control,
    seq_id: jax.Array,
    index: jax.Array,
    group: LayerGroup,
    group_id: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    block_pool = control.block_pools[group_id]
    is_layer = index < group.num_layers
    length = jnp.where(is_layer, get_at(row_len(control, group.kind), seq_id, 0), 0)
    ids = get_at(block_pool.block_table, seq_id)
    rows = storage.block_rows(ids, index, block_pool.num_blocks, pool.num_rows)
    tile = storage.load_blocks(pool, group, rows[None])
    read = storage.keys_values_of(group, tile, None)
    k, v = read.in_float32()
    k, v = k[:, 0].astype(read.k.dtype), v[:, 0].astype(read.v.dtype)
    v = storage.outputs_of(group, jnp.moveaxis(v, 0, 1)).astype(read.v.dtype)
    is_token = jnp.repeat(ids < block_pool.num_blocks, group.block_size)
    places = jnp.arange(is_token.shape[0], dtype=jnp.int32)
    is_token &= places < length
    if control.holes is not None:
        is_token &= ~control.holes.of_rows(seq_id[None]).of_group(group_id).is_hidden(places[None])[0]

    def held(values: jax.Array) -> jax.Array:
        values = jnp.where(is_token[:, None, None], values, jnp.zeros((), values.dtype))
        return values[: group.max_len]

    return held(jnp.moveaxis(k, 0, 1)), held(v), length
