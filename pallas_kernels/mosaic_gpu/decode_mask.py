"""Which keys of a tile the queries of an item see, inside the decode kernel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_rows import DecodeOptions
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS, Tiling


@dataclasses.dataclass(frozen=True)
class KeyMask:
    """The keys of one row, counted in the order in which they are read, and who sees them.

    Attributes:
      options: Static.
      tiling: Static.
      block_size: Tokens of a block.
      first_column: See `DecodeRows`; a scalar, like the following.
      num_columns: Likewise.
      first_position: Likewise.
      num_queries: Likewise.
      first_query: Query of the row at which the lane tile starts.
    """

    options: DecodeOptions
    tiling: Tiling
    block_size: int
    first_column: Any
    num_columns: Any
    first_position: Any
    num_queries: Any
    first_query: Any

    @property
    def num_sink_blocks(self) -> int:
        """Columns read before `first_column`."""
        return self.options.num_sink_blocks(self.block_size)

    def column(self, nth_block: Any) -> Any:
        """Column of the table of the nth block that is read."""
        behind_sinks = nth_block + (self.first_column - self.num_sink_blocks)
        if not self.num_sink_blocks:
            return behind_sinks
        return jnp.where(nth_block < self.num_sink_blocks, nth_block, behind_sinks)

    def query(self) -> jax.Array:
        """i32[lanes], which query of the row a lane belongs to."""
        layout = plgpu.Layout.WGMMA.reduce(0)
        lane = plgpu.broadcasted_iota(jnp.int32, (self.tiling.num_lanes,), 0, layout=layout)
        return self.first_query + lax.div(lane, jnp.int32(self.tiling.group_size))

    def is_seen(self, tile: Any, query: jax.Array) -> jax.Array:
        """bool[TILE_ROWS, lanes], lanes without a query as for a later query."""
        shape = (TILE_ROWS, self.tiling.num_lanes)
        position, is_read = self._positions(tile, shape)
        query_pos = self.first_position
        if self.tiling.num_queries > 1:
            query_pos = query_pos + lax.broadcast_in_dim(query, shape, [1])
        return is_read & (position <= query_pos) & self._is_in_window(position, query_pos)

    def is_seen_by_any(self, tile: Any, width: int) -> jax.Array:
        """bool[TILE_ROWS, width], the same for every column."""
        position, is_read = self._positions(tile, (TILE_ROWS, width))
        in_window = self._is_in_window(position, self.first_position)
        return is_read & (position < self.first_position + self.num_queries) & in_window

    def is_edge(self, tile: Any) -> Any:
        """Whether a tile may hold keys that no query sees."""
        first = tile * TILE_ROWS
        end = first + TILE_ROWS
        last_seen = self.first_position + self.num_queries - 1
        is_edge = (end > self.num_columns * self.block_size) | (self._position(end - 1) > last_seen)
        if self.options.window is not None:
            is_edge |= self._position(first) <= self.first_position - self.options.window
        return is_edge

    def _position(self, nth: Any) -> Any:
        """Position in the sequence of the nth key that is read."""
        behind_sinks = nth + (self.first_column - self.num_sink_blocks) * self.block_size
        if not self.num_sink_blocks:
            return behind_sinks
        return jnp.where(nth < self.num_sink_blocks * self.block_size, nth, behind_sinks)

    def _positions(self, tile: Any, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        """Of the keys of a tile: position, and whether the key is in a column that is read."""
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        nth = tile * TILE_ROWS + row
        return self._position(nth), nth < self.num_columns * self.block_size

    def _is_in_window(self, position: jax.Array, query_pos: Any) -> Any:
        if self.options.window is None:
            return True
        is_near = position > query_pos - self.options.window
        return is_near | (position < self.options.num_sink_tokens) if self.num_sink_blocks else is_near
