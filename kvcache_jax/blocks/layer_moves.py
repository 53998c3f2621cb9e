"""Moving tokens in all layers of a pool, one layer after the other, and the derivative of that."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.derivatives import reverse_mode_only
from kvcache_jax.arrays.masked_updates import read_first, set_at
from kvcache_jax.blocks.storage import block_rows, require_gradient
from kvcache_jax.core.state import KVPool
from kvcache_jax.layers.layer_group import LayerGroup


class Moves(Protocol):
    """Tokens that move: a pytree of integers, with the blocks `destination` i32[n, C] that are written."""

    @property
    def destination(self) -> jax.Array:
        """Nowhere for blocks that are not written."""
        ...


type ReadLayer = Callable[[KVPool, Any, jax.Array, jax.Array], Mapping[str, jax.Array]]
"""Reads what one layer moves, `(pool, moves, layer, place) -> blocks [n, C, *array.shape]` by name. The
layer's blocks are the `place`-th in the pool, which may hold this layer alone. Linear in the pool."""


def move_in_layers(read: ReadLayer, group: LayerGroup, pool: KVPool, moves: Moves) -> KVPool:
    """Moves tokens in all layers, one layer after the other, in place under donation.

    All that a layer moves is read before any of it is written. The gradient is one more pool, changed in
    place, and a few copies of one layer of it.

    Args:
      read: Of one layer.
      group: The layer group.
      pool: Of the group.
      moves: What `read` gets.
    """
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
