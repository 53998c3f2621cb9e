"""Which tiles of keys a program of the prefill reads, and who sees the keys in them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.decode_mask import ReadKeys

QUERY_ROWS = 64
"""Queries of a warpgroup: the rows of a product."""


@dataclasses.dataclass(frozen=True)
class QueryMask(ReadKeys):
    """The keys of one row, and queries of it that see them, from `first_query` on, `QUERY_ROWS` of them."""

    first_query: Any

    def is_seen(self, tile: Any) -> jax.Array:
        """bool[QUERY_ROWS, tile_len], rows without a query as for a later query."""
        shape = (QUERY_ROWS, self.tile_len)
        position, is_read = self.positions(tile * self.tile_len, shape, 1)
        nth = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        query_pos = self.first_position + self.first_query + nth
        return is_read & (position <= query_pos) & self.is_in_window(position, query_pos)

    def is_all_seen(self, tile: Any) -> Any:
        """Whether all the queries see all keys of a tile, so that nothing is to be masked."""
        first, first_pos = tile * self.tile_len, self.first_position + self.first_query
        end = first + self.tile_len
        is_all = (end <= self.num_columns * self.block_size) & (self.position(end - 1) <= first_pos)
        if self.options.window is not None:
            is_all &= self.position(first) > first_pos + QUERY_ROWS - 1 - self.options.window
        return is_all


class Walk:
    """The tiles that queries `[first_query, end_query)` of a row read: of kept tokens, then the others.

    Attributes:
      num_steps: How many tiles.
    """

    def __init__(self, keys: ReadKeys, first_query: Any, end_query: Any):
        sinks = keys.num_sink_blocks * keys.block_size
        shift = keys.first_column * keys.block_size - sinks  # from places in the order to positions
        end_query = jnp.minimum(end_query, keys.num_queries)
        end = keys.first_position + end_query - shift
        if sinks:
            end = jnp.maximum(end, jnp.minimum(keys.first_position + end_query, sinks))
        end = jnp.clip(end, 0, keys.num_columns * keys.block_size)
        end_tile = _tiles_of(jnp.where(end_query > first_query, end, 0), keys.tile_len)
        first = jnp.int32(0)
        if keys.options.window is not None:
            first = keys.first_position + first_query - keys.options.window + 1 - shift
            first = lax.div(jnp.maximum(first, 0), jnp.int32(keys.tile_len))
        self._num_first = jnp.minimum(-(-sinks // keys.tile_len), end_tile)
        self._num_skipped = jnp.maximum(first - self._num_first, 0)
        self.num_steps = jnp.maximum(end_tile - self._num_skipped, self._num_first)

    def tile(self, step: Any) -> Any:
        """The tile that is read in a step."""
        return jnp.where(step < self._num_first, step, step + self._num_skipped)


def _tiles_of(num_keys: Any, tile_len: int) -> Any:
    return lax.div(num_keys + (tile_len - 1), jnp.int32(tile_len))
