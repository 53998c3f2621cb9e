"""The exchange of blocks that many operations make: rows release blocks and take others.

An operation finds the columns that each row exchanges in each layer group. `decide` keeps the rows for which
there are blocks, and `carry_out` evicts cached blocks, takes, releases, and writes the block tables.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import num_true, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Control
from kvcache_jax.core.status import Status
from kvcache_jax.prefix import eviction


class Exchange(NamedTuple):
    """The first `C` columns of rows of one layer group, `[n, C]`."""

    entries: jax.Array  # i32, the rows' blocks before
    is_taken: jax.Array  # bool, the column gets a new block
    is_released: jax.Array  # bool, the row releases the column's block once others are taken
    is_left: jax.Array | None = None  # bool, the row releases it before and leaves the column empty; or None
    # Computes the columns afterwards, i32, from the new blocks, i32. None: other columns stay.
    table: Callable[[jax.Array], jax.Array] | None = None

    @property
    def need(self) -> jax.Array:
        """Blocks that each row takes, i32[n]."""
        return jnp.sum(self.is_taken, axis=1, dtype=jnp.int32)


def decide(
    control: Control, needs: Mapping[int, jax.Array], wants: jax.Array, status: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keeps the rows of `wants` bool[n] for which there are blocks in all layer groups, in entry order.

    A row needs `needs[group_id]` i32[n] blocks, below 0 if it gives more back than it takes. The other rows
    that want blocks get OUT_OF_BLOCKS in `status` i32[n].
    """
    available = jnp.stack([block_pool.num_available(control.block_pools[g]) for g in needs])
    ok = fitting_rows(available, jnp.where(wants, jnp.stack([*needs.values()]), 0), wants)
    return ok, jnp.where(wants & ~ok, jnp.int32(Status.OUT_OF_BLOCKS), status)


def fitting_rows(available: jax.Array, needs: jax.Array, wants: jax.Array) -> jax.Array:
    """Keeps the rows of `wants` bool[n] for which there are blocks in all layer groups, in entry order.

    `needs` i32[groups, n] is 0 where nothing is wanted, and below 0 for a row that gives more back than it
    takes; `available` is i32[groups].
    """
    num_rows = wants.shape[0]
    is_short = (jnp.max(jnp.cumsum(needs, axis=1, dtype=jnp.int32), axis=1, initial=0) > available).any()

    def admit_row(state):
        row, free, ok = state
        left = free - needs[:, row]
        fits = ok[row] & (left >= 0).all()
        return row + 1, jnp.where(fits, left, free), ok.at[row].set(fits)

    state = jnp.where(is_short, 0, num_rows), available, wants
    return lax.while_loop(lambda state: state[0] < num_rows, admit_row, state)[2]


def carry_out(
    control: Control, rows: jax.Array, exchanges: Mapping[int, Exchange], config: CacheConfig
) -> tuple[Control, dict[int, jax.Array]]:
    """Exchanges the blocks of `rows` i32[n], for which there are enough; `max_seqs` for none.

    Returns the new blocks per layer group too, i32[n, C], nowhere in other columns.
    """
    is_row = (rows < control.max_seqs)[:, None]

    def release(pool: BlockPool, exchange: Exchange, mask: jax.Array) -> BlockPool:
        return block_pool.release(pool, jnp.where(mask & is_row, exchange.entries, pool.num_blocks)[:, ::-1])

    pools, new = list(control.block_pools), {}
    for g, exchange in exchanges.items():
        if exchange.is_left is not None:
            pools[g] = release(pools[g], exchange, exchange.is_left)
    control = dataclasses.replace(control, block_pools=tuple(pools))
    needs = {g: num_true(exchange.is_taken & is_row) for g, exchange in exchanges.items()}
    control = eviction.make_room(control, needs, config)
    pools = list(control.block_pools)
    for g, exchange in exchanges.items():
        pool, new[g] = block_pool.take(pools[g], exchange.is_taken & is_row)
        pool = release(pool, exchange, exchange.is_released)
        table = _with_columns(pool, rows, _columns_after(exchange, new[g], pool.num_blocks))
        pools[g] = dataclasses.replace(pool, block_table=table)
    return dataclasses.replace(control, block_pools=tuple(pools)), new


def _columns_after(exchange: Exchange, new: jax.Array, nowhere: int) -> jax.Array:
    if exchange.table is not None:
        return exchange.table(new)
    stays = exchange.entries
    if exchange.is_left is not None:
        stays = jnp.where(exchange.is_left, nowhere, stays)
    return jnp.where(exchange.is_taken, new, stays)


def _with_columns(pool: BlockPool, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns the block table with the first columns of rows in place of theirs."""
    if columns.shape[1] == pool.max_blocks_per_seq:
        return set_at(pool.block_table, rows, columns)
    order = jnp.arange(columns.shape[1], dtype=jnp.int32)[None]
    return set_at(pool.block_table, (rows[:, None], order), columns)
