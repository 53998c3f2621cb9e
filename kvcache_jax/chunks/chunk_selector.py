"""The choice of the tokens of chunks that are computed again: their metadata, selectors, the selection."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.registry import Registry
from kvcache_jax.chunks.chunk_store import Chunks, require_chunks
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache


class ChunkMetadata(NamedTuple):
    """Metadata of composed tokens that a selector sees: n rows of S places, S the cache's `max_seq_len`.

    A selector receives the optional fields named in `needs`; the others are None. Entries at places outside
    chunks are arbitrary.

    Attributes:
      is_token: bool[n, S], the place holds a composed token that may be computed again.
      nth_chunk: i32[n, S], the row's chunk, in the order that the caller gave.
      place_in_chunk: i32[n, S], 0 for a chunk's first token.
      chunk_len: i32[n, S], tokens of the chunk.
      attention: f32[n, S], attention that the token gives to the tokens before its chunk, mean over
        heads; see `chunks.attention`.
      k_deviation: f32[n, S], squared difference of the key that is right here and the composed one, summed
        over heads and features of a layer; see `chunks.deviation`.
      v_deviation: f32[n, S], of values likewise.
      key: A key of `jax.random`.
    """

    is_token: jax.Array
    nth_chunk: jax.Array
    place_in_chunk: jax.Array
    chunk_len: jax.Array
    attention: jax.Array | None = None
    k_deviation: jax.Array | None = None
    v_deviation: jax.Array | None = None
    key: jax.Array | None = None


jax.export.register_namedtuple_serialization(ChunkMetadata, serialized_name="kvcache_jax.ChunkMetadata")

Selector = Callable[[ChunkMetadata], jax.Array]

selectors = Registry[Selector]("a chunk selector", "chunks.selector", "selector", ChunkMetadata)


def chunk_selector(name: str, *, needs: Sequence[str] = ()) -> Callable[[Selector], Selector]:
    """Registers a function from `chunks.Metadata` to scores f32[n, S]; the highest are computed again.

    A score of infinity or NaN is computed again beyond the number asked for, one of minus infinity never. Of
    equal scores the first token is chosen first. The function is traced once per program.

    Args:
      name: For `select_tokens`.
      needs: The optional fields of `chunks.Metadata` that it reads.

    Returns:
      The decorator; it returns the function unchanged.

    Raises:
      ValueError, TypeError: the name is taken, or `needs` names no field.

    Example:
      >>> import kvcache_jax as kv
      >>> @kv.chunks.selector("last tokens")
      ... def last_tokens(chunks: kv.chunks.Metadata):
      ...     return (chunks.place_in_chunk - chunks.chunk_len).astype("float32")
    """
    return selectors.decorate(name, needs)


def visible_to(name: str, chunks: ChunkMetadata) -> ChunkMetadata:
    """Leaves the optional metadata that the selector needs, and refuses a missing field."""
    needs = selectors.find(name).needs
    if not isinstance(chunks, ChunkMetadata):
        raise TypeError(f"chunks is a {type(chunks).__name__}, expected what kv.chunks.metadata returns")
    for field in sorted(needs):
        if getattr(chunks, field) is None:
            raise ValueError(f"{field} is None, expected an array: the selector {name!r} needs it")
    return chunks._replace(**dict.fromkeys(selectors.optional - needs))


@chunk_selector("attention", needs=["attention"])
def _attention(chunks: ChunkMetadata) -> jax.Array:
    """Scores by the attention that the token gives to the tokens before its chunk (Cache-Craft)."""
    assert chunks.attention is not None
    return chunks.attention


@chunk_selector("key deviation", needs=["k_deviation"])
def _key_deviation(chunks: ChunkMetadata) -> jax.Array:
    """Scores by how much a layer's key is off, as LMCache's port of CacheBlend does."""
    assert chunks.k_deviation is not None
    return chunks.k_deviation


@chunk_selector("value deviation", needs=["v_deviation"])
def _value_deviation(chunks: ChunkMetadata) -> jax.Array:
    """Scores by how much a layer's value is off (CacheBlend)."""
    assert chunks.v_deviation is not None
    return chunks.v_deviation


@chunk_selector("first")
def _first(chunks: ChunkMetadata) -> jax.Array:
    """Scores the first tokens of each chunk highest, which act as its sinks (EPIC)."""
    return -chunks.place_in_chunk.astype(jnp.float32)


@chunk_selector("random", needs=["key"])
def _random(chunks: ChunkMetadata) -> jax.Array:
    """Scores by chance."""
    assert chunks.key is not None
    return jax.random.uniform(chunks.key, chunks.is_token.shape)


