"""The tokens that `compress` keeps, and the columns of rows that it writes anew."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.state import BlockPool
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange


class Kept(NamedTuple):
    """The tokens that rows of one layer group keep."""

    sources: jax.Array  # as in `TokenMoves`
    first: jax.Array  # i32[n], first place with a token
    same_len: jax.Array  # i32[n], first tokens, which stay where they are, in all layers and heads


def counts_of(num_keep: jax.Array, group: LayerGroup, config: CacheConfig) -> tuple[jax.Array, jax.Array]:
    """Reads how many tokens a group keeps, i32[n], and in which rows its layers differ, bool[n]."""
    if num_keep.ndim == 1:
        return num_keep, jnp.zeros_like(num_keep, bool)
    of_layers = num_keep[:, np.array([config.own_layers.index(layer) for layer in group.layer_ids])]
    return of_layers[:, 0], (of_layers != of_layers[:, :1]).any(axis=1)


def scores_of(scores: jax.Array, group: LayerGroup, config: CacheConfig) -> jax.Array:
    """Reads a group's scores, `[n, layers, heads, max_seq_len]`, 1 layer or head where they are all's."""
    if scores.ndim > 2:
        scores = scores[:, np.array([config.own_layers.index(layer) for layer in group.layer_ids])]
    num_middle = scores.ndim - 2
    shape = scores.shape[0], *scores.shape[1:-1], *[1] * (2 - num_middle), scores.shape[-1]
    return scores.reshape(shape)


def keep(
    scores: jax.Array,
    context_len: jax.Array,
    holes: Holes,
    num_keep: jax.Array,
    new_len: jax.Array,
    group: LayerGroup,
) -> Kept:
    """Chooses the tokens that rows keep in a layer group, the last of them at place `new_len - 1`.

    `scores` is f32[n, layers, heads, max_seq_len], `holes` of the rows and the group, all else i32[n].
    """
    shape, width = scores.shape, group.max_blocks_per_seq * group.block_size
    num_keep, first = num_keep[:, None, None, None], new_len - num_keep
    places = lax.broadcasted_iota(jnp.int32, shape, 3)
    row_places = places[:, 0, 0]
    is_shown = (row_places < context_len[:, None]) & ~holes.is_hidden(row_places)
    scores = jnp.where(places < group.span.num_sink_tokens, jnp.inf, scores)
    is_less = jnp.broadcast_to(~is_shown[:, None, None], shape).astype(jnp.int32)
    # Visible tokens first, then by score, then by place; NaN sorts after all numbers, so it is kept last.
    *_, best = lax.sort((is_less, -scores, places), num_keys=3)
    chosen = jnp.sort(jnp.where(places < num_keep, best, width), axis=-1)  # `places` are ranks here

    target = lax.broadcasted_iota(jnp.int32, (*shape[:3], width), 3)
    nth = target - first[:, None, None, None]
    is_kept = (nth >= 0) & (nth < num_keep)
    found = jnp.take_along_axis(chosen, jnp.clip(nth, 0, shape[3] - 1), axis=-1)
    sources = jnp.where(is_kept, found, width)
    # Kept places ascend, so the tokens that stay in their places are the first ones.
    same_len = jnp.min(jnp.sum(sources == target, axis=-1, dtype=jnp.int32), axis=(1, 2))
    return Kept(sources, first, jnp.where(first + holes.first == 0, same_len, 0))


class MovedColumns(NamedTuple):
    """The columns of rows of one layer group, `[n, C]`."""

    exchange: Exchange  # blocks that the row takes and releases
    reused: jax.Array  # i32, the row's own blocks that get moved tokens, in their new columns, or nowhere


def moved_columns_of(
    pool: BlockPool,
    group: LayerGroup,
    seq_ids: jax.Array,
    first: jax.Array,
    context_len: jax.Array,
    new_len: jax.Array,
    same_len: jax.Array,
) -> MovedColumns:
    """Finds the columns of rows i32[n] that are written, and the blocks that may be.

    The blocks of the first `same_len` of `context_len` tokens stay; afterwards the row has `new_len` places,
    with tokens from `first` on; i32[n] all.
    """
    entries = get_at(pool.block_table, seq_ids, pool.num_blocks)
    num_before, num_after = group.num_columns(context_len), group.num_columns(new_len)
    columns, order = (lax.broadcasted_iota(jnp.int32, entries.shape, axis) for axis in (1, 0))
    num_same = quotient(same_len, group.block_size)
    first_written = jnp.maximum(num_same, quotient(first, group.block_size))
    num_same, num_before, num_after = (x[:, None] for x in (num_same, num_before, num_after))
    is_replaced = (columns >= num_same) & (columns < num_before)
    is_own = (block_pool.ref_counts(pool, entries) == 1) & ~block_pool.is_published(pool, entries)
    is_own &= is_replaced
    is_written = (columns >= first_written[:, None]) & (columns < num_after)

    nowhere, nth_own, nth_written = pool.num_blocks, _ranked(is_own), _ranked(is_written)
    own = set_at(jnp.full_like(entries, nowhere), (order, nth_own), entries)  # one after the other
    reused = jnp.where(is_written, get_at(own, (order, nth_written), nowhere), nowhere)
    num_written = jnp.sum(is_written, axis=1, dtype=jnp.int32)[:, None]
    # Blocks reserved after the tokens stay the row's.
    reserved = get_at(entries, (order, columns + num_before - num_after), nowhere)

    def table(new: jax.Array) -> jax.Array:
        written = jnp.where(columns < num_after, jnp.minimum(reused, new), reserved)
        return jnp.where(columns < num_same, entries, written)

    exchange = Exchange(
        entries,
        is_taken=is_written & (reused == nowhere),
        is_released=is_replaced & ~(is_own & (nth_own < num_written)),
        table=table,
    )
    return MovedColumns(exchange, reused)


def _ranked(mask: jax.Array) -> jax.Array:
    """Counts the true entries before each true one in its row, i32 like `mask`; past the end for others."""
    before = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    return jnp.where(mask, before, mask.shape[1])
