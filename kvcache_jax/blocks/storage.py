"""Moving keys and values: into slots, between blocks, out as contiguous arrays.

Reverse-mode rules are written out: autodiff of a scatter would build index arrays as large as the
pool, and it cannot pass a loop with a dynamic number of trips. Forward mode is refused by name.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.derivatives import no_derivative, reverse_mode_only
from kvcache_jax.arrays.masked_updates import common_bound, get_at, quotient, remainder, run_if
from kvcache_jax.arrays.same_form import form_of, same_form
from kvcache_jax.arrays.sharding import (
    as_varied,
    axis_of_types,
    axis_to_map,
    for_each_head,
    over_heads,
    over_tokens,
)
from kvcache_jax.blocks.split_blocks import of_all_parts, own_places, require_whole, run_len
from kvcache_jax.core import backends
from kvcache_jax.core.choose_backend import choose
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockCopies, Cache, KVPool
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.layer_kind import KeysValues

_COPIES_PER_TRIP = 16


def block_rows(block_ids: jax.Array, layer: jax.Array | int, num_blocks: int, num_rows: int) -> jax.Array:
    """Computes each block's index on the pool's first axis; nowhere (`num_blocks`) becomes `num_rows`.

    Nowhere is mapped first: shifted by the layer, it would be block 0 of the next layer.
    """
    return jnp.where(block_ids < num_blocks, layer * num_blocks + block_ids, num_rows)


def rows_of_all_layers(pool: KVPool, group: LayerGroup, block_ids: jax.Array) -> jax.Array:
    """Computes where blocks i32[...] are in the pool in each layer, i32[..., num_layers]."""
    layers = jnp.arange(group.num_layers, dtype=jnp.int32)
    layers = lax.broadcast_to_rank(layers, block_ids.ndim + 1)
    num_blocks = pool.num_rows // max(group.num_layers, 1)
    return block_rows(block_ids[..., None], layers, num_blocks, pool.num_rows)


@functools.partial(jax.jit, static_argnames=("config", "group_id"), inline=True)
def store_tokens(
    pool: KVPool,
    layer: jax.Array | int,
    new: Mapping[str, jax.Array],
    slots: jax.Array,
    config: CacheConfig,
    group_id: int,
) -> KVPool:
    """Encodes `new`, inputs `[*slots.shape, ...]` of one layer, and writes the arrays at `slots`."""
    group = config.groups[group_id]
    backend = choose(config, None, pool, group)
    new = {name: values.reshape(-1, *values.shape[slots.ndim :]) for name, values in new.items()}
    stored = _stored(group, pool, new)
    slots, layer = slots.reshape(-1), jnp.asarray(layer)
    pool, stored = reverse_mode_only("what is written into pools", as_varied((pool, stored), slots))
    return _store(backend, config, group, pool, stored, slots, layer)


def _stored(group: LayerGroup, pool: KVPool, new: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Encodes new tokens `[n, ...]`, and checks the shapes and dtypes that the kind made."""
    encoded, stored = group.kind.encode(**new), {}
    num_tokens = next(iter(new.values())).shape[0]
    is_mapping = isinstance(encoded, Mapping)
    if not is_mapping or {*encoded} != {name for name, _ in group.arrays}:
        got = sorted(encoded) if is_mapping else form_of(encoded)
        raise ValueError(
            f"{group.kind.label}.encode() returned {got}, expected its arrays "
            f"{[name for name, _ in group.arrays]}"
        )
    for name, array in group.arrays:
        values, (_, *shape) = encoded[name], pool.arrays[name].shape
        expected = num_tokens, *shape[: array.token_axis], *shape[array.axis_of_tokens + 1 :]
        is_cast = jnp.issubdtype(values.dtype, jnp.floating) and jnp.issubdtype(array.dtype, jnp.floating)
        if values.shape != expected or not (is_cast or values.dtype == array.dtype):
            raise ValueError(
                f"{group.kind.label}.encode() returned {values.dtype}{list(values.shape)} for {name!r}, "
                f"expected {jnp.dtype(array.dtype).name}{list(expected)}"
            )
        stored[name] = values.astype(array.dtype)
    return stored


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _store(
    backend: backends.Backend,
    config: CacheConfig,
    group: LayerGroup,
    pool: KVPool,
    new: dict[str, jax.Array],
    slots: jax.Array,
    layer: jax.Array,
) -> KVPool:
    if write := backend.write:

        def local(pool, new, slots, layer):
            found = write(pool, new, slots, group, layer=layer)
            return same_form(f"write of the backend {backend.name!r}", found, pool)

        heads = KVPool(arrays=group.head_positions)
        new_heads = {
            name: None if array.token_head_axis is None else 1 + array.token_head_axis
            for name, array in group.arrays
        }
        axis = _axis_to_map(group, pool, config.head_axis)
        return over_heads(local, axis, (heads, new_heads, None, None), heads)(pool, new, slots, layer)

    def set_own(pool, new, slots, layer):
        return write_by_xla(pool, new, slots, group, layer=layer, context_axis=config.context_axis)

    tokens = KVPool(arrays=group.token_positions)
    mapped = over_tokens(set_own, config.context_axis, (tokens, None, None, None), tokens)
    return mapped(pool, new, slots, layer)


