"""The queries of a step, a row per sequence in a padded one and per token in a packed one; what they read."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.core.state import Step


class Queries(NamedTuple):
    """Who asks, and how far they see.

    Attributes:
      table_row: i32[r], row of the block table.
      first_column: i32[r], see `AttentionPlan`.
      num_columns: i32[r], see `AttentionPlan`; 0 reads nothing.
      positions: i32[r, t], position of each query; those of a row follow each other.
      is_query: bool[r, t], false for padding and failed rows.
    """

    table_row: jax.Array
    first_column: jax.Array
    num_columns: jax.Array
    positions: jax.Array
    is_query: jax.Array


class Reads(NamedTuple):
    """What a call of attention reads, beside the pools.

    Attributes:
      block_table: i32[max_seqs, max_blocks_per_seq].
      layer: i32[], index in the group.
      queries: Queries.
      work: See `AttentionPlan`.
    """

    block_table: jax.Array
    layer: jax.Array
    queries: Queries
    work: tuple[jax.Array, ...]


def queries_of(step: Step, group_id: int, nowhere: int) -> Queries:
    """The step's queries in one layer group; `nowhere` is the slot of tokens that are not there."""
    plan, is_query = step.plans[group_id], step.slots[group_id] < nowhere
    if step.cu_query_lens is None:
        return Queries(step.seq_ids, plan.first_column, plan.num_columns, step.positions, is_query)
    order = jnp.arange(step.positions.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(step.cu_query_lens[1:], order, side="right").astype(jnp.int32)

    def per_token(values: jax.Array) -> jax.Array:
        return get_at(values, row, 0)

    return Queries(
        per_token(step.seq_ids),
        per_token(plan.first_column),
        jnp.where(is_query, per_token(plan.num_columns), 0),
        step.positions[:, None],
        is_query[:, None],
    )
