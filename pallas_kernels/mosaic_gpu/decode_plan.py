"""How a decode is cut into work: statically into tiles, and on the device, once per step, into items.

One program computes one key/value head of one item: a run of tiles of one row. Where rows are too few or too
unequal to fill the GPU, they are split into several items, and `merge_items` puts their results together.
"""

import dataclasses
import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_rows import DecodeRows

TILE_ROWS = 64
"""Keys of a tile: the rows of a wgmma."""

MAX_GROUP_SIZE = 16
"""Query heads of a key/value head."""
MAX_LANES = 32
"""Lanes of a program."""
_MAX_LANE_VALUES = MAX_LANES * 128  # lanes times head_dim of a program: more does not fit into its registers
_MIN_SPLIT_TILES = 4


@dataclasses.dataclass(frozen=True)
class LaneTiling:
    """The static cut of the queries of a row and key/value head.

    A lane is a query of one query head. The lanes of `queries_per_tile` queries are a lane tile, filled up to
    a multiple of 8 with lanes whose results are not read. Each lane tile reads the keys again (from the L2
    cache, for they run side by side).

    Attributes:
      num_queries: Queries of a row.
      group_size: Query heads of a key/value head.
      queries_per_tile: Queries of a lane tile; the last one may have fewer.
      num_lanes: Lanes of a lane tile, a multiple of 8.
      num_lane_tiles: Lane tiles.
    """

    num_queries: int
    group_size: int
    queries_per_tile: int
    num_lanes: int
    num_lane_tiles: int


@dataclasses.dataclass(frozen=True)
class Tiling(LaneTiling):
    """The static cut of queries and of keys.

    The keys of a tile are copied piece by piece; a block is a whole number of pieces.

    Attributes:
      piece_len: Tokens of a piece, a multiple of 8; divides both a block and a tile.
      pieces_per_block: Pieces of a block.
      pieces_per_tile: Pieces of a tile.
      number_bytes: Of a stored number.
    """

    piece_len: int
    pieces_per_block: int
    pieces_per_tile: int
    number_bytes: int


