"""The operation `find_chunks`: the chunks that are stored of passages."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.chunk_arguments import checked_before
from kvcache_jax.core.chunks import Chunks, require_chunks
from kvcache_jax.core.state import Cache
from kvcache_jax.operations.store_chunk import padded_name


@takes_one
@jax.named_scope("kvcache.find_chunks")
def find_chunks(
    cache: Cache,
    tokens: ArrayLike,
    num_tokens: IntRows,
    namespace: ArrayLike | None = None,
    *,
    before: ArrayLike | None = None,
) -> jax.Array:
    """Finds the chunks with exactly these tokens in a namespace; changes nothing.

    Args:
      cache: Not changed; built with `CacheConfig(num_chunks=, max_chunk_len=)`.
      tokens: i32[n, P], the passages, padded at the end; P is at most `max_chunk_len`.
      num_tokens: i32[n], their lengths.
      namespace: u32[4] or u32[n, 4]. Default: all zero.
      before: u32[n, J, 2], digests of the chunks that stand in front, in order, see `chunk_digests`; 0 for
        none. Of several variants the one that fits best is found: the least CFO (see `chunk_overhead`),
        then the most chunks that stand in front again. Default: that of the lowest id.

    Returns:
      i32[n], ids for `compose`; `num_chunks` where no such chunk is stored.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, `before` where it keeps no statistics, or
        shapes or dtypes that do not fit.

    References:
      Cache-Craft (Agarwal et al.; arXiv:2502.15734), for variants and their choice.
    """
    chunks = require_chunks("find_chunks", cache.control.chunks)
    num_tokens = arguments.int_column("num_tokens", num_tokens)
    tokens = token_arguments.token_ids(tokens, num_tokens.shape[0], None)
    namespaces = arguments.namespace_words(namespace, num_tokens.shape[0])
    if before is not None:
        before = checked_before(before, num_tokens.shape[0], chunks.stats)
    max_variants = cache.config.max_chunk_variants
    return _find(
        chunks, padded_name(tokens, chunks), num_tokens, namespaces, before, max_variants=max_variants
    )


@functools.partial(jax.jit, static_argnames="max_variants")
def _find(
    chunks: Chunks,
    tokens: jax.Array,
    num_tokens: jax.Array,
    namespaces: jax.Array,
    before: jax.Array | None,
    max_variants: int,
) -> jax.Array:
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    named = jnp.where(places[None] < num_tokens[:, None], tokens, 0)
    variants = chunks.variants(named, num_tokens, jnp.asarray(namespaces), max_variants)
    return chunks.best_of(variants, before)
