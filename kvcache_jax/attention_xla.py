"""Paged attention in plain XLA: online softmax over tiles of blocks, forward and backward.

The loop runs as far as the longest row of the step needs, not over the table's width. Rows are
anything that has one position list and one row of the block table: sequences in a padded step,
single tokens in a packed one. Shapes below: `r` rows, `t` queries of a row, `h` key/value heads,
`g` query heads per key/value head, `m = t * g` queries of a row and key/value head, `b` blocks of a
tile, `s` tokens of a block, `n = b * s` keys of a tile, `d` head_dim.

References:
  Online softmax normalizer calculation for softmax (Milakov, Gimelshein; arXiv:1805.02867) and
  FlashAttention-2 (Dao; arXiv:2307.08691) for the recomputing backward pass.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.attention_options import Options
from kvcache_jax.head_axis import for_each_head
from kvcache_jax.indexing import get_at
from kvcache_jax.loops import run_if
from kvcache_jax.queries import Queries, Reads
from kvcache_jax.storage import block_rows

# Bytes of a tile's keys, or of its logits: as much as stays in a core's cache until it was used.
_TILE_BYTES = 2 * 1024 * 1024
_MIN_TILE_TOKENS = 256
_MASKED = -1e30


def _tile(
    options: Options,
    pool: jax.Array,
    block_table: jax.Array,
    layer: jax.Array,
    queries: Queries,
    tile_blocks: int,
    i: jax.Array,
):
    """Tile `i` of every row: pool rows i32[r, b], and which keys each query sees, bool[r, m, n]."""
    block_size = pool.shape[2]
    nth = (i * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32))[None]
    behind_sinks = queries.first_column[:, None] + nth - options.num_sink_blocks
    column = jnp.where(nth < options.num_sink_blocks, nth, behind_sinks)
    is_read = nth < queries.num_columns[:, None]
    block_ids = get_at(block_table, (queries.table_row[:, None], column))
    block_ids = jnp.where(is_read, block_ids, options.num_blocks)
    rows = block_rows(block_ids, layer, options.num_blocks, pool.shape[0])

    def per_key(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, block_size, axis=1)[:, None]

    offset = jnp.tile(jnp.arange(block_size, dtype=jnp.int32), tile_blocks)
    key_pos = per_key(column * block_size) + offset[None, None]
    query_pos = queries.positions[:, :, None]
    is_seen = key_pos <= query_pos
    if options.window is not None:
        is_seen &= (key_pos > query_pos - options.window) | (key_pos < options.num_sink_tokens)
    is_seen &= per_key(block_ids < options.num_blocks) & queries.is_query[:, :, None]
    # Computed once: without the fence XLA computes them again for every value that is read or compared.
    return lax.optimization_barrier((rows, is_seen))


def _tile_blocks(pool: jax.Array, block_table: jax.Array, q: jax.Array) -> int:
    """Blocks of a row in a tile; `q` is [h, r, m, d]."""
    num_heads, num_rows, num_queries, head_dim = q.shape
    token_bytes = 4 * num_rows * num_heads * max(num_queries, head_dim)
    tokens = max(_MIN_TILE_TOKENS, _TILE_BYTES // token_bytes)
    return max(1, min(tokens // pool.shape[2], block_table.shape[-1]))


def _num_tiles(tile_blocks: int, queries: Queries) -> jax.Array:
    return (queries.num_columns.max() + tile_blocks - 1) // tile_blocks


def _load(pool: jax.Array, rows: jax.Array) -> jax.Array:
    """f32[h, r, n, d], a tile of keys or values.

    Slots that nobody owns may hold anything, and rows past the pool's end read some block. Where no query
    looks, `_clean` must follow if the tile is multiplied by weights of 0: 0 * NaN would poison the sum.
    """
    num_heads, block_size, head_dim = pool.shape[1:]
    # A head's part of a block is one run of values, read head by head: no value is moved on its own.
    runs = pool.reshape(-1, num_heads, block_size * head_dim)
    tile = lax.optimization_barrier(jax.vmap(get_at, (1, 0))(runs, for_each_head(rows, pool)))
    tile = tile.reshape(*tile.shape[:3], block_size, head_dim)
    return tile.reshape(num_heads, rows.shape[0], -1, head_dim).astype(jnp.float32)


def _clean(tile: jax.Array, is_seen: jax.Array) -> jax.Array:
    """The tile with 0 where no query looks."""
    is_seen = is_seen.any(axis=1)
    return run_if(~is_seen.all(), lambda tile: jnp.where(is_seen[:, :, None], tile, 0), tile)


def _as_blocks(tile: jax.Array, block_size: int) -> jax.Array:
    """`[h, r, n, d]` as the pool has it, `[r, b, h, s, d]`."""
    num_heads, num_rows, _, head_dim = tile.shape
    return jnp.moveaxis(tile.reshape(num_heads, num_rows, -1, block_size, head_dim), 0, 2)


def _by_head(x: jax.Array) -> jax.Array:
    """`[r, t, h, g, ...]` as `[h, r, m, ...]`."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _by_query(x: jax.Array, num_queries: int) -> jax.Array:
    """The inverse of `_by_head`, for `t = num_queries`."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_queries, -1, *x.shape[3:]), 0, 2)


def _repeated(queries: Queries, group_size: int) -> Queries:
    """The queries of one key/value head: positions i32[r, m] and is_query bool[r, m]."""
    positions, is_query = (jnp.repeat(x, group_size, axis=1) for x in (queries.positions, queries.is_query))
    return queries._replace(positions=positions, is_query=is_query)


def _logits(options: Options, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[h, r, m, n] scaled (and capped) logits, and their derivative by the scaled product."""
    logits = jnp.einsum("hrmd,hrnd->hrmn", q, k) * options.scale
    if options.soft_cap is None:
        return logits, jnp.ones((), jnp.float32)
    capped = jnp.tanh(logits / options.soft_cap)
    return options.soft_cap * capped, 1 - capped * capped