def tiling_of(
    num_queries: int,
    group_size: int,
    head_dim: int,
    block_size: int,
    number_bytes: int = 2,
    tile_len: int = TILE_ROWS,
) -> Tiling:
    """The cut into full tiles with the fewest copies."""
    piece_len, pieces_per_block = pieces_of_blocks(block_size, tile_len)
    most_lanes = min(MAX_LANES, _MAX_LANE_VALUES // head_dim)
    num_lane_tiles = -(-num_queries // max(1, most_lanes // group_size))
    queries_per_tile = -(-num_queries // num_lane_tiles)
    return Tiling(
        num_queries=num_queries,
        group_size=group_size,
        queries_per_tile=queries_per_tile,
        num_lanes=-(-queries_per_tile * group_size // 8) * 8,
        num_lane_tiles=num_lane_tiles,
        piece_len=piece_len,
        pieces_per_block=pieces_per_block,
        pieces_per_tile=tile_len // piece_len,
        number_bytes=number_bytes,
    )


def pieces_of_blocks(block_size: int, tile_len: int) -> tuple[int, int]:
    """Tokens of a piece, the longest ones that blocks and tiles are whole numbers of; pieces of a block."""
    piece_len = math.gcd(block_size, tile_len)
    return piece_len, block_size // piece_len


class Item(enum.IntEnum):
    """Columns of `DecodePlan.items`: what a program must know, in one place to be read at once."""

    ROW = 0  # -1: no work
    TABLE_ROW = 1
    FIRST_COLUMN = 2
    NUM_COLUMNS = 3
    FIRST_POSITION = 4
    NUM_QUERIES = 5
    FIRST_TILE = 6
    NUM_TILES = 7
    PART = 8  # among the parts of all split rows; -1: the item is a whole row


class DecodePlan(NamedTuple):
    """The cut of one step, the same for all its layers.

    Attributes:
      items: i32[num_items, len(Item)].
      first_part: i32[r + 1]; the items of row `i` are the parts `[first_part[i], first_part[i + 1])`, none if
        it is one item.
    """

    items: jax.Array
    first_part: jax.Array

    @property
    def num_parts(self) -> int:
        """Parts that there may be: a split row has at most two for each item more than one."""
        num_items, num_rows = self.items.shape[0], self.first_part.shape[0] - 1
        return min(num_items, 2 * (num_items - num_rows))


def plan_decode(rows: DecodeRows, tiling: Tiling, *, num_columns: int, num_parallel: int) -> DecodePlan:
    """Cuts the rows into items.

    Rows are split, evenly, into the shortest runs of tiles (at least 256 tokens, in steps of an eighth) of
    which there are no more than `_max_items`.

    Args:
      rows: Who asks.
      tiling: The static cut.
      num_columns: Columns of the block table.
      num_parallel: Items whose programs, one for each key/value head and lane tile, run side by side.
    """
    num_rows, max_tiles = rows.table_row.shape[0], _num_tiles(num_columns, tiling)
    num_tiles = _num_tiles(rows.num_columns, tiling)
    num_items = num_rows if max_tiles <= _MIN_SPLIT_TILES else _max_items(num_rows, num_parallel)
    item = jnp.arange(num_items, dtype=jnp.int32)
    if num_items == num_rows:  # each row is an item: nothing to look for
        num_splits, row, is_item, first_item = jnp.ones_like(num_tiles), item, item >= 0, item
        first_part = jnp.zeros(num_rows + 1, jnp.int32)
    else:
        run = jnp.asarray(_run_lengths(max_tiles))
        splits = jnp.maximum(1, -(-num_tiles[None] // run[:, None]))  # [runs, r]
        fits = splits.sum(axis=1) <= num_items
        num_splits = splits.at[jnp.argmax(fits)].get(mode="promise_in_bounds")
        counts = jnp.stack([num_splits, jnp.where(num_splits > 1, num_splits, 0)])
        ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)  # of each row's items, and of its parts
        first_item = ends[0] - num_splits
        first_part = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[1]])
        row = jnp.searchsorted(ends[0], item, side="right", method="compare_all").astype(jnp.int32)
        is_item = row < num_rows
        row = jnp.where(is_item, row, 0)
    run_len = -(-num_tiles // num_splits)
    nth = item - first_item[row]
    first_tile = nth * run_len[row]
    reads = rows.num_columns[row] > 0  # other rows may have anything in the table's indices
    columns = {
        Item.ROW: jnp.where(is_item, row, -1),
        Item.TABLE_ROW: jnp.where(reads, rows.table_row[row], 0),
        Item.FIRST_COLUMN: jnp.where(reads, rows.first_column[row], 0),
        Item.NUM_COLUMNS: rows.num_columns[row],
        Item.FIRST_POSITION: rows.first_position[row],
        Item.NUM_QUERIES: rows.num_queries[row],
        Item.FIRST_TILE: first_tile,
        Item.NUM_TILES: jnp.clip(num_tiles[row] - first_tile, 0, run_len[row]),
        Item.PART: jnp.where(num_splits[row] > 1, first_part[row] + nth, -1),
    }
    return DecodePlan(jnp.stack([columns[name] for name in Item], axis=1), first_part)


def check_plan(plan: DecodePlan, num_rows: int) -> None:
    """Raises unless the plan is of so many rows."""
    items, first_part = plan
    is_items = items.ndim == 2 and items.shape[0] >= num_rows and items.shape[1] == len(Item)
    is_int32 = items.dtype == first_part.dtype == jnp.int32
    if not (is_items and is_int32) or first_part.shape != (num_rows + 1,):
        raise ValueError(
            f"the plan has items {items.dtype}{items.shape} and first_part {first_part.dtype}"
            f"{first_part.shape}, expected int32 of at least ({num_rows}, {len(Item)}) and of "
            f"({num_rows + 1},): `plan_for` with the same rows"
        )


def _max_items(num_rows: int, num_parallel: int) -> int:
    """Returns the most items, so that no long one is left when all others are done.

    Fewer rows than items that run side by side are cut into so many, or where that leaves room for few parts,
    half as many more than rows: a second wave of short parts costs less than to wait for a long one. As many
    rows or more fill the GPU in any case, and parts for one and a half waves fill the gaps that whole rows
    leave at the end.
    """
    if num_parallel <= num_rows:
        return num_rows + num_parallel + num_parallel // 2
    return max(num_parallel, num_rows + num_parallel // 2)


def _num_tiles(num_columns, tiling: Tiling):
    return -(-num_columns * tiling.pieces_per_block // tiling.pieces_per_tile)


def _run_lengths(max_tiles: int) -> np.ndarray:
    """i32[runs], ascending; the last one splits nothing."""
    lengths = [min(_MIN_SPLIT_TILES, max_tiles)]
    while lengths[-1] < max_tiles:
        lengths.append(min(max_tiles, lengths[-1] + max(1, lengths[-1] // 8)))
    return np.array(lengths, np.int32)
