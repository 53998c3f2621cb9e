"""What new tokens ask of the block pools, and which rows get it.

The definition is sequential: the rows grow one after the other, each giving back the blocks that left
its window, then taking what it needs or failing. (Those that grow then give back before any takes: fewer
cached blocks are evicted, or others.) Almost always every row fits and no tail is shared;
then all rows proceed at once. Otherwise `_walk` decides row by row; it knows how many blocks can be had, not
which are evicted or freed for them, and says where that matters (`Decision`).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.loops import run_if
from kvcache_jax.arrays.masked_updates import (
    add_at,
    any_of,
    get_at,
    num_true,
    quotient,
    read_first,
    remainder,
)
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig, LayerGroup
from kvcache_jax.core.reach import first_column
from kvcache_jax.core.state import BlockPool, Control
from kvcache_jax.operations.new_tokens import NewTokens


class Wish(NamedTuple):
    """What a call of `extend` asks for, before anything is granted.

    Attributes:
      seq_ids: i32[n], `max_seqs` for ids that name no row.
      num_new: i32[n], as the caller gave it.
      tokens: How the caller laid them out.
      context_len: i32[n], tokens before the call.
      num_published: i32[n], blocks of the row that are published.
      positions: i32[tokens], each token's place in its row.
      status: i32[n], OK unless something but blocks stands against it.
      wants: bool[n], the row is to grow.
    """

    seq_ids: jax.Array
    num_new: jax.Array
    tokens: NewTokens
    context_len: jax.Array
    num_published: jax.Array
    positions: jax.Array
    status: jax.Array
    wants: jax.Array


class Demand(NamedTuple):
    """What the rows of one call ask of one layer group.

    Attributes:
      num_blocks: i32[n], blocks per row, copies not counted.
      tail: i32[n], the partly filled block that the row's first new token goes into, or nowhere.
      is_tail_published: bool[n], that block is published: it is never written again, not even by one owner.
      first_kept: i32[n], first table column behind the sinks that stays in reach.
    """

    num_blocks: jax.Array
    tail: jax.Array
    is_tail_published: jax.Array
    first_kept: jax.Array


def demands_of(
    control: Control, wish: Wish, wants: jax.Array, config: CacheConfig
) -> tuple[list[Demand], list[jax.Array]]:
    """What those rows of the wish for which `wants` bool[n] holds need of each group.

    Returns:
      The demands; and per group bool[tokens], the token is the first of a block that its row lacks.
    """
    tokens, rows = wish.tokens, jnp.where(wants, wish.seq_ids, control.max_seqs)
    token_rows = tokens.spread(rows, control.max_seqs)
    is_token = tokens.offset < tokens.spread(wish.num_new, 0)
    demands, opens_block = [], []
    for g, (pool, group) in enumerate(zip(control.block_pools, config.groups, strict=True)):
        # Outside the table nothing is needed, so the fill value is any block.
        entries = get_at(pool.block_table, (token_rows, quotient(wish.positions, group.block_size)), 0)
        is_first = is_token & (remainder(wish.positions, group.block_size) == 0)
        opens_block.append(is_first & (entries == pool.num_blocks))
        has_tail = wants & (remainder(wish.context_len, group.block_size) > 0)
        tail = jnp.where(has_tail, tokens.first(entries), pool.num_blocks)
        if control.prefix_index is not None and g == config.indexed_group:
            # What the blocks themselves say too, which are all over a big array.
            is_published = has_tail & (wish.num_published * group.block_size > wish.context_len)
        else:
            is_published = block_pool.is_published(pool, tail)
        first_kept = first_column(group, wish.context_len, group.max_rollback)
        demands.append(Demand(tokens.count(opens_block[-1]), tail, is_published, first_kept))
    return demands, opens_block


class _Overview(NamedTuple):
    """What holds of the demands of all rows.

    Attributes:
      is_free: bool[], there are free blocks for all, copies not counted.
      fits: bool[], there are with those that can be evicted.
      is_shared: bool[], of a block that is to be written into.
      is_published: bool[], likewise.
    """

    is_free: jax.Array
    fits: jax.Array
    is_shared: jax.Array
    is_published: jax.Array


def _overview(control: Control, demands: list[Demand]) -> _Overview:
    is_free, fits = jnp.bool_(True), jnp.bool_(True)
    is_shared, is_published = jnp.bool_(False), jnp.bool_(False)
    for pool, demand in zip(control.block_pools, demands, strict=True):
        num_blocks = jnp.sum(demand.num_blocks, dtype=jnp.int32)
        is_free &= num_blocks <= pool.num_free
        fits &= num_blocks <= block_pool.num_available(pool)
        is_shared |= (block_pool.ref_counts(pool, demand.tail) > 1).any()
        is_published |= demand.is_tail_published.any()
    return _Overview(is_free, fits, is_shared, is_published)


def takes_at_once(control: Control, demands: list[Demand]) -> tuple[jax.Array, jax.Array]:
    """bool[], there are blocks for all `demands` and no row has one to copy; and bool[], these are free."""
    is_free, fits, is_shared, is_published = _overview(control, demands)
    return fits & ~is_shared & ~is_published, is_free


class Decision(NamedTuple):
    """Which of the rows that want to grow do.

    Attributes:
      demands: What the rows that want to grow need, per group.
      opens_block: Per group bool[tokens], which of their tokens open a block (`demands_of`).
      grows: bool[n], the row grows.
      copies_tail: bool[groups, n], it must copy its tail first.
      must_take_turns: bool[], rows that take at once might get something else than one after the other:
        a last block that is to be written into is published, and may be evicted for a row before it; or one
        that is copied leaves a later row's window, and would be free before it was copied.
    """

    demands: list[Demand]
    opens_block: list[jax.Array]
    grows: jax.Array
    copies_tail: jax.Array
    must_take_turns: jax.Array


def decide(control: Control, wish: Wish, wants: jax.Array, config: CacheConfig) -> tuple[Control, Decision]:
    """Decides for the rows of the wish for which `wants` bool[n] holds, as if no block were evicted for any.

    Returns:
      The control state unchanged, but to be used from here on: the walk counts on its arrays in place.
      The decision.
    """
    demands, opens_block = demands_of(control, wish, wants, config)
    _, fits, is_shared, is_published = _overview(control, demands)
    available = jnp.stack([block_pool.num_available(pool) for pool in control.block_pools])

    def walk(state):
        ref_counts, *_ = state
        found = _walk(ref_counts, available, control, demands, wish.seq_ids, wants, config)
        return found.ref_counts, found.grows, found.copies_tail, found.loses_tail

    ref_counts = tuple(pool.ref_count for pool in control.block_pools)
    nothing_to_copy = jnp.zeros_like(wants, shape=(len(demands), *wants.shape))
    must_walk = ~fits | is_shared | is_published
    state = ref_counts, wants, nothing_to_copy, jnp.zeros_like(must_walk)
    ref_counts, grows, copies, loses_tail = run_if(must_walk, walk, state)
    pools = tuple(
        dataclasses.replace(pool, ref_count=ref_count)
        for pool, ref_count in zip(control.block_pools, ref_counts, strict=True)
    )
    needs = num_taken(demands, grows, copies)
    lacks = any_of([n > pool.num_free for n, pool in zip(needs, pools, strict=True)])
    control = dataclasses.replace(control, block_pools=pools)
    return control, Decision(demands, opens_block, grows, copies, loses_tail | (is_published & lacks))


def num_taken(demands: list[Demand], grows: jax.Array, copies_tail: jax.Array) -> list[jax.Array]:
    """i32[] per group, blocks that the rows take, copies included."""
    return [
        jnp.sum(jnp.where(grows, demand.num_blocks, 0) + copies_tail[g].astype(jnp.int32), dtype=jnp.int32)
        for g, demand in enumerate(demands)
    ]


def num_blocks_for_all(control: Control, wish: Wish, config: CacheConfig) -> jax.Array:
    """i32[groups], how many blocks must be available for all rows that want to grow to do so."""
    demands, _ = demands_of(control, wish, wish.wants, config)
    plenty = jnp.full(len(demands), 2**30, jnp.int32)
    ref_counts = tuple(pool.ref_count for pool in control.block_pools)
    walk = _walk(ref_counts, plenty, control, demands, wish.seq_ids, wish.wants, config)
    return jnp.maximum(jnp.max(plenty - walk.spare, axis=0), 0)


class _Walk(NamedTuple):
    """What a walk over the rows finds.

    Attributes:
      ref_counts: Per group i32[num_blocks], as they were.
      grows: As in `Decision`.
      copies_tail: Likewise.
      loses_tail: bool[], a block that is copied is free when all rows had their turn.
      spare: i32[n, groups], blocks that are left when the row has taken its own, negative if it cannot.
    """

    ref_counts: tuple[jax.Array, ...]
    grows: jax.Array
    copies_tail: jax.Array
    loses_tail: jax.Array
    spare: jax.Array


def _walk(
    ref_counts: tuple[jax.Array, ...],
    available: jax.Array,
    control: Control,
    demands: list[Demand],
    seq_ids: jax.Array,
    wants: jax.Array,
    config: CacheConfig,
) -> _Walk:
    """`decide` one row after the other, counting owners down on the way and up again at the end.

    Only owners and free blocks are followed: a block taken here is neither shared nor given back in
    the same call, so its id does not matter.

    Args:
      ref_counts: i32[num_blocks] per group.
      available: i32[groups], blocks that can be handed out.
      control: The state, but for these.
      demands: Per group.
      seq_ids: i32[n].
      wants: bool[n].
      config: The cache's.
    """

    def walk_row(state, row):
        ref_counts, free = state
        seq_id, wants_row, row_demands = row
        grows, copies, let_go, spare, left, counts = wants_row, [], [], [], [], []
        for g, demand in enumerate(row_demands):
            pool = control.block_pools[g]
            leaving = _leaving(pool, config.groups[g], seq_id, demand.first_kept)
            owners = get_at(ref_counts[g], jnp.append(leaving, demand.tail), 0)
            owners, ref_count = read_first(owners, ref_counts[g])
            copies_tail = (owners[-1] > 1) | demand.is_tail_published
            num_back = num_true(owners[:-1] == 1)
            need = demand.num_blocks + copies_tail.astype(jnp.int32)
            spare.append(free[g] + num_back - need)
            grows &= spare[g] >= 0
            copies.append(copies_tail)
            let_go.append(jnp.append(leaving, jnp.where(copies_tail, demand.tail, pool.num_blocks)))
            # The original, published and without owner now, can be evicted for the rows that follow.
            left.append(spare[g] + (copies_tail & (owners[-1] == 1)).astype(jnp.int32))
            counts.append(ref_count)
        let_go = [
            jnp.where(grows, ids, pool.num_blocks)
            for ids, pool in zip(let_go, control.block_pools, strict=True)
        ]
        free = jnp.where(grows, jnp.stack(left), free)
        found = grows, jnp.stack(copies) & grows, jnp.stack(spare), let_go
        return (add_owners(counts, let_go, -1), free), found

    def add_owners(ref_counts, let_go, change: int):
        return tuple(add_at(counts, ids, change) for counts, ids in zip(ref_counts, let_go, strict=True))

    (ref_counts, _), walked = lax.scan(walk_row, (ref_counts, available), (seq_ids, wants, demands))
    grows, copies, spare, let_go = walked
    loses_tail = any_of(
        [
            (copied & block_pool.has_no_owner(counts, demand.tail) & ~demand.is_tail_published).any()
            for counts, demand, copied in zip(ref_counts, demands, copies.T, strict=True)
        ]
    )
    loses_tail, ref_counts = read_first(loses_tail, ref_counts)
    return _Walk(add_owners(ref_counts, let_go, 1), grows, copies.T, loses_tail, spare)


def _leaving(pool: BlockPool, group: LayerGroup, seq_id: jax.Array, first_kept: jax.Array) -> jax.Array:
    """i32[any], the row's blocks that left its window, and nowheres."""
    if group.window is None:
        return jnp.full(0, pool.num_blocks, jnp.int32)
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
    is_leaving = (columns >= group.num_sink_blocks) & (columns < first_kept)
    entries = get_at(pool.block_table, seq_id, pool.num_blocks)
    return jnp.where(is_leaving, entries, pool.num_blocks)
