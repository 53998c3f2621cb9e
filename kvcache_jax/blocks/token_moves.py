"""Moving single tokens within rows: read from the blocks where they are, written into blocks of the row."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder
from kvcache_jax.arrays.sharding import axis_of_types
from kvcache_jax.blocks.layer_moves import move_in_layers
from kvcache_jax.blocks.storage import as_blocks, block_rows
from kvcache_jax.core.state import KVPool
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_group import LayerGroup


class TokenMoves(NamedTuple):
    """The tokens that rows of one layer group move, `C` columns of `s` tokens each.

    Attributes:
      sources: i32[n, layers, heads, C * s], place that the token at each place comes from; outside of the row
        for none. An axis of one layer, or of one head, applies to all.
      table: i32[n, C], blocks that hold the rows before.
      destination: i32[n, C], blocks that are written; nowhere for those that are not.
    """

    sources: jax.Array
    table: jax.Array
    destination: jax.Array


def move_tokens(pool: KVPool, group: LayerGroup, moves: TokenMoves) -> KVPool:
    """Moves tokens in all layers, one layer after the other, in place under donation.

    All that a layer moves is read before any of it is written, so a block may be both source and destination.
    Beside the pool that takes the memory of the rows in one layer.
    """
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
        places = (rows[:, 0], *[slice(None)] * array.token_axis, offsets[:, 0])
        return values.at[places].get(mode="clip")[None]
    head_position = 1 + array.head_axis
    if axis_of_types({"": values}, {"": head_position}) is None:
        # With all indices in the order of the axes, XLA for TPUs reads the pool in its own layout; a batched
        # gather it reads in another one, of a copy.
        heads = lax.broadcasted_iota(jnp.int32, (1, values.shape[head_position], 1), 1)
        at: list[Any] = [rows, *[slice(None)] * (values.ndim - 1)]
        at[head_position], at[1 + array.token_axis] = heads, offsets
        return jnp.moveaxis(values.at[tuple(at)].get(mode="clip"), 1, 0)
    token_axis = array.token_axis - (array.head_axis < array.token_axis)

    def of_head(values: jax.Array, rows: jax.Array, offsets: jax.Array) -> jax.Array:
        return values.at[(rows, *[slice(None)] * token_axis, offsets)].get(mode="clip")

    index_axis = None if rows.shape[1] == 1 else 1
    if index_axis is None:
        rows, offsets = rows[:, 0], offsets[:, 0]
    return jax.vmap(of_head, (head_position, index_axis, index_axis))(values, rows, offsets)
