"""New tokens with their keys and values, in one call."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from kvcache_jax.attention.write import write
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.operations.extend import extend


@takes_one
@jax.named_scope("kvcache.append")
def append(
    cache: Cache,
    k: jax.Array | Sequence[jax.Array],
    v: jax.Array | Sequence[jax.Array] | None,
    num_new: IntRows,
    *,
    seq_ids: IntRows | None = None,
    tokens: ArrayLike | None = None,
) -> tuple[Cache, Step]:
    """Extends rows and writes all layers: `extend`, then `write`.

    Args:
      cache: Not changed, unless donated.
      k: `[num_layers, n, T, num_kv_heads, head_dim]`; or a sequence, one array per layer. Of the layers that
        store keys and values, `cache.config.own_layers`.
      v: Values, shaped like `k`; None if no layer takes values.
      num_new: i32[n], new tokens per row, at most T.
      seq_ids: i32[n]. Default: all rows.
      tokens: i32[n, T], for prefix caching.

    Returns:
      The cache and the `Step` of `extend`.

    Raises:
      ValueError, TypeError: no `tokens` with prefix caching, or the layers, shapes or dtypes do not fit.
    """
    num_layers = len(cache.config.own_layers)
    arguments.check_layers("k", k, num_layers)
    if v is not None:
        arguments.check_layers("v", v, num_layers)
    max_new = k[0].shape[1] if isinstance(k, Sequence) else k.shape[2]
    cache, step = extend(cache, num_new, max_new=max_new, seq_ids=seq_ids, tokens=tokens)
    return _write_all(cache, *arguments.owned((k, v)), step), step


@functools.partial(jax.jit, inline=True)
def _write_all(cache: Cache, k: Any, v: Any, step: Step) -> Cache:
    for i, layer in enumerate(cache.config.own_layers):
        cache = write(cache, layer, k[i], None if v is None else v[i], step)
    return cache
