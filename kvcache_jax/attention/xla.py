"""Paged attention in plain XLA: online softmax over tiles of blocks, forward and backward.

One loop, which runs as far as the longest row of the step needs, not over the table's width. Products are
computed in the dtype that keys and values are stored in, and added up in float32. Shapes below: `r` rows of
the `AttentionPlan`, `t` queries of a row, `h` key/value heads, `g` query heads per key/value head,
`m = t * g` queries of a row and key/value head, `b` blocks of a tile, `s` tokens of a block, `n = b * s` keys
of a tile, `d` the width of a key, `e` that of a value. Stored blocks become keys and values tile by tile, by
the layer kind's `keys_values`; its scales are applied to logits and weights.

References:
  Online softmax normalizer calculation for softmax (Milakov, Gimelshein; arXiv:1805.02867) and
  FlashAttention-2 (Dao; arXiv:2307.08691) for the recomputing backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.blocks.storage import block_rows, keys_values_of, keys_values_shapes, load_blocks
from kvcache_jax.core.backends import target_device
from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.layer_kinds.block_array import BlockArray
from kvcache_jax.core.state import AttentionPlan, KVPool

# On an accelerator the host waits for every trip of a loop: few trips, as far as memory allows.
_TILE_TOKENS = 2048
_TILE_BYTES = 256 * 1024 * 1024
# On a CPU, bytes of a tile's keys or of its logits: as much as stays in a core's cache until it was used.
_CPU_TILE_BYTES = 2 * 1024 * 1024
_MIN_TILE_TOKENS = 256
_MASKED = -1e30


class Tile(NamedTuple):
    """A run of blocks of every row.

    Attributes:
      rows: i32[r, b], where the blocks stand in the pool, or past its end.
      stored: By name `[h', r, n, ...]`, the blocks' arrays; see `load_blocks`.
      is_held: bool[1, r, n, 1], some query of the row sees the key. Others may be NaN, and 0 * NaN is NaN.
      is_seen: bool[1, r, m, n], the query sees the key.
    """

    rows: jax.Array
    stored: dict[str, jax.Array]
    is_held: jax.Array
    is_seen: jax.Array


def _tiles(
    pool: KVPool,
    block_table: jax.Array,
    plan: AttentionPlan,
    group: LayerGroup,
    layer: jax.Array,
    num_blocks: int,
    q_shape: tuple[int, ...],
    tile_tokens: int | None,
) -> tuple[jax.Array, Callable[[jax.Array], Tile]]:
    """Cuts what is read into tiles: their number, and the function that loads the one of an index."""
    num_queries, group_size, block_size = q_shape[1], q_shape[3], group.block_size
    tokens = tile_tokens or _default_tile_tokens(group, q_shape)
    tile_blocks = max(1, min(tokens // block_size, block_table.shape[-1]))
    num_tiles = (plan.num_columns.max() + tile_blocks - 1) // tile_blocks
    query = jnp.repeat(jnp.arange(num_queries, dtype=jnp.int32), group_size)[None, :, None]
    first, num_rows_queries = plan.first_position[:, None, None], plan.num_queries[:, None, None]
    last, position, is_query = first + num_rows_queries - 1, first + query, query < num_rows_queries
    offset = jnp.tile(jnp.arange(block_size, dtype=jnp.int32), tile_blocks)[None]

    def sees(first: jax.Array, last: jax.Array, key_pos: jax.Array) -> jax.Array:
        """Tells which keys any of the queries at positions `first` to `last` sees."""
        if plan.num_keys is not None:
            return key_pos < plan.num_keys[:, None, None]
        if plan.holes is None:
            return group.span.sees(first, last, key_pos)
        # Distances are those of the text, of what is still there.
        first, last, in_text = (plan.holes.positions(place) for place in (first, last, key_pos))
        seen = group.span.sees(first, last, in_text) & ~plan.holes.is_hidden(key_pos)
        return seen if plan.within is None else seen & plan.within.sees(first, last, in_text)

    def load(i: jax.Array) -> Tile:
        nth = (i * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32))[None]
        behind_sinks = plan.first_column[:, None] + nth - group.num_sink_blocks
        column = jnp.where(nth < group.num_sink_blocks, nth, behind_sinks)
        is_read = nth < plan.num_columns[:, None]
        block_ids = get_at(block_table, (plan.table_row[:, None], column))
        block_ids = jnp.where(is_read, block_ids, num_blocks)
        rows = block_rows(block_ids, layer, num_blocks, pool.num_rows)

        def per_key(values: jax.Array) -> jax.Array:
            return jnp.repeat(values, block_size, axis=1)

        key_pos, is_stored = per_key(column * block_size) + offset, per_key(block_ids < num_blocks)
        is_held = sees(first, last, key_pos[:, :, None]) & is_stored[:, :, None]
        is_seen = sees(position, position, key_pos[:, None]) & is_stored[:, None] & is_query
        # Computed once: without the fence XLA computes them again for every value that is read or compared.
        rows, is_held, is_seen = lax.optimization_barrier((rows, is_held, is_seen))
        return Tile(rows, load_blocks(pool, group, rows), is_held[None], is_seen[None])

    return num_tiles, load


def _default_tile_tokens(group: LayerGroup, q_shape: tuple[int, ...]) -> int:
    """Chooses the tokens of a row in a tile, by the platform that the program is for."""
    num_rows, num_queries, num_heads, group_size, key_dim = q_shape
    num_logits, itemsize = num_queries * group_size, jnp.dtype(group.kind.dtype).itemsize
    token_bytes = num_rows * num_heads * max(4 * num_logits, itemsize * key_dim)
    if target_device().platform == "cpu":
        return max(_MIN_TILE_TOKENS, _CPU_TILE_BYTES // token_bytes)
    return max(_MIN_TILE_TOKENS, min(_TILE_TOKENS, _TILE_BYTES // token_bytes))


def _as_blocks(tile: jax.Array, array: BlockArray, block_size: int) -> jax.Array:
    """Turns a tile `[h', r, n, ...]` into blocks as the pool has them, `[r, b, *array.shape]`."""
    num_heads, num_rows = tile.shape[:2]
    tile = tile.reshape(num_heads, num_rows, -1, block_size, *tile.shape[3:])
    if array.head_axis is None:
        return jnp.moveaxis(tile[0], 2, 2 + array.token_axis)
    return jnp.moveaxis(tile, (0, 3), (2 + array.head_axis, 2 + array.token_axis))


def _by_head(x: jax.Array) -> jax.Array:
    """Turns `[r, t, h, g, ...]` into `[h, r, m, ...]`."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _by_query(x: jax.Array, num_queries: int) -> jax.Array:
    """Computes the inverse of `_by_head`, for `t = num_queries`."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_queries, -1, *x.shape[3:]), 0, 2)


def _is_query(plan: AttentionPlan, q_shape: tuple[int, ...]) -> jax.Array:
    """Tells queries from padding and failed rows, bool[r, t, 1, 1]."""
    is_query = jnp.arange(q_shape[1], dtype=jnp.int32)[None] < plan.num_queries[:, None]
    return is_query[:, :, None, None]


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` of two arrays of one dtype, added up in float32; rounds no float32 first."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _logits(
    scale: float, soft_cap: float | None, q: jax.Array, k: jax.Array, k_scale: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Computes scaled (and capped) logits f32[h, r, m, n], and their derivative by the scaled product."""
    logits = _product("hrmd,hrnd->hrmn", q, k) * scale
    if k_scale is not None:
        logits *= k_scale[:, :, None].astype(jnp.float32)
    if soft_cap is None:
        return logits, jnp.ones((), jnp.float32)
    capped = jnp.tanh(logits / soft_cap)
    return soft_cap * capped, 1 - capped * capped


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
    num_tiles, load = _tiles(pool, block_table, plan, group, layer, num_blocks, q.shape, tile_tokens)
    read = keys_values_shapes(pool, group, weights)
    peak = jnp.full_like(q[..., 0], _MASKED, jnp.float32)
    if sink_logits is not None:
        peak = peak * 0 + sink_logits[None, None]
    # A layer that does not exist reads NaN.
    is_layer = (layer >= 0) & (layer < group.num_layers)
    is_query = _by_head(jnp.broadcast_to(_is_query(plan, q.shape), peak.shape))
    q, peak = _by_head(jnp.where(is_layer, q.astype(read.k.dtype), jnp.nan)), _by_head(peak)

    def add_tile(i, state):
        peak, total, out = state  # [h, r, m], [h, r, m], [h, r, m, e]
        tile = load(i)
        k, v, k_scale, v_scale = keys_values_of(group, tile.stored, weights)
        logits = jnp.where(tile.is_seen, _logits(scale, soft_cap, q, k, k_scale)[0], _MASKED)
        new_peak = jnp.maximum(peak, logits.max(axis=-1))
        # Before a query's first key all of these are 1, and then decay to 0.
        shares = jnp.exp(logits - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        total = total * decay + shares.sum(axis=-1)
        v = jnp.where(tile.is_held, v, 0)
        if v_scale is not None:
            shares = shares * jnp.where(tile.is_held[..., 0], v_scale, 0)[:, :, None].astype(jnp.float32)
        added = _product("hrmn,hrne->hrme", shares.astype(v.dtype), v)
        return new_peak, total, out * decay[..., None] + added

    total = jnp.zeros_like(peak) if sink_logits is None else jnp.ones_like(peak)
    out = _zeros_of_width(q, read.v.shape[-1])
    peak, total, out = lax.fori_loop(0, num_tiles, add_tile, (peak, total, out))
    is_empty = (peak <= _MASKED) | ~is_query
    total = jnp.where(is_empty, 1, total)
    out = jnp.where(is_empty[..., None], 0, out / total[..., None])
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return _by_query(out, num_queries), _by_query(lse, num_queries)


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

    rows: jax.Array  # i32[m], where the blocks stand in the pools, or past their end
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
        table = jnp.where(ids < num_blocks, order, num_entries).reshape(num_rows, -1)
        table_row = jnp.arange(num_rows, dtype=jnp.int32)
    else:
        ids = jnp.arange(num_blocks, dtype=jnp.int32)
        table, table_row = block_table, plan.table_row
    rows = block_rows(ids, layer, num_blocks, pool.num_rows)
    plan = dataclasses.replace(plan, table_row=table_row, work=())
    return Saved(rows, jax.tree.map(lambda x: get_at(x, rows), pool), table, plan)


def zeros_after(per_head: jax.Array, position: int | None, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Makes zeros when something else has been computed.

    XLA makes constants ahead of the program, those of all layers at once, where they would only lie about;
    and it removes barriers before it decides on an order.

    Args:
      per_head: f32[h], any part of what comes before; split over a mesh as the heads of the result.
      position: Axis of the `h` heads in the result; None for none.
      shape: Of the result.
      dtype: Of the result.
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

    Shares are those of the forward pass; the products of gradients are computed in float32.

    Args:
      group: Static, like the next three.
      scale: See `Backend.decode`.
      soft_cap: Likewise.
      tile_tokens: See `CacheConfig`.
      saved: From `save`.
      q: As in the forward pass, like the following.
      weights: Likewise.
      sink_logits: Likewise.
      out: Likewise.
      lse: Likewise.
      grads: Those of the pool handed through, of `out` and of `lse`.
    """
    pool_grads, grad_out, grad_lse = grads
    num_queries, num_blocks, arrays = q.shape[1], saved.rows.shape[0], dict(group.arrays)
    plan, layer = saved.plan, jnp.int32(0)
    num_tiles, load = _tiles(
        saved.pool, saved.block_table, plan, group, layer, num_blocks, q.shape, tile_tokens
    )
    key_dtype = keys_values_shapes(saved.pool, group, weights).k.dtype
    # Padding may hold anything, and 0 * NaN would poison the keys' gradient.
    stored_q = jnp.where(_is_query(plan, q.shape)[..., None], q, 0).astype(key_dtype)
    stored_q, out, lse, grad_out, grad_lse = (
        _by_head(x) for x in (stored_q, *(x.astype(jnp.float32) for x in (out, lse, grad_out, grad_lse)))
    )
    q32 = stored_q.astype(jnp.float32)
    is_empty = jnp.isneginf(lse)
    safe_lse = jnp.where(is_empty, 0, lse)
    # d logit = share * (d share - delta), with delta the same for all keys of a query.
    delta = jnp.where(is_empty, 0, (grad_out * out).sum(axis=-1) - grad_lse)
    grad_out = jnp.where(is_empty[..., None], 0, grad_out)

    def add_tile(i, state):
        grad_q, grad_weights, sums = state
        tile = load(i)
        rows, is_seen, stored = tile.rows, tile.is_seen, tile.stored
        if weights is not None:  # of which each gets something from every token: 0 * NaN again
            stored = {name: _where_held(tile.is_held, values) for name, values in stored.items()}
        k, _, k_scale, _ = keys_values_of(group, stored, weights)
        # What unseen values give is masked below; the product of a share of 0 and an unseen key is not.
        k = jnp.where(tile.is_held, k, 0)
        logits, slope = _logits(scale, soft_cap, stored_q, k, k_scale)
        (k, v), pull = jax.vjp(functools.partial(_scaled, group), *_in_float32((stored, weights)))
        k = jnp.where(tile.is_held, k, 0)
        shares = jnp.where(is_seen, jnp.exp(logits - safe_lse[..., None]), 0)
        grad_logits = shares * (_product("hrme,hrne->hrmn", grad_out, v) - delta[..., None])
        grad_logits = jnp.where(is_seen, grad_logits * slope * scale, 0)
        grad_q += _product("hrmn,hrnd->hrmd", grad_logits, k)
        tile_k = _product("hrmn,hrmd->hrnd", grad_logits, q32)
        tile_v = _product("hrmn,hrme->hrne", shares, grad_out)
        tile_grads, more = pull((tile_k, tile_v))
        if adds_to_pool:
            rows = get_at(saved.rows, rows, pool_grads.num_rows)
        sums = {
            name: grad.at[rows].add(_as_blocks(tile_grads[name], arrays[name], group.block_size), mode="drop")
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
    grad_q, grad_weights, sums = lax.fori_loop(0, num_tiles, add_tile, start)
    if not adds_to_pool:
        sums = {
            name: grad.at[saved.rows].add(sums[name].astype(grad.dtype), mode="drop")
            for name, grad in pool_grads.arrays.items()
        }
    grad_weights = jax.tree.map(lambda grad, x: grad.astype(x.dtype), grad_weights, weights)
    grad_sinks = None
    if sink_logits is not None:
        lse, delta = (_by_query(x, num_queries) for x in (safe_lse, delta))  # delta is 0 where lse was -inf
        shares = jnp.exp(sink_logits[None, None] - lse)
        grad_sinks = -jnp.sum(shares * delta, axis=(0, 1)).astype(sink_logits.dtype)
    grad_q = _by_query(grad_q, num_queries).astype(q.dtype)
    return KVPool(arrays=sums), grad_q, grad_weights, grad_sinks


def _scaled(group: LayerGroup, stored: Mapping[str, jax.Array], weights: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the keys and values of a tile with their scales multiplied in."""
    k, v, k_scale, v_scale = keys_values_of(group, stored, weights)
    k = k if k_scale is None else k * k_scale[..., None]
    return k, v if v_scale is None else v * v_scale[..., None]


def _in_float32(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), arrays)


def _where_held(is_held: jax.Array, values: jax.Array) -> jax.Array:
    """Puts zeros in place of the tokens of `values [h', r, n, ...]` that no query sees.

    Args:
      is_held: bool[1, r, n, 1], some query of the row sees the token.
      values: Of a tile.
    """
    is_held = is_held.reshape(*is_held.shape[:3], *[1] * (values.ndim - 3))
    return jnp.where(is_held, values, 0)
