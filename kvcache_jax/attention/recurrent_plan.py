"""The plan of a step's recurrent layers: the states that rows start from, and the trips of a long step."""

from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control, RecurrentPlan, Step
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.recurrent import Part


def parts_of(config: CacheConfig, group_id: int) -> tuple[int, ...]:
    """Lists the groups of a recurrent layer, given its first one: entries, then points where it has them."""
    kind = config.groups[group_id].kind
    assert isinstance(kind, Part)
    kinds = [group.kind for group in config.groups]
    return tuple(kinds.index(part) for part in kind.recurrent.parts)


def plan_recurrence(control: Control, step: Step, group_id: int, config: CacheConfig) -> RecurrentPlan | None:
    """Plans what the recurrent layers of a group read and write; None for a group of points."""
    kind, group = config.groups[group_id].kind, config.groups[group_id]
    if not isinstance(kind, Part) or parts_of(config, group_id)[0] != group_id:
        return None
    is_padded, shape = step.cu_query_lens is None, step.positions.shape
    if is_padded and step.follows is None and shape[1] <= group.block_size:
        entry = jnp.arange(shape[0], dtype=jnp.int32)
        first, num = step.held, step.query_len
        token, goes_on = entry * shape[1], None
        order = jnp.arange(shape[1], dtype=jnp.int32)
    else:
        entry, first, num, token, goes_on = _trips(step, group)
        order = jnp.arange(group.block_size, dtype=jnp.int32)
    token = jnp.where(order[None] < num[:, None], token[:, None] + order[None], step.positions.size)
    seq_ids, block_size = get_at(step.seq_ids, entry, control.max_seqs), group.block_size

    def ids_at(part: int, columns: jax.Array, mask: jax.Array) -> jax.Array:
        pool = control.block_pools[parts_of(config, group_id)[part]]
        rows = seq_ids.reshape(-1, *[1] * (columns.ndim - 1))
        return jnp.where(mask, get_at(pool.block_table, (rows, columns), pool.num_blocks), pool.num_blocks)

    if not kind.recurrent.has_points:
        back = kind.recurrent.reach - jnp.arange(kind.recurrent.reach, dtype=jnp.int32)
        before = first[:, None] - back[None]
        return RecurrentPlan(
            token=token,
            num_tokens=num,
            count=jnp.minimum(first, kind.recurrent.reach),
            held_ids=ids_at(0, quotient(jnp.maximum(before, 0), block_size), before >= 0),
            held_offsets=remainder(jnp.maximum(before, 0), block_size),
            goes_on=goes_on,
        )
    column, last = quotient(first, block_size), quotient(first + num, block_size) - 1
    count, is_full = remainder(first, block_size), last >= column
    return RecurrentPlan(
        token=token,
        num_tokens=num,
        count=count,
        held_ids=ids_at(0, column, count > 0),
        point_ids=ids_at(1, column - 1, column > 0),
        goes_on=goes_on,
        is_full=is_full,
        full_ids=ids_at(0, last, is_full),
        new_point_ids=ids_at(1, last, is_full),
    )


def note_call(plan: RecurrentPlan, group: LayerGroup, index: Any, layer: Any) -> None:
    """Notes the call of a layer; refuses it before those that come first.

    The last layer of a kind folds what all of them stored: out of order it would fold what is not there yet.
    """
    if isinstance(index, jax.Array):  # of scanned layers: any of them
        object.__setattr__(plan, "num_called", None)
    if plan.num_called is None or plan.point_ids is None:
        return
    if index > plan.num_called:
        raise ValueError(
            f"recurrence got layer {layer!r} and not yet layer {group.layer_ids[plan.num_called]} with this "
            f"step, expected layers {list(group.layer_ids)} in this order, once each: the last one folds "
            "what all of them stored"
        )
    object.__setattr__(plan, "num_called", int(index) + 1)


def _trips(step: Step, group: LayerGroup) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cuts the tokens of a step into trips, each of tokens of one block of a row.

    Blocks are counted from the row's beginning, so that a row computes the same in steps of any lengths.

    Returns:
      Per trip i32[r] the entry of the step, the position of the first token, the number of tokens, and the
      first token's place in the step; and bool[r], the trip goes on where the one before ended.
    """
    block_size, num_entries = group.block_size, step.seq_ids.shape[0]
    if step.cu_query_lens is None:
        width = step.positions.shape[1]
        starts = jnp.arange(num_entries, dtype=jnp.int32) * width
        num_trips = num_entries * ((width + block_size - 2) // block_size + 1)
    else:
        starts, num_tokens = step.cu_query_lens[:-1], step.positions.shape[0]
        num_trips = min(num_tokens // block_size + 2 * num_entries, num_tokens)
    first, end = step.held, step.context_len
    first_column = quotient(first, block_size)
    num_columns = quotient(end + block_size - 1, block_size) - first_column
    num_columns = jnp.where(step.query_len > 0, num_columns, 0)
    ends = jnp.cumsum(num_columns, dtype=jnp.int32)
    order = jnp.arange(num_trips, dtype=jnp.int32)
    # Compared with all at once: a search would be a loop.
    entry = jnp.searchsorted(ends, order, side="right", method="compare_all").astype(jnp.int32)
    nth = order - get_at(ends - num_columns, entry, 0)
    column, first = get_at(first_column, entry, 0) + nth, get_at(first, entry, 0)
    start = jnp.maximum(first, column * block_size)
    num = jnp.minimum(get_at(end, entry, 0), (column + 1) * block_size) - start
    num = jnp.where(entry < num_entries, num, 0)
    goes_on = nth > 0
    if step.follows is not None:
        goes_on |= get_at(step.follows, entry, False)
    return entry, start, num, get_at(starts, entry, 0) + start - first, goes_on & (num > 0)
