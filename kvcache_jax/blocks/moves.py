"""Tokens that move between blocks, spans of them or single ones, layer by layer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.derivatives import reverse_mode_only
from kvcache_jax.arrays.masked_updates import get_at, quotient, read_first, remainder, set_at
from kvcache_jax.arrays.sharding import axis_of_types, split_alone
from kvcache_jax.blocks.key_rotation import Rotate
from kvcache_jax.blocks.split_blocks import require_whole
from kvcache_jax.blocks.storage import as_blocks, block_rows, require_gradient
from kvcache_jax.core.state import KVPool
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_group import LayerGroup


class Moves(Protocol):
    """Tokens that move: a pytree of integers, with the blocks `destination` i32[n, C] that are written."""

    @property
    def destination(self) -> jax.Array:
        """Nowhere for blocks that are not written."""
        ...


type ReadLayer = Callable[[KVPool, Any, jax.Array, jax.Array], Mapping[str, jax.Array]]
"""Reads the blocks that one layer moves: `(pool, moves, layer, place) -> [n, C, *array.shape]` by name. The
layer's blocks are the `place`-th in the pool, which may hold this layer alone. Linear in the pool."""


def move_in_layers(read: ReadLayer, group: LayerGroup, pool: KVPool, moves: Moves) -> KVPool:
    """Moves tokens in all layers, one layer after the other, in place under donation.

    All that a layer moves is read before any of it is written. The gradient is one more pool, changed in
    place, and a few copies of one layer of it.
    """
    require_whole("an operation that moves tokens", pool, group)
    return _move(read, group, reverse_mode_only("moved tokens", pool), moves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(read: ReadLayer, group: LayerGroup, pool: KVPool, moves: Moves) -> KVPool:
    num_blocks = pool.num_rows // group.num_layers

    def move_layer(layer: jax.Array, pool: KVPool) -> KVPool:
        layer = layer.astype(jnp.int32)
        # Without the fence XLA may write where it has yet to read (openxla/xla#49176).
        tiles, arrays = read_first(read(pool, moves, layer, layer), pool.arrays)
        written = block_rows(moves.destination, layer, num_blocks, pool.num_rows)
        return KVPool(arrays={name: set_at(arrays[name], written, tiles[name]) for name in arrays})

    return lax.fori_loop(0, group.num_layers, move_layer, pool)


def _move_fwd(read, group, pool, moves):
    return _move(read, group, pool, moves), moves


def _move_bwd(read, group, moves, grads):
    require_gradient(group)
    num_blocks = grads.num_rows // group.num_layers

    def return_layer(layer: jax.Array, grads: KVPool) -> KVPool:
        layer = layer.astype(jnp.int32)

        def of_layer(grad: jax.Array) -> jax.Array:
            # Gradients of tokens that several blocks have are added up in float32.
            return lax.dynamic_slice_in_dim(grad, layer * num_blocks, num_blocks).astype(jnp.float32)

        after = jax.tree.map(of_layer, grads)
        written = {name: _read_written(x, moves.destination) for name, x in after.arrays.items()}
        kept = {
            name: set_at(x, moves.destination, jnp.zeros_like(written[name]))
            for name, x in after.arrays.items()
        }
        # Linear, so that it has the same derivative everywhere.
        zeros = jax.tree.map(jnp.zeros_like, after)
        (moved,) = jax.vjp(lambda pool: read(pool, moves, layer, jnp.int32(0)), zeros)[1](written)

        def put_back(grad: jax.Array, kept: jax.Array, moved: jax.Array) -> jax.Array:
            new = (kept + moved).astype(grad.dtype)
            return lax.dynamic_update_slice_in_dim(grad, new, layer * num_blocks, 0)

        return jax.tree.map(put_back, grads, KVPool(arrays=kept), moved)

    return lax.fori_loop(0, group.num_layers, return_layer, grads), None


def _read_written(values: jax.Array, destination: jax.Array) -> jax.Array:
    """Reads the blocks that were written, zeros for those that were not."""
    return values.at[destination].get(mode="fill", fill_value=0)


_move.defvjp(_move_fwd, _move_bwd)


class TokenMoves(NamedTuple):
    """The tokens that rows of one layer group move, `C` columns of `s` tokens each."""

    # i32[n, layers, heads, C * s], place that the token at each place comes from; outside of the row for
    # none. An axis of one layer, or of one head, applies to all.
    sources: jax.Array
    table: jax.Array  # i32[n, C], blocks that hold the rows before
    destination: jax.Array  # i32[n, C], blocks that are written; nowhere for those that are not


def move_tokens(pool: KVPool, group: LayerGroup, moves: TokenMoves) -> KVPool:
    """Moves tokens in all layers, one layer after the other, in place under donation.

    All that a layer moves is read before any of it is written, so a block may be both source and destination.
    Beside the pool that takes the memory of the rows in one layer.
    """
    if not group.layer_ids:
        return pool
    num_blocks = pool.num_rows // group.num_layers

    def read(pool: KVPool, moves: TokenMoves, layer: jax.Array, place: jax.Array) -> dict[str, jax.Array]:
        sources = get_at(jnp.moveaxis(moves.sources, 1, 0), layer)  # [n, heads, C * s]; clips to the one
        columns, offsets = quotient(sources, group.block_size), remainder(sources, group.block_size)
        order = lax.broadcasted_iota(jnp.int32, sources.shape, 0)
        ids = get_at(moves.table, (order, columns), num_blocks)
        rows = block_rows(ids, place, num_blocks, pool.num_rows)
        return {
            name: as_blocks(read_tokens(pool.arrays[name], array, rows, offsets), array, group.block_size)
            for name, array in group.arrays
        }

    return move_in_layers(read, group, pool, moves)


def read_tokens(values: jax.Array, array: BlockArray, rows: jax.Array, offsets: jax.Array) -> jax.Array:
    """Reads tokens `[n, heads, t]` of an array's blocks, `[heads, n, t, ...]`; 1 head where it has none."""
    if array.head_axis is None:
        places = (rows[:, 0], *array.before_tokens, offsets[:, 0])
        return values.at[places].get(mode="clip")[None]
    head_position = 1 + array.head_axis
    axis = axis_of_types({"": values}, {"": head_position})
    if axis is None:
        # With all indices in the order of the axes, XLA for TPUs reads the pool in its own layout; a batched
        # gather it reads in another one, of a copy.
        heads = lax.broadcasted_iota(jnp.int32, (1, values.shape[head_position], 1), 1)
        at: list[Any] = [rows, *[slice(None)] * (values.ndim - 1)]
        at[head_position], at[1 + array.axis_of_tokens] = heads, offsets
        return jnp.moveaxis(values.at[tuple(at)].get(mode="clip"), 1, 0)
    token_axis = array.axis_of_tokens - (array.head_axis < array.axis_of_tokens)

    def of_head(values: jax.Array, rows: jax.Array, offsets: jax.Array) -> jax.Array:
        return values.at[(rows, *[slice(None)] * token_axis, offsets)].get(mode="clip")

    index_axis = None if rows.shape[1] == 1 else 1
    if index_axis is None:
        rows, offsets = rows[:, 0], offsets[:, 0]
    else:
        rows, offsets = (split_alone(x, 1, axis, values) for x in (rows, offsets))
    return jax.vmap(of_head, (head_position, index_axis, index_axis))(values, rows, offsets)


class SpanMoves(NamedTuple):
    """The tokens that are written into blocks of one layer group, `n` times `C` blocks of `s` tokens."""

    blocks: jax.Array  # i32[n, C * s], block that the token at each place comes from; nowhere writes zeros
    offsets: jax.Array  # i32[n, C * s], its place in that block
    distance: jax.Array | None  # i32[n, C * s], positions that its key moves by; None for 0
    destination: jax.Array  # i32[n, C], blocks that are written; nowhere for those that are not


def move_spans(pool: KVPool, group: LayerGroup, moves: SpanMoves, rotate: Rotate | None = None) -> KVPool:
    """Moves tokens in all layers, one layer after the other, in place under donation.

    All that a layer moves is read before any of it is written. Keys that move by 0 keep their bits.
    """
    if not group.layer_ids:
        return pool
    num_blocks = pool.num_rows // group.num_layers
    rotated_features = group.kind.rotated_features or {}
    if moves.distance is not None:
        # A token that is not written has no angle: one beyond a table is NaN, also times a gradient of 0.
        is_written = jnp.repeat(moves.destination < num_blocks, group.block_size, axis=1)
        is_moved = is_written & (moves.blocks < num_blocks)
        moves = moves._replace(distance=jnp.where(is_moved, moves.distance, 0))

    def moved(pool: KVPool, name: str, array: BlockArray, rows: jax.Array, moves: SpanMoves) -> jax.Array:
        tile = read_tokens(pool.arrays[name], array, rows[:, None], moves.offsets[:, None])
        if rotate is not None and moves.distance is not None and name in rotated_features:
            keys = tile[..., rotated_features[name]]
            tile = tile.at[..., rotated_features[name]].set(_rotated(keys, moves.distance, rotate))
        is_token = moves.blocks < num_blocks
        mask = is_token.reshape(1, *is_token.shape, *[1] * (tile.ndim - 3))
        # Numbers in a place without a token must not stay: they may be another namespace's, or NaN.
        return as_blocks(jnp.where(mask, tile, jnp.zeros_like(tile)), array, group.block_size)

    def read(pool: KVPool, moves: SpanMoves, layer: jax.Array, place: jax.Array) -> dict[str, jax.Array]:
        rows = block_rows(moves.blocks, place, num_blocks, pool.num_rows)
        return {name: moved(pool, name, array, rows, moves) for name, array in group.arrays}

    return move_in_layers(read, group, pool, moves)


def _rotated(tile: jax.Array, distance: jax.Array, rotate: Rotate) -> jax.Array:
    """Rotates keys `[heads, n, t, head_dim]` by `distance` i32[n, t], in float32."""
    keys = jnp.moveaxis(tile, 0, 2)
    rotated = _rotate(rotate, keys.astype(jnp.float32), distance)
    shape = getattr(rotated, "shape", None)
    if shape != keys.shape:
        raise ValueError(f"rotate returned shape {shape}, expected {keys.shape} as its keys have")
    stays = (distance == 0)[..., None, None]
    return jnp.moveaxis(jnp.where(stays, keys, rotated.astype(keys.dtype)), 2, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(rotate: Rotate, keys: jax.Array, distance: jax.Array) -> jax.Array:
    return rotate(keys, distance)


def _rotate_fwd(rotate, keys, distance):
    return rotate(keys, distance), distance


def _rotate_bwd(rotate, distance, grad):
    try:
        return *jax.linear_transpose(lambda keys: rotate(keys, distance), grad)(grad), None
    except Exception as error:  # jax's, of several types
        raise NotImplementedError(
            f"got a gradient through rotate={rotate!r}, which jax cannot transpose, expected a function that "
            "is linear in its keys, such as a key_rotation"
        ) from error


_rotate.defvjp(_rotate_fwd, _rotate_bwd)
