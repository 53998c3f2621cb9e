"""Rows fork, roll back and end: the one-row forms of the operations on control state.

Each takes the control state, scalars and the config, and returns `(control, status)`; a row that fails
comes back as it was. `each_row` makes the n-row operation of it: n successive one-row calls.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax import block_pool
from kvcache_jax.config import CacheConfig, LayerGroup
from kvcache_jax.indexing import (
    Update,
    any_of,
    get_at,
    max_at,
    min_at,
    quotient,
    read_first,
    remainder,
    set_at,
    update_all,
)
from kvcache_jax.loops import skip_unless
from kvcache_jax.reach import first_column
from kvcache_jax.state import ROW_FIELDS, BlockPool, Control, Counter, count_events
from kvcache_jax.status import Status


def each_row(operation: Callable, control: Control, *columns: Any) -> tuple[Control, Any]:
    """Applies a one-row operation to the rows of `columns` (pytrees of `[n, ...]`), in order."""
    if jax.tree.leaves(columns)[0].shape[0] == 1:
        control, result = operation(control, *jax.tree.map(lambda column: column[0], columns))
        return control, jax.tree.map(lambda leaf: leaf[None], result)
    return lax.scan(lambda control, row: operation(control, *row), control, columns)


def first_failure(*checks: tuple[jax.Array, Status]) -> jax.Array:
    """i32 status: that of the first check whose condition holds, else OK."""
    status = jnp.asarray(Status.OK, jnp.int32)
    for condition, failure in reversed(checks):
        status = jnp.where(condition, jnp.int32(failure), status)
    return status


def check_seq_ids(control: Control, *seq_ids: jax.Array) -> tuple[tuple[jax.Array, Status], ...]:
    """The checks for ids that name a row: not left empty, not out of range."""
    is_empty = [ids == control.max_seqs for ids in seq_ids]
    is_outside = [(ids < 0) | (ids > control.max_seqs) for ids in seq_ids]
    return (any_of(is_outside), Status.BAD_SEQ_ID), (any_of(is_empty), Status.SKIPPED)


def check_distinct(
    control: Control, seq_ids: jax.Array, *others: jax.Array, mask: jax.Array | bool = True
) -> tuple[tuple[jax.Array, Status], ...]:
    """`check_seq_ids` for i32[n] of which no two may be the same, where `mask` bool[n] holds."""
    checks = check_seq_ids(control, seq_ids, *others)
    is_row = ~any_of([condition for condition, _ in checks])
    repeated = is_repeated(seq_ids, is_row & mask, control.max_seqs)
    return *checks, (repeated, Status.DUPLICATE_SEQ_ID)


def _check_active(control: Control, seq_id: jax.Array) -> tuple[tuple[jax.Array, Status], ...]:
    """`check_seq_ids` for a row that must hold a sequence."""
    return *check_seq_ids(control, seq_id), (~get_at(control.is_active, seq_id), Status.SEQ_NOT_ACTIVE)


def _active_row(control: Control, seq_id: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Status and row of an operation that asks for nothing but an active row; `max_seqs` if it is none."""
    status = first_failure(*_check_active(control, seq_id))
    return status, jnp.where(status == Status.OK, seq_id, control.max_seqs)


def mark_used(control: Control, rows: jax.Array, is_use: jax.Array | bool, **fields: ArrayLike) -> Control:
    """Marks `rows` i32[...], which differ, as just used, and sets further fields of theirs.

    Nowhere is skipped. The clock advances if `is_use` bool[].
    """
    clock = control.clock + jnp.asarray(is_use).astype(jnp.uint32)
    last_used, num_uses, *updated = update_all(
        Update(control.last_used, rows, clock),
        Update(control.num_uses, rows, 1, "add"),
        *(Update(getattr(control, name), rows, values) for name, values in fields.items()),
    )
    others = dict(zip(fields, updated, strict=True))
    return dataclasses.replace(control, clock=clock, last_used=last_used, num_uses=num_uses, **others)


def num_blocks_for(num_tokens: jax.Array, block_size: int) -> jax.Array:
    """Blocks that hold `num_tokens` tokens."""
    return quotient(num_tokens + block_size - 1, block_size)