def forward(
    options: Options,
    pools: tuple[jax.Array, jax.Array],
    q: jax.Array,
    sink_logits: jax.Array | None,
    reads: Reads,
) -> tuple[jax.Array, jax.Array]:
    """The results f32[r, t, h, g, d] and lse f32[r, t, h, g]; see `attention_vjp.attend`."""
    (k_pool, v_pool), num_queries = pools, q.shape[1]
    block_table, layer, queries, _ = reads
    queries = _repeated(queries, q.shape[3])
    peak = jnp.full_like(q[..., 0], _MASKED, jnp.float32)
    if sink_logits is not None:
        peak = peak * 0 + sink_logits[None, None]
    # A layer that does not exist reads NaN.
    is_layer = (layer >= 0) & (layer < k_pool.shape[0] // options.num_blocks)
    q, peak = _by_head(jnp.where(is_layer, q.astype(jnp.float32), jnp.nan)), _by_head(peak)
    tile_blocks = _tile_blocks(k_pool, block_table, q)

    def add_tile(i, state):
        peak, total, out = state  # [h, r, m], [h, r, m], [h, r, m, d]
        rows, is_seen = _tile(options, k_pool, block_table, layer, queries, tile_blocks, i)
        logits = jnp.where(is_seen, _logits(options, q, _load(k_pool, rows))[0], _MASKED)
        new_peak = jnp.maximum(peak, logits.max(axis=-1))
        # Before a query's first key all of these are 1, and then decay to 0.
        weights = jnp.exp(logits - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        total = total * decay + weights.sum(axis=-1)
        v = _clean(_load(v_pool, rows), is_seen)
        return new_peak, total, out * decay[..., None] + jnp.einsum("hrmn,hrnd->hrmd", weights, v)

    total = jnp.zeros_like(peak) if sink_logits is None else jnp.ones_like(peak)
    num_tiles = _num_tiles(tile_blocks, queries)
    peak, total, out = lax.fori_loop(0, num_tiles, add_tile, (peak, total, jnp.zeros_like(q)))
    is_empty = (peak <= _MASKED) | ~queries.is_query[None]
    total = jnp.where(is_empty, 1, total)
    out = jnp.where(is_empty[..., None], 0, out / total[..., None])
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return _by_query(out, num_queries), _by_query(lse, num_queries)


class Saved(NamedTuple):
    """What the backward pass reads: a pool of its own with the blocks of one layer that may be read.

    Later layers write elsewhere in the pools, so keeping these blocks is enough. Keeping the pools
    themselves would make every later write copy them.
    """

    rows: jax.Array  # i32[m], where the blocks stand in the pools, or past their end
    k: jax.Array  # [m, h, s, d]
    v: jax.Array
    block_table: jax.Array  # of block ids in this pool
    table_row: jax.Array  # i32[r]


def save(options: Options, pools: tuple[jax.Array, jax.Array], reads: Reads) -> Saved:
    """Keeps the rows' blocks, or the whole layer where that is less (at most one pool over all layers)."""
    block_table, layer, queries, _ = reads
    num_rows = queries.table_row.shape[0]
    num_entries = num_rows * block_table.shape[-1]
    if num_entries < options.num_blocks:
        ids = get_at(block_table, queries.table_row, options.num_blocks).reshape(-1)
        order = jnp.arange(num_entries, dtype=jnp.int32)
        table = jnp.where(ids < options.num_blocks, order, num_entries).reshape(num_rows, -1)
        table_row = jnp.arange(num_rows, dtype=jnp.int32)
    else:
        ids = jnp.arange(options.num_blocks, dtype=jnp.int32)
        table, table_row = block_table, queries.table_row
    rows = block_rows(ids, layer, options.num_blocks, pools[0].shape[0])
    k, v = (get_at(pool, rows) for pool in pools)
    return Saved(rows, k, v, table, table_row)


def zeros_after(per_head: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros that are made when something else has been computed.

    XLA makes constants ahead of the program, those of all layers at once, where they would only lie about;
    and it removes barriers before it decides on an order.

    Args:
      per_head: f32[h], any part of what comes before.
      shape: (n, h, s, d).
      dtype: Of the result.
    """
    bits = lax.bitcast_convert_type(per_head, jnp.uint32)
    zero = lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(31)), jnp.uint32(1))
    return jnp.broadcast_to(zero.astype(dtype)[:, None, None], shape)


def backward(options: Options, saved: Saved, q, sink_logits, queries: Queries, out, lse, grads):
    """The gradients of the pools (which are handed through), of `q` and of `sink_logits`.

    Args:
      options: Static.
      saved: From `save`.
      q: As in the forward pass, like the following.
      sink_logits: Likewise.
      queries: Likewise.
      out: Likewise.
      lse: Likewise.
      grads: Those of the pools handed through, of `out` and of `lse`.
    """
    pool_grads, grad_out, grad_lse = grads
    options = dataclasses.replace(options, num_blocks=saved.rows.shape[0])
    num_queries, block_size = q.shape[1], saved.k.shape[2]
    # Padding may hold anything, and 0 * NaN would poison the keys' gradient.
    q32 = jnp.where(queries.is_query[:, :, None, None, None], q.astype(jnp.float32), 0)
    queries = _repeated(queries._replace(table_row=saved.table_row), q.shape[3])
    q32, out, lse, grad_out, grad_lse = (
        _by_head(x.astype(jnp.float32)) for x in (q32, out, lse, grad_out, grad_lse)
    )
    is_empty = jnp.isneginf(lse)
    safe_lse = jnp.where(is_empty, 0, lse)
    # d logit = weight * (d weight - delta), with delta the same for all keys of a query.
    delta = jnp.where(is_empty, 0, (grad_out * out).sum(axis=-1) - grad_lse)
    grad_out = jnp.where(is_empty[..., None], 0, grad_out)
    tile_blocks = _tile_blocks(saved.k, saved.block_table, q32)

    def add_tile(i, state):
        grad_q, grad_k, grad_v = state
        rows, is_seen = _tile(options, saved.k, saved.block_table, jnp.int32(0), queries, tile_blocks, i)
        k, v = (_clean(_load(pool, rows), is_seen) for pool in (saved.k, saved.v))
        logits, slope = _logits(options, q32, k)
        weights = jnp.where(is_seen, jnp.exp(logits - safe_lse[..., None]), 0)
        grad_logits = weights * (jnp.einsum("hrmd,hrnd->hrmn", grad_out, v) - delta[..., None])
        grad_logits = jnp.where(is_seen, grad_logits * slope * options.scale, 0)
        grad_q += jnp.einsum("hrmn,hrnd->hrmd", grad_logits, k)
        tile_k = jnp.einsum("hrmn,hrmd->hrnd", grad_logits, q32)
        tile_v = jnp.einsum("hrmn,hrmd->hrnd", weights, grad_out)
        if adds_to_pools:
            rows = get_at(saved.rows, rows, pool_grads[0].shape[0])
        grad_k = grad_k.at[rows].add(_as_blocks(tile_k, block_size), mode="drop")
        grad_v = grad_v.at[rows].add(_as_blocks(tile_v, block_size), mode="drop")
        return grad_q, grad_k, grad_v

    # The gradients of rows that share a block are added up in float32: within the pools, if they have it.
    adds_to_pools = pool_grads[0].dtype == jnp.float32
    sums = pool_grads
    if not adds_to_pools:
        start = functools.partial(zeros_after, grad_out[:, 0, 0, 0], dtype=jnp.float32)
        sums = tuple(start(shape=blocks.shape) for blocks in (saved.k, saved.v))
    num_tiles = _num_tiles(tile_blocks, queries)
    grad_q, *sums = lax.fori_loop(0, num_tiles, add_tile, (jnp.zeros_like(q32), *sums))
    if not adds_to_pools:
        sums = [
            grad.at[saved.rows].add(blocks.astype(grad.dtype), mode="drop")
            for grad, blocks in zip(pool_grads, sums, strict=True)
        ]
    grad_sinks = None
    if sink_logits is not None:
        lse, delta = (_by_query(x, num_queries) for x in (safe_lse, delta))  # delta is 0 where lse was -inf
        grad_sinks = -jnp.sum(jnp.exp(sink_logits[None, None] - lse) * delta, axis=(0, 1)).astype(
            sink_logits.dtype
        )
    return tuple(sums), _by_query(grad_q, num_queries).astype(q.dtype), grad_sinks
