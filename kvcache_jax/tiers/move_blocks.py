"""Contents that move between the device's memory and the host's, a block at a time.

A loop over blocks takes one run of the host's memory each trip: compilers for GPUs and TPUs know no gather
and no scatter there. All layers of a block lie together on the host, in whole tiles of a TPU: arrays of other
shapes it would lay out by other axes than the blocks', and copy as a whole for every loop.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from kvcache_jax.arrays.masked_updates import common_bound, get_at, rank_true, run_if, set_at
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.core.cache_form import is_traced
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.extras import KeptArray
from kvcache_jax.core.state import Cache, KVPool
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import ceil_div
from kvcache_jax.tiers.hosted import host_groups, tier_of, with_tier

HOST_MEMORY = "pinned_host"
"""The kind of memory, as jax calls it. Arrays of a cache's copy stay in the memory where that was put."""

type Kept = tuple[dict[str, jax.Array], ...]
"""The host's arrays per layer group by name, `[blocks of the host, heads or 1, tiles * 8, 128]`.

A head has its numbers of all layers one after the other, then zeros up to the end of its last tile.
"""
_TILE = 8, 128


def kept_arrays(config: CacheConfig, num_blocks: int) -> tuple[dict[str, KeptArray], ...]:
    """Returns the shapes of the host's arrays, as `Kept`."""

    def kept(group: LayerGroup, array: BlockArray) -> KeptArray:
        shape = group.num_blocks, *_kept_shape(group, array)
        return KeptArray(shape, array.dtype, None if array.head_axis is None else 1)

    return tuple(
        {name: kept(group, array) for name, array in group.arrays if group.num_blocks}
        for group in host_groups(config, num_blocks)
    )


def kept_bytes(group: LayerGroup) -> int:
    """Computes the bytes of a block of all layers on the host, in whole tiles."""
    return sum(
        math.prod(_kept_shape(group, array)) * jnp.dtype(array.dtype).itemsize for _, array in group.arrays
    )


def _kept_shape(group: LayerGroup, array: BlockArray) -> tuple[int, int, int]:
    num_heads = 1 if array.head_axis is None else array.shape[array.head_axis]
    num_tiles = ceil_div(group.num_layers * math.prod(array.shape), num_heads * math.prod(_TILE))
    return num_heads, num_tiles * _TILE[0], _TILE[1]


def _places(rows: jax.Array, array: BlockArray) -> Any:
    """Finds blocks at `rows` i32[num_layers] in an array of a pool."""
    if (array.head_axis, array.token_axis, len(array.shape)) != (None, None, 2):
        return rows
    # A place per run of numbers: to move a few runs at once, XLA for TPUs would lay out the whole pool anew.
    return rows[:, None], jnp.arange(array.shape[0], dtype=jnp.int32)[None]


def _as_kept(values: jax.Array, array: BlockArray, kept: jax.Array) -> jax.Array:
    """Arranges a block `[num_layers, *shape]` as the host has one of `kept`, `[1, heads, rows, 128]`."""
    heads_first = values if array.head_axis is None else jnp.moveaxis(values, 1 + array.head_axis, 0)
    values = heads_first.reshape(kept.shape[1], -1)
    num_more = math.prod(kept.shape[2:]) - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, num_more))).reshape(1, *kept.shape[1:])


def of_kept[T: (jax.Array, np.ndarray)](kept: T, array: BlockArray, num_layers: int) -> T:
    """Returns a block `[heads or 1, rows, 128]` of the host as `[num_layers, *shape]`."""
    axis = array.head_axis
    rest = [size for i, size in enumerate(array.shape) if i != axis]
    values = kept.reshape(kept.shape[0], -1)[:, : num_layers * math.prod(rest)]
    if axis is None:
        return values.reshape(num_layers, *rest)
    values = values.reshape(kept.shape[0], num_layers, *rest)
    return values.transpose(*range(1, 2 + axis), 0, *range(2 + axis, values.ndim))


@explicit_transfers
def settle(cache: Cache) -> Cache:
    """Moves the contents that blocks wait for: first to the host, then to the device."""
    if not is_traced(cache.control) and bool(tier_of(cache.control).is_settled):
        return cache
    if cache.pools and cache.kept is None:
        raise ValueError(
            "the cache has pools and lacks what it keeps on the host, expected Cache.kept with them"
        )
    return _settle_if_due(cache)


@jax.jit
def _settle_if_due(cache: Cache) -> Cache:
    num_moves = common_bound((~tier_of(cache.control).is_settled).astype(jnp.int32))
    return run_if(num_moves > 0, _settle, cache)


