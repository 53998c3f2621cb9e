"""The attention plan of a step: the blocks that its rows read, computed once for all layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient
from kvcache_jax.arrays.sharding import axis_of_types, axis_to_map, num_local
from kvcache_jax.attention.recurrent_plan import plan_recurrence
from kvcache_jax.core.backends import Backend
from kvcache_jax.core.choose_backend import choose
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.state import AttentionPlan, Cache, KVPool, Step, row_len
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import Span


def plan_attention(
    cache: Cache, step: Step, *, is_contiguous: bool = True, within: Span | None = None
) -> Step:
    """Adds the plans of all layer groups to a step whose slots were reserved in `cache`.

    Args:
      cache: After the reservation.
      step: Padded or packed.
      is_contiguous: Whether a row's tokens follow one another.
      within: Positions that no query sees beyond, for caches whose rows hide tokens.
    """
    config = cache.config
    if not config.own_layers:  # no layer attends
        plans = [plan_recurrence(cache.control, step, g, config) for g in range(len(config.groups))]
        return dataclasses.replace(step, plans=tuple(plans)).watched()
    num_queries = step.positions.shape[1] if step.cu_query_lens is None else 1
    group_id, _ = config.locate(config.own_layers[0])
    num_slots = cache.control.block_pools[group_id].num_blocks * cache.config.groups[group_id].block_size
    is_query = step.slots[group_id] < num_slots
    table_row, first_position, num_queries_of_row = _rows_of(step, is_query)
    plans: list[Any] = []
    for group_id, (group, pool) in enumerate(zip(cache.config.groups, cache.pools, strict=True)):
        if not group.arrays:
            plans.append(None)
            continue
        if group.span.is_read_later:
            plans.append(plan_recurrence(cache.control, step, group_id, config))
            continue
        block_pool = cache.control.block_pools[group_id]
        num_keys = None
        if not group.kind.is_causal:
            num_keys = get_at(row_len(cache.control, group.kind), table_row, 0)
        holes = cache.control.holes
        if holes is not None:
            holes = holes.of_rows(table_row).of_group(group_id)
        positions = None if is_contiguous else step.cache_positions
        plan = plan_rows(
            group, table_row, first_position, num_queries_of_row, num_keys, holes, positions=positions
        )
        plan = dataclasses.replace(plan, within=within)
        backend = choose(cache.config, None, pool, group)
        plan, width = in_runs(plan, group, backend, num_queries)
        if backend.plan and backend.attend(width):
            work = backend.plan(
                plan,
                _local_shapes(pool, group, cache.config.head_axis),
                group,
                num_queries=width,
                num_columns=block_pool.max_blocks_per_seq,
            )
            plan = dataclasses.replace(plan, work=tuple(work))
        plans.append(plan)
    return dataclasses.replace(step, plans=tuple(plans)).watched()


def plan_rows(
    group: LayerGroup,
    table_row: jax.Array,
    first_position: jax.Array,
    num_queries: jax.Array,
    num_keys: jax.Array | None = None,
    holes: Holes | None = None,
    *,
    positions: jax.Array | None = None,
) -> AttentionPlan:
    """Plans which columns are read by rows of `num_queries` tokens each, from `first_position` on."""
    if num_keys is None:
        end = quotient(last_position(first_position, num_queries, positions), group.block_size) + 1
    else:
        end = group.num_columns(num_keys)
    first = group.first_column(first_position)
    if holes is not None and group.span.keeps_all and not group.holds_sources:
        first = jnp.maximum(first, quotient(holes.first, group.block_size))
    # The sinks' columns, fewer where the row ends among them, and those from the first in reach.
    num_columns = jnp.minimum(group.num_sink_blocks, end) + jnp.maximum(end - first, 0)
    return AttentionPlan(
        table_row=table_row,
        first_column=first,
        num_columns=jnp.where(num_queries > 0, num_columns, 0),
        first_position=first_position,
        num_queries=num_queries,
        positions=positions,
        num_keys=num_keys,
        holes=holes,
    )


def last_position(
    first_position: jax.Array, num_queries: jax.Array, positions: jax.Array | None
) -> jax.Array:
    """Finds the position of each row's last query that counts; see `AttentionPlan`."""
    if positions is None:
        return first_position + num_queries - 1
    is_query = jnp.arange(positions.shape[1], dtype=jnp.int32)[None] < num_queries[:, None]
    return jnp.max(jnp.where(is_query, positions, -1), axis=1)


def in_runs(
    plan: AttentionPlan, group: LayerGroup, backend: Backend, num_queries: int
) -> tuple[AttentionPlan, int]:
    """Makes each query a row where a backend of runs of queries would serve a plan that has none.

    Returns:
      The plan, and the queries of its rows.
    """
    if plan.positions is None or backend.attend(num_queries) is None:
        return plan, num_queries

    def repeated(values: Any) -> Any:
        return jax.tree.map(lambda x: jnp.repeat(x, num_queries, axis=0), values)

    nth = jnp.arange(num_queries, dtype=jnp.int32)
    plan_of_queries = plan_rows(
        group,
        repeated(plan.table_row),
        plan.positions.reshape(-1),
        (nth[None] < plan.num_queries[:, None]).astype(jnp.int32).reshape(-1),
        repeated(plan.num_keys),
        repeated(plan.holes),
    )
    return dataclasses.replace(plan_of_queries, within=plan.within), 1


def _rows_of(step: Step, is_query: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists the step's rows, or its tokens: row of the table, first position, token count."""
    if step.cu_query_lens is None:
        return step.seq_ids, step.cache_positions[:, 0], is_query.sum(axis=1, dtype=jnp.int32)
    order = jnp.arange(step.positions.shape[0], dtype=jnp.int32)
    # Compared with all at once: a search would be a loop.
    row = jnp.searchsorted(step.cu_query_lens[1:], order, side="right", method="compare_all")
    return get_at(step.seq_ids, row.astype(jnp.int32), 0), step.cache_positions, is_query.astype(jnp.int32)


def _local_shapes(pool: KVPool, group: LayerGroup, head_axis: str | None) -> KVPool:
    """Shapes of the pool's arrays on one device."""
    axis = axis_to_map(axis_of_types(pool.arrays, group.head_positions), head_axis)

    def local(x: jax.Array, position: int | None) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if position is not None:
            shape[position] = num_local(shape[position], axis)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    positions = group.head_positions
    return KVPool(arrays={name: local(pool.arrays[name], positions[name]) for name in positions})
