"""Checks of the statistics of chunks that callers hand in, and of the digests of those in front."""

from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.core import arguments
from kvcache_jax.core.chunk_stats import ChunkStats, unknown_stats


def checked_stats(stats: Any, num_rows: int, kept: ChunkStats | None) -> ChunkStats | None:
    """Gives statistics of n chunks the widths of those that a store keeps; None where it keeps none."""
    if stats is None:
        return None if kept is None else unknown_stats(num_rows, kept.attention.shape[1], kept.inter.shape[1])
    if not isinstance(stats, ChunkStats):
        raise TypeError(f"stats is a {type(stats).__name__}, expected ChunkStats, see ChunkAttention.stats")
    if kept is None:
        raise ValueError(
            "stats are given and the store keeps none, expected CacheConfig(max_chunks_before=...)"
        )
    padded = {}
    for name, most in vars(kept).items():
        values = jnp.asarray(getattr(stats, name), most.dtype)
        shape = num_rows, *most.shape[1:]
        if values.ndim != most.ndim or values.shape[0] != num_rows or not _fits(values.shape, shape):
            raise ValueError(f"stats.{name} has shape {values.shape}, expected {shape}, or narrower")
        padded[name] = jnp.pad(
            values, [(0, big - small) for small, big in zip(values.shape, shape, strict=True)]
        )
    return ChunkStats(**padded)


def _fits(shape: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return all(small <= big for small, big in zip(shape, most, strict=True))


def checked_before(before: Any, num_rows: int, kept: ChunkStats | None) -> jax.Array:
    """Checks digests of the chunks that stand in front, u32[num_rows, J, 2] for any J."""
    if kept is None:
        raise ValueError("before is given and the store keeps no statistics, expected max_chunks_before=...")
    before = arguments.as_array("before", before)
    if before.dtype != jnp.uint32 or before.ndim != 3 or before.shape[::2] != (num_rows, 2):
        raise ValueError(
            f"before is {before.dtype}{list(before.shape)}, "
            f"expected uint32[{num_rows}, J, 2], of chunk_digests"
        )
    return jnp.asarray(before)
