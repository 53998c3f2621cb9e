"""Paged attention in plain XLA: online softmax over tiles of blocks, forward and backward.

One loop, which runs as far as the rows of the step need, not over the table's width; on CPUs a few rows at a
time (`lanes`). Products are computed in the dtype that keys and values are stored in, and added up in
float32. Shapes below: `r` rows of the `AttentionPlan`, `t` queries of a row, `h` key/value heads, `g` query
heads per key/value head, `m = t * g` queries of a row and key/value head, `b` blocks of a tile, `s` tokens of
a block, `n = b * s` keys of a tile, `d` the width of a key, `e` the width of a value. Stored blocks become
keys and values tile by tile, by the layer kind's `keys_values`; its scales and offsets are applied to logits
and weights.

References:
  Online softmax normalizer calculation for softmax (Milakov, Gimelshein; arXiv:1805.02867) and
  FlashAttention-2 (Dao; arXiv:2307.08691) for the recomputing backward pass.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import common_bound, get_at
from kvcache_jax.attention.companies import fold_shared
from kvcache_jax.attention.lanes import fold
from kvcache_jax.attention.tiles import (
    MASKED,
    Tiles,
    by_head,
    by_query,
    product,
    query_mask,
    scaled_logits,
    tiles,
)
from kvcache_jax.blocks.split_blocks import run_len
from kvcache_jax.blocks.storage import as_blocks, block_rows, keys_values_of, keys_values_shapes
from kvcache_jax.core.state import AttentionPlan, KVPool
from kvcache_jax.layers.layer_group import LayerGroup


def forward(
    q: jax.Array,
    pool: KVPool,
    weights: Any,
    block_table: jax.Array,
    plan: AttentionPlan,
    group: LayerGroup,
    *,
    layer: jax.Array,
    scale: float,
    soft_cap: float | None,
    sink_logits: jax.Array | None,
    tile_tokens: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the results f32[r, t, h, g, e] and lse f32[r, t, h, g]; see `Backend.decode`."""
    num_queries, num_blocks = q.shape[1], pool.num_rows // group.num_layers
    shape, read = q.shape, keys_values_shapes(pool, group, weights)
    peak = jnp.full_like(q[..., 0], MASKED, jnp.float32)
    if sink_logits is not None:
        peak = peak * 0 + sink_logits[None, None]
    # A layer that does not exist reads NaN.
    is_layer = (layer >= 0) & (layer < group.num_layers)
    is_query = by_head(jnp.broadcast_to(query_mask(plan, q.shape), peak.shape))
    q, peak = by_head(jnp.where(is_layer, q.astype(read.k.dtype), jnp.nan)), by_head(peak)

    def add_tile(state, q, tile):
        peak, total, out = state  # [h, r, m], [h, r, m], [h, r, m, e]
        stored = keys_values_of(group, tile.stored, weights)
        logits = jnp.where(tile.is_seen, scaled_logits(scale, soft_cap, q, stored)[0], MASKED)
        new_peak = jnp.maximum(peak, logits.max(axis=-1))
        # Before a query's first key all of these are 1, and then decay to 0.
        shares = jnp.exp(logits - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        total = total * decay + shares.sum(axis=-1)
        out = out * decay[..., None]
        # What a kind computes of a token that no query sees may be NaN, and a share of 0 would not hide it.
        v = stored.v if group.kind.is_plain else jnp.where(tile.is_held, stored.v, 0)
        is_held = tile.is_held[..., 0]
        if stored.v_offset is not None:
            offset = jnp.where(is_held, stored.v_offset, 0).astype(jnp.float32)
            out += product("hrmn,hrn->hrm", shares, offset)[..., None]
        if stored.v_scale is not None:
            shares = shares * jnp.where(is_held, stored.v_scale, 0)[:, :, None].astype(jnp.float32)
        return new_peak, total, out + product("hrmn,hrne->hrme", shares.astype(v.dtype), v)

    # A sink takes weight and adds no value: the sum begins with its share, exp(sink - peak) = 1.
    total = jnp.zeros_like(peak) if sink_logits is None else jnp.ones_like(peak)
    out = _zeros_of_width(q, read.v.shape[-1])

    def cut(plan: AttentionPlan, rows: int, width: int, tile_tokens: int | None) -> Tiles:
        wide = (rows, width * num_queries, *shape[2:])
        return tiles(pool, block_table, plan, group, layer, num_blocks, wide, tile_tokens)

    state = peak, total, out
    if plan.shared is None:
        state = fold(add_tile, state, q, plan, cut(plan, shape[0], 1, tile_tokens))
    else:
        state = fold_shared(add_tile, state, q, plan, plan.shared, cut, group.block_size)
    peak, total, out = state
    is_empty = (peak <= MASKED) | ~is_query
    total = jnp.where(is_empty, 1, total)
    out = jnp.where(is_empty[..., None], 0, out / total[..., None])
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return by_query(out, num_queries), by_query(lse, num_queries)


def _zeros_of_width(q: jax.Array, width: int) -> jax.Array:
    """Makes zeros f32[h, r, m, width], split over a mesh as `q [h, r, m, d]` is."""
    if width == q.shape[-1]:
        return jnp.zeros_like(q, jnp.float32)
    return jnp.repeat(jnp.zeros_like(q[..., :1], jnp.float32), width, axis=-1)


class Saved(NamedTuple):
    """A pool of its own with the blocks of one layer that the backward pass may read.

    Later layers write elsewhere in the pools, so keeping these blocks is enough. Keeping the pools
    themselves would make every later write copy them.
    """

    rows: jax.Array  # i32[m], where the blocks are in the pools, or past their end
    pool: KVPool  # arrays [m, *shape]
    block_table: jax.Array  # of block ids in this pool
    plan: AttentionPlan  # of rows of this table


def save(
    pool: KVPool, block_table: jax.Array, plan: AttentionPlan, group: LayerGroup, layer: jax.Array
) -> Saved:
    """Keeps the rows' blocks, or the whole layer where that is less (at most one pool over all layers)."""
    num_blocks, num_rows = pool.num_rows // group.num_layers, plan.table_row.shape[0]
    num_entries = num_rows * block_table.shape[-1]
    if num_entries < num_blocks:
        ids = get_at(block_table, plan.table_row, num_blocks).reshape(-1)
        order = jnp.arange(num_entries, dtype=jnp.int32)
        # Each entry has a block of its own here, shared ones too: their gradients add up through `rows`.
        table = jnp.where(ids < num_blocks, order, num_entries).reshape(num_rows, -1)
        table_row = jnp.arange(num_rows, dtype=jnp.int32)
    else:
        ids = jnp.arange(num_blocks, dtype=jnp.int32)
        table, table_row = block_table, plan.table_row
    rows = block_rows(ids, layer, num_blocks, pool.num_rows)
    plan = dataclasses.replace(plan, table_row=table_row, work=(), shared=None)
    return Saved(rows, jax.tree.map(lambda x: get_at(x, rows), pool), table, plan)


def zeros_after(per_head: jax.Array, position: int | None, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Makes zeros when something else has been computed.

    XLA makes constants ahead of the program, for all layers at once, where they would only take memory;
    and it removes barriers before it decides on an order. `per_head` f32[h] is any part of an earlier result,
    split over a mesh as the heads of the zeros, which are at the axis `position`, or None.
    """
    bits = lax.bitcast_convert_type(per_head, jnp.uint32)
    zero = lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(31)), jnp.uint32(1))
    zero = zero.astype(dtype)
    if position is None or shape[position] != zero.shape[0]:
        return jnp.broadcast_to(zero[0], shape)
    per_axis = [zero.shape[0] if axis == position else 1 for axis in range(len(shape))]
    return jnp.broadcast_to(zero.reshape(per_axis), shape)


def backward(
    group: LayerGroup,
    scale: float,
    soft_cap: float | None,
    tile_tokens: int | None,
    saved: Saved,
    q: jax.Array,
    weights: Any,
    sink_logits: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    grads: tuple[KVPool, jax.Array, jax.Array],
) -> tuple[KVPool, jax.Array, Any, jax.Array | None]:
    """Computes the gradients of the pool (which is handed through), `q`, `weights` and `sink_logits`.

    Shares are the forward pass's, and so are the arguments but `saved`, from `save`, and `grads`, of the
    pool, of `out` and of `lse`. The products of gradients are computed in float32.
    """
    pool_grads, grad_out, grad_lse = grads
    num_queries, num_blocks, arrays = q.shape[1], saved.rows.shape[0], dict(group.arrays)
    block_len = run_len(saved.pool, group)
    plan, layer = saved.plan, jnp.int32(0)
    cut = tiles(saved.pool, saved.block_table, plan, group, layer, num_blocks, q.shape, tile_tokens)
    key_dtype = keys_values_shapes(saved.pool, group, weights).k.dtype
    # Padding may hold anything, and 0 * NaN would poison the keys' gradient.
    stored_q = jnp.where(query_mask(plan, q.shape)[..., None], q, 0).astype(key_dtype)
    stored_q, out, lse, grad_out, grad_lse = (
        by_head(x) for x in (stored_q, *(x.astype(jnp.float32) for x in (out, lse, grad_out, grad_lse)))
    )
    q32 = stored_q.astype(jnp.float32)
    # A query that sees no key has no shares: all its gradients are 0, not NaN.
    is_empty = jnp.isneginf(lse)
    safe_lse = jnp.where(is_empty, 0, lse)
    # d logit = share * (d share - delta), with delta the same for all keys of a query.
    delta = jnp.where(is_empty, 0, (grad_out * out).sum(axis=-1) - grad_lse)
    grad_out = jnp.where(is_empty[..., None], 0, grad_out)

    def add_tile(i, state):
        grad_q, grad_weights, sums = state
        tile = cut.load(i, plan)
        rows, is_seen, stored = tile.rows, tile.is_seen, tile.stored
        read = keys_values_of(group, stored, weights)
        # Products of unseen values are masked below; the product of a share of 0 and an unseen key is not.
        read = read._replace(k=jnp.where(tile.is_held, read.k, 0))
        logits, slope = scaled_logits(scale, soft_cap, stored_q, read)
        (k, v), pull = jax.vjp(functools.partial(_meant, group), *_in_float32((stored, weights)))
        k = jnp.where(tile.is_held, k, 0)
        shares = jnp.where(is_seen, jnp.exp(logits - safe_lse[..., None]), 0)
        grad_logits = shares * (product("hrme,hrne->hrmn", grad_out, v) - delta[..., None])
        grad_logits = jnp.where(is_seen, grad_logits * slope * scale, 0)
        grad_q += product("hrmn,hrnd->hrmd", grad_logits, k)
        tile_k = product("hrmn,hrmd->hrnd", grad_logits, q32)
        tile_v = product("hrmn,hrme->hrne", shares, grad_out)
        tile_grads, more = pull((tile_k, tile_v))
        if adds_to_pool:
            rows = get_at(saved.rows, rows, pool_grads.num_rows)
        sums = {
            name: grad.at[rows].add(as_blocks(tile_grads[name], arrays[name], block_len), mode="drop")
            for name, grad in sums.items()
        }
        return grad_q, jax.tree.map(jnp.add, grad_weights, more), sums

    # The gradients of rows that share a block are added up in float32: within the pool, if it has that.
    adds_to_pool = all(grad.dtype == jnp.float32 for grad in pool_grads.arrays.values())
    sums = pool_grads.arrays
    if not adds_to_pool:
        sums = {
            name: zeros_after(grad_out[:, 0, 0, 0], position, saved.pool.arrays[name].shape, jnp.float32)
            for name, position in group.head_positions.items()
        }
    start = jnp.zeros_like(q32), jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), weights), sums
    grad_q, grad_weights, sums = lax.fori_loop(0, common_bound(cut.num_tiles.max()), add_tile, start)
    if not adds_to_pool:
        sums = {
            name: grad.at[saved.rows].add(sums[name].astype(grad.dtype), mode="drop")
            for name, grad in pool_grads.arrays.items()
        }
    grad_weights = jax.tree.map(lambda grad, x: grad.astype(x.dtype), grad_weights, weights)
    grad_sinks = None
    if sink_logits is not None:
        lse, delta = (by_query(x, num_queries) for x in (safe_lse, delta))  # delta is 0 where lse was -inf
        shares = jnp.exp(sink_logits[None, None] - lse)
        grad_sinks = -jnp.sum(shares * delta, axis=(0, 1)).astype(sink_logits.dtype)
    grad_q = by_query(grad_q, num_queries).astype(q.dtype)
    return KVPool(arrays=sums), grad_q, grad_weights, grad_sinks


def _meant(group: LayerGroup, stored: Mapping[str, jax.Array], weights: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the keys and values of a tile with their scales and offsets."""
    return keys_values_of(group, stored, weights).in_float32()


def _in_float32(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
