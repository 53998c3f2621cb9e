"""Whole blocks of all layers, read out of a pool and written into it, by the backend or by XLA."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kvcache_jax.arrays.derivatives import reverse_mode_only
from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.same_form import same_form
from kvcache_jax.arrays.sharding import axis_of_types, axis_to_map, over_heads
from kvcache_jax.blocks.storage import rows_of_all_layers
from kvcache_jax.core.backends import Backend
from kvcache_jax.core.choose_backend import choose
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import KVPool
from kvcache_jax.layers.layer_group import LayerGroup

type Arrays = dict[str, jax.Array]
"""Contents of blocks by name, `[*block_ids.shape, num_layers, *shape]`."""


def read_blocks(config: CacheConfig, group: LayerGroup, pool: KVPool, block_ids: jax.Array) -> Arrays:
    """Reads blocks i32[...]; zeros for ids that are no blocks."""
    by_xla, backend = functools.partial(_read_by_xla, group), _backend_of(config, group, pool)
    read = backend and backend.read_blocks
    if backend is None or read is None:
        return by_xla(pool, block_ids)

    def by_backend(pool: KVPool, block_ids: jax.Array) -> Arrays:
        def local(pool: KVPool, ids: jax.Array) -> Arrays:
            num_rows = (*ids.shape, group.num_layers)
            like = {
                n: jax.ShapeDtypeStruct((*num_rows, *x.shape[1:]), x.dtype) for n, x in pool.arrays.items()
            }
            return same_form(f"read_blocks of the backend {backend.name!r}", read(pool, ids, group), like)

        mapped = over_heads(local, *_heads(config, group, pool, is_read=True))
        arrays = mapped(pool, block_ids.reshape(-1))
        return {name: x.reshape(*block_ids.shape, *x.shape[1:]) for name, x in arrays.items()}

    return _with_gradient_of(by_xla, by_backend, reverse_mode_only("blocks that are read", pool), block_ids)


def write_blocks(
    config: CacheConfig, group: LayerGroup, pool: KVPool, block_ids: jax.Array, arrays: Arrays
) -> KVPool:
    """Writes contents into blocks i32[...], different ones, in place under donation; elsewhere nothing."""
    arrays = _split_as(pool, arrays)
    by_xla, backend = functools.partial(_write_by_xla, group), _backend_of(config, group, pool)
    write = backend and backend.write_blocks
    if backend is None or write is None:
        return by_xla((pool, arrays), block_ids)

    def by_backend(operands: tuple[KVPool, Arrays], block_ids: jax.Array) -> KVPool:
        def local(pool: KVPool, arrays: Arrays, ids: jax.Array) -> KVPool:
            found = write(pool, arrays, ids, group)
            return same_form(f"write_blocks of the backend {backend.name!r}", found, pool)

        pool, arrays = operands
        flat = {name: x.reshape(-1, *x.shape[block_ids.ndim :]) for name, x in arrays.items()}
        mapped = over_heads(local, *_heads(config, group, pool, is_read=False))
        return mapped(pool, flat, block_ids.reshape(-1))

    operands = reverse_mode_only("blocks that are written", (pool, arrays))
    return _with_gradient_of(by_xla, by_backend, operands, block_ids)


def _backend_of(config: CacheConfig, group: LayerGroup, pool: KVPool) -> Backend | None:
    """Finds who moves the group's blocks; None for XLA alone.

    A backend is asked about keys and values as they are given. Where the mesh of the heads is not the current
    one, as for a cache that is saved outside of it, no kernel can be mapped over it.
    """
    axes = jax.sharding.get_abstract_mesh().axis_names
    if not group.kind.is_plain or config.head_axis not in (None, *axes):
        return None
    return choose(config, None, pool, group)


def _read_by_xla(group: LayerGroup, pool: KVPool, block_ids: jax.Array) -> Arrays:
    rows = rows_of_all_layers(pool, group, block_ids)
    return {name: get_at(x, rows, 0) for name, x in pool.arrays.items()}


def _write_by_xla(group: LayerGroup, operands: tuple[KVPool, Arrays], block_ids: jax.Array) -> KVPool:
    pool, arrays = operands
    rows = rows_of_all_layers(pool, group, block_ids)

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        # Of rows that may be equal, jax computes the gradient by a scatter that no explicit axis splits.
        new = jnp.asarray(new, pool.dtype)
        return pool.at[rows].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return KVPool(arrays={name: write(x, arrays[name]) for name, x in pool.arrays.items()})


def _split_as(pool: KVPool, arrays: Arrays) -> Arrays:
    """Splits contents as the pool's heads, where its type tells: who made them need not know of the mesh."""

    def split(name: str) -> jax.Array:
        x, like = arrays[name], jax.typeof(pool.arrays[name])
        if not any(like.sharding.spec):
            return x
        spec = PartitionSpec(*[None] * (x.ndim - like.ndim), *like.sharding.spec)
        return jax.sharding.reshard(x, NamedSharding(like.sharding.mesh, spec))

    return {name: split(name) for name in arrays}


def _heads(
    config: CacheConfig, group: LayerGroup, pool: KVPool, is_read: bool
) -> tuple[str | None, tuple[Any, ...], Any]:
    """Finds the mesh axis of the heads, and where the operands and the result have them, for `over_heads`."""
    axis = axis_to_map(axis_of_types(pool.arrays, group.head_positions), config.head_axis)
    in_pool = KVPool(arrays=group.head_positions)
    in_blocks = {name: None if at is None else at + 1 for name, at in group.head_positions.items()}
    return (axis, (in_pool, None), in_blocks) if is_read else (axis, (in_pool, in_blocks, None), in_pool)


def _with_gradient_of[T, R](
    by_xla: Callable[[T, jax.Array], R],
    by_backend: Callable[[T, jax.Array], R],
    operands: T,
    block_ids: jax.Array,
) -> R:
    """Runs the backend's function, which is linear in the operands; XLA computes its gradient."""
    types = jax.tree.map(jax.typeof, operands)  # which say how heads are split

    def backward(block_ids: jax.Array, grads: R) -> tuple[T, None]:
        (moved,) = jax.linear_transpose(lambda operands: by_xla(operands, block_ids), types)(grads)
        return moved, None

    run = jax.custom_vjp(by_backend)
    run.defvjp(lambda operands, block_ids: (by_backend(operands, block_ids), block_ids), backward)
    return run(operands, block_ids)