@chunk_selector("all")
def _all(chunks: ChunkMetadata) -> jax.Array:
    """Scores so that all tokens are computed again, whatever the number asked for."""
    return jnp.full(chunks.is_token.shape, jnp.inf)


@chunk_selector("none")
def _none(chunks: ChunkMetadata) -> jax.Array:
    """Scores so that no token is computed again."""
    return jnp.full(chunks.is_token.shape, -jnp.inf)


@takes_one
@jax.named_scope("kvcache.chunk_metadata")
def chunk_metadata(cache: Cache, chunk_ids: Any, starts: Any) -> ChunkMetadata:
    """Describes the tokens of chunks at their places in rows, for `select_tokens`; changes nothing.

    A chunk that was computed at place 0 and is composed there is exact: no token needs computing again.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      chunk_ids: i32[n, K], as in `compose`; `num_chunks` for none.
      starts: i32[n, K], as in `compose`.

    Returns:
      `chunks.Metadata`, each of `[n, max_seq_len]`. Attention, deviations and a key are added with
      `_replace`.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or shapes or dtypes that do not fit.

    Example: see `chunks.compose`.
    """
    chunks = require_chunks("chunk_metadata", cache)
    chunk_ids = arguments.saturated("chunk_ids", chunk_ids)
    starts = arguments.saturated("starts", starts)
    if chunk_ids.ndim != 2 or starts.shape != chunk_ids.shape:
        raise ValueError(
            f"chunk_ids and starts have shapes {chunk_ids.shape} and {starts.shape}, expected one (n, K)"
        )
    return _described(chunks, chunk_ids, starts, cache.config.max_seq_len)


@functools.partial(jax.jit, static_argnames="max_seq_len")
def _described(chunks: Chunks, chunk_ids: jax.Array, starts: jax.Array, max_seq_len: int) -> ChunkMetadata:
    lengths = get_at(chunks.length, chunk_ids, 0)
    shape = chunk_ids.shape[0], max_seq_len, chunk_ids.shape[1]
    behind = lax.broadcasted_iota(jnp.int32, shape, 1) - starts[:, None]
    covers = (behind >= 0) & (behind < lengths[:, None])

    def of_chunk(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(covers, values, 0), axis=-1, dtype=jnp.int32)

    is_exact = (starts == 0) & (get_at(chunks.start, chunk_ids, 0) == 0)
    return ChunkMetadata(
        is_token=(covers & ~is_exact[:, None]).any(axis=-1),
        nth_chunk=of_chunk(lax.broadcasted_iota(jnp.int32, shape, 2)),
        place_in_chunk=of_chunk(behind),
        chunk_len=of_chunk(lengths[:, None]),
    )


@jax.named_scope("kvcache.select_tokens")
def select_tokens(selector: str, chunks: ChunkMetadata, num_select: Any, *, max_select: int) -> jax.Array:
    """Chooses the tokens of composed chunks to compute again.

    Args:
      selector: A name, "attention", "key deviation", "value deviation", "first",
        "random", "all", "none", or one registered with `chunks.selector`.
      chunks: The tokens' metadata; `chunks.metadata` makes it of rows to compose.
      num_select: Tokens to choose, i32[n] per row, or i32[n, K] per chunk; all where there are fewer.
        Infinite scores are chosen beyond it, see `chunks.selector`.
      max_select: Most tokens of a row, the width of the result; of more the highest scores.

    Returns:
      i32[n, max_select], places ascending, then `max_seq_len`, as `rewrite` takes them.

    Raises:
      ValueError, TypeError: there is no such selector, it needs a field that `chunks` lacks, or shapes or
        dtypes do not fit.

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
    is_token = arguments.as_array("is_token", chunks.is_token)
    if is_token.ndim != 2 or is_token.dtype != bool:
        raise ValueError(f"is_token is {is_token.dtype}{list(is_token.shape)}, expected bool[n, max_seq_len]")
    named: dict[str, Any] = {"is_token": is_token}
    for name, values in chunks._asdict().items():
        if name == "key" and values is not None:
            arguments.require_key(name, values)
        elif name not in selectors.optional | named.keys():
            named[name] = arguments.saturated(name, values)
        elif name not in named and values is not None:
            named[name] = arguments.as_array(name, values)
            arguments.require_floats(name, named[name])
    for name, values in named.items():
        if values.shape != is_token.shape:
            raise ValueError(f"{name} has shape {values.shape}, expected {is_token.shape} as is_token")
    return chunks._replace(**named)


@functools.partial(jax.jit, static_argnames=("selector", "max_select"))
def _select(chunks: ChunkMetadata, num_select: jax.Array, selector: str, max_select: int) -> jax.Array:
    scores = selectors.call(selector, chunks, chunks.is_token.shape, dtype=jnp.float32)
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
