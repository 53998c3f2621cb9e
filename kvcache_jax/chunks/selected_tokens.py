"""The choice of the composed tokens that `rewrite` computes again, by a selector of a name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.chunks.chunk_selector import ChunkMetadata, scores_by, visible_to
from kvcache_jax.core import arguments


@jax.named_scope("kvcache.select_tokens")
def select_tokens(selector: str, chunks: ChunkMetadata, num_select: Any, *, max_select: int) -> jax.Array:
    """Chooses the tokens of composed chunks to compute again.

    Args:
      selector: A name, one of `chunk_selectors()`: "attention", "key deviation", "value deviation", "first",
        "random", "all", "none", or one registered with `chunks.selector`.
      chunks: Metadata of the tokens; `chunks.metadata` returns it for rows to compose.
      num_select: Tokens to choose, i32[n] per row, or i32[n, K] per chunk; all where there are fewer.
        Infinite scores are chosen beyond it, see `chunks.selector`.
      max_select: Most tokens of a row, the width of the result; of more the highest scores.

    Returns:
      i32[n, max_select], places ascending, then `max_seq_len`, as `rewrite` takes them.

    Raises:
      ValueError, TypeError: there is no such selector, it needs what `chunks` has not, or shapes or dtypes do
        not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> chunks = kv.chunks.Metadata(    # two chunks at places 1 to 3 and 5 to 7 of 9
      ...     is_token=[[False, True, True, True, False, True, True, True, False]],
      ...     nth_chunk=[[0, 0, 0, 0, 0, 1, 1, 1, 1]],
      ...     place_in_chunk=[[0, 0, 1, 2, 0, 0, 1, 2, 0]],
      ...     chunk_len=[[3] * 9])
      >>> kv.chunks.select_tokens("first", chunks, [3], max_select=4).tolist()
      [[1, 2, 5, 9]]
      >>> kv.chunks.select_tokens("first", chunks, [[1, 2]], max_select=4).tolist()
      [[1, 5, 6, 9]]
    """
    chunks = _checked(visible_to(selector, chunks))
    num_rows, num_places = chunks.is_token.shape
    num_select = arguments.saturated("num_select", num_select)
    if num_select.ndim not in (1, 2) or num_select.shape[0] != num_rows:
        raise ValueError(
            f"num_select has shape {num_select.shape}, expected ({num_rows},), or ({num_rows}, K) per chunk"
        )
    max_select = static_count("max_select", max_select, most=num_places, most_name="places of a row")
    return _select(chunks, num_select, selector=selector, max_select=max_select)


def num_of_share(share: ArrayLike, num_tokens: ArrayLike) -> jax.Array:
    """Counts the tokens that a share f32[...] of `num_tokens` i32[...] is, rounded up, i32[...]."""
    num_tokens = jnp.asarray(num_tokens, jnp.float32)
    # A share such as 0.2 is rounded, which adds no token.
    exact = jnp.ceil(jnp.asarray(share, jnp.float32) * num_tokens * (1 - 2**-21))
    return jnp.clip(exact, 0, num_tokens).astype(jnp.int32)


def _checked(chunks: ChunkMetadata) -> ChunkMetadata:
    """Converts metadata to arrays of one shape."""
    named = {
        name: values for name, values in chunks._asdict().items() if values is not None and name != "key"
    }
    named = {name: arguments.as_array(name, values) for name, values in named.items()}
    is_token = named["is_token"]
    if is_token.ndim != 2 or is_token.dtype != bool:
        raise ValueError(f"is_token is {is_token.dtype}{list(is_token.shape)}, expected bool[n, max_seq_len]")
    for name, values in named.items():
        if values.shape != is_token.shape:
            raise ValueError(f"{name} has shape {values.shape}, expected {is_token.shape} as is_token")
    return chunks._replace(**named)


@functools.partial(jax.jit, static_argnames=("selector", "max_select"))
def _select(chunks: ChunkMetadata, num_select: jax.Array, selector: str, max_select: int) -> jax.Array:
    scores = scores_by(selector, chunks)
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)  # where nothing is known it is safe to compute
    may = chunks.is_token & (scores > -jnp.inf)
    row = jnp.zeros_like(chunks.nth_chunk)
    if num_select.ndim == 1:
        rank, num = _ranks(row, scores, may), num_select[:, None]
    else:
        order = lax.broadcasted_iota(jnp.int32, may.shape, 0)
        rank, num = _ranks(chunks.nth_chunk, scores, may), get_at(num_select, (order, chunks.nth_chunk), 0)
    is_chosen = may & ((rank < num) | (scores == jnp.inf))
    is_chosen &= _ranks(row, scores, is_chosen) < max_select
    places = lax.broadcasted_iota(jnp.int32, may.shape, 1)
    return jnp.sort(jnp.where(is_chosen, places, may.shape[1]), axis=1)[:, :max_select]


def _ranks(part: jax.Array, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Ranks the masked scores of each part of a row, i32[n, S], the highest and then the first ahead."""
    places = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    is_less = (~mask).astype(jnp.int32)
    is_less, part, _, order = lax.sort((is_less, part, -scores, places), num_keys=4)
    # Rank = position minus the position of the first entry of the same part.
    is_first = (part != jnp.roll(part, 1, axis=1)) | (is_less != jnp.roll(is_less, 1, axis=1)) | (places == 0)
    first = lax.cummax(jnp.where(is_first, places, 0), axis=1)
    return lax.sort((order, places - first), num_keys=1)[1]