def fork_row(
    control: Control, src_id: jax.Array, dst_id: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Starts row `dst_id` on the blocks that hold the tokens of `src_id`."""
    status = first_failure(
        *check_seq_ids(control, src_id, dst_id),
        (~get_at(control.is_active, src_id), Status.SEQ_NOT_ACTIVE),
        (get_at(control.is_active, dst_id), Status.SEQ_IN_USE),
    )
    ok = status == Status.OK
    row = jnp.where(ok, dst_id, control.max_seqs)
    pools = []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        ids = jnp.where(ok, token_blocks(pool, group, control.context_len, src_id), pool.num_blocks)
        ids, block_table = read_first(ids, pool.block_table)
        pool = block_pool.share(pool, ids)
        pools.append(dataclasses.replace(pool, block_table=set_at(block_table, row, ids)))
    return dataclasses.replace(
        _inherit(control, row, src_id, ok, is_active=True),
        counters=count_events(control, {Counter.FORKS: ok}),
        block_pools=tuple(pools),
    ), status


def _inherit(
    control: Control, rows: jax.Array, parent_ids: jax.Array, is_use: jax.Array, **fields: ArrayLike
) -> Control:
    """`mark_used` that also gives `rows` what their parents have, but for the blocks."""
    names = "context_len", "priority", "namespace", "num_published"
    inherited = {name: get_at(getattr(control, name), parent_ids) for name in names}
    return mark_used(control, rows, is_use, **inherited, **fields)


def truncate_row(
    control: Control, seq_id: jax.Array, new_len: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Drops the tokens from `new_len` on; blocks without a token left, reserved ones too, go back."""
    context_len = get_at(control.context_len, seq_id)
    is_lost = [
        _window_is_lost(pool, group, seq_id, context_len, new_len)
        for pool, group in zip(control.block_pools, config.groups, strict=True)
    ]
    status = first_failure(
        *_check_active(control, seq_id),
        (new_len < 0, Status.BAD_LENGTH),
        (new_len > context_len, Status.TOO_LONG),
        (any_of(is_lost), Status.WINDOW_LOST),
    )
    row = jnp.where(status == Status.OK, seq_id, control.max_seqs)
    pools = [
        _drop_columns(pool, row, num_blocks_for(new_len, group.block_size))
        for pool, group in zip(control.block_pools, config.groups, strict=True)
    ]
    control = dataclasses.replace(
        control, context_len=set_at(control.context_len, row, new_len), block_pools=tuple(pools)
    )
    return _count_published(control, row, config), status


def _count_published(control: Control, row: jax.Array, config: CacheConfig) -> Control:
    """`num_published` of a row that lost tokens; `row == max_seqs` changes nothing."""
    group, pool = config.groups[config.indexed_group], control.block_pools[config.indexed_group]
    tail = partial_tails(control, config, row)
    num_full = quotient(get_at(control.context_len, row), group.block_size)
    num_published = jnp.minimum(get_at(control.num_published, row), num_full)
    num_published = jnp.where(block_pool.is_published(pool, tail), num_full + 1, num_published)
    return dataclasses.replace(control, num_published=set_at(control.num_published, row, num_published))


def free_row(control: Control, seq_id: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    """Ends a row: all its blocks lose this owner."""
    status, row = _active_row(control, seq_id)
    cleared = update_all(*(Update(getattr(control, name), row, 0) for name in ROW_FIELDS))
    return dataclasses.replace(
        control,
        **dict(zip(ROW_FIELDS, cleared, strict=True)),
        counters=count_events(control, {Counter.FREES: status == Status.OK}),
        block_pools=tuple(_drop_columns(pool, row, jnp.int32(0)) for pool in control.block_pools),
    ), status


def reorder_rows(
    control: Control, seq_ids: jax.Array, parent_ids: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Row `seq_ids[i]` continues from `parent_ids[i]` as it was before the call; i32[n] both.

    All rows at once, because a parent may itself be replaced. New owners come before old ones go, so
    a block that only changes hands is never free in between.
    """
    status = first_failure(
        *check_distinct(control, seq_ids, parent_ids),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (~get_at(control.is_active, parent_ids), Status.SEQ_NOT_ACTIVE),
    )
    moves = (status == Status.OK) & (seq_ids != parent_ids)
    row = jnp.where(moves, seq_ids, control.max_seqs)
    pools = []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        new_ids = token_blocks(pool, group, control.context_len, parent_ids)
        new_ids = jnp.where(moves[:, None], new_ids, pool.num_blocks)
        old_ids = get_at(pool.block_table, row, pool.num_blocks)
        # Column by column from the last one, so that of what stays cached the ends go first.
        pool = block_pool.release(block_pool.share(pool, new_ids), old_ids.T[::-1])
        pools.append(dataclasses.replace(pool, block_table=set_at(pool.block_table, row, new_ids)))
    control = _inherit(control, row, parent_ids, moves.any())
    return dataclasses.replace(control, block_pools=tuple(pools)), status


def set_priority_row(
    control: Control, seq_id: jax.Array, priority: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Sets a row's priority."""
    status, row = _active_row(control, seq_id)
    return dataclasses.replace(control, priority=set_at(control.priority, row, priority)), status


def touch_row(control: Control, seq_id: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    """Marks a row as just used."""
    status, row = _active_row(control, seq_id)
    return mark_used(control, row, status == Status.OK), status


def is_repeated(seq_ids: jax.Array, mask: jax.Array, max_seqs: int) -> jax.Array:
    """bool[n], masked entries whose id already stands in an earlier masked entry."""
    rows = jnp.where(mask, seq_ids, max_seqs)

    def look(_: jax.Array) -> jax.Array:
        order = jnp.arange(seq_ids.shape[0], dtype=jnp.int32)
        first = min_at(jnp.full_like(rows, seq_ids.shape[0], shape=max_seqs), rows, order)
        return mask & (get_at(first, rows, 0) < order)

    # Lists are in ascending order, as a rule.
    is_ascending = (rows[1:] > rows[:-1]) | (rows[1:] == max_seqs)
    return skip_unless(~is_ascending.all(), look, mask & False)


def token_blocks(pool: BlockPool, group: LayerGroup, context_len: jax.Array, seq_ids: jax.Array) -> jax.Array:
    """i32[..., max_blocks_per_seq], the rows' blocks that hold tokens; nowhere for reserved ones."""
    num_held = num_blocks_for(get_at(context_len, seq_ids), group.block_size)
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
    columns = lax.broadcast_to_rank(columns, num_held.ndim + 1)
    return jnp.where(columns < num_held[..., None], get_at(pool.block_table, seq_ids), pool.num_blocks)


def partial_tails(control: Control, config: CacheConfig, seq_ids: jax.Array) -> jax.Array:
    """i32 like `seq_ids`, the rows' last blocks of the indexed group if they are not full, else nowhere."""
    group, pool = config.groups[config.indexed_group], control.block_pools[config.indexed_group]
    context_len = get_at(control.context_len, seq_ids, 0)
    columns = quotient(context_len, group.block_size)
    tails = get_at(pool.block_table, (seq_ids, columns), pool.num_blocks)
    return jnp.where(remainder(context_len, group.block_size) > 0, tails, pool.num_blocks)


def num_tokens_held(control: Control, pool: BlockPool, block_size: int) -> jax.Array:
    """i32[num_blocks], tokens that each block of a group holds for a row, or published."""
    starts = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32) * block_size
    filled = jnp.clip(control.context_len[:, None] - starts[None], 0, block_size)
    # A last block may be shared by a longer fork, for which it is not the last.
    num_tokens = max_at(jnp.zeros_like(pool.ref_count), pool.block_table, filled)
    if pool.cached is None:
        return num_tokens
    return jnp.where(pool.cached.is_published, block_size, num_tokens)


def _drop_columns(pool: BlockPool, row: jax.Array, first_column: jax.Array) -> BlockPool:
    """Releases the row's blocks from `first_column` on; `row == max_seqs` changes nothing."""
    entries = get_at(pool.block_table, row, pool.num_blocks)
    entries, block_table = read_first(entries, pool.block_table)
    is_dropped = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32) >= first_column
    pool = block_pool.release(pool, jnp.where(is_dropped, entries, pool.num_blocks)[::-1])
    kept = jnp.where(is_dropped, pool.num_blocks, entries)
    return dataclasses.replace(pool, block_table=set_at(block_table, row, kept))


def _window_is_lost(
    pool: BlockPool, group: LayerGroup, seq_id: jax.Array, context_len: jax.Array, new_len: jax.Array
) -> jax.Array:
    """bool[], whether a row of the group cannot be rolled back to `new_len`."""
    if group.window is None:
        return jnp.bool_(False)
    is_beyond = (context_len > group.window) & (context_len - new_len > group.max_rollback)
    # Behind the sinks the next token reads from here on, and what is held is contiguous up to the tail.
    column = first_column(group, new_len)
    is_read = column * group.block_size < new_len
    entry = get_at(pool.block_table, (seq_id, column), pool.num_blocks)
    return is_beyond | (is_read & (entry == pool.num_blocks))
