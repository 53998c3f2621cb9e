"""Selectors by name, which choose the tokens of chunks to compute again, and a decorator for one's own.

A chunk's tokens were computed without the tokens that now precede them. A selector is a pure
function from what is known of composed tokens to a score per token: `select_tokens` takes the highest, and
`rewrite` computes them again.

References:
  Cache-Craft (Agarwal et al.; arXiv:2502.15734), CacheBlend (Yao et al.; arXiv:2405.16444) and EPIC (Hu et
  al.; arXiv:2410.15332).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.registry import Registered, Registry


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


Selector = Callable[[ChunkMetadata], jax.Array]

_selectors = Registry[Selector]("a chunk selector", "chunk_selector", ChunkMetadata)


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
      >>> from kvcache_jax.chunks.chunk_selector import chunk_selectors
      >>> "last tokens" in chunk_selectors()
      True
    """
    return _selectors.decorate(name, needs)


def chunk_selectors() -> tuple[str, ...]:
    """Lists the names that `select_tokens` takes.

    Example:
      >>> import kvcache_jax as kv
      >>> from kvcache_jax.chunks.chunk_selector import chunk_selectors
      >>> chunk_selectors()[:7]
      ('attention', 'key deviation', 'value deviation', 'first', 'random', 'all', 'none')
    """
    return _selectors.names


def registered_selector(name: str) -> Registered[Selector]:
    """Returns the selector of a name, or raises."""
    return _selectors.find(name, "selector")


def visible_to(name: str, chunks: ChunkMetadata) -> ChunkMetadata:
    """Leaves of the optional metadata what the selector needs, and refuses what is missing."""
    needs = registered_selector(name).needs
    for field in sorted(needs):
        if getattr(chunks, field) is None:
            raise ValueError(f"{field} is None, expected an array: the selector {name!r} needs it")
    return chunks._replace(**dict.fromkeys(_selectors.optional - needs))


def scores_by(name: str, chunks: ChunkMetadata) -> jax.Array:
    """Computes a selector's scores, f32[n, S].

    Raises:
      TypeError: the selector returned something else. What it raises comes with a note that names it.
    """
    selector = registered_selector(name)
    with _selectors.noted(name):
        scores = selector.function(chunks)
    is_array = isinstance(scores, jax.Array | np.ndarray) and jnp.issubdtype(scores.dtype, jnp.floating)
    if not is_array or scores.shape != chunks.is_token.shape:
        got = f"{scores.dtype}{list(scores.shape)}" if hasattr(scores, "shape") else type(scores).__name__
        raise TypeError(
            f"chunk selector {name!r} returned {got}, expected floats {list(chunks.is_token.shape)}"
        )
    return jnp.asarray(scores).astype(jnp.float32)


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
