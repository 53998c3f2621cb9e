"""The operation `attention_scores`: the weights that queries give to each token of their rows."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.derivatives import forward_mode_only
from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.attention.tiles import MASKED, by_head, by_query, scaled_logits, tiles
from kvcache_jax.blocks.split_blocks import require_whole
from kvcache_jax.blocks.storage import keys_values_of, keys_values_shapes, queries_of
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import AttentionPlan, Cache, KVPool, Step
from kvcache_jax.layers.layer_group import LayerGroup


@takes_one
@jax.named_scope("kvcache.attention_scores")
def attention_scores(
    cache: Cache,
    layer: Layer,
    q: jax.Array,
    step: Step,
    *,
    num_last: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: ArrayLike | None = None,
    weights: Any = None,
) -> jax.Array:
    """Computes the weights that attention gives to each token of a row, from the stored keys.

    Attention itself, above all by kernels, returns no weights. Here the keys are read again, tile by tile,
    for a few queries of each row. A layer may be of any kind, also one that shares, quantises or sees a
    window. There is no gradient: it is refused by name where something is computed of it.

    Args:
      cache: Not changed; the step's keys and values are written.
      layer: As in `attention`, like the arguments after it.
      q: `[n, w, num_q_heads, key_dim]`, of all tokens of a padded step.
      step: Of one row after the other, from `extend`; or from `rewrite`, without `num_last`.
      num_last: Of each row's tokens, only the last so many count; where there are fewer, the others are
        padding.
      scale: As in `attention`.
      soft_cap: Soft cap of the logits, as in `attention`.
      sink_logits: Logits of the sinks, as in `attention`; the weight that sinks take is missing in the sum.
      weights: The layer's own weights, as in `attention`.

    Returns:
      f32[n, num_q_heads, w, max_seq_len], `w = num_last` where that is given; of each query that counts 1 in
      all, at the places of the row's tokens. 0 for tokens that a query does not see, for padding and failed
      rows. Of a layer that reads sources `[..., max_source_len]`.

    Raises:
      ValueError, TypeError: the layer, shapes, dtypes or options do not fit, or the step is packed.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [4])
      >>> cache, step = kv.extend(cache, [4, 0], max_new=4)
      >>> q, new = jnp.zeros((2, 4, 2, 8)), jnp.ones((2, 4, 1, 8))
      >>> cache = kv.write(cache, 0, new, new, step)
      >>> kv.attention_scores(cache, 0, q, step, num_last=1)[0, 0, :, :5].tolist()
      [[0.25, 0.25, 0.25, 0.25, 0.0]]
    """
    group_id, index, pool = arguments.located(cache, layer, step)
    if step.parts:
        raise ValueError(
            "attention_scores got a step of several parts, in which an engine joins prompts and next tokens, "
            "expected one by itself: give the model no parameter logits_at"
        )
    group, plan = cache.config.groups[group_id], step.plans[group_id]
    require_whole("attention_scores", pool, group)
    if step.cu_query_lens is not None:
        raise ValueError("attention_scores got a packed step, expected a padded one: extend(max_new=...)")
    weights = arguments.jax_arrays("weights", weights)
    num_kv_heads, _, key_dim = keys_values_shapes(pool, group, weights).k.shape
    arguments.require_floats("q", q)
    arguments.check_queries(q, step, num_kv_heads, key_dim)
    if sink_logits is not None:
        sink_logits = arguments.as_array("sink_logits", sink_logits)
    arguments.check_options(scale, soft_cap, sink_logits, q.shape[-2])
    if num_last is not None:
        num_last = static_count("num_last", num_last, least=1, most=q.shape[1], most_name="the step's tokens")
        if plan.positions is not None or plan.table_row.shape[0] != q.shape[0]:
            raise ValueError("num_last is given with a step of rewrite, expected None: hand in fewer tokens")
        plan, q = _last_queries(plan, q, num_last)
    scores = _scores(
        pool,
        q,
        weights,
        sink_logits,
        cache.control.block_pools[group_id].block_table,
        plan,
        index,
        group=group,
        scale=1 / math.sqrt(key_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        num_kv_heads=num_kv_heads,
        tile_tokens=cache.config.tile_tokens,
    )
    instead = "expected lax.stop_gradient of the scores, or products with the keys of gather"
    return forward_mode_only("attention_scores", instead, scores[..., : group.max_len])


def _last_queries(plan: AttentionPlan, q: jax.Array, num_last: int) -> tuple[AttentionPlan, jax.Array]:
    """Leaves of each row's queries the last ones."""
    num_before = jnp.maximum(plan.num_queries - num_last, 0)
    nth = num_before[:, None] + jnp.arange(num_last, dtype=jnp.int32)[None]
    order = lax.broadcasted_iota(jnp.int32, nth.shape, 0)
    plan = dataclasses.replace(
        plan,
        first_position=plan.first_position + num_before,
        num_queries=plan.num_queries - num_before,
    )
    return plan, get_at(q, (order, nth))


