"""Paged attention in plain XLA: online softmax over tiles of blocks, forward and backward.

The loop runs as far as the longest row of the step needs, not over the table's width. Rows are
anything that has one position list and one row of the block table: sequences in a padded step,
single tokens in a packed one. Shapes below: `r` rows, `t` queries of a row, `h` key/value heads,
`g` query heads per key/value head, `b` blocks of a tile, `s` tokens of a block, `d` head_dim.

References:
  Online softmax normalizer calculation for softmax (Milakov, Gimelshein; arXiv:1805.02867) and
  FlashAttention-2 (Dao; arXiv:2307.08691) for the recomputing backward pass.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.storage import block_rows

_TILE_TOKENS = 256
_MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of an attention call; see `cache.attention`."""

    scale: float
    soft_cap: float | None
    window: int | None
    num_sink_tokens: int
    num_sink_blocks: int
    num_blocks: int


class Queries(NamedTuple):
    """Who asks, and how far they see.

    Attributes:
      table_row: i32[r], row of the block table.
      first_column: i32[r], see `AttentionPlan`.
      num_columns: i32[r], see `AttentionPlan`; 0 reads nothing.
      positions: i32[r, t], position of each query.
      is_query: bool[r, t], false for padding and failed rows.
    """

    table_row: jax.Array
    first_column: jax.Array
    num_columns: jax.Array
    positions: jax.Array
    is_query: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    options: Options,
    pools: tuple[jax.Array, jax.Array],
    q: jax.Array,
    sink_logits: jax.Array | None,
    block_table: jax.Array,
    layer: jax.Array,
    queries: Queries,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """Attention of `q` over the blocks of one layer.

    The pools are handed through, so that a chain of layers has one chain of gradients, updated in
    place, and not a pool-sized gradient per layer.

    Args:
      options: Static.
      pools: (k, v), `[num_layers * num_blocks, h, s, d]` each.
      q: `[r, t, h, g, d]`.
      sink_logits: f32[h, g] or None.
      block_table: i32[max_seqs, max_blocks_per_seq].
      layer: i32[], index in the group.
      queries: Queries.

    Returns:
      (pools, out f32[r, t, h, g, d], lse f32[r, t, h, g]); out is 0 and lse -inf where nothing is seen.
    """
    return _handed_through(pools, *_forward(options, pools, q, sink_logits, block_table, layer, queries))


def _handed_through(pools, out: jax.Array, lse: jax.Array):
    """Fences the pools behind the reads, so that the next layer's write happens in place."""
    return lax.optimization_barrier((pools, out, lse))


def _tile(
    options: Options,
    pool: jax.Array,
    block_table: jax.Array,
    layer: jax.Array,
    queries: Queries,
    i: jax.Array,
):
    """Tile `i` of every row: pool rows i32[r, b], and which keys each query sees, bool[r, b, t, s]."""
    block_size = pool.shape[2]
    nth = i * _tile_blocks(pool, block_table) + jnp.arange(_tile_blocks(pool, block_table), dtype=jnp.int32)
    behind_sinks = queries.first_column[:, None] + nth - options.num_sink_blocks
    column = jnp.where(nth < options.num_sink_blocks, nth, behind_sinks)
    is_read = nth < queries.num_columns[:, None]
    block_ids = block_table.at[queries.table_row[:, None], column].get(
        mode="fill", fill_value=options.num_blocks
    )
    block_ids = jnp.where(is_read, block_ids, options.num_blocks)
    rows = block_rows(block_ids, layer, options.num_blocks, pool.shape[0])

    key_pos = (column[:, :, None] * block_size + jnp.arange(block_size, dtype=jnp.int32))[:, :, None, :]
    query_pos = queries.positions[:, None, :, None]
    is_seen = key_pos <= query_pos
    if options.window is not None:
        is_seen &= (key_pos > query_pos - options.window) | (key_pos < options.num_sink_tokens)
    is_seen &= (block_ids < options.num_blocks)[:, :, None, None] & queries.is_query[:, None, :, None]
    return rows, is_seen


