"""The caller's step: `jax.jit` that donates the cache."""

from collections.abc import Callable

import jax


def donate[T](fn: Callable[..., T]) -> Callable[..., T]:
    """Jits a step that donates its first argument, the cache: pools are updated in place.

    The cache passed in cannot be used afterwards; keep a `fork` of a row to be able to come back to it.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=32))
      >>> cache, _ = kv.allocate(cache, [0], [5])
      >>> step_fn = kv.donate(lambda cache, num_new: kv.extend(cache, num_new, max_new=5))
      >>> cache, step = step_fn(cache, jnp.array([5, 0]))
      >>> cache.context_len.tolist()
      [5, 0]
    """
    return jax.jit(fn, donate_argnums=0)
