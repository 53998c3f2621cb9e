"""A heap of blocks: the least valuable is found again and again while blocks leave and others enter.

The blocks are split into groups, and the heap knows the least of each group. The least of all is one of
these. When a block leaves or enters, its group alone is searched again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient, read_first, set_at

# Blocks of a group: about as many as there are groups in a big pool.
_GROUP = 256
_MAX = jnp.iinfo(jnp.int32).max


class VictimHeap(NamedTuple):
    """Blocks in groups of 256, compared by key first, then by recency."""

    is_out: jax.Array  # bool[groups, 256], the block is no candidate
    key: jax.Array  # i32[groups, 256]
    recency: jax.Array  # i32[groups, 256], different for all candidates
    least: jax.Array  # i32[groups], the place of the least candidate within each group


def start(is_candidate: jax.Array, key: jax.Array, recency: jax.Array) -> VictimHeap:
    """Builds the heap of blocks, bool[num_blocks] and i32[num_blocks] twice."""
    missing = (0, -key.shape[0] % _GROUP)
    is_out = jnp.pad(~is_candidate, missing, constant_values=True).reshape(-1, _GROUP)
    key, recency = (jnp.pad(x, missing).reshape(-1, _GROUP) for x in (key, recency))
    # Kept as they are compared: else the comparison would have arrays of its own.
    is_out, key, recency = lax.optimization_barrier((is_out, key, recency))
    return VictimHeap(is_out, key, recency, _least(is_out, key, recency))


def pop(heap: VictimHeap, is_wanted: jax.Array, nowhere: int) -> tuple[VictimHeap, jax.Array]:
    """Takes the least candidate out: i32[], the block's id; `nowhere` if none is wanted or left."""
    places = jnp.arange(heap.least.shape[0], dtype=jnp.int32), heap.least
    group = _least(heap.is_out[places], heap.key[places], heap.recency[places])
    block_id = group * _GROUP + heap.least[group]
    is_taken = is_wanted & ~heap.is_out[group, heap.least[group]]
    (block_id, is_taken), heap = read_first((block_id, is_taken), heap)
    heap = _put(heap, jnp.where(is_taken, block_id, heap.key.size), True)
    return heap, jnp.where(is_taken, block_id, nowhere)


def push(heap: VictimHeap, block_id: jax.Array) -> VictimHeap:
    """Makes a block i32[] a candidate, if it is one of the pool's."""
    return _put(heap, block_id, False)


def _put(heap: VictimHeap, block_id: jax.Array, is_out: bool) -> VictimHeap:
    group = quotient(block_id, _GROUP)
    place = block_id - group * _GROUP
    outs, is_out_before = read_first(get_at(heap.is_out, group), heap.is_out)
    outs = jnp.where(jnp.arange(_GROUP, dtype=jnp.int32) == place, is_out, outs)
    least = _least(outs, get_at(heap.key, group), get_at(heap.recency, group))
    return heap._replace(
        is_out=set_at(is_out_before, (group, place), is_out), least=set_at(heap.least, group, least)
    )


def _least(is_out: jax.Array, key: jax.Array, recency: jax.Array) -> jax.Array:
    """Finds the place of the least candidate along the last axis, or any place where there is none."""
    is_least = ~is_out
    for values in (key, recency):
        lowest = jnp.min(jnp.where(is_least, values, _MAX), axis=-1, keepdims=True)
        is_least &= values == lowest
    order = lax.broadcasted_iota(jnp.int32, key.shape, key.ndim - 1)
    return jnp.min(jnp.where(is_least, order, key.shape[-1] - 1), axis=-1)