def write_by_xla(
    pool: KVPool,
    new: Mapping[str, jax.Array],
    slots: jax.Array,
    group: LayerGroup,
    *,
    layer: jax.Array,
    context_axis: str | None = None,
) -> KVPool:
    """Writes new tokens, as a backend's `write` does; of any kind, and of blocks a device's part."""
    arrays, places = {}, _places(group, pool, slots, layer, context_axis)
    for name, array in group.arrays:
        arrays[name] = _set_tokens(pool.arrays[name], array, places[name], new[name])
    return KVPool(arrays=arrays)


def _set_tokens(values: jax.Array, array: BlockArray, places: tuple[Any, ...], new: jax.Array) -> jax.Array:
    """Sets the numbers of tokens at their places; `new` is `[n, *token_shape]`."""
    is_split = axis_of_types({"": values}, {"": 1}) is not None
    if backends.target_device().platform != "tpu" or not _is_by_head(array) or is_split:
        return values.at[places].set(new, mode="drop")
    # A place per head: to write all heads of a token at once, XLA for TPUs would lay out the whole pool with
    # tokens first, and back for every reader of blocks.
    block, _, offset = places
    heads = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    return values.at[block[:, None], heads, offset[:, None]].set(new, mode="drop")


def _is_by_head(array: BlockArray) -> bool:
    """Tests whether a head's part of a block is one run of numbers."""
    return (array.head_axis, array.token_axis) == (0, 1)


def _axis_to_map(group: LayerGroup, pool: KVPool, head_axis: str | None) -> str | None:
    """Finds the mesh axis over which a backend's functions are mapped."""
    return axis_to_map(axis_of_types(pool.arrays, group.head_positions), head_axis)


