"""The question `eviction_candidates`: the cached blocks that are evicted next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.core.cache_checks import refuse_donated, takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.prefix import eviction


@takes_one
@jax.named_scope("kvcache.eviction_candidates")
def eviction_candidates(cache: Cache, n: int) -> jax.Array:
    """Returns the blocks that `evict(cache, n)` would give up; changes nothing.

    Export them first (`export_blocks`) to keep their contents elsewhere.

    Args:
      cache: Not changed.
      n: How many, at most.

    Returns:
      i32[n] block ids of the group that prefixes are found by, those released longest ago first; `num_blocks`
      where fewer blocks are cached.

    Example:
      >>> import numpy as np, kvcache_jax as kv
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, block_size=2, max_seqs=1,
      ...                         max_seq_len=8, enable_prefix_caching=True)
      >>> cache, tokens = kv.init(config), np.arange(5)[None]
      >>> cache, _ = kv.allocate(cache, [0], [5], tokens=tokens)
      >>> cache, _ = kv.extend(cache, [5], max_new=5, tokens=tokens)
      >>> cache, _ = kv.free(kv.commit(cache)[0], [0])
      >>> kv.tiers.eviction_candidates(cache, 3).tolist()  # a block before its predecessor
      [1, 0, 4]
    """
    config = cache.config
    num_blocks = config.groups[config.indexed_group].num_blocks
    n = static_count("n", n, most=num_blocks, most_name="num_blocks")
    if cache.control.prefix_index is None:
        refuse_donated("eviction_candidates", cache)
        return jnp.asarray(np.full(n, num_blocks, np.int32))
    return _candidates(cache.control, n=n, config=config)


@functools.partial(jax.jit, static_argnames=("n", "config"))
def _candidates(control: Control, n: int, config: CacheConfig) -> jax.Array:
    control = as_varied(control)
    before = control.block_pools[config.indexed_group].cached
    assert before is not None
    evicted = eviction.evict(control, config.indexed_group, jnp.minimum(n, before.num_cached), config)
    after = evicted.block_pools[config.indexed_group].cached
    assert after is not None
    goes = before.is_published & ~after.is_published
    num_blocks = goes.shape[0]
    # Entries of the queue since its head: in the order of release.
    age = jnp.where(goes, before.queued_at - before.head, jnp.uint32(0xFFFFFFFF))
    order = jnp.argsort(age).astype(jnp.int32)[:n]
    return jnp.where(get_at(goes, order), order, num_blocks)
