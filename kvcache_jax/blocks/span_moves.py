"""Moving spans of tokens between blocks, keys rotated on the way."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.blocks.key_rotation import Rotate
from kvcache_jax.blocks.layer_moves import move_in_layers
from kvcache_jax.blocks.storage import as_blocks, block_rows
from kvcache_jax.blocks.token_moves import read_tokens
from kvcache_jax.core.state import KVPool
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_group import LayerGroup


class SpanMoves(NamedTuple):
    """The tokens that are written into blocks of one layer group, `n` times `C` blocks of `s` tokens.

    Attributes:
      blocks: i32[n, C * s], block that the token at each place comes from; nowhere writes zeros.
      offsets: i32[n, C * s], its place in that block.
      distance: i32[n, C * s], positions that its key moves by; None for 0.
      destination: i32[n, C], blocks that are written; nowhere for those that are not.
    """

    blocks: jax.Array
    offsets: jax.Array
    distance: jax.Array | None
    destination: jax.Array


def move_spans(pool: KVPool, group: LayerGroup, moves: SpanMoves, rotate: Rotate | None = None) -> KVPool:
    """Moves tokens in all layers, one layer after the other, in place under donation.

    All that a layer moves is read before any of it is written. Keys that move by 0 keep their bits.
    """
    num_blocks = pool.num_rows // group.num_layers
    rotated_features = group.kind.rotated_features or {}
    if moves.distance is not None:
        # What is not written has no angle: one beyond a table is NaN, also times a gradient of 0.
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
        # What no token is in must not stay: it may be another namespace's, or NaN.
        return as_blocks(jnp.where(mask, tile, jnp.zeros_like(tile)), array, group.block_size)

    def read(pool: KVPool, moves: SpanMoves, layer: jax.Array, place: jax.Array) -> dict[str, jax.Array]:
        rows = block_rows(moves.blocks, place, num_blocks, pool.num_rows)
        return {name: moved(pool, name, array, rows, moves) for name, array in group.arrays}

    return move_in_layers(read, group, pool, moves)


def _rotated(tile: jax.Array, distance: jax.Array, rotate: Rotate) -> jax.Array:
    """Rotates keys `[heads, n, t, head_dim]` by `distance` i32[n, t], in float32."""
    keys = jnp.moveaxis(tile, 0, 2)
    rotated = _rotate(rotate, keys.astype(jnp.float32), distance)
    if rotated.shape != keys.shape:
        raise ValueError(f"rotate returned shape {rotated.shape}, expected that of its keys, {keys.shape}")
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