@functools.partial(
    jax.jit, static_argnames=("group", "scale", "soft_cap", "num_kv_heads", "tile_tokens"), inline=True
)
def _scores(
    pool: KVPool,
    q: jax.Array,
    weights: Any,
    sink_logits: jax.Array | None,
    block_table: jax.Array,
    plan: AttentionPlan,
    layer: jax.Array,
    group: LayerGroup,
    scale: float,
    soft_cap: float | None,
    num_kv_heads: int,
    tile_tokens: int | None,
) -> jax.Array:
    """Computes the weights f32[n, num_q_heads, w, tokens of the table]."""
    shape = q.shape
    q = queries_of(group, q)
    num_rows = plan.table_row.shape[0]
    q = q.reshape(num_rows, -1, num_kv_heads, shape[-2] // num_kv_heads, shape[-1])
    pool, q, weights, block_table, plan = as_varied((pool, q, weights, block_table, plan))
    num_blocks = pool.num_rows // group.num_layers
    cut = tiles(pool, block_table, plan, group, layer, num_blocks, q.shape, tile_tokens)
    read = keys_values_shapes(pool, group, weights)
    is_layer = (layer >= 0) & (layer < group.num_layers)
    grouped = by_head(jnp.where(is_layer, q.astype(read.k.dtype), jnp.nan))

    def add_tile(i: jax.Array, logits: jax.Array) -> jax.Array:
        tile = cut.load(i, plan)
        new, _ = scaled_logits(scale, soft_cap, grouped, keys_values_of(group, tile.stored, weights))
        return lax.dynamic_update_slice_in_dim(
            logits, jnp.where(tile.is_seen, new, MASKED), i * cut.tile_len, axis=3
        )

    # Rounded up: the last tile may reach past the table.
    num_keys = -(-block_table.shape[-1] * group.block_size // cut.tile_len) * cut.tile_len
    logits = jnp.zeros_like(grouped[..., :1], jnp.float32) + jnp.full((1, 1, 1, num_keys), MASKED)
    logits = lax.fori_loop(0, cut.num_tiles.max(), add_tile, logits)
    sinks = jnp.full_like(logits[..., :1], -jnp.inf)
    if sink_logits is not None:
        per_head = sink_logits.astype(jnp.float32).reshape(1, 1, num_kv_heads, -1)
        sinks = by_head(jnp.broadcast_to(per_head, q.shape[:-1]))[..., None]
    peak = jnp.maximum(logits.max(axis=-1, keepdims=True), sinks)
    shares = jnp.where(logits > MASKED, jnp.exp(logits - peak), 0)
    total = shares.sum(axis=-1, keepdims=True) + jnp.exp(sinks - peak)
    shares = jnp.where(total > 0, shares / jnp.where(total > 0, total, 1), 0)
    shares = _at_places(by_query(shares, q.shape[1]), plan, group)
    return jnp.moveaxis(shares.reshape(*shape[:-1], -1), 1, 2)


def _at_places(shares: jax.Array, plan: AttentionPlan, group: LayerGroup) -> jax.Array:
    """Scatters weights `[r, ..., keys]`, in the order of the plan's columns, at the keys' places."""
    if group.span.keeps_all and plan.holes is None:
        return shares
    num_sinks = group.num_sink_blocks * group.block_size
    places = lax.broadcasted_iota(jnp.int32, (shares.shape[0], shares.shape[-1]), 1)
    behind = places - plan.first_column[:, None] * group.block_size + num_sinks
    is_behind = behind >= num_sinks
    nth = jnp.where(places < num_sinks, places, jnp.where(is_behind, behind, shares.shape[-1]))
    nth = nth.reshape(nth.shape[0], *[1] * (shares.ndim - 2), -1)
    return jnp.take_along_axis(shares, nth, axis=-1, mode="fill", fill_value=0)
