"""The plan of an `extend`: blocks that rows need, blocks that they release, and the rows that grow.

`propose` plans for all rows that may grow, as if there were blocks for all. `decide` keeps those for which
there are, in entry order: a row needs its new blocks and copies, and may count on the blocks that left its
own window or the window of an earlier row that grows. `NewTokens` is the layout of the call's tokens: padded,
a row of an array each, or packed end to end.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import (
    add_at,
    count_down,
    get_at,
    num_true,
    quotient,
    remainder,
    run_of,
)
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.backends import computed_once
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.rows import check_ids


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The new tokens as the caller laid them out, flat."""

    row: jax.Array  # i32[tokens], index of the token's row in the call, `n` for padding
    offset: jax.Array  # i32[tokens], place among the row's new tokens
    starts: jax.Array  # i32[n + 1], the row's tokens are `[starts[i], starts[i + 1])`
    shape: tuple[int, ...]  # of the caller's token arrays
    is_packed: bool  # rows lie end to end

    def spread(self, per_row: jax.Array, fill: int) -> jax.Array:
        """Repeats each row's entry of `per_row`, i32[n] or bool[n], for its tokens; `fill` for padding."""
        if self.is_packed:
            return get_at(per_row, self.row, fill)
        return jnp.broadcast_to(per_row[:, None], self.shape).reshape(-1)

    def first(self, per_token: jax.Array) -> jax.Array:
        """Reads `per_token` [tokens] at each row's first token, [n]; any for a row without."""
        if self.is_packed:
            return get_at(per_token, self.starts[:-1])
        return per_token.reshape(self.shape)[:, 0]

    def count(self, mask: jax.Array) -> jax.Array:
        """Counts each row's tokens for which `mask bool[tokens]` is true, i32[n]."""
        if self.is_packed:
            before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(mask, dtype=jnp.int32)])
            return jnp.diff(get_at(before, self.starts))
        return jnp.sum(mask.reshape(self.shape), axis=1, dtype=jnp.int32)


