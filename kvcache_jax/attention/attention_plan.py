"""The attention plan of a step: the blocks that its rows read, computed once for all layers.

Rows with a common past (samples of a prompt, hits of a prefix, tokens of one row in a packed step) have the
same block ids at the start of their tables. Some such rows are a
*company*: their queries meet each tile of the common columns as the queries of one row would, and go on by
themselves from there.

References:
  Hydragen (Juravsky et al.; arXiv:2402.05099) and ChunkAttention (Ye et al.; arXiv:2402.15220).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import first_true, get_at, quotient, rank_true, set_at
from kvcache_jax.arrays.same_form import form_of
from kvcache_jax.arrays.sharding import axis_of_types, axis_to_map, num_local
from kvcache_jax.attention.recurrent_plan import plan_recurrence
from kvcache_jax.core.backends import MAX_DECODE_QUERIES, Backend, target_device
from kvcache_jax.core.choose_backend import choose
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.state import AttentionPlan, Cache, KVPool, SharedColumns, Step, row_len
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import Span, ceil_div

# Queries of a company: so many that its products are of matrices, and that reading takes little of the time.
_MOST_QUERIES = 16
# Where a company has places for more, fewer members cost more than they save.
_LEAST_MEMBERS = 4
# Columns are compared so many tokens at a time; less than twice as many in common are not worth it.
STRIDE_TOKENS = 64


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
            local_pool = _local_shapes(pool, group, config.head_axis)
            work = backend.plan(plan, local_pool, block_pool.block_table, group, num_queries=width)
            if not isinstance(work, tuple):
                raise TypeError(
                    f"plan of the backend {backend.name!r} returned {form_of(work)}, expected a tuple"
                )
            plan = dataclasses.replace(plan, work=work)
        elif backend.attend(width) is None and _may_share(plan, group, config, width):
            shared = find_shared(plan, block_pool.block_table, group, width)
            plan = dataclasses.replace(plan, shared=shared)
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


def _may_share(plan: AttentionPlan, group: LayerGroup, config: CacheConfig, num_queries: int) -> bool:
    """Tests whether rows of `num_queries` tokens that XLA serves look for columns in common (static).

    On an accelerator every loop is a wait for the host.
    """
    is_free = config.tile_tokens is None and config.context_axis is None
    is_free &= jax.sharding.get_abstract_mesh().empty and target_device().platform == "cpu"
    return is_free and may_share(plan, group, num_queries, _least_members(num_queries))


def may_share(plan: AttentionPlan, group: LayerGroup, num_queries: int, least: int) -> bool:
    """Tests whether `least` rows of `num_queries` tokens can have as much in common as is worth it (static).

    Wide rows share a tile among many queries as it is.
    """
    is_plain = plan.positions is None and plan.num_keys is None and plan.holes is None
    is_long = group.max_len > 2 * STRIDE_TOKENS and plan.table_row.shape[0] >= least
    return is_plain and is_long and group.span.keeps_all and num_queries <= MAX_DECODE_QUERIES


def each_alone(step: Step) -> Step:
    """Leaves out of a step which columns its rows share: where they share none, a smaller program."""

    def alone(plan: Any) -> Any:
        return dataclasses.replace(plan, shared=None) if isinstance(plan, AttentionPlan) else plan

    return dataclasses.replace(step, plans=tuple(map(alone, step.plans)))


def _num_places(num_queries: int) -> int:
    return max(2, _MOST_QUERIES // num_queries)


def _least_members(num_queries: int) -> int:
    return min(_LEAST_MEMBERS, _num_places(num_queries))


def find_shared(
    plan: AttentionPlan, block_table: jax.Array, group: LayerGroup, num_queries: int
) -> SharedColumns:
    """Finds rows with full columns in common, all before the first query of each.

    Stride by stride rows are compared with all others, as long as enough of any are alike: where none share a
    beginning, once. A row's company are rows with which it shares the most.
    """
    stride, least = stride_columns(group), _least_members(num_queries)
    order = jnp.arange(plan.table_row.shape[0], dtype=jnp.int32)
    num_strides = strides_before(plan, group)

    def compare(carry):
        n, is_alike, leader, depth, _ = carry
        columns = n * stride + jnp.arange(stride, dtype=jnp.int32)
        ids = get_at(block_table, (plan.table_row[:, None], columns[None]), 0)
        is_alike &= _equal(ids[:, -1]) & _both(num_strides > n)
        first = first_true(is_alike)
        is_equal = (ids == get_at(ids, first, 0)).all(axis=1)
        is_alike &= _both(is_equal)
        is_shared = jnp.sum(is_alike, axis=1, dtype=jnp.int32) >= least
        leader, depth = jnp.where(is_shared, first, leader), jnp.where(is_shared, n + 1, depth)
        return n + 1, is_alike, leader, depth, is_shared.any()

    carry = jnp.int32(0), jnp.ones((order.size, order.size), bool), order, 0 * order, jnp.bool(True)
    _, _, leader, depth, _ = lax.while_loop(lambda carry: carry[-1], compare, carry)
    return companies_of(leader, depth, stride, num_places=_num_places(num_queries), least=least)


def stride_columns(group: LayerGroup) -> int:
    """Returns how many columns are compared together (static)."""
    return ceil_div(STRIDE_TOKENS, group.block_size)


def strides_before(plan: AttentionPlan, group: LayerGroup) -> jax.Array:
    """Counts the strides i32[r] of columns before each row's first query."""
    num_strides = quotient(plan.first_position, stride_columns(group) * group.block_size)
    return jnp.where(plan.num_queries > 0, num_strides, 0)


def companies_of(
    leader: jax.Array, depth: jax.Array, stride: int, *, num_places: int, least: int
) -> SharedColumns:
    """Makes companies of rows, in their order, each of `least` to `num_places`.

    Args:
      leader: i32[r], the first row that begins alike.
      depth: i32[r], for how many strides; less than two are not worth it.
      stride: Columns.
      num_places: In a company.
      least: Rows of a company.
    """
    num_rows = leader.shape[0]
    order = jnp.arange(num_rows, dtype=jnp.int32)
    # Rows of one beginning that end it alike.
    is_alike = _equal(leader) & _equal(depth) & _both(depth >= 2)
    nth = jnp.sum(is_alike & (order[None] < order[:, None]), axis=1, dtype=jnp.int32)
    place = lax.rem(nth, jnp.full_like(nth, num_places))
    num_together = jnp.sum(is_alike, axis=1, dtype=jnp.int32) - (nth - place)
    is_member = num_together >= least
    rank, _ = rank_true(is_member & (place == 0))
    first = first_true(is_alike & (nth[None] == (nth - place)[:, None]))
    num_companies = num_rows // 2
    company = jnp.where(is_member, get_at(rank, first, num_companies), num_companies)
    num_shared = jnp.where(is_member, depth * stride, 0)
    members = jnp.full((num_companies, num_places), num_rows, jnp.int32)
    return SharedColumns(
        members=set_at(members, (company, place), order),
        num_columns=set_at(jnp.zeros(num_companies, jnp.int32), company, num_shared),
        num_of_row=num_shared,
    )


def _equal(values: jax.Array) -> jax.Array:
    """Masks the pairs of equal entries, bool[n, n]."""
    return values[:, None] == values[None]


def _both(mask: jax.Array) -> jax.Array:
    """Masks the pairs of true entries, bool[n, n]."""
    return mask[:, None] & mask[None]


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
