"""Storing the keys and values of one layer in the slots of a step."""

import jax

from kvcache_jax.blocks import storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, Step


@takes_one
@jax.named_scope("kvcache.write")
def write(cache: Cache, layer: Layer, k: jax.Array, v: jax.Array, step: Step) -> Cache:
    """Stores the step's keys and values of one layer in the slots that `extend` reserved.

    Args:
      cache: Not changed, unless donated.
      layer: As in `attention`.
      k: `[n, max_new, num_kv_heads, head_dim]`, or `[num_tokens, ...]` for a packed step; cast to the
        cache's dtype.
      v: Likewise.
      step: From `extend`.

    Returns:
      The cache. Padding and failed rows are written nowhere.

    Raises:
      ValueError, TypeError: the layer, shapes or dtypes do not fit.
    """
    group_id, index = arguments.locate_layer(cache.config, layer)
    pool = arguments.pool_of(cache, group_id)
    arguments.check_keys_values(cache, pool, k, v, step)
    k, v = arguments.owned((k, v))
    num_blocks = cache.control.block_pools[group_id].num_blocks
    return storage.with_pool(
        cache, group_id, storage.store_tokens(pool, index, k, v, step.slots[group_id], num_blocks)
    )
