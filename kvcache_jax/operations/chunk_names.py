"""The names that `store_chunk` is asked to keep: those that are there, and those that are new."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.core.chunk_stats import ChunkStats
from kvcache_jax.core.chunks import Chunks


class ChunkNames(NamedTuple):
    """The names of the entries of a call.

    Attributes:
      tokens: i32[n, max_chunk_len], 0 behind the last one.
      length: i32[n].
      namespace: u32[n, 4].
      stats: ChunkStats of n, of which `before` names variants; None where the store keeps none.
    """

    tokens: jax.Array
    length: jax.Array
    namespace: jax.Array
    stats: ChunkStats | None


class ResolvedNames(NamedTuple):
    """Origins of the chunks of the entries of a call.

    Attributes:
      found: i32[n], a chunk of the store: the same, or the variant that fits best where no other is added.
      is_new: bool[n], none was found.
      wants: bool[n], the entry is to be stored; no two of them are the same.
      leader: i32[n], the entry whose outcome the new entry shares, itself included.
    """

    found: jax.Array
    is_new: jax.Array
    wants: jax.Array
    leader: jax.Array


def resolve(chunks: Chunks, names: ChunkNames, mask: jax.Array, max_variants: int) -> ResolvedNames:
    """Finds the masked names in the store and among each other, in entry order."""
    nowhere, before = chunks.num_chunks, None if names.stats is None else names.stats.before
    variants = chunks.variants(names.tokens, names.length, names.namespace, max_variants)
    is_there = variants < nowhere
    num_there = jnp.sum(is_there, axis=1, dtype=jnp.int32)
    is_exact = is_there & (before is None or _is_same(chunks.stats_of(variants).before, before[:, None]))
    exact = jnp.min(jnp.where(is_exact, variants, nowhere), axis=1)
    best = chunks.best_of(variants, before)

    asks = mask & (exact == nowhere)
    is_namesake = asks[None] & _are_namesakes(names)
    is_twin = is_namesake if before is None else is_namesake & _is_same(before[:, None], before[None])
    entry, other = (lax.broadcasted_iota(jnp.int32, is_twin.shape, axis) for axis in (0, 1))
    twin = jnp.min(jnp.where(is_twin, other, asks.size), axis=1)
    leads = asks & (twin == entry[:, 0])
    # A name has room for so many variants; the entries of a call take it in their order.
    num_before = jnp.sum(is_namesake & leads[None] & (other < twin[:, None]), axis=1, dtype=jnp.int32)
    has_room = num_there + num_before < max_variants
    wants = leads & has_room
    namesake = jnp.min(jnp.where(is_namesake & wants[None], other, asks.size), axis=1)
    is_full = asks & ~has_room & (num_there > 0)
    return ResolvedNames(
        found=jnp.where(is_full, best, exact),
        is_new=asks & ~is_full,
        wants=wants,
        leader=jnp.where(has_room, twin, namesake),
    )


def _are_namesakes(names: ChunkNames) -> jax.Array:
    """Tells which two entries have the same name, bool[n, n]."""
    is_same = names.length[:, None] == names.length[None]
    for words in (names.tokens, names.namespace):
        is_same &= (words[:, None] == words[None]).all(axis=-1)
    return is_same


def _is_same(before: jax.Array, others: jax.Array) -> jax.Array:
    return (before == others).all(axis=(-2, -1))
