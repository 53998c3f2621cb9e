"""The tiles in which attention reads stored blocks: their keys, the queries that see them, the logits.

Shapes: `r` rows of the `AttentionPlan`, `t` queries of a row, `h` key/value heads, `g` query heads per
key/value head, `m = t * g` queries of a row and key/value head, `b` blocks of a tile, `s` tokens of a block,
`n = b * s` keys of a tile, `d` the width of a key.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.attention.attention_plan import last_position
from kvcache_jax.blocks.split_blocks import run_len
from kvcache_jax.blocks.storage import block_rows, load_blocks
from kvcache_jax.core.backends import target_device
from kvcache_jax.core.state import AttentionPlan, KVPool
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.layer_kind import KeysValues

# On an accelerator the host waits for every trip of a loop: few trips, as far as memory allows.
_TILE_TOKENS = 2048
_TILE_BYTES = 256 * 1024 * 1024
# On a CPU, bytes of a trip's keys or of its logits: as much as stays in a core's cache until it was used.
_CPU_TILE_BYTES = 512 * 1024
MIN_TILE_TOKENS = 256
MASKED = -1e30


class Tile(NamedTuple):
    """A run of blocks of each of some rows."""

    rows: jax.Array  # i32[r, b], where the blocks are in the pool, or past its end
    stored: dict[str, jax.Array]  # by name `[h', r, n, ...]`, see `load_blocks`; 0 for keys that are not held
    # bool[1, r, n, 1], some query of the row sees the key. A kind may give NaN for others: 0 * NaN is NaN.
    is_held: jax.Array
    is_seen: jax.Array  # bool[1, r, m, n], the query sees the key


class Tiles(NamedTuple):
    """The tiles of a call."""

    num_tiles: jax.Array  # i32[r], of each row
    tile_len: int  # tokens of a row in a tile (static)
    num_lanes: int  # rows whose tiles are read at a time (static)
    # Reads the tile of an index i32[] of the rows of a plan, or of an index of each, i32[r].
    load: Callable[[jax.Array, AttentionPlan], Tile]


def tiles(
    pool: KVPool,
    block_table: jax.Array,
    plan: AttentionPlan,
    group: LayerGroup,
    layer: jax.Array,
    num_blocks: int,
    q_shape: tuple[int, ...],
    tile_tokens: int | None,
) -> Tiles:
    """Cuts the blocks that a plan's queries, of shape `q_shape` = `[r, t, h, g, d]`, read into tiles."""
    num_queries, group_size, block_len = q_shape[1], q_shape[3], run_len(pool, group)
    tokens, num_lanes = _sizes(group, q_shape, tile_tokens)
    tile_blocks = max(1, min(tokens // block_len, block_table.shape[-1]))
    num_tiles = (plan.num_columns + tile_blocks - 1) // tile_blocks
    query = jnp.repeat(jnp.arange(num_queries, dtype=jnp.int32), group_size)[None, :, None]
    offset = jnp.tile(jnp.arange(block_len, dtype=jnp.int32), tile_blocks)[None]

    def sees(plan: AttentionPlan, first: jax.Array, last: jax.Array, key_pos: jax.Array) -> jax.Array:
        """Masks the keys that any of the queries at positions `first` to `last` sees."""
        if plan.num_keys is not None:
            return key_pos < plan.num_keys[:, None, None]
        if plan.holes is None:
            return group.span.sees(first, last, key_pos)
        # Windows count distances in the text: dropped tokens still lie between a query and earlier keys.
        first, last, in_text = (plan.holes.positions(place) for place in (first, last, key_pos))
        seen = group.span.sees(first, last, in_text) & ~plan.holes.is_hidden(key_pos)
        return seen if plan.within is None else seen & plan.within.sees(first, last, in_text)

    def load(i: jax.Array, plan: AttentionPlan) -> Tile:
        first, num_rows_queries = plan.first_position[:, None, None], plan.num_queries[:, None, None]
        position, is_query = first + query, query < num_rows_queries
        if plan.positions is not None:
            position = jnp.repeat(plan.positions, group_size, axis=1)[:, :, None]
        last = last_position(plan.first_position, plan.num_queries, plan.positions)[:, None, None]
        nth = jnp.reshape(i, (-1, 1)) * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)[None]
        behind_sinks = plan.first_column[:, None] + nth - group.num_sink_blocks
        column = jnp.where(nth < group.num_sink_blocks, nth, behind_sinks)
        is_read = nth < plan.num_columns[:, None]
        block_ids = get_at(block_table, (plan.table_row[:, None], column))
        block_ids = jnp.where(is_read, block_ids, num_blocks)
        rows = block_rows(block_ids, layer, num_blocks, pool.num_rows)

        def per_key(values: jax.Array) -> jax.Array:
            return jnp.repeat(values, block_len, axis=1)

        key_pos, is_stored = per_key(column * group.block_size) + offset, per_key(block_ids < num_blocks)
        if plan.first_offset is not None:
            key_pos += plan.first_offset[:, None]
        is_held = sees(plan, first, last, key_pos[:, :, None]) & is_stored[:, :, None]
        is_seen = sees(plan, position, position, key_pos[:, None]) & is_stored[:, None] & is_query
        # Computed once: without the fence XLA computes them again for every value that is read or compared.
        rows, is_held, is_seen = lax.optimization_barrier((rows, is_held, is_seen))
        return Tile(rows, load_blocks(pool, group, rows, is_held[:, :, 0]), is_held[None], is_seen[None])

    return Tiles(num_tiles, tile_blocks * block_len, num_lanes, load)


def _sizes(group: LayerGroup, q_shape: tuple[int, ...], tile_tokens: int | None) -> tuple[int, int]:
    """Chooses the tokens of a row in a tile, and the rows of a trip, for the program's platform."""
    num_rows, num_queries, num_heads, group_size, key_dim = q_shape
    num_logits, itemsize = num_queries * group_size, jnp.dtype(group.kind.dtype).itemsize
    token_bytes = num_heads * max(4 * num_logits, itemsize * key_dim)
    if target_device().platform != "cpu":
        most = min(_TILE_TOKENS, _TILE_BYTES // (num_rows * token_bytes))
        return tile_tokens or max(MIN_TILE_TOKENS, most), num_rows
    tokens = tile_tokens or max(MIN_TILE_TOKENS, _CPU_TILE_BYTES // (num_rows * token_bytes))
    return tokens, min(num_rows, max(1, _CPU_TILE_BYTES // (tokens * token_bytes)))


def by_head(x: jax.Array) -> jax.Array:
    """Turns `[r, t, h, g, ...]` into `[h, r, m, ...]`."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def by_query(x: jax.Array, num_queries: int) -> jax.Array:
    """Computes the inverse of `by_head`, for `t = num_queries`."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_queries, -1, *x.shape[3:]), 0, 2)


def query_mask(plan: AttentionPlan, q_shape: tuple[int, ...]) -> jax.Array:
    """Masks the queries that are neither padding nor of failed rows, bool[r, t, 1, 1]."""
    is_query = jnp.arange(q_shape[1], dtype=jnp.int32)[None] < plan.num_queries[:, None]
    return is_query[:, :, None, None]


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` of two arrays of one dtype, added up in float32; rounds no float32 first."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def scaled_logits(
    scale: float, soft_cap: float | None, q: jax.Array, read: KeysValues
) -> tuple[jax.Array, jax.Array]:
    """Computes scaled (and capped) logits f32[h, r, m, n], and their derivative by the scaled product."""
    logits = product("hrmd,hrnd->hrmn", q, read.k) * scale
    if read.k_scale is not None:
        logits *= read.k_scale[:, :, None].astype(jnp.float32)
    if read.k_offset is not None:
        sums = q.astype(jnp.float32).sum(axis=-1, keepdims=True) * scale
        logits += sums * read.k_offset[:, :, None].astype(jnp.float32)
    if soft_cap is None:
        return logits, jnp.ones((), jnp.float32)
    capped = jnp.tanh(logits / soft_cap)
    return soft_cap * capped, 1 - capped * capped
