"""Attention's loop where rows read the columns that they have in common together; see `attention_plan`.

Each company of rows goes through the tiles of its common columns as one row with all their queries. Then each
row goes through whole tiles of its own, and at last through shorter ones: what is left of a row whose
beginning others share is short. `r` rows, `c` companies of `p` places, `w` lanes.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient
from kvcache_jax.arrays.sharding import split_as
from kvcache_jax.attention.attention_plan import STRIDE_TOKENS
from kvcache_jax.attention.lanes import deal, fold
from kvcache_jax.attention.tiles import MIN_TILE_TOKENS, Tile, Tiles
from kvcache_jax.core.state import AttentionPlan, SharedColumns


def fold_shared[T](
    add: Callable[[T, jax.Array, Tile], T],
    state: T,
    q: jax.Array,
    plan: AttentionPlan,
    shared: SharedColumns,
    cut: Callable[[AttentionPlan, int, int, int | None], Tiles],
    block_size: int,
) -> T:
    """Folds each row's tiles into its state, as `lanes.fold` does, beginning with shared columns.

    Args:
      add: As in `lanes.fold`, like `state`.
      state: Arrays `[h, r, m, ...]`.
      q: Like `state`, and not changed.
      plan: Of the `r` rows.
      shared: Of the same rows.
      cut: `(plan, rows, width, tile_tokens) -> Tiles`, for at most `rows` rows at a time, each of `width`
        times `m` queries.
      block_size: Tokens of a column.
    """
    num_rows, num_places, num_queries = q.shape[1], shared.members.shape[1], q.shape[2]
    leaders, num_columns = shared.members[:, 0], shared.num_columns
    companies = AttentionPlan(
        table_row=get_at(plan.table_row, leaders, 0),
        first_column=jnp.zeros_like(leaders),
        num_columns=num_columns,
        first_position=jnp.zeros_like(leaders),
        num_queries=jnp.full_like(leaders, num_places * num_queries),
        num_keys=num_columns * block_size,  # all lie before any member's first query
    )
    # One after the other: lanes without a company would compute as much, and companies are few.
    common = cut(companies, 1, num_places, MIN_TILE_TOKENS)
    state = _fold_companies(add, state, q, companies, shared.members, common)
    plan = after(plan, shared.num_of_row)
    whole = cut(plan, num_rows, 1, None)
    tile_columns = whole.tile_len // block_size
    num_whole = quotient(plan.num_columns, tile_columns) * tile_columns
    whole_plan = dataclasses.replace(plan, num_columns=num_whole)
    state = fold(add, state, q, whole_plan, cut(whole_plan, num_rows, 1, None))
    plan = after(plan, num_whole)
    return fold(add, state, q, plan, cut(plan, num_rows, 1, STRIDE_TOKENS))


def after(plan: AttentionPlan, num_read: jax.Array) -> AttentionPlan:
    """Leaves the first columns i32[r] of each row out of a plan."""
    first_column, num_columns = plan.first_column + num_read, plan.num_columns - num_read
    return dataclasses.replace(plan, first_column=first_column, num_columns=num_columns)


def _fold_companies[T](
    add: Callable[[T, jax.Array, Tile], T],
    state: T,
    q: jax.Array,
    plan: AttentionPlan,
    members: jax.Array,
    cut: Tiles,
) -> T:
    lanes = deal(cut.num_tiles, cut.num_lanes)
    # Zeros need not be split over a mesh as what is computed for their place.
    state = jax.tree.map(lambda x: split_as(x, q), state)

    def add_some(i: jax.Array, state: T) -> T:
        companies, nth = lanes.at(i)
        rows = get_at(members, companies, q.shape[1])

        def together(x: jax.Array) -> jax.Array:
            found = x.at[:, rows].get(mode="clip")  # [h, w, p, m, ...]
            return found.reshape(*found.shape[:2], -1, *found.shape[4:])

        def apart(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[:, rows].set(new.reshape(x.shape[0], *rows.shape, *x.shape[2:]), mode="drop")

        some, some_q = jax.tree.map(together, (state, q))
        return jax.tree.map(apart, state, add(some, some_q, cut.load(nth, plan.of_rows(companies))))

    return lax.fori_loop(0, lanes.num_trips, add_some, state)
