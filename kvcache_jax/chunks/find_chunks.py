"""The operation `chunks.find`: finds the chunks with exactly these tokens."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.chunks.store_chunk import padded_name
from kvcache_jax.chunks.stored_chunks import Chunks, require_chunks
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache


@takes_one
@jax.named_scope("kvcache.find_chunks")
def find_chunks(
    cache: Cache, tokens: ArrayLike, num_tokens: IntRows, namespace: ArrayLike | None = None
) -> jax.Array:
    """Finds the chunks with exactly these tokens in a namespace; changes nothing.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      tokens: i32[n, P], the passages, padded at the end; P is at most `max_chunk_len`.
      num_tokens: i32[n], their lengths.
      namespace: u32[4] or u32[n, 4]. Default: all zero.

    Returns:
      i32[n], ids for `compose`; `num_chunks` where no such chunk is stored.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or shapes or dtypes that do not fit.
    """
    chunks = require_chunks("find_chunks", cache)
    num_tokens = arguments.int_column("num_tokens", num_tokens)
    tokens = token_arguments.token_ids(tokens, num_tokens.shape[0], None)
    namespaces = arguments.namespace_words(namespace, num_tokens.shape[0])
    return _find(chunks, padded_name(tokens, chunks), num_tokens, namespaces)


@jax.jit
def _find(chunks: Chunks, tokens: jax.Array, num_tokens: jax.Array, namespaces: jax.Array) -> jax.Array:
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    named = jnp.where(places[None] < num_tokens[:, None], tokens, 0)
    return chunks.find(named, num_tokens, jnp.asarray(namespaces))
