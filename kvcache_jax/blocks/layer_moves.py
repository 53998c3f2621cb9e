"""Moving tokens in all layers of a pool, one layer after the other, and the derivative of that."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.derivatives import reverse_mode_only
from kvcache_jax.blocks.storage import require_gradient
from kvcache_jax.core.state import KVPool
from kvcache_jax.layers.layer_group import LayerGroup

type MoveLayer = Callable[[KVPool, Any, jax.Array, jax.Array], KVPool]
"""Moves tokens of one layer, `(pool, moves, layer, place) -> pool`: its blocks are the `place`-th of those of
layers in the pool, which may hold this layer alone. Linear in the pool, of any float dtype."""


def move_in_layers(move: MoveLayer, group: LayerGroup, pool: KVPool, moves: Any) -> KVPool:
    """Moves tokens in all layers, one layer after the other, in place under donation.

    The gradient is one more pool, changed in place, and a few copies of one layer of it.

    Args:
      move: Of one layer.
      group: The layer group.
      pool: Of the group.
      moves: A pytree of integers, what `move` gets.
    """
    return _move(move, group, reverse_mode_only("moved tokens", pool), moves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(move: MoveLayer, group: LayerGroup, pool: KVPool, moves: Any) -> KVPool:
    def move_layer(layer: jax.Array, pool: KVPool) -> KVPool:
        layer = layer.astype(jnp.int32)
        return move(pool, moves, layer, layer)

    return lax.fori_loop(0, group.num_layers, move_layer, pool)


def _move_fwd(move, group, pool, moves):
    return _move(move, group, pool, moves), moves


def _move_bwd(move, group, moves, grads):
    require_gradient(group)
    num_blocks = grads.num_rows // group.num_layers

    def return_layer(layer: jax.Array, grads: KVPool) -> KVPool:
        layer = layer.astype(jnp.int32)
        first = layer * num_blocks

        def of_layer(grad: jax.Array) -> jax.Array:
            # Gradients of tokens that several blocks have are added up in float32.
            return lax.dynamic_slice_in_dim(grad, first, num_blocks).astype(jnp.float32)

        # Linear, so that it has the same derivative everywhere.
        moved = jax.tree.map(of_layer, grads)
        _, pull = jax.vjp(
            lambda pool: move(pool, moves, layer, jnp.int32(0)), jax.tree.map(jnp.zeros_like, moved)
        )

        def put_back(grad: jax.Array, of_layer: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(grad, of_layer.astype(grad.dtype), first, 0)

        return jax.tree.map(put_back, grads, *pull(moved))

    return lax.fori_loop(0, group.num_layers, return_layer, grads), None


_move.defvjp(_move_fwd, _move_bwd)
