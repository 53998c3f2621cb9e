"""The operation `lookup`: counts the tokens of each prompt that `allocate` would find cached."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import refuse_donated, takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.operations.allocate import Prompts, find_hits


@takes_one
@jax.named_scope("kvcache.lookup")
def lookup(
    cache: Cache,
    tokens: ArrayLike,
    num_tokens: IntRows,
    namespace: ArrayLike | None = None,
    *,
    items: ArrayLike | None = None,
) -> jax.Array:
    """Counts the tokens of each prompt that `allocate` would find cached; changes nothing.

    Args:
      cache: Not changed.
      tokens: i32[n, P], the prompts.
      num_tokens: i32[n], their lengths.
      namespace: u32[4] or u32[n, 4]. Default: all zero.
      items: i32[n, I, 2], as in `allocate`.

    Returns:
      i32[n]; at most `num_tokens - 1`, in whole blocks but with `partial_hits`; 0 without prefix caching, and
      where `allocate` would refuse `num_tokens`.
    """
    return with_junction(cache, tokens, num_tokens, namespace, items)[0]


def with_junction(
    cache: Cache,
    tokens: ArrayLike,
    num_tokens: IntRows,
    namespace: ArrayLike | None = None,
    items: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Counts as `lookup`, and finds the junctions, see `Admission`; i32[n] both."""
    num_tokens = arguments.int_column("num_tokens", num_tokens)
    tokens = token_arguments.token_ids(tokens, num_tokens.shape[0], None)
    namespaces = arguments.namespace_words(namespace, num_tokens.shape[0])
    if cache.control.prefix_index is None:
        refuse_donated("lookup", cache)
        return jnp.zeros_like(num_tokens), jnp.zeros_like(num_tokens)
    spans = token_arguments.item_spans(items, num_tokens.shape[0])
    return _lookup(cache.control, tokens, num_tokens, namespaces, spans, config=cache.config)


@functools.partial(jax.jit, static_argnames="config")
def _lookup(
    control: Control,
    tokens: jax.Array,
    num_tokens: jax.Array,
    namespaces: jax.Array,
    items: jax.Array | None,
    config: CacheConfig,
) -> tuple[jax.Array, jax.Array]:
    """Counts the cached tokens, and finds the junction, i32[n] both."""
    prompts = Prompts(
        num_tokens=num_tokens,
        namespace=namespaces,
        priority=jnp.zeros_like(num_tokens),
        tokens=tokens,
        reuse=jnp.ones_like(num_tokens, bool),
        items=items,
    )
    hits = find_hits(control, prompts, config)
    is_length = (num_tokens >= 0) & (num_tokens <= min(tokens.shape[1], config.max_seq_len))
    return jnp.where(is_length, hits.num_tokens, 0), jnp.where(is_length, hits.junction, 0)