def padded_tokens(num_rows: int, max_new: int) -> NewTokens:
    """Lays tokens out in `[num_rows, max_new]` arrays."""
    order = jnp.arange(num_rows * max_new, dtype=jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * max_new
    return NewTokens(
        quotient(order, max_new), remainder(order, max_new), starts, (num_rows, max_new), is_packed=False
    )


def packed_tokens(num_new: jax.Array, num_tokens: int) -> NewTokens:
    """Lays tokens out end to end in `[num_tokens]` arrays, `num_new[i]` of row `i`."""
    ends = jnp.cumsum(jnp.clip(num_new, 0, num_tokens + 1), dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    order = jnp.arange(num_tokens, dtype=jnp.int32)
    row = run_of(ends, order)
    row, offset = computed_once((row, order - starts[row]))
    return NewTokens(row, offset, starts, (num_tokens,), is_packed=True)


class GroupPlan(NamedTuple):
    """The part of an `ExtendPlan` that concerns one layer group."""

    opens_block: jax.Array  # bool[tokens], the token is the first of a block that its row lacks
    num_blocks: jax.Array  # i32[n], such blocks per row
    tail: jax.Array  # i32[n], the partly filled block that the row's first new token goes into, or nowhere
    is_tail_published: jax.Array  # bool[n], that block is published, so that no row may write into it
    copies_tail: jax.Array  # bool[n], the row copies that block first
    leaving: jax.Array  # i32[n, most per call], blocks that left the row's window, the last first, or nowhere
    leaving_columns: jax.Array  # i32[n, most per call], columns of the block table
    num_back: (
        jax.Array
    )  # i32[n], leaving blocks that are free once the rows before and this one release theirs

    @property
    def need(self) -> jax.Array:
        """Blocks that each row takes, copies included, i32[n]."""
        return self.num_blocks + self.copies_tail.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ExtendPlan:
    """The rows of a call of `extend`, and which of them grow."""

    seq_ids: jax.Array  # i32[n], `max_seqs` for ids that name no row
    num_new: jax.Array  # i32[n], as the caller gave it
    tokens: NewTokens
    context_len: jax.Array  # i32[n], tokens before the call
    kept_len: jax.Array  # i32[n], of these, the ones before all that windows must still serve
    positions: jax.Array  # i32[tokens], each token's place in its row
    status: jax.Array  # i32[n], OK or the reason why the row does not grow
    grows: jax.Array  # bool[n]
    groups: tuple[GroupPlan, ...]  # per layer group
    may_copy: bool  # some row may have to copy its last block (static)


def propose(
    control: Control,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: NewTokens,
    max_new: int,
    config: CacheConfig,
    *,
    kept_len: jax.Array | None = None,
    may_copy: bool = True,
) -> tuple[Control, ExtendPlan]:
    """Plans for all rows that may grow; `seq_ids` None means all rows.

    Windows keep what tokens from `kept_len` i32[n] on read, at most `context_len`, which is the default. A
    caller that knows that no row has to copy its last block (`may_copy=False`) counts no owners.

    The control state has the same values: continue with it, not with the argument, so that XLA counts owners
    in place instead of copying the array.
    """
    id_checks = ()
    if seq_ids is None:  # none is out of range or repeated
        seq_ids = jnp.arange(control.max_seqs, dtype=jnp.int32)
        context_len, is_active = control.context_len, control.is_active
    else:
        id_checks = check_ids(control, seq_ids, mask=num_new != 0)
        seq_ids = jnp.where(seq_ids < 0, control.max_seqs, jnp.minimum(seq_ids, control.max_seqs))
        context_len = get_at(control.context_len, seq_ids, 0)
        is_active = get_at(control.is_active, seq_ids, False)
    # A packed row that ends past the arrays would have tokens without a slot: it fails as a whole.
    ends_outside = tokens.is_packed & (tokens.starts[1:] > tokens.row.shape[0])
    is_too_long = (num_new > max_new) | ends_outside | (num_new > config.max_seq_len - context_len)
    status = first_failure(
        *id_checks,
        (num_new < 0, Status.BAD_LENGTH),
        ((num_new > 0) & ~is_active, Status.SEQ_NOT_ACTIVE),
        ((num_new > 0) & is_too_long, Status.TOO_LONG),
    )
    grows = (status == Status.OK) & (num_new > 0)
    positions = tokens.spread(context_len, 0) + tokens.offset
    kept_len = context_len if kept_len is None else kept_len
    plan = ExtendPlan(seq_ids, num_new, tokens, context_len, kept_len, positions, status, grows, (), may_copy)
    marks = None if control.marks is None else get_at(control.marks, seq_ids, 0)
    pools, groups = [], []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        pool, proposal = _propose_group(pool, group, plan, marks, config)
        pools.append(pool)
        groups.append(proposal)
    control = dataclasses.replace(control, block_pools=tuple(pools))
    return control, dataclasses.replace(plan, groups=tuple(groups))


def _propose_group(
    pool: BlockPool, group: LayerGroup, plan: ExtendPlan, marks: jax.Array | None, config: CacheConfig
) -> tuple[BlockPool, GroupPlan]:
    tokens, nowhere, block_size = plan.tokens, pool.num_blocks, group.block_size
    if group.holds_sources:
        return pool, _nothing(plan, nowhere)
    rows = jnp.where(plan.grows, plan.seq_ids, pool.block_table.shape[0])
    token_rows = tokens.spread(rows, pool.block_table.shape[0])
    is_token = tokens.offset < tokens.spread(plan.num_new, 0)
    # Outside the table nothing is needed, so the fill value is any block.
    columns = quotient(plan.positions, block_size)
    entries = get_at(pool.block_table, (token_rows, columns), 0)
    opens_block = is_token & group.span.is_opening(plan.positions, block_size) & (entries == nowhere)
    if group.span.is_read_later:
        opens_block &= _is_stored(group, plan, columns, marks, config)
    has_tail = plan.grows & group.tail_column(plan.context_len)[1]
    tail = jnp.where(has_tail, tokens.first(entries), nowhere)
    is_published = block_pool.is_published(pool, tail)
    ref_count, copies_tail = pool.ref_count, jnp.zeros_like(has_tail)
    if plan.may_copy:
        # A writer copies while its block has another owner. If every owner writes, the last one writes in
        # place. Each count down is undone at once: a proposal changes no owner, and may still be refused.
        ref_count, is_last_owner = count_down(ref_count, tail)
        ref_count = add_at(ref_count, tail, 1)
        copies_tail = has_tail & (is_published | ~is_last_owner)

    num_leaving = min(
        group.span.max_leaving_blocks(config.query_len_limit, block_size), pool.max_blocks_per_seq
    )
    # A window keeps the tokens that it reads after `max_rollback` fewer, so that `truncate` can return there.
    first_kept = group.first_column(plan.kept_len, group.max_rollback)
    old_columns = first_kept[:, None] - 1 - jnp.arange(num_leaving, dtype=jnp.int32)[None]
    leaving = get_at(pool.block_table, (rows[:, None], old_columns), nowhere)
    # Sinks never leave a window.
    leaving = jnp.where(old_columns >= group.num_sink_blocks, leaving, nowhere)
    if marks is not None and group in config.snapshot_groups.values():
        marked = _marked_columns(group, marks)
        # What is to be published with a state stays until it is, however far the row has gone.
        is_waiting = (old_columns[..., None] == marked[:, None]).any(axis=2)
        leaving = jnp.where(is_waiting & ~block_pool.is_published(pool, leaving), nowhere, leaving)
        marked = jnp.where(marked < old_columns[:, -1:], marked, -1)
        waiting = get_at(pool.block_table, (rows[:, None], marked), nowhere)
        waiting = jnp.where(block_pool.is_published(pool, waiting), waiting, nowhere)
        leaving = jnp.concatenate([leaving, waiting], axis=1)
        old_columns = jnp.concatenate([old_columns, marked], axis=1)
    num_back = jnp.zeros_like(plan.num_new)
    if num_leaving:
        ref_count, is_free = count_down(ref_count, leaving)
        ref_count = add_at(ref_count, leaving, 1)
        num_back = jnp.sum(is_free, axis=1, dtype=jnp.int32)
    proposal = GroupPlan(
        opens_block,
        tokens.count(opens_block),
        tail,
        is_published,
        copies_tail,
        leaving,
        old_columns,
        num_back,
    )
    return dataclasses.replace(pool, ref_count=ref_count), proposal


def _marked_columns(group: LayerGroup, marks: jax.Array) -> jax.Array:
    """Lists the columns of the states after `marks` i32[n, m] tokens, each once; -1 for none."""
    first, end = group.span.needed_columns(marks, group.block_size)
    nth = jnp.arange(group.span.num_prefix_blocks(group.block_size), dtype=jnp.int32)
    columns = first[..., None] + nth[None, None]
    columns = jnp.where((columns < end[..., None]) & (marks > 0)[..., None], columns, -1)
    columns = columns.reshape(marks.shape[0], -1)
    order = jnp.arange(columns.shape[1], dtype=jnp.int32)
    is_repeated = (columns[:, :, None] == columns[:, None]) & (order[:, None] > order[None])[None]
    return jnp.where(is_repeated.any(axis=2), -1, columns)


def _is_stored(
    group: LayerGroup, plan: ExtendPlan, columns: jax.Array, marks: jax.Array | None, config: CacheConfig
) -> jax.Array:
    """Masks the tokens in columns i32[tokens] that later steps read, of this row or one that begins alike."""
    span, block_size, tokens = group.span, group.block_size, plan.tokens
    first = span.first_stored_column(plan.context_len + plan.num_new, block_size)
    is_stored = columns >= tokens.spread(first, 0)
    if marks is None or not span.is_in_prefix:
        return is_stored
    for marked in _marked_columns(group, marks).T:
        is_stored |= columns == tokens.spread(marked, -1)
    if config.snapshots.every:
        for nth in range(1, span.num_prefix_blocks(block_size) + 1):
            is_stored |= remainder((columns + nth) * block_size, config.snapshots.every) == 0
    return is_stored


def _nothing(plan: ExtendPlan, nowhere: int) -> GroupPlan:
    """Plans for a group in which new tokens change nothing."""
    none, no_row = jnp.zeros_like(plan.tokens.offset, bool), jnp.zeros_like(plan.grows)
    zeros = jnp.zeros_like(plan.num_new)
    empty = jnp.zeros_like(plan.num_new, shape=(zeros.shape[0], 0))
    return GroupPlan(none, zeros, jnp.full_like(zeros, nowhere), no_row, no_row, empty, empty, zeros)


def required_blocks(plan: ExtendPlan) -> jax.Array:
    """Counts the blocks that must be available for all rows of a proposal to grow, i32[groups]."""
    # The largest sum over the first entries: a row may count on blocks that earlier rows and itself release,
    # never on blocks of later ones.
    required = [jnp.max(jnp.cumsum(group.need - group.num_back), initial=0) for group in plan.groups]
    return jnp.stack(required)


def decide(control: Control, plan: ExtendPlan, config: CacheConfig) -> tuple[Control, ExtendPlan]:
    """Keeps the rows of a proposal for which there are blocks, in entry order.

    Where there are blocks for all, nothing changes. Else the rows are looked at one after the other: a failed
    row takes nothing, gives nothing back, and stays an owner of its last block.
    """
    num_rows = plan.num_new.shape[0]
    available = jnp.stack([block_pool.num_available(pool) for pool in control.block_pools])
    is_short = (required_blocks(plan) > available).any()
    tails = [(group.tail, block_pool.ref_counts(pool, group.tail)) for group, pool in _pairs(control, plan)]

    def decide_row(state):
        row, free, grows, copies_tail, ref_counts = state
        left, copies = [], []
        for g, (group, (tail, num_owners)) in enumerate(zip(plan.groups, tails, strict=True)):
            # Earlier rows that copied this block own it no more. One that failed still does, so that this row
            # must not write into a block that the other one reads.
            num_copied = num_true(copies_tail[g] & (tail == tail[row]))
            is_shared = num_owners[row] - num_copied > 1
            copies.append((tail[row] < ref_counts[g].shape[0]) & (group.is_tail_published[row] | is_shared))
            # A leaving block becomes free with its last owner: earlier rows that grow have released theirs.
            num_back = num_true(get_at(ref_counts[g], group.leaving[row], 0) == 1)
            left.append(free[g] + num_back - group.num_blocks[row] - copies[-1].astype(jnp.int32))
        # A row grows in all layer groups or in none; one that fails leaves its blocks to the rows after it.
        row_grows = plan.grows[row] & (jnp.stack(left) >= 0).all()
        free = jnp.where(row_grows, jnp.stack(left), free)
        copies_tail = copies_tail.at[:, row].set(jnp.stack(copies) & row_grows)
        # Only a row that grows releases its blocks, so a failed one keeps its window bit for bit.
        ref_counts = tuple(
            add_at(counts, jnp.where(row_grows, group.leaving[row], counts.shape[0]), -1)
            for counts, group in zip(ref_counts, plan.groups, strict=True)
        )
        return row + 1, free, grows.at[row].set(row_grows), copies_tail, ref_counts

    # Where blocks are short no row copies before it is decided: until then it owns its last block.
    copies_tail = jnp.stack([group.copies_tail & ~is_short for group in plan.groups])
    ref_counts = tuple(pool.ref_count for pool in control.block_pools)
    state = jnp.where(is_short, 0, num_rows), available, plan.grows, copies_tail, ref_counts
    state = lax.while_loop(lambda state: state[0] < num_rows, decide_row, state)
    _, _, grows, copies_tail, ref_counts = state

    # Owners were only counted down to decide: `extend` releases the blocks, after this.
    pools, groups = [], []
    for g, (group, pool) in enumerate(_pairs(control, plan)):
        let_go = jnp.where((grows & is_short)[:, None], group.leaving, pool.num_blocks)
        pools.append(dataclasses.replace(pool, ref_count=add_at(ref_counts[g], let_go, 1)))
        groups.append(group._replace(copies_tail=copies_tail[g]))
    status = jnp.where(plan.grows & ~grows, jnp.int32(Status.OUT_OF_BLOCKS), plan.status)
    control = dataclasses.replace(control, block_pools=tuple(pools))
    return control, dataclasses.replace(plan, status=status, grows=grows, groups=tuple(groups))


def _pairs(control: Control, plan: ExtendPlan) -> list[tuple[GroupPlan, BlockPool]]:
    return list(zip(plan.groups, control.block_pools, strict=True))
