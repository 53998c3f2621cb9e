"""The list of work of attention's loop: the rows whose tiles a trip reads.

Where every trip reads a tile of every row, a long row costs as much as if all rows were as long. So a trip
reads tiles of a few rows, one in each *lane*, and rows take the lanes in turns. `r` rows, `w` lanes.

References:
  Scheduling with deadlines and loss functions (McNaughton; Management Science 6, 1959): the wrap-around rule.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.sharding import split_as
from kvcache_jax.attention.tiles import Tile, Tiles
from kvcache_jax.core.state import AttentionPlan


def fold[T](
    add: Callable[[T, jax.Array, Tile], T], state: T, q: jax.Array, plan: AttentionPlan, cut: Tiles
) -> T:
    """Folds each row's tiles into its state, first to last, so that other rows do not change its results.

    Args:
      add: `(state, q, tile) -> state` of some of the rows.
      state: Arrays `[h, r, ...]`.
      q: Like `state`, and not changed.
      plan: Of the `r` rows.
      cut: Their tiles.
    """
    if cut.num_lanes >= plan.table_row.shape[0]:
        return lax.fori_loop(0, cut.num_tiles.max(), lambda i, state: add(state, q, cut.load(i, plan)), state)
    lanes = deal(cut.num_tiles, cut.num_lanes)
    # Zeros need not be split over a mesh as what is computed for their place.
    state = jax.tree.map(lambda x: split_as(x, q), state)

    def add_some(i: jax.Array, state: T) -> T:
        rows, nth = lanes.at(i)
        some, some_q = jax.tree.map(lambda x: x.at[:, rows].get(mode="clip"), (state, q))
        some = add(some, some_q, cut.load(nth, plan.of_rows(rows)))
        return jax.tree.map(lambda x, new: x.at[:, rows].set(new, mode="drop"), state, some)

    return lax.fori_loop(0, lanes.num_trips, add_some, state)


class Lanes(NamedTuple):
    """The trips in which lanes read all tiles."""

    num_trips: jax.Array  # i32[]
    # Finds the rows i32[w] that lanes read in a trip i32[], no two equal, `r` for none; and which tiles.
    at: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def deal(num_tiles: jax.Array, num_lanes: int) -> Lanes:
    """Deals the tiles of rows, i32[r] of each, to lanes in as few trips as there can be.

    One row after the other fills the lanes, which are as long as there are trips. A row that reaches the end
    of a lane goes on at the start of the next. No row has more tiles than there are trips, and so none is in
    two lanes at once. It is in the second of them earlier, where it reads its first tiles.
    """
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    starts = ends - num_tiles
    num_trips = jnp.maximum(num_tiles.max(), (ends[-1] + num_lanes - 1) // num_lanes)
    num_early = jnp.maximum(
        lax.rem(starts, jnp.broadcast_to(jnp.maximum(num_trips, 1), starts.shape)) + num_tiles - num_trips, 0
    )

    def at(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = jnp.arange(num_lanes, dtype=jnp.int32) * num_trips + i
        # Compared with all at once: a search would be a loop.
        rows = jnp.sum(ends[None] <= place[:, None], axis=1, dtype=jnp.int32)
        num = get_at(num_tiles, rows, 0)
        nth = place - get_at(starts, rows, 0) + get_at(num_early, rows, 0)
        return rows, jnp.where(nth < num, nth, nth - num)

    return Lanes(num_trips, at)