def _places(
    group: LayerGroup, pool: KVPool, slots: jax.Array, layer: jax.Array, context_axis: str | None
) -> dict[str, tuple[Any, ...]]:
    """Finds the slots in the pool's arrays, past the end of the first axis for nowhere: an index by name."""
    block_ids, offset = quotient(slots, group.block_size), remainder(slots, group.block_size)
    block_ids, offset = own_places(pool, group, context_axis, block_ids, offset)
    block = block_rows(block_ids, layer, pool.num_rows // group.num_layers, pool.num_rows)
    return {name: (block, *array.before_tokens, offset) for name, array in group.arrays}


def _store_fwd(backend, config, group, pool, new, slots, layer):
    require_gradient(group)  # backwards nothing comes through arrays of integers alone
    require_whole("a gradient", pool, group)
    return _store(backend, config, group, pool, new, slots, layer), (slots, layer)


def _store_bwd(backend, config, group, residuals, grads):
    def take_own(grads, slots, layer):
        kept, new = {}, {}
        for name, places in _places(group, grads, slots, layer, config.context_axis).items():
            grad = grads.arrays[name]
            values = grad.at[places].get(mode="fill", fill_value=0)
            # The barrier orders the read before the write, which can then be done in place.
            new[name], grad = lax.optimization_barrier((values, grad))
            kept[name] = grad.at[places].set(jnp.zeros_like(values), mode="drop")
        return KVPool(arrays=kept), of_all_parts(grads, group, config.context_axis, new)

    tokens = KVPool(arrays=group.token_positions)
    mapped = over_tokens(take_own, config.context_axis, (tokens, None, None), (tokens, None))
    return *mapped(grads, *residuals), None, None


def require_gradient(group: LayerGroup) -> None:
    """Refuses a gradient through a layer whose kind has none."""
    if not _is_differentiable(group):
        raise NotImplementedError(_no_gradient_of(group))


def _is_differentiable(group: LayerGroup) -> bool:
    is_float = all(jnp.issubdtype(array.dtype, jnp.floating) for _, array in group.arrays)
    return group.kind.is_differentiable and is_float


def _no_gradient_of(group: LayerGroup) -> str:
    return (
        f"got a gradient through {group.kind.label} layers, which have none, expected layers that store "
        "keys and values as they are: FullAttention or SlidingWindow"
    )


def refuse_derivatives[T](group: LayerGroup, arrays: T) -> T:
    """Returns arrays whose derivatives are refused, when one is computed, where the layer's kind has none."""
    return arrays if _is_differentiable(group) else no_derivative(_no_gradient_of(group), arrays)


_store.defvjp(_store_fwd, _store_bwd)


def copy_all(cache: Cache, copies: Mapping[int, BlockCopies]) -> Cache:
    """Copies whole blocks of all layers, per layer group, in place under donation.

    A source block may be a later copy's destination: its last owner now uses the copy. What a keeper has to
    move is moved first.
    """
    keeper = cache.config.keeper
    is_settled = keeper.is_settled(cache.control)
    if isinstance(is_settled, bool):
        return _copy_all(cache, copies)
    # One condition in place of one per group, and of the keeper's.
    num_moves = sum((copied.num_copies for copied in copies.values()), start=(~is_settled).astype(jnp.int32))
    return run_if(common_bound(num_moves) > 0, lambda cache: _copy_all(keeper.settle(cache), copies), cache)


def _copy_all(cache: Cache, copies: Mapping[int, BlockCopies]) -> Cache:
    config, pools = cache.config, list(cache.pools)
    for g, copied in copies.items() if pools else ():
        group = config.groups[g]
        if not group.arrays or group.span.is_written_once:
            continue
        backend = choose(config, None, pools[g], group)
        pool = reverse_mode_only("blocks that are copied", as_varied(pools[g], copied))
        pools[g] = _copy(backend, config.head_axis, group, pool, *copied)
    return dataclasses.replace(cache, pools=tuple(pools))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _copy(
    backend: backends.Backend,
    head_axis: str | None,
    group: LayerGroup,
    pool: KVPool,
    src: jax.Array,
    dst: jax.Array,
    num_copies: jax.Array,
) -> KVPool:
    """Sets `pool[layer, dst[i]] = pool[layer, src[i]]` for `i < num_copies` and every layer."""
    if copy := backend.copy_blocks:

        def local(pool, src, dst, num_copies):
            found = copy(pool, src, dst, num_copies, group)
            return same_form(f"copy_blocks of the backend {backend.name!r}", found, pool)

        heads, axis = KVPool(arrays=group.head_positions), _axis_to_map(group, pool, head_axis)
        return over_heads(local, axis, (heads, None, None, None), heads)(pool, src, dst, num_copies)

    return copy_by_xla(pool, src, dst, num_copies, group)


def copy_by_xla(
    pool: KVPool, src: jax.Array, dst: jax.Array, num_copies: jax.Array, group: LayerGroup
) -> KVPool:
    """Copies blocks of all layers, as a backend's `copy_blocks` does; of any kind."""

    def copy_some(i, pool):
        rows, new_rows = (_copied_rows(group, pool, ids, num_copies, i) for ids in (src, dst))
        return jax.tree.map(lambda x: x.at[new_rows].set(get_at(x, rows), mode="drop"), pool)

    return lax.fori_loop(0, _num_trips(num_copies), copy_some, pool)


def _copy_fwd(backend, head_axis, group, pool, *copies):
    return _copy(backend, head_axis, group, pool, *copies), copies


def _copy_bwd(backend, head_axis, group, copies, grads):
    require_gradient(group)
    src, dst, num_copies = copies
    num_trips = _num_trips(num_copies)

    def return_some(i, grads):
        i = num_trips - 1 - i
        rows, new_rows = (_copied_rows(group, grads, ids, num_copies, i) for ids in (src, dst))

        def return_grads(grad: jax.Array) -> jax.Array:
            moved = get_at(grad, new_rows)
            # In this order: a block may be handed to the row that copies it.
            grad = grad.at[new_rows].set(jnp.zeros_like(moved), mode="drop")
            return grad.at[rows].add(moved, mode="drop")

        return jax.tree.map(return_grads, grads)

    return lax.fori_loop(0, num_trips, return_some, grads), None, None, None


_copy.defvjp(_copy_fwd, _copy_bwd)


def _num_trips(num_copies: jax.Array) -> jax.Array:
    return common_bound((num_copies + _COPIES_PER_TRIP - 1) // _COPIES_PER_TRIP)


def _copied_rows(
    group: LayerGroup, pool: KVPool, ids: jax.Array, num_copies: jax.Array, trip: jax.Array
) -> jax.Array:
    """Finds where the blocks of a trip are in the pool, i32[layers * copies]; past its end for no copy."""
    num_rows = pool.num_rows
    num_blocks = num_rows // group.num_layers
    nth = trip * _COPIES_PER_TRIP + jnp.arange(min(_COPIES_PER_TRIP, ids.shape[0]), dtype=jnp.int32)
    block_ids = jnp.where(nth < num_copies, get_at(ids, nth), num_blocks)
    layers = jnp.arange(group.num_layers, dtype=jnp.int32)[:, None]
    return block_rows(block_ids[None], layers, num_blocks, num_rows).reshape(-1)


def load_blocks(
    pool: KVPool, group: LayerGroup, rows: jax.Array, is_held: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Reads the blocks at `rows` i32[r, b] of a pool's first axis; places past its end give any block.

    By name they are `[heads, r, b * block_size, ...]`, 1 head for an array without an axis of heads. With
    `is_held` bool[r, b * block_size] they are gathered once into a tile that products read, and tokens that
    are not masked are 0 in it.
    """
    # On TPUs a reshape of the pool would copy it, tiled as it is there.
    takes_runs = backends.target_device().platform != "tpu"
    block_len = run_len(pool, group)

    def load(values: jax.Array, array: BlockArray) -> jax.Array:
        rest = array.shape[2:]
        if _is_by_head(array) and takes_runs:
            # A head's part of a block is one run of values, read head by head: none is moved on its own.
            runs = values.reshape(-1, values.shape[1], block_len * math.prod(rest))
            tile = jax.vmap(get_at, (1, 0))(runs, for_each_head(rows, values))
            if is_held is not None:
                held = jnp.repeat(is_held.reshape(*rows.shape, -1), math.prod(rest), axis=2)
                tile = _tile(tile, held[None])
            tile = tile.reshape(*tile.shape[:3], block_len, *rest)
        else:
            tile = get_at(values, rows)  # [r, b, *shape]
            if is_held is not None:
                others = [axis + 2 for axis in range(len(array.shape)) if axis != array.axis_of_tokens]
                tile = _tile(tile, jnp.expand_dims(is_held.reshape(*rows.shape, -1), others))
            if array.head_axis is None:
                tile, head = tile[None], 0
            else:
                head = 2 + array.head_axis
            token = 2 + array.axis_of_tokens + (array.head_axis is None)
            tile = jnp.moveaxis(tile, (head, token), (0, 3))
            rest = tile.shape[4:]
        return tile.reshape(tile.shape[0], rows.shape[0], -1, *rest)

    return {name: load(pool.arrays[name], array) for name, array in group.arrays}


def _tile(gathered: jax.Array, is_held: jax.Array) -> jax.Array:
    """Replaces what is not held by 0, in the pass that gathers it."""
    return lax.optimization_barrier(jnp.where(is_held, gathered, jnp.zeros((), gathered.dtype)))


def as_blocks(tile: jax.Array, array: BlockArray, block_size: int) -> jax.Array:
    """Turns a tile `[heads, r, tokens, ...]` into blocks as the pool has them, `[r, b, *array.shape]`."""
    num_heads, num_rows = tile.shape[:2]
    tile = tile.reshape(num_heads, num_rows, -1, block_size, *tile.shape[3:])
    if array.head_axis is None:
        return jnp.moveaxis(tile[0], 2, 2 + array.axis_of_tokens)
    return jnp.moveaxis(tile, (0, 3), (2 + array.head_axis, 2 + array.axis_of_tokens))


def keys_values_of(group: LayerGroup, tile: Mapping[str, jax.Array], weights: Any) -> KeysValues:
    """Computes keys and values of a tile from `load_blocks`, as `[heads, r, tokens, ...]`."""

    def of_row(tile: Mapping[str, jax.Array]) -> KeysValues:
        return _keys_values(group, tile, weights)

    return jax.vmap(of_row, in_axes=1, out_axes=1)(tile)


def keys_values_shapes(pool: KVPool, group: LayerGroup, weights: Any) -> KeysValues:
    """Shapes and dtypes of the keys and values of one block of one row, `[heads, tokens, ...]`."""

    def shape_of(name: str, array: BlockArray) -> jax.ShapeDtypeStruct:
        position = group.head_positions[name]
        num_heads = 1 if position is None else pool.arrays[name].shape[position]
        rest = [size for i, size in enumerate(array.shape) if i not in (array.head_axis, array.token_axis)]
        return jax.ShapeDtypeStruct((num_heads, group.block_size, *rest), array.dtype)

    tile = {name: shape_of(name, array) for name, array in group.arrays}
    return jax.eval_shape(functools.partial(_keys_values, group), tile, weights)


def _keys_values(group: LayerGroup, tile: Mapping[str, jax.Array], weights: Any) -> KeysValues:
    found = group.kind.keys_values(tile, weights)
    num_tokens = next(iter(tile.values())).shape[1]
    if not _are_keys_values(found, num_tokens):
        raise TypeError(
            f"{group.kind.label}.keys_values() returned {_forms(found)}, expected a tuple: k and v [heads, "
            f"{num_tokens}, width] of one floating dtype; scales, offsets [heads, {num_tokens}] or None"
        )
    return KeysValues(*found)  # type: ignore  # the first fields, or all


def _are_keys_values(found: Any, num_tokens: int) -> bool:
    if not isinstance(found, tuple) or not 2 <= len(found) <= len(KeysValues._fields):
        return False
    (k, v), of_tokens = found[:2], found[2:]
    if any(getattr(x, "ndim", 0) != 3 for x in (k, v)) or k.dtype != v.dtype:
        return False
    shape = k.shape[0], num_tokens
    fits = k.shape[:2] == v.shape[:2] == shape and jnp.issubdtype(k.dtype, jnp.floating)
    return fits and all(x is None or getattr(x, "shape", None) == shape for x in of_tokens)


def _forms(found: Any) -> Any:
    return [form_of(x) for x in found] if isinstance(found, tuple) else form_of(found)


def queries_of(group: LayerGroup, q: jax.Array) -> jax.Array:
    """Computes what is multiplied with keys from queries, by the kind."""
    return same_form(f"{group.kind.label}.queries()", group.kind.queries(q), q)


def outputs_of(group: LayerGroup, out: jax.Array) -> jax.Array:
    """Computes the results of sums of values `[..., heads, width]`, by the kind."""
    found = group.kind.outputs(out)
    if getattr(found, "ndim", 0) != out.ndim or found.shape[:-1] != out.shape[:-1]:
        shape = [*out.shape[:-1], "width"]
        raise TypeError(f"{group.kind.label}.outputs() returned {form_of(found)}, expected {shape}")
    return found


def with_pool(cache: Cache, group_id: int, pool: KVPool) -> Cache:
    """Replaces the pool of one layer group."""
    pools = (*cache.pools[:group_id], pool, *cache.pools[group_id + 1 :])
    return dataclasses.replace(cache, pools=pools)