def _tile_blocks(pool: jax.Array, block_table: jax.Array) -> int:
    return max(1, min(_TILE_TOKENS // pool.shape[2], block_table.shape[-1]))


def _num_tiles(pool: jax.Array, block_table: jax.Array, queries: Queries) -> jax.Array:
    tile_blocks = _tile_blocks(pool, block_table)
    return (queries.num_columns.max() + tile_blocks - 1) // tile_blocks


def _load(pool: jax.Array, rows: jax.Array, is_seen: jax.Array) -> jax.Array:
    """f32[r, b, h, s, d], a tile of keys or values; 0 where no query looks.

    Slots that nobody owns may hold anything: 0 * NaN would poison a sum even at weight 0. A layer
    that does not exist reads NaN.
    """
    is_read = is_seen.any(axis=2)[:, :, None, :, None]
    tile = pool.at[rows].get(mode="fill", fill_value=jnp.nan)
    return jnp.where(is_read, tile, jnp.zeros((), tile.dtype)).astype(jnp.float32)


def _logits(options: Options, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[r, b, h, g, t, s] scaled (and capped) logits, and their derivative by the scaled product."""
    logits = jnp.einsum("rthgd,rbhsd->rbhgts", q, k) * options.scale
    if options.soft_cap is None:
        return logits, jnp.ones((), jnp.float32)
    capped = jnp.tanh(logits / options.soft_cap)
    return options.soft_cap * capped, 1 - capped * capped


def _forward(options, pools, q, sink_logits, block_table, layer, queries):
    k_pool, v_pool = pools
    q = q.astype(jnp.float32)

    def add_tile(i, state):
        peak, total, out = state  # [r, t, h, g], [r, t, h, g], [r, t, h, g, d]
        rows, is_seen = _tile(options, k_pool, block_table, layer, queries, i)
        mask = is_seen[:, :, None, None]
        logits = jnp.where(mask, _logits(options, q, _load(k_pool, rows, is_seen))[0], _MASKED)
        new_peak = jnp.maximum(peak, jnp.moveaxis(logits.max(axis=(1, 5)), 3, 1))
        weights = jnp.where(mask, jnp.exp(logits - jnp.moveaxis(new_peak, 1, 3)[:, None, ..., None]), 0)
        decay = jnp.exp(peak - new_peak)
        total = total * decay + jnp.moveaxis(weights.sum(axis=(1, 5)), 3, 1)
        update = jnp.einsum("rbhgts,rbhsd->rthgd", weights, _load(v_pool, rows, is_seen))
        return new_peak, total, out * decay[..., None] + update

    peak = jnp.full_like(q[..., 0], _MASKED)
    if sink_logits is not None:
        peak = peak * 0 + sink_logits
    total = jnp.zeros_like(peak) if sink_logits is None else jnp.ones_like(peak)
    num_tiles = _num_tiles(k_pool, block_table, queries)
    peak, total, out = lax.fori_loop(0, num_tiles, add_tile, (peak, total, jnp.zeros_like(q)))
    is_empty = (total == 0) | ~queries.is_query[:, :, None, None]
    total = jnp.where(is_empty, 1, total)
    out = jnp.where(is_empty[..., None], 0, out / total[..., None])
    return out, jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))


class _Saved(NamedTuple):
    """What the backward pass reads: a pool of its own with the blocks of one layer that may be read.

    Later layers write elsewhere in the pools, so keeping these blocks is enough. Keeping the pools
    themselves would make every later write copy them.
    """

    rows: jax.Array  # i32[m], where the blocks stand in the pools, or past their end
    k: jax.Array  # [m, h, s, d]
    v: jax.Array
    block_table: jax.Array  # of block ids in this pool
    table_row: jax.Array  # i32[r]


def _save(options: Options, pools, block_table: jax.Array, layer: jax.Array, queries: Queries) -> _Saved:
    """Keeps the rows' blocks, or the whole layer where that is less (at most one pool over all layers)."""
    num_rows = queries.table_row.shape[0]
    num_entries = num_rows * block_table.shape[-1]
    if num_entries < options.num_blocks:
        ids = block_table.at[queries.table_row].get(mode="fill", fill_value=options.num_blocks).reshape(-1)
        order = jnp.arange(num_entries, dtype=jnp.int32)
        table = jnp.where(ids < options.num_blocks, order, num_entries).reshape(num_rows, -1)
        table_row = jnp.arange(num_rows, dtype=jnp.int32)
    else:
        ids = jnp.arange(options.num_blocks, dtype=jnp.int32)
        table, table_row = block_table, queries.table_row
    rows = block_rows(ids, layer, options.num_blocks, pools[0].shape[0])
    k, v = (pool.at[rows].get(mode="clip") for pool in pools)
    return _Saved(rows, k, v, table, table_row)


def _attend_fwd(options, pools, q, sink_logits, block_table, layer, queries):
    out, lse = _forward(options, pools, q, sink_logits, block_table, layer, queries)
    saved = _save(options, pools, block_table, layer, queries)
    return _handed_through(pools, out, lse), (saved, q, sink_logits, queries, out, lse)


def _attend_bwd(options, residuals, grads):
    saved, q, sink_logits, queries, out, lse = residuals
    pool_grads, grad_out, grad_lse = grads
    options = dataclasses.replace(options, num_blocks=saved.rows.shape[0])
    queries = queries._replace(table_row=saved.table_row)
    q32 = q.astype(jnp.float32)
    is_empty = jnp.isneginf(lse)
    safe_lse = jnp.where(is_empty, 0, lse)
    # d logit = weight * (d weight - delta), with delta the same for all keys of a query.
    delta = jnp.where(is_empty, 0, jnp.einsum("rthgd,rthgd->rthg", grad_out, out) - grad_lse)
    grad_out = jnp.where(is_empty[..., None], 0, grad_out)

    def add_tile(i, state):
        grad_q, grad_k, grad_v = state
        rows, is_seen = _tile(options, saved.k, saved.block_table, jnp.int32(0), queries, i)
        mask = is_seen[:, :, None, None]
        k, v = _load(saved.k, rows, is_seen), _load(saved.v, rows, is_seen)
        logits, slope = _logits(options, q32, k)
        weights = jnp.where(mask, jnp.exp(logits - jnp.moveaxis(safe_lse, 1, 3)[:, None, ..., None]), 0)
        grad_weights = jnp.einsum("rthgd,rbhsd->rbhgts", grad_out, v)
        grad_logits = weights * (grad_weights - jnp.moveaxis(delta, 1, 3)[:, None, ..., None])
        grad_logits = jnp.where(mask, grad_logits * slope * options.scale, 0)
        grad_q += jnp.einsum("rbhgts,rbhsd->rthgd", grad_logits, k)
        grad_k = grad_k.at[rows].add(jnp.einsum("rbhgts,rthgd->rbhsd", grad_logits, q32), mode="drop")
        grad_v = grad_v.at[rows].add(jnp.einsum("rbhgts,rthgd->rbhsd", weights, grad_out), mode="drop")
        return grad_q, grad_k, grad_v

    no_grads = tuple(jnp.zeros_like(blocks, jnp.float32) for blocks in (saved.k, saved.v))
    num_tiles = _num_tiles(saved.k, saved.block_table, queries)
    grad_q, *block_grads = lax.fori_loop(0, num_tiles, add_tile, (jnp.zeros_like(q32), *no_grads))
    pool_grads = tuple(
        grad.at[saved.rows].add(blocks.astype(grad.dtype), mode="drop")
        for grad, blocks in zip(pool_grads, block_grads, strict=True)
    )
    grad_sinks = None
    if sink_logits is not None:
        sink_weights = jnp.where(is_empty, 0, jnp.exp(sink_logits - safe_lse))
        grad_sinks = -jnp.sum(sink_weights * delta, axis=(0, 1)).astype(sink_logits.dtype)
    return pool_grads, grad_q.astype(q.dtype), grad_sinks, None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)
