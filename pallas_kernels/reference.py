"""What each kernel computes, in plain jnp and float32: slow, obvious, the judge of the kernels.

Pools are `[num_layers * num_blocks, num_kv_heads, block_size, head_dim]`, layer after layer.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.eight_bits import Scaling, meant


def paged_decode(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    rows: DecodeRows,
    options: DecodeOptions,
    *,
    layer: jax.Array | int = 0,
    sink_logits: jax.Array | None = None,
    scaling: Scaling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries over the blocks of one layer, of few per row as a decode has them, or of many.

    Args:
      q: `[r, t, h, g, d]`: rows, queries of a row, key/value heads, query heads of each, head_dim.
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      block_table: i32[max_rows, columns] of block ids within a layer; what a row does not read is arbitrary.
      rows: Who asks, and which columns are read.
      options: Static.
      layer: i32[].
      sink_logits: f32[h, g], a logit per head that takes weight and adds nothing; or None.
      scaling: Beside pools of 8 bits.

    Returns:
      out f32[r, t, h, g, d] and the log of the sum of exponentials (sink included) f32[r, t, h, g]; 0 and
      -inf where nothing is seen.
    """
    num_rows, num_queries = q.shape[:2]
    block_size = k_pool.shape[2]
    nth = jnp.arange(block_table.shape[1])[None]
    sinks = options.num_sink_blocks(block_size)
    column = jnp.where(nth < sinks, nth, rows.first_column[:, None] + nth - sinks)  # [r, c]
    is_read = nth < rows.num_columns[:, None]
    block = block_table.at[rows.table_row[:, None], column].get(mode="clip")
    block = jnp.where(is_read, layer * options.num_blocks + block, 0)
    of_keys, of_values = ((), ()) if scaling is None else (scaling.of_keys(), scaling.of_values())

    def keys_of(pool: jax.Array, beside: tuple[jax.Array, ...]) -> jax.Array:
        """f32[r, h, n, d] of the columns that the row reads, else 0."""
        blocks = pool[block] if scaling is None else meant(pool[block], *(array[block] for array in beside))
        blocks = jnp.where(is_read[:, :, None, None, None], blocks, 0).astype(jnp.float32)
        return blocks.swapaxes(1, 2).reshape(num_rows, pool.shape[1], -1, pool.shape[3])

    key_pos = (column[:, :, None] * block_size + jnp.arange(block_size)[None, None]).reshape(num_rows, 1, -1)
    query_pos = (rows.first_position[:, None] + jnp.arange(num_queries)[None])[:, :, None]
    is_seen = (key_pos <= query_pos) & jnp.repeat(is_read, block_size, axis=1)[:, None]
    if options.window is not None:
        is_seen &= (key_pos > query_pos - options.window) | (key_pos < options.num_sink_tokens)
    is_seen &= (jnp.arange(num_queries)[None] < rows.num_queries[:, None])[:, :, None]  # [r, t, n]

    logits = jnp.einsum("rthgd,rhnd->rthgn", q.astype(jnp.float32), keys_of(k_pool, of_keys)) * options.scale
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    is_seen = is_seen[:, :, None, None]
    logits = jnp.where(is_seen, logits, -jnp.inf)
    if sink_logits is not None:
        is_query = jnp.arange(num_queries)[None] < rows.num_queries[:, None]
        sink = jnp.where(is_query[:, :, None, None], sink_logits.astype(jnp.float32), -jnp.inf)
        logits = jnp.concatenate([logits, sink[..., None]], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.where(is_seen, jnp.exp(logits[..., : is_seen.shape[-1]] - lse[..., None]), 0)
    # A key that no query sees may hold anything, also NaN.
    v = jnp.where(is_seen.any(axis=(1, 2, 3))[:, None, :, None], keys_of(v_pool, of_values), 0)
    return jnp.einsum("rthgn,rhnd->rthgd", weights, v), lse


def merge_attention(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys.

    Args:
      outs: `[s, ..., d]`, each normalised over its own keys.
      lses: f32[s, ...], the log of each sum of exponentials; -inf where a part saw nothing.

    Returns:
      out f32[..., d] and lse f32[...], as if all the keys had been attended to at once.
    """
    lse = jax.nn.logsumexp(lses, axis=0)
    weights = jnp.where(jnp.isneginf(lses), 0, jnp.exp(lses - lse[None]))
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0)
    return (weights[..., None] * parts).sum(axis=0), lse


def gather_blocks(
    k_pool: jax.Array, v_pool: jax.Array, block_ids: jax.Array, *, num_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """The blocks `block_ids` of all layers, block after block.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      block_ids: i32[n], within a layer; those outside of `[0, num_blocks)` are no blocks.
      num_blocks: Blocks of one layer.

    Returns:
      k and v, `[n, num_layers, h, block_size, d]`; 0 for no block.
    """
    is_block = (block_ids >= 0) & (block_ids < num_blocks)

    def gather(pool: jax.Array) -> jax.Array:
        layers = pool.reshape(-1, num_blocks, *pool.shape[1:])
        blocks = layers[:, jnp.where(is_block, block_ids, 0)].swapaxes(0, 1)
        return jnp.where(is_block[:, None, None, None, None], blocks, 0)

    return gather(k_pool), gather(v_pool)


def scatter_blocks(
    k_pool: jax.Array, v_pool: jax.Array, k: jax.Array, v: jax.Array, block_ids: jax.Array, *, num_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """The inverse: the pools with `k` and `v`, `[n, num_layers, h, block_size, d]`, at `block_ids`.

    The ids must differ; those outside of `[0, num_blocks)` are written nowhere.
    """
    ids = jnp.where(block_ids >= 0, block_ids, num_blocks)

    def scatter(pool: jax.Array, blocks: jax.Array) -> jax.Array:
        layers = pool.reshape(-1, num_blocks, *pool.shape[1:])
        blocks = blocks.astype(pool.dtype).swapaxes(0, 1)
        return layers.at[:, ids].set(blocks, mode="drop").reshape(pool.shape)

    return scatter(k_pool, k), scatter(v_pool, v)


def copy_blocks(
    k_pool: jax.Array, v_pool: jax.Array, src: jax.Array, dst: jax.Array, count: jax.Array, *, num_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """The pools with block `dst[i]` like `src[i]` in every layer, for `i < count`.

    The destinations must differ. One may be the source of an earlier copy, which sees it as it was, but not
    of a later one.
    """
    src, dst = (jnp.where(jnp.arange(ids.shape[0]) < count, ids, num_blocks) for ids in (src, dst))
    k, v = gather_blocks(k_pool, v_pool, src, num_blocks=num_blocks)
    return scatter_blocks(k_pool, v_pool, k, v, dst, num_blocks=num_blocks)


def append_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    num_blocks: int,
    layer: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The pools with the keys and values of new tokens of one layer.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      k: `[n, h, d]`, cast to the pool's dtype.
      v: Like `k`.
      slots: i32[n], `block_id * block_size + offset`, all different; out of `[0, num_blocks * block_size)`
        means nowhere.
      num_blocks: Blocks of one layer.
      layer: i32[].
    """
    block_size = k_pool.shape[2]
    is_stored = (slots >= 0) & (slots < num_blocks * block_size)
    block = jnp.where(is_stored, layer * num_blocks + slots // block_size, k_pool.shape[0])

    def store(pool: jax.Array, values: jax.Array) -> jax.Array:
        return pool.at[block, :, slots % block_size].set(values.astype(pool.dtype), mode="drop")

    return store(k_pool, k), store(v_pool, v)


def append_scaled(
    k_pool: jax.Array,
    v_pool: jax.Array,
    scaling: Scaling,
    k: jax.Array,
    v: jax.Array,
    new_scaling: Scaling,
    slots: jax.Array,
    *,
    num_blocks: int,
    layer: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array, Scaling]:
    """`append_kv` of numbers of 8 bits `[n, h, d]`, and of their scales and offsets, `[n, h]` each."""
    append = functools.partial(append_kv, num_blocks=num_blocks, layer=layer)

    def store(pools: tuple, new: tuple) -> list[jax.Array]:
        pairs = [(pool[..., None], values[..., None]) for pool, values in zip(pools, new, strict=True)]
        return [append(p, p, x, x, slots)[0][..., 0] for p, x in pairs]

    k_pool, v_pool = append(k_pool, v_pool, k, v, slots)
    of_keys = store(scaling.of_keys(), new_scaling.of_keys())
    of_values = store(scaling.of_values(), new_scaling.of_values())
    k_scale, *k_offset = of_keys
    v_scale, *v_offset = of_values
    return k_pool, v_pool, Scaling(k_scale, v_scale, *k_offset, *v_offset)
