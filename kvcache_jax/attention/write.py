"""Storing the keys and values of one layer in the slots of a step."""

import jax

from kvcache_jax.blocks import storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer, Place
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, Step


@takes_one
def write(cache: Cache, layer: Layer, k: jax.Array, v: jax.Array | None, step: Step) -> Cache:
    """Stores the step's keys and values of one layer in the slots that `extend` reserved.

    Args:
      cache: Not changed, unless donated.
      layer: As in `attention`.
      k: `[n, max_new, num_kv_heads, head_dim]`, or `[num_tokens, ...]` for a packed step; stored as the
        layer's kind says.
      v: Values, shaped like `k`; None for kinds that take no values.
      step: From `extend`.

    Returns:
      The cache. Padding and failed rows are written nowhere.

    Raises:
      ValueError, TypeError: the layer, shapes or dtypes do not fit.
    """
    return store(cache, arguments.located_to_store(cache, layer, step), k, v, step)


@jax.named_scope("kvcache.write")
def store(cache: Cache, place: Place, k: jax.Array, v: jax.Array | None, step: Step) -> Cache:
    """Stores keys and values in the slots of a step that was checked."""
    new = arguments.layer_inputs(cache, place, {"k": k, "v": v}, step.positions.shape)
    slots = step.slots[place.group_id]
    pool = storage.store_tokens(place.pool, place.layer, new, slots, cache.config, place.group_id)
    return storage.with_pool(cache, place.group_id, pool)
