"""Which keys of a tile are seen, inside the kernels: the keys of a row, and a decode's queries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_rows import DecodeOptions
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS, Tiling


@dataclasses.dataclass(frozen=True)
class ReadKeys:
    """The keys of one row, counted in the order in which they are read, in tiles.

    Attributes:
      options: Static.
      block_size: Tokens of a block.
      first_column: See `DecodeRows`; a scalar, like the following.
      num_columns: Likewise.
      first_position: Likewise.
      num_queries: Likewise.
      tile_len: Keys of a tile.
    """

    options: DecodeOptions
    block_size: int
    first_column: Any
    num_columns: Any
    first_position: Any
    num_queries: Any
    tile_len: int = dataclasses.field(default=TILE_ROWS, kw_only=True)

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

    def is_edge(self, tile: Any) -> Any:
        """Whether a tile may hold keys that no query sees."""
        first = tile * self.tile_len
        end = first + self.tile_len
        last_seen = self.first_position + self.num_queries - 1
        is_edge = (end > self.num_columns * self.block_size) | (self.position(end - 1) > last_seen)
        if self.options.window is not None:
            is_edge |= self.position(first) <= self.first_position - self.options.window
        return is_edge

    def is_seen_by_any(
        self, first: Any, shape: tuple[int, ...], layout: Any = plgpu.Layout.WGMMA
    ) -> jax.Array:
        """bool[keys, ...] of the keys from the `first` on, the same along other axes."""
        position, is_read = self.positions(first, shape, 0, layout)
        in_window = self.is_in_window(position, self.first_position)
        return is_read & (position < self.first_position + self.num_queries) & in_window

    def position(self, nth: Any) -> Any:
        """Position in the sequence of the nth key that is read."""
        behind_sinks = nth + (self.first_column - self.num_sink_blocks) * self.block_size
        if not self.num_sink_blocks:
            return behind_sinks
        return jnp.where(nth < self.num_sink_blocks * self.block_size, nth, behind_sinks)

    def positions(
        self, first: Any, shape: tuple[int, ...], axis: int, layout: Any = plgpu.Layout.WGMMA
    ) -> tuple[jax.Array, jax.Array]:
        """Positions of the keys from the `first` on, along an axis; whether each is in a column read."""
        nth = first + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        return self.position(nth), nth < self.num_columns * self.block_size

    def is_in_window(self, position: jax.Array, query_pos: Any) -> Any:
        """Whether a query at `query_pos` reaches that far back."""
        if self.options.window is None:
            return True
        is_near = position > query_pos - self.options.window
        return is_near | (position < self.options.num_sink_tokens) if self.num_sink_blocks else is_near


@dataclasses.dataclass(frozen=True)
class KeyMask(ReadKeys):
    """Who sees the keys, in a decode.

    Attributes:
      tiling: Static.
      first_query: Query of the row at which the lane tile starts.
    """

    tiling: Tiling
    first_query: Any

    def query(self) -> jax.Array:
        """i32[lanes], which query of the row a lane belongs to."""
        layout = plgpu.Layout.WGMMA.reduce(0)
        lane = plgpu.broadcasted_iota(jnp.int32, (self.tiling.num_lanes,), 0, layout=layout)
        return self.first_query + lax.div(lane, jnp.int32(self.tiling.group_size))

    def is_seen(self, tile: Any, query: jax.Array) -> jax.Array:
        """bool[TILE_ROWS, lanes], lanes without a query as for a later query."""
        shape = (TILE_ROWS, self.tiling.num_lanes)
        position, is_read = self.positions(tile * TILE_ROWS, shape, 0)
        query_pos = self.first_position
        if self.tiling.num_queries > 1:
            query_pos = query_pos + lax.broadcast_in_dim(query, shape, [1])
        return is_read & (position <= query_pos) & self.is_in_window(position, query_pos)
