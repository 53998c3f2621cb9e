"""Attention by Pallas kernels: the kernel's view of a step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.head_axis import num_local_heads, over_heads
from kvcache_jax.attention.inputs import Queries, Reads, queries_of
from kvcache_jax.attention.options import Options
from kvcache_jax.core.backends import MOSAIC_GPU, choose, is_interpreted, kernels
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.layer_kinds.base import num_columns as num_columns_of
from kvcache_jax.core.state import KVPool, Step


def with_work(step: Step, config: CacheConfig, pools: tuple[KVPool, ...], block_pools: Any) -> Step:
    """The step with the work plan of kernels that have one: made once, for all layers of a group."""
    plans = list(step.plans)
    for group_id, (pool, block_pool) in enumerate(zip(pools, block_pools, strict=True)):
        if choose(config, None, pool) == MOSAIC_GPU:
            group, (_, _, block_size, head_dim) = config.groups[group_id], pool.k.shape
            queries = queries_of(step, group_id, block_pool.num_blocks * block_size)
            rows = _decode_rows(queries, group.window, group.num_sink_blocks, block_size)
            num_queries = _cut(queries.is_query).shape[1]
            num_heads = num_local_heads(pool.k, config.head_axis)
            q_shape = (rows.table_row.shape[0], num_queries, num_heads, 1, head_dim)
            num_columns = block_pool.block_table.shape[1]
            plan_for, interpret = kernels(MOSAIC_GPU).plan_for, is_interpreted.value
            work = plan_for(rows, q_shape, num_columns, block_size, interpret=interpret)
            plans[group_id] = dataclasses.replace(plans[group_id], work=tuple(work))
    return dataclasses.replace(step, plans=tuple(plans))


def forward(
    options: Options,
    pools: tuple[jax.Array, jax.Array],
    q: jax.Array,
    sink_logits: jax.Array | None,
    reads: Reads,
) -> tuple[jax.Array, jax.Array]:
    """What `attention_xla.forward` computes, by a kernel; `reads.work` is () if the step has no plan."""
    from pallas_kernels.decode_rows import DecodeOptions

    block_table, layer, queries, work = reads
    package, block_size = kernels(options.implementation), pools[0].shape[2]
    decode_options = DecodeOptions(
        options.num_blocks, options.scale, options.soft_cap, options.window, options.num_sink_tokens
    )
    # A step's work is cut for the cache's own kernels; the call may have asked for others.
    is_planned = bool(work) and options.implementation == MOSAIC_GPU
    plan = {"plan": package.DecodePlan(*work)} if is_planned else {}

    # Cut and joined on each device: a reshape of q would need its sharding where mesh axes are explicit.
    def decode(q, k_pool, v_pool, table, rows, layer, sink_logits, plan):
        results = package.paged_decode(
            _cut(q),
            k_pool,
            v_pool,
            table,
            rows,
            decode_options,
            layer=layer,
            sink_logits=sink_logits,
            interpret=is_interpreted.value,
            **plan,
        )
        return tuple(_joined(x, q.shape) for x in results)

    rows = _decode_rows(queries, options.window, options.num_sink_blocks, block_size)
    heads = (2, 1, 1, None, None, None, None if sink_logits is None else 0, None)
    decode = over_heads(decode, pools[0], options.head_axis, heads, (2, 2))
    num_layers = pools[0].shape[0] // options.num_blocks
    is_layer = layer < num_layers  # one that does not exist reads NaN
    safe_layer = jnp.where(is_layer, layer, 0)
    out, lse = decode(q, *pools, block_table, rows, safe_layer, sink_logits, plan)
    return jnp.where(is_layer, out, jnp.nan), jnp.where(is_layer, lse, jnp.nan)


def _cut(q: jax.Array) -> jax.Array:
    """`[r, t, ...]` with each row cut into rows of at most `MAX_QUERIES` queries."""
    from pallas_kernels.decode_rows import MAX_QUERIES

    num_queries = q.shape[1]
    if num_queries <= MAX_QUERIES:
        return q
    padding = [(0, -num_queries % MAX_QUERIES if axis == 1 else 0) for axis in range(q.ndim)]
    return jnp.pad(q, padding).reshape(-1, MAX_QUERIES, *q.shape[2:])


def _joined(x: jax.Array, q_shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_cut`, for queries `[r, t, ...]`."""
    return x.reshape(q_shape[0], -1, *x.shape[2:])[:, : q_shape[1]]


def _decode_rows(queries: Queries, window: int | None, num_sink_blocks: int, block_size: int) -> Any:
    """DecodeRows of `_cut`; each reads only the columns that its own queries reach."""
    from pallas_kernels.decode_rows import DecodeRows

    is_query = _cut(queries.is_query)
    num_queries = is_query.sum(axis=1, dtype=jnp.int32)
    num_cuts = is_query.shape[0] // queries.positions.shape[0]
    order = jnp.arange(num_cuts, dtype=jnp.int32)

    def of_cuts(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_cuts, total_repeat_length=is_query.shape[0])

    first_position = (queries.positions[:, :1] + order[None] * is_query.shape[1]).reshape(-1)
    first_column = of_cuts(queries.first_column)
    if window is not None:
        first_column = jnp.maximum(first_column, (first_position - window + 1) // block_size)
    end_column = (first_position + num_queries - 1) // block_size + 1
    num_columns = num_columns_of(num_sink_blocks, first_column, end_column)
    num_columns = jnp.where(num_queries > 0, jnp.minimum(num_columns, of_cuts(queries.num_columns)), 0)
    return DecodeRows(of_cuts(queries.table_row), first_column, num_columns, first_position, num_queries)
