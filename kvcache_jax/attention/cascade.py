"""Cascade attention: backends whose kernels read columns that rows have in common once for several rows.

The queries of a company of rows are one row of the kernel, which reads the columns that they have in common;
in a second call each row reads what follows. Both results are merged by their log-sum-exp. On GPUs a
step of 16 layers takes 356 launches in place of 257 (`tests.aot.decode_steps`), also where no rows have
anything in common, so it has a name by which it is asked for: "mosaic_gpu_cascade".

References:
  "Cascade attention" is FlashInfer's name (Ye et al.; arXiv:2501.01005); see `attention_plan` for others.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import first_true, get_at, quotient, set_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.attention.attention_plan import companies_of, may_share, stride_columns, strides_before
from kvcache_jax.attention.companies import after
from kvcache_jax.core.backends import MAX_DECODE_QUERIES, Backend
from kvcache_jax.core.state import AttentionPlan, KVPool, SharedColumns
from kvcache_jax.layers.layer_group import LayerGroup

_MOST_ROWS = 256
"""Rows that are compared, each with each, column by column."""
_ONE_READING = 840
"""A number of which one to eight rows have equal shares."""


@pytree_dataclass()
class Cascade:
    """The work of one step in two calls of a backend.

    Attributes:
      members: i32[c, p], rows of each company; `r` where there are fewer.
      place: i32[r], of each row among all `members`; `c * p` for a row without a company.
      together: Of `c` rows, the companies.
      apart: Of `r` rows.
    """

    members: jax.Array
    place: jax.Array
    together: AttentionPlan
    apart: AttentionPlan


def cascade(backend: Backend) -> Backend:
    """Makes a backend that decodes by two calls of `backend` where rows may have columns in common.

    No verdict is asked for: `implementation=None` does not pick it.
    """
    return dataclasses.replace(
        backend,
        name=f"{backend.name}_cascade",
        decode=functools.partial(_decode, backend),
        plan=functools.partial(_plan, backend),
        code=None,
    )


def _plan(
    backend: Backend,
    plan: AttentionPlan,
    pool: KVPool,
    block_table: jax.Array,
    group: LayerGroup,
    *,
    num_queries: int,
) -> tuple[Any, ...]:
    def work(plan: AttentionPlan, num_queries: int) -> tuple[Any, ...]:
        if backend.plan is None:
            return ()
        return tuple(backend.plan(plan, pool, block_table, group, num_queries=num_queries))

    def worked_out(plan: AttentionPlan, num_queries: int) -> AttentionPlan:
        return dataclasses.replace(plan, work=work(plan, num_queries))

    num_rows, num_places = plan.table_row.shape[0], MAX_DECODE_QUERIES // num_queries
    if num_places < 2 or num_rows > _MOST_ROWS or not may_share(plan, group, num_queries, 2):
        return work(plan, num_queries)
    shared = find_shared_at_once(plan, block_table, group, num_places)
    members, num_columns = shared.members, shared.num_columns
    is_place = members < num_rows
    place = jnp.arange(members.size, dtype=jnp.int32).reshape(members.shape)
    together = AttentionPlan(
        table_row=get_at(plan.table_row, members[:, 0], 0),
        first_column=jnp.zeros_like(num_columns),
        num_columns=num_columns,
        first_position=num_columns * group.block_size,  # each query sees all of them
        num_queries=jnp.sum(is_place, axis=1, dtype=jnp.int32) * num_queries,
    )
    cascade = Cascade(
        members=members,
        place=set_at(jnp.full_like(plan.table_row, members.size), members, place),
        together=worked_out(together, num_places * num_queries),
        apart=worked_out(after(plan, shared.num_of_row), num_queries),
    )
    return (cascade,)


def find_shared_at_once(
    plan: AttentionPlan, block_table: jax.Array, group: LayerGroup, num_places: int
) -> SharedColumns:
    """Finds rows with full columns in common, without a loop, for companies of at most eight places.

    A row's company are rows with which it saves the most: columns in common, less their share of one reading.
    """
    stride, num_strides = stride_columns(group), strides_before(plan, group)
    ids = get_at(block_table, (plan.table_row,), 0)
    is_other = ids[:, None] != ids[None]  # [r, r, columns]
    in_common = jnp.minimum(num_strides[:, None], num_strides[None])  # [r, r]
    in_common = jnp.minimum(in_common, quotient(first_true(is_other), stride))
    num_rows = jnp.sum(in_common[:, None] >= in_common[:, :, None], axis=2, dtype=jnp.int32)
    share = lax.div(jnp.full_like(num_rows, _ONE_READING), jnp.minimum(num_rows, num_places))
    num_saved = in_common * (_ONE_READING - share)
    is_best = num_saved == jnp.max(num_saved, axis=1, keepdims=True)
    depth = jnp.max(jnp.where(is_best, in_common, 0), axis=1)
    leader = first_true(in_common >= depth[:, None])
    return companies_of(leader, depth, stride, num_places=num_places, least=2)


def _decode(
    backend: Backend,
    q: jax.Array,
    pool: KVPool,
    block_table: jax.Array,
    plan: AttentionPlan,
    group: LayerGroup,
    *,
    sink_logits: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    assert backend.decode is not None
    attend = functools.partial(backend.decode, group=group, **options)
    if not (plan.work and isinstance(plan.work[0], Cascade)):
        return attend(q, pool, block_table, plan, sink_logits=sink_logits)
    work = plan.work[0]
    num_companies, num_places = work.members.shape
    q = q.astype(jnp.float32)  # which results are then, so that they are rounded once
    of_companies = get_at(q, work.members).reshape(num_companies, -1, *q.shape[2:])
    parts = attend(of_companies, pool, block_table, work.together, sink_logits=None)
    out, lse = (x.reshape(-1, *q.shape[1 : x.ndim]) for x in parts)
    parts = get_at(out, work.place, 0), get_at(lse, work.place, -jnp.inf)
    return _merged(parts, attend(q, pool, block_table, work.apart, sink_logits=sink_logits))


def _merged(
    common: tuple[jax.Array, jax.Array], own: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys; a query that counts sees its own token among `own`."""
    (common_out, common_lse), (own_out, own_lse) = common, own
    # Of rows that are not full a company has queries that do not count, and may be NaN.
    counts = ~jnp.isneginf(own_lse)
    lse = jnp.where(counts, jnp.logaddexp(common_lse, own_lse), -jnp.inf)
    share = jnp.where(counts, jnp.exp(common_lse - lse), 0)[..., None]
    common_out = jnp.where(counts[..., None], common_out, 0)
    return share * common_out + (1 - share) * own_out, lse