def _settle(cache: Cache) -> Cache:
    control, tier = cache.control, tier_of(cache.control)
    pools, kept = list(cache.pools), list[dict[str, jax.Array]](cache.kept or ())
    awaits, sources = list(tier.awaits), list(tier.sources)
    for g, pool in enumerate(tier.control.block_pools):
        nowhere, none = control.block_pools[g].num_blocks, pool.num_blocks
        if not none:
            continue
        if pools and kept[g]:
            assert pool.cached is not None
            # What was forgotten meanwhile need not move.
            is_live = pool.cached.is_published[: awaits[g].shape[0]] | (
                pool.ref_count[: awaits[g].shape[0]] > 0
            )
            to_host = _listed(jnp.where(is_live, awaits[g], nowhere), nowhere)
            to_device = _listed(sources[g], none)
            pools[g], kept[g] = _move(cache.config.groups[g], pools[g], kept[g], to_host, to_device)
        tier = tier.with_pool(g, block_pool.release(pool, sources[g]))
        awaits[g] = jnp.full_like(awaits[g], nowhere)
        sources[g] = jnp.full_like(sources[g], none)
    tier = dataclasses.replace(
        tier, awaits=tuple(awaits), sources=tuple(sources), is_settled=jnp.ones_like(tier.is_settled)
    )
    return dataclasses.replace(
        cache,
        control=with_tier(control, tier),
        pools=tuple(pools),
        kept=tuple(kept) if cache.kept is not None else None,
    )


type Moves = tuple[jax.Array, jax.Array, jax.Array]
"""Blocks that get contents, i32[n], where these are now, i32[n], and how many entries count, i32[]."""


def _listed(sources: jax.Array, none: int) -> Moves:
    """Lists the blocks that have a source; `sources` is i32[blocks], `none` for no source."""
    has_source = sources < none
    rank, num_moves = rank_true(has_source)
    places = jnp.where(has_source, rank, sources.shape[0])
    order = jnp.arange(sources.shape[0], dtype=jnp.int32)
    empty = jnp.zeros_like(order)
    return set_at(empty, places, order), set_at(empty, places, sources), num_moves


def _move(
    group: LayerGroup, pool: KVPool, kept: dict[str, jax.Array], to_host: Moves, to_device: Moves
) -> tuple[KVPool, dict[str, jax.Array]]:
    """Moves contents of a layer group."""

    @jax.custom_jvp
    def move(
        arrays: dict[str, jax.Array], kept: dict[str, jax.Array], to_host: Moves, to_device: Moves
    ) -> Any:
        return _move_each(group)(arrays, kept, to_host, to_device)

    @move.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "got a derivative through keys and values that move between the device and the host, which have "
            "none, expected a cache without kv.tiers.Host, or rows whose blocks stay on the device"
        )

    # A replicated array and one that differs between devices become one.
    pool, kept, to_host, to_device = as_varied((pool, kept, to_host, to_device))
    arrays, kept = move(pool.arrays, kept, to_host, to_device)
    return KVPool(arrays=arrays), kept


def _move_each(group: LayerGroup) -> Any:
    @custom_vmap
    def move(
        arrays: dict[str, jax.Array], kept: dict[str, jax.Array], to_host: Moves, to_device: Moves
    ) -> Any:
        ids, block_ids, num_moves = to_host

        def demote(i: jax.Array, kept: dict[str, jax.Array]) -> dict[str, jax.Array]:
            rows = storage.rows_of_all_layers(KVPool(arrays=arrays), group, block_ids[i])
            moved = {}
            for name, array in group.arrays:
                block = _as_kept(get_at(arrays[name], _places(rows, array)), array, kept[name])
                block = jax.device_put(block, jax.typeof(kept[name]).memory_space)
                moved[name] = lax.dynamic_update_slice_in_dim(kept[name], block, ids[i], 0)
            return moved

        kept = lax.fori_loop(0, num_moves, demote, kept)
        block_ids, ids, num_moves = to_device

        def promote(i: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
            rows = storage.rows_of_all_layers(KVPool(arrays=arrays), group, block_ids[i])
            moved = {}
            for name, array in group.arrays:
                block = lax.dynamic_slice_in_dim(kept[name], ids[i], 1)
                block = jax.device_put(block, jax.memory.Space.Device)[0]
                moved[name] = set_at(
                    arrays[name], _places(rows, array), of_kept(block, array, group.num_layers)
                )
            return moved

        return lax.fori_loop(0, num_moves, promote, arrays), kept

    @move.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> Any:
        # Host memory knows no gather: one cache after the other.
        def of_all(x: jax.Array, is_batched: bool) -> jax.Array:
            return x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        moved = lax.map(lambda each: move(*each), jax.tree.map(of_all, args, tuple(in_batched)))
        return moved, jax.tree.map(lambda _: True, moved)

    return move


def overwrite(kept: Kept, masks: list[jax.Array]) -> Kept:
    """Overwrites the masked blocks of the host, per layer group bool[blocks], with zeros."""
    cleared = []
    for arrays, mask in zip(kept, masks, strict=True):
        if not arrays:
            cleared.append(arrays)
            continue
        ids, _, num_blocks = _listed(jnp.where(mask, 0, 1), 1)

        def clear(i: jax.Array, arrays: dict[str, jax.Array], ids: jax.Array = ids) -> dict[str, jax.Array]:
            moved = {}
            for name, x in arrays.items():
                block = jax.device_put(jnp.zeros((1, *x.shape[1:]), x.dtype), jax.typeof(x).memory_space)
                moved[name] = lax.dynamic_update_slice_in_dim(x, block, ids[i], 0)
            return moved

        cleared.append(lax.fori_loop(0, num_blocks, clear, arrays))
    return tuple(cleared)
