"""Rows start, fork, roll back and end: the one-row forms of the operations on control state.

Each takes the control state, scalars and the config, and returns `(control, status)`; a row that fails
comes back as it was. `each_row` makes the n-row operation of it: n successive one-row calls.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax import block_pool, companions, eviction, prefix_index
from kvcache_jax.config import CacheConfig, LayerGroup
from kvcache_jax.indexing import (
    add_at,
    any_of,
    get_at,
    max_at,
    min_at,
    num_true,
    quotient,
    read_first,
    set_at,
)
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


def mark_used(control: Control, rows: jax.Array, is_use: jax.Array) -> Control:
    """Marks `rows` i32[...] as just used; nowhere is skipped. The clock advances if `is_use` bool[]."""
    clock = control.clock + is_use.astype(jnp.uint32)
    return dataclasses.replace(
        control,
        clock=clock,
        last_used=set_at(control.last_used, rows, clock),
        num_uses=add_at(control.num_uses, rows, 1),
    )


def num_blocks_for(num_tokens: jax.Array, block_size: int) -> jax.Array:
    """Blocks that hold `num_tokens` tokens."""
    return quotient(num_tokens + block_size - 1, block_size)


class Prompt(NamedTuple):
    """What a row is to start with.

    Attributes:
      num_tokens: i32[].
      namespace: u32[4].
      priority: i32[].
      tokens: i32[P] with prefix caching, else i32[0].
      reuse: bool[], whether to look for a cached prefix.
      items: i32[I, 2], first position and end of each multimodal item; equal where there is none.
    """

    num_tokens: jax.Array
    namespace: jax.Array
    priority: jax.Array
    tokens: jax.Array
    reuse: jax.Array
    items: jax.Array


class Reservation(NamedTuple):
    """What the admission of a prompt asks of the layer groups.

    Attributes:
      hits: Per group i32[max_blocks_per_seq], cached blocks to start from by column, or nowhere.
      num_cached: i32[], their tokens.
      num_new: Per group i32[], blocks to take.
      num_required: Per group i32[], blocks that must be available: also the hits that nobody holds.
    """

    hits: list[jax.Array]
    num_cached: jax.Array
    num_new: list[jax.Array]
    num_required: list[jax.Array]


def reservation(control: Control, prompt: Prompt, config: CacheConfig) -> Reservation:
    """What `allocate_row` takes for a prompt."""
    hits, num_cached = find_hits(control, prompt, config)
    num_new, num_required = [], []
    for pool, group, ids in zip(control.block_pools, config.groups, hits, strict=True):
        is_hit = ids < pool.num_blocks
        num_blocks = jnp.minimum(
            num_blocks_for(prompt.num_tokens, group.block_size) - quotient(num_cached, group.block_size),
            group.max_held_blocks - num_true(is_hit),
        )
        num_new.append(num_blocks)
        num_required.append(num_blocks + num_true(is_hit & (block_pool.ref_counts(pool, ids) == 0)))
    return Reservation(hits, num_cached, num_new, num_required)


def allocate_row(
    control: Control, seq_id: jax.Array, prompt: Prompt, *, config: CacheConfig
) -> tuple[Control, tuple[jax.Array, jax.Array]]:
    """Starts a row on the cached prefix of its prompt and reserves the rest.

    A window group reserves no more than a row may hold. The result is `(status, num_cached)`.
    """
    num_tokens = prompt.num_tokens
    hits, num_cached, need, required = reservation(control, prompt, config)
    lacks = [
        num_blocks > block_pool.num_available(pool)
        for num_blocks, pool in zip(required, control.block_pools, strict=True)
    ]
    is_unknown = num_tokens > (prompt.tokens.shape[0] if control.prefix_index else config.max_seq_len)
    status = first_failure(
        *check_seq_ids(control, seq_id),
        (get_at(control.is_active, seq_id), Status.SEQ_IN_USE),
        (num_tokens < 0, Status.BAD_LENGTH),
        (num_tokens > config.max_seq_len, Status.TOO_LONG),
        (is_unknown, Status.BAD_LENGTH),
        (any_of(lacks), Status.OUT_OF_BLOCKS),
    )
    ok = status == Status.OK
    row = jnp.where(ok, seq_id, control.max_seqs)
    num_cached = jnp.where(ok, num_cached, 0)
    need = [jnp.where(ok, n, 0) for n in need]
    control = mark_used(control, row, ok)
    # Hits are held before anything is evicted.
    hits = [jnp.where(ok, ids, pool.num_blocks) for ids, pool in zip(hits, control.block_pools, strict=True)]
    if control.prefix_index is not None:
        pools = tuple(block_pool.reuse(*pair) for pair in zip(control.block_pools, hits, strict=True))
        index = prefix_index.note_hits(
            control.prefix_index, hits[config.indexed_group], control.clock, prompt.priority
        )
        control = dataclasses.replace(control, block_pools=pools, prefix_index=index)
        control = eviction.make_room(control, need, config)
    pools = []
    for pool, group, ids, num_blocks in zip(control.block_pools, config.groups, hits, need, strict=True):
        columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
        first = quotient(num_cached, group.block_size)
        pool, new_ids = block_pool.take(pool, (columns >= first) & (columns < first + num_blocks))
        ids = jnp.minimum(ids, new_ids)
        pools.append(dataclasses.replace(pool, block_table=set_at(pool.block_table, row, ids)))
    return dataclasses.replace(
        control,
        is_active=set_at(control.is_active, row, True),
        context_len=set_at(control.context_len, row, num_cached),
        priority=set_at(control.priority, row, prompt.priority),
        namespace=set_at(control.namespace, row, prompt.namespace),
        num_published=set_at(
            control.num_published, row, quotient(num_cached, config.groups[config.indexed_group].block_size)
        ),
        counters=_count_admission(control, ok, prompt, num_cached, config),
        block_pools=tuple(pools),
    ), (status, num_cached)


def find_hits(control: Control, prompt: Prompt, config: CacheConfig) -> tuple[list[jax.Array], jax.Array]:
    """Per group i32[max_blocks_per_seq] cached blocks by column, or nowhere; and i32[], their tokens."""
    if control.prefix_index is None:
        nowhere = [
            jnp.full(pool.max_blocks_per_seq, pool.num_blocks, jnp.int32) for pool in control.block_pools
        ]
        return nowhere, jnp.int32(0)
    found = prefix_index.find_prefix(
        control.prefix_index, control.hash_key, prompt.tokens, prompt.num_tokens, prompt.namespace
    )
    found = jnp.where(prompt.reuse, found, control.block_pools[config.indexed_group].num_blocks)
    return companions.usable_prefix(control, found, prompt.items, config)


def _count_admission(
    control: Control, ok: jax.Array, prompt: Prompt, num_cached: jax.Array, config: CacheConfig
) -> jax.Array:
    """The counters after an admission."""
    block_size = config.groups[config.indexed_group].block_size
    asked = ok & prompt.reuse if control.prefix_index is not None else jnp.bool_(False)
    num_asked = jnp.where(asked, prompt.num_tokens, 0)
    events = {
        Counter.ALLOCATIONS: ok,
        Counter.REQUEST_QUERIES: asked,
        Counter.REQUEST_HITS: num_cached > 0,
        Counter.BLOCK_QUERIES: quotient(num_asked, block_size),
        Counter.BLOCK_HITS: quotient(num_cached, block_size),
        Counter.TOKEN_QUERIES: num_asked,
        Counter.TOKEN_HITS: num_cached,
    }
    return count_events(control, events)


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
        _inherit(control, row, src_id, ok),
        is_active=set_at(control.is_active, row, True),
        counters=count_events(control, {Counter.FORKS: ok}),
        block_pools=tuple(pools),
    ), status


def _inherit(control: Control, rows: jax.Array, parent_ids: jax.Array, is_use: jax.Array) -> Control:
    """Gives `rows` i32[...] what their parents have but for the blocks, and marks them as just used.

    The clock advances if `is_use` bool[]; rows that are nowhere are skipped.
    """

    def inherit(field: jax.Array) -> jax.Array:
        return set_at(field, rows, get_at(field, parent_ids))

    return dataclasses.replace(
        mark_used(control, rows, is_use),
        context_len=inherit(control.context_len),
        priority=inherit(control.priority),
        namespace=inherit(control.namespace),
        num_published=inherit(control.num_published),
    )


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
    return dataclasses.replace(
        control,
        context_len=set_at(control.context_len, row, new_len),
        num_published=min_at(
            control.num_published, row, quotient(new_len, config.groups[config.indexed_group].block_size)
        ),
        block_pools=tuple(pools),
    ), status


def free_row(control: Control, seq_id: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    """Ends a row: all its blocks lose this owner."""
    status, row = _active_row(control, seq_id)

    def clear(field: jax.Array) -> jax.Array:
        return set_at(field, row, jnp.zeros_like(field[0]))

    return dataclasses.replace(
        control,
        **{name: clear(getattr(control, name)) for name in ROW_FIELDS},
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
        pool = block_pool.release_repeated(block_pool.share(pool, new_ids), old_ids.T[::-1])
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
    order = jnp.arange(seq_ids.shape[0], dtype=jnp.int32)
    rows = jnp.where(mask, seq_ids, max_seqs)
    first = min_at(jnp.full_like(rows, seq_ids.shape[0], shape=max_seqs), rows, order)
    return mask & (get_at(first, rows, 0) < order)


def token_blocks(pool: BlockPool, group: LayerGroup, context_len: jax.Array, seq_ids: jax.Array) -> jax.Array:
    """i32[..., max_blocks_per_seq], the rows' blocks that hold tokens; nowhere for reserved ones."""
    num_held = num_blocks_for(get_at(context_len, seq_ids), group.block_size)
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
    return jnp.where(columns < num_held[..., None], get_at(pool.block_table, seq_ids), pool.num_blocks)


def num_tokens_held(control: Control, pool: BlockPool, block_size: int) -> jax.Array:
    """i32[num_blocks], tokens that each block of a group holds for a row, or published."""
    starts = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32) * block_size
    filled = jnp.clip(control.context_len[:, None] - starts, 0, block_size)
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
