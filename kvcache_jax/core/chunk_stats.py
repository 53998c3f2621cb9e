"""Statistics of chunks: what stood in front of them when they were computed, and how much it mattered.

They are estimates, by which a chunk is repaired and one of its variants chosen; nothing is named by them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.core.cache_craft import context_impact, fix_overhead, prefix_overlap


@pytree_dataclass()
class ChunkStats:
    """Statistics of n chunks, means over heads and layers; `ChunkAttention.stats` computes them.

    Attributes:
      a: f32[n], attention per pair of tokens to the chunks in front, see `context_impact`.
      b: f32[n], likewise within the chunk; 0 where nothing is known.
      attention: f32[n, P], what each token gave to all that stood in front of the chunk; 0 behind the last.
      before: u32[n, J, 2], digests of the chunks in front, in order; 0 behind the last of them.
      inter: f32[n, J], attention that the chunk gave to each of them.
    """

    a: jax.Array
    b: jax.Array
    attention: jax.Array
    before: jax.Array
    inter: jax.Array


def unknown_stats(
    num_chunks: int, max_chunk_len: int, max_chunks_before: int, numpy: Any = jnp
) -> ChunkStats:
    """Builds statistics of chunks of which nothing is known; `numpy` makes their arrays."""
    return ChunkStats(
        a=numpy.zeros(num_chunks, jnp.float32),
        b=numpy.zeros(num_chunks, jnp.float32),
        attention=numpy.zeros((num_chunks, max_chunk_len), jnp.float32),
        before=numpy.zeros((num_chunks, max_chunks_before, 2), jnp.uint32),
        inter=numpy.zeros((num_chunks, max_chunks_before), jnp.float32),
    )


def overheads(stats: ChunkStats, before: jax.Array, alpha: Any = 1.0) -> tuple[jax.Array, jax.Array]:
    """Computes Cache-Craft's CFO of chunks [...] behind others.

    Args:
      stats: Of the chunks; where nothing is known all is to be computed again.
      before: u32[..., J, 2], digests of those that stand in front, in order; 0 for none.
      alpha: As in `fix_overhead`.

    Returns:
      f32[...]; and i32[...], how many of the chunks that stood in front do so again.
    """
    is_same = (stats.before[..., :, None, :] == before[..., None, :, :]).all(axis=-1)
    is_same &= (stats.before != 0).any(axis=-1)[..., None]
    place = lax.broadcasted_iota(jnp.int32, is_same.shape, is_same.ndim - 1)
    first = jnp.min(jnp.where(is_same, place, is_same.shape[-1]), axis=-1)
    is_common = first < is_same.shape[-1]
    overlap = prefix_overlap(stats.inter, jnp.where(is_common, first, -1))
    share = fix_overhead(context_impact(stats.a, stats.b), overlap, alpha)
    return jnp.where(stats.b > 0, share, 1), jnp.sum(is_common, axis=-1, dtype=jnp.int32)
