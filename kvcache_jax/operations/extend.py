"""Reserving slots for new tokens: the rows that `demand` lets grow take their blocks and copies.

All at once, as a rule. Where what a row gets may depend on the blocks that are evicted for those before it,
or that later ones give back, they take turns (`_grow`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.loops import run_if
from kvcache_jax.arrays.masked_updates import (
    Update,
    get_at,
    min_at,
    num_true,
    quotient,
    rank_true,
    remainder,
    set_at,
    update_all,
)
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.attention_plan import plan_attention
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig, LayerGroup
from kvcache_jax.core.single_kernel import one_control_kernel
from kvcache_jax.core.state import (
    BlockCopies,
    BlockPool,
    Cache,
    Control,
    Counter,
    Step,
    count_events,
)
from kvcache_jax.core.status import Status
from kvcache_jax.operations.extend_plan import Decision, Wish, decide, demands_of, num_taken, takes_at_once
from kvcache_jax.operations.new_tokens import NewTokens, packed_tokens, padded_tokens
from kvcache_jax.operations.rows import check_distinct, first_failure, mark_used
from kvcache_jax.prefix import eviction


@takes_one
@jax.named_scope("kvcache.extend")
def extend(
    cache: Cache,
    num_new: IntRows,
    *,
    max_new: int | None = None,
    num_tokens: int | None = None,
    seq_ids: IntRows | None = None,
    tokens: ArrayLike | None = None,
) -> tuple[Cache, Step]:
    """Reserves slots for the next tokens of each row, copying first a last block that is shared or published.

    Blocks reserved by `allocate` are used first; blocks that left a window go back: those of all rows of the
    call that grow before any of them takes one, so that other cached blocks may be evicted than by one-row
    calls. Call it inside a donated jit: called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated.
      num_new: i32[n], new tokens per row; 0 leaves the row alone, even an idle one.
      max_new: Width of padded token arrays, `[n, max_new]`.
      num_tokens: In place of `max_new`: length of packed token arrays, `[num_tokens]`, in which rows
        lie end to end in the order of `seq_ids`.
      seq_ids: i32[n]. Default: all rows, n = max_seqs.
      tokens: i32[n, max_new] or i32[num_tokens]; required with prefix caching, else unused.

    Returns:
      The cache and a `Step`. `status`: OUT_OF_BLOCKS, TOO_LONG, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID,
      BAD_LENGTH, BAD_SEQ_ID, SKIPPED; such a row has `query_len` 0.

    Raises:
      ValueError, TypeError: both or none of `max_new` and `num_tokens`, no `tokens` with prefix caching, or
        shapes or dtypes that do not fit.

    Example:
      >>> import jax, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [1], [3])
      >>> cache, step = kv.extend(cache, [0, 3], max_new=4)
      >>> step.slots[0].tolist()  # 64 = 4 blocks * 16 tokens is nowhere
      [[64, 64, 64, 64], [0, 1, 2, 64]]
    """
    if (max_new is None) == (num_tokens is None):
        raise ValueError(
            f"got max_new={max_new} and num_tokens={num_tokens}, expected one: padded or packed tokens"
        )
    limit = cache.config.query_len_limit
    if max_new is not None:
        max_new = static_count("max_new", max_new, most=limit, most_name="max_query_len")
    if seq_ids is not None:
        seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_rows = cache.max_seqs if seq_ids is None else seq_ids.shape[0]
    if num_tokens is not None:
        most = (2**31 - 1) // max(num_rows, 1) - 1  # what all rows ask for is added up
        num_tokens = static_count("num_tokens", num_tokens, most=most, most_name="2**31 over the rows")
    num_new = arguments.int_column("num_new", num_new, num_rows)
    arguments.require_tokens("extend", tokens, cache)
    if tokens is not None:
        tokens = arguments.token_ids(tokens, *((num_rows, max_new) if num_tokens is None else (num_tokens,)))
    if cache.control.prefix_index is None:
        tokens = None
    return _extend(cache, seq_ids, num_new, tokens, max_new=max_new, num_tokens=num_tokens)


@functools.partial(jax.jit, static_argnames=("max_new", "num_tokens"))
def _extend(
    cache: Cache,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: jax.Array | None,
    max_new: int | None,
    num_tokens: int | None,
) -> tuple[Cache, Step]:
    config = cache.config  # `reserve` outlives the trace: see `single_kernel`.

    def reserve(control, seq_ids, num_new, tokens):
        if num_tokens is not None:
            new_tokens, limit = packed_tokens(num_new, num_tokens), num_tokens
        else:
            assert max_new is not None
            new_tokens, limit = padded_tokens(num_new.shape[0], max_new), max_new
        limit = min(limit, config.query_len_limit)
        control, step, copies = extend_control(control, seq_ids, num_new, new_tokens, limit, config)
        if tokens is not None:
            control = record_tokens(control, tokens, step, copies, config)
        return control, step, copies

    control, step, copies = one_control_kernel(reserve, cache.control, seq_ids, num_new, tokens)
    cache = dataclasses.replace(cache, control=control)
    if cache.pools:
        step = plan_attention(cache, step)
        cache = storage.copy_all(cache, copies)
    return cache, step


def wish_of(
    control: Control,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: NewTokens,
    max_new: int,
    config: CacheConfig,
) -> Wish:
    """`seq_ids` None stands for all rows, of which none is out of range or repeated."""
    id_checks = ()
    if seq_ids is None:
        seq_ids = jnp.arange(control.max_seqs, dtype=jnp.int32)
        context_len, is_active, num_published = control.context_len, control.is_active, control.num_published
    else:
        id_checks = check_distinct(control, seq_ids, mask=num_new > 0)
        seq_ids = jnp.where(seq_ids < 0, control.max_seqs, jnp.minimum(seq_ids, control.max_seqs))
        context_len = get_at(control.context_len, seq_ids, 0)
        is_active = get_at(control.is_active, seq_ids, False)
        num_published = get_at(control.num_published, seq_ids, 0)
    ends_outside = tokens.is_packed & (tokens.starts[1:] > tokens.row.shape[0])
    is_too_long = (num_new > max_new) | ends_outside | (num_new > config.max_seq_len - context_len)
    status = first_failure(
        *id_checks,
        (num_new < 0, Status.BAD_LENGTH),
        ((num_new > 0) & ~is_active, Status.SEQ_NOT_ACTIVE),
        ((num_new > 0) & is_too_long, Status.TOO_LONG),
    )
    wants = (status == Status.OK) & (num_new > 0)
    positions = tokens.spread(context_len, 0) + tokens.offset
    return Wish(seq_ids, num_new, tokens, context_len, num_published, positions, status, wants)


def extend_control(
    control: Control,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: NewTokens,
    max_new: int,
    config: CacheConfig,
) -> tuple[Control, Step, tuple[BlockCopies, ...]]:
    """Reserves the slots; the caller carries out the copies, in order, before anything is written."""
    wish = wish_of(control, seq_ids, num_new, tokens, max_new, config)
    control, copies, grows = _grow(control, wish, config)

    seq_ids, context_len, positions = wish.seq_ids, wish.context_len, wish.positions
    status = jnp.where(wish.wants & ~grows, jnp.int32(Status.OUT_OF_BLOCKS), wish.status)
    query_len = jnp.where(grows, num_new, 0)
    new_len = context_len + query_len
    rows = jnp.where(grows, seq_ids, control.max_seqs)
    token_rows = tokens.spread(rows, control.max_seqs)
    is_token = tokens.offset < tokens.spread(query_len, 0)
    slots = []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        column = quotient(positions, group.block_size)
        block_ids = get_at(pool.block_table, (token_rows, column), pool.num_blocks)
        slot = block_ids * group.block_size + remainder(positions, group.block_size)
        slots.append(jnp.where(is_token, slot, pool.num_blocks * group.block_size).reshape(tokens.shape))

    num_copies = sum((copied.num_copies for copied in copies), start=jnp.int32(0))
    # The clock advanced with the first row that grew.
    control = mark_used(control, rows, False, context_len=new_len)
    control = dataclasses.replace(control, counters=count_events(control, {Counter.COPIES: num_copies}))
    step = Step(
        status=status,
        seq_ids=seq_ids,
        query_len=query_len,
        context_len=new_len,
        positions=positions.reshape(tokens.shape),
        slots=tuple(slots),
        plans=(),
        cu_query_lens=tokens.starts if tokens.is_packed else None,
    )
    return control, step, copies


def _grow(
    control: Control, wish: Wish, config: CacheConfig
) -> tuple[Control, tuple[BlockCopies, ...], jax.Array]:
    """The rows take what they need, all at once; or, where that may differ (`Decision`), each at its turn.

    Returns:
      The control state; per group the copies, of which a later one may overwrite what an earlier one read;
      and bool[n], the row grows.
    """
    nobody = wish.wants & False
    if any(group.window is not None for group in config.groups):
        return _take_turns(control, wish, nobody.any(), config)
    if control.prefix_index is None:  # nothing is evicted: nobody needs a turn
        return _take_turn(control.clock, wish, config, _before_turns(control, wish, nobody.any()))[:3]

    # A decoding step, as a rule: rows write on in blocks of their own, and take others that are free.
    demands, opens_block = demands_of(control, wish, wish.wants, config)
    at_once, is_free = takes_at_once(control, demands)
    grows = wish.wants & at_once
    control = dataclasses.replace(control, clock=control.clock + grows.any().astype(jnp.uint32))
    control = _take_wiped(control, wish, [opens & at_once & is_free for opens in opens_block], config)

    def make_room(state):
        needs = [jnp.where(at_once, jnp.sum(demand.num_blocks, dtype=jnp.int32), 0) for demand in demands]
        control = eviction.make_room(state[0], needs, config)
        pools = [
            block_pool.take(pool, opens & at_once, *_table_place(pool, group, wish))[0]
            for pool, group, opens in zip(control.block_pools, config.groups, opens_block, strict=True)
        ]
        return _take_turns(dataclasses.replace(control, block_pools=tuple(pools)), wish, at_once, config)

    start = _before_turns(control, wish, at_once)[:3]
    control, copies, grows_at_turn = run_if(~at_once | ~is_free, make_room, start)
    return control, copies, grows | grows_at_turn


def _before_turns(control: Control, wish: Wish, is_done: jax.Array) -> tuple:
    """What `_take_turn` starts from; where `is_done` bool[], nobody has a turn."""
    copies = tuple(_no_copies(pool, wish) for pool in control.block_pools)
    nobody = wish.wants & False
    return control, copies, nobody, is_done.astype(jnp.int32), nobody.any()


def _take_turns(
    control: Control, wish: Wish, is_done: jax.Array, config: CacheConfig
) -> tuple[Control, tuple[BlockCopies, ...], jax.Array]:
    """`_grow` by one turn of all rows, or if that may not be, one of each; by none if `is_done` bool[]."""

    def is_left(state):
        *_, turn, is_one_by_one = state
        return turn < jnp.where(is_one_by_one, wish.wants.shape[0], 1)

    take_turn = functools.partial(_take_turn, control.clock, wish, config)
    return lax.while_loop(is_left, take_turn, _before_turns(control, wish, is_done))[:3]


def _take_turn(clock: jax.Array, wish: Wish, config: CacheConfig, state: tuple) -> tuple:
    """A turn: all rows take what they need, or the next one does; `clock` u32[] is that before all turns."""
    control, copies, grows, turn, is_one_by_one = state
    order = jnp.arange(wish.wants.shape[0], dtype=jnp.int32)
    wants = wish.wants & (~is_one_by_one | (order == turn))
    control, decision = decide(control, wish, wants, config)
    takes_turns = is_one_by_one | decision.must_take_turns
    # The first time that this is found, nobody takes anything yet.
    is_decided = takes_turns == is_one_by_one
    decision = decision._replace(
        grows=decision.grows & is_decided, copies_tail=decision.copies_tail & is_decided
    )
    grows |= decision.grows
    control = dataclasses.replace(control, clock=clock + grows.any().astype(jnp.uint32))
    control, copies = _take_blocks(control, copies, wish, decision, config)
    return control, copies, grows, turn + is_decided.astype(jnp.int32), takes_turns


def _take_wiped(control: Control, wish: Wish, is_new: list[jax.Array], config: CacheConfig) -> Control:
    """A block for each token for which `is_new` bool[tokens], per group, holds; none of them is copied."""
    pools, index = [], control.prefix_index
    assert index is not None
    for g, (pool, group) in enumerate(zip(control.block_pools, config.groups, strict=True)):
        place = is_new[g], *_table_place(pool, group, wish)
        if g == config.indexed_group:
            pool, block_tokens = block_pool.take_wiped(pool, *place, index.block_tokens)
            index = dataclasses.replace(index, block_tokens=block_tokens)
        else:
            pool, _ = block_pool.take(pool, *place)
        pools.append(pool)
    return dataclasses.replace(control, block_pools=tuple(pools), prefix_index=index)


def _take_blocks(
    control: Control, copies: tuple[BlockCopies, ...], wish: Wish, decision: Decision, config: CacheConfig
) -> tuple[Control, tuple[BlockCopies, ...]]:
    """Rows that grow get their blocks, and copies of their last ones.

    Of several rows that take at once, none copies a block that may be evicted or freed for another.
    """
    demands, opens_block, grows, copies_tail, _ = decision
    rows = jnp.where(grows, wish.seq_ids, control.max_seqs)
    tails = [
        jnp.where(copies, demand.tail, pool.num_blocks)
        for pool, demand, copies in zip(control.block_pools, demands, copies_tail, strict=True)
    ]
    pools = [
        _give_back(pool, group, rows, demand.first_kept, tail)
        for pool, group, demand, tail in zip(control.block_pools, config.groups, demands, tails, strict=True)
    ]
    control = dataclasses.replace(control, block_pools=tuple(pools))
    # A row's own block is no victim of its copy while there is another, whatever the policy.
    control = eviction.make_room(
        control, num_taken(demands, grows, copies_tail), config, last=tails[config.indexed_group]
    )
    tokens, pools, all_copies = wish.tokens, [], []
    for g, (pool, group) in enumerate(zip(control.block_pools, config.groups, strict=True)):
        is_new = opens_block[g] & tokens.spread(grows, False)
        # The copy takes the place of the block that the row's first new token goes into.
        is_new |= tokens.spread(copies_tail[g], False) & (tokens.offset == 0)
        pool, new = block_pool.take(pool, is_new, *_table_place(pool, group, wish))
        pools.append(pool)
        all_copies.append(_add_copies(copies[g], copies_tail[g], tails[g], new, tokens))
    control = dataclasses.replace(control, block_pools=tuple(pools))
    return _forget_copied(control, wish, copies_tail, config), tuple(all_copies)


def _table_place(pool: BlockPool, group: LayerGroup, wish: Wish) -> tuple[jax.Array, jax.Array]:
    """i32[tokens] both, row and column of the table for each token's block."""
    rows = wish.tokens.spread(wish.seq_ids, pool.block_table.shape[0])
    return rows, quotient(wish.positions, group.block_size)


def _forget_copied(control: Control, wish: Wish, copies_tail: jax.Array, config: CacheConfig) -> Control:
    """A row whose last block was copied does not hold a published one any more behind those that are full."""
    if control.prefix_index is None:
        return control
    rows = jnp.where(copies_tail[config.indexed_group], wish.seq_ids, control.max_seqs)
    num_full = quotient(wish.context_len, config.groups[config.indexed_group].block_size)
    return dataclasses.replace(control, num_published=min_at(control.num_published, rows, num_full))


def record_tokens(
    control: Control, tokens: jax.Array, step: Step, copies: tuple[BlockCopies, ...], config: CacheConfig
) -> Control:
    """Notes which tokens the blocks of the indexed group hold; copied blocks hold those of the original."""
    index, group_id = control.prefix_index, config.indexed_group
    assert index is not None
    src, dst, num_copies = copies[group_id]

    def copy_block(i: jax.Array, block_tokens: jax.Array) -> jax.Array:
        return set_at(block_tokens, dst[i], block_tokens[src[i]])

    block_tokens = lax.fori_loop(0, num_copies, copy_block, index.block_tokens)
    # Entries per trip: fewer wait for one place after the other, more make a longer kernel to compile.
    by_slot = set_at(block_tokens.reshape(-1), step.slots[group_id], tokens, per_trip=16)
    index = dataclasses.replace(index, block_tokens=by_slot.reshape(block_tokens.shape))
    return dataclasses.replace(control, prefix_index=index)


def _give_back(
    pool: BlockPool, group: LayerGroup, rows: jax.Array, first_kept: jax.Array, tails: jax.Array
) -> BlockPool:
    """Gives back the blocks between the sinks and `first_kept`, then `tails` i32[n], which are copied.

    One column of every row at a time. What a row holds behind its sinks is contiguous, so the walk down from
    `first_kept` ends at the first empty column: no trip where nothing left the window, one or two while
    decoding.
    """
    nowhere = pool.num_blocks

    def entries_at(pool: BlockPool, distance: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = first_kept - distance
        if group.window is None:
            return jnp.full_like(rows, nowhere), columns
        is_droppable = (rows < pool.block_table.shape[0]) & (columns >= group.num_sink_blocks)
        entries = get_at(pool.block_table, (rows, columns), nowhere)
        return jnp.where(is_droppable, entries, nowhere), columns

    def give_back(state):
        pool, tails, distance = state
        entries, columns = entries_at(pool, distance)
        is_last = ~(entries < nowhere).any()
        pool = block_pool.release(pool, jnp.where(is_last, tails, entries))
        held_rows = jnp.where(entries < nowhere, rows, pool.block_table.shape[0])
        table = set_at(pool.block_table, (held_rows, columns), nowhere)
        tails = jnp.where(is_last, nowhere, tails)
        return dataclasses.replace(pool, block_table=table), tails, distance + 1

    def is_left(state):
        pool, tails, distance = state
        return ((entries_at(pool, distance)[0] < nowhere) | (tails < nowhere)).any()

    return lax.while_loop(is_left, give_back, (pool, tails, jnp.int32(1)))[0]


def _no_copies(pool: BlockPool, wish: Wish) -> BlockCopies:
    # Made of the rows' lengths: a constant would lose their mesh.
    nowhere = jnp.maximum(wish.context_len & 0, pool.num_blocks)
    return BlockCopies(src=nowhere, dst=nowhere, num_copies=num_true(nowhere < 0))


def _add_copies(
    copies: BlockCopies, mask: jax.Array, tails: jax.Array, new: jax.Array, tokens: NewTokens
) -> BlockCopies:
    """`copies` and those of masked rows, from `tails` i32[n] to the blocks of their first tokens in `new`."""

    def add(copies: BlockCopies) -> BlockCopies:
        rank, num_more = rank_true(mask)
        place = jnp.where(mask, copies.num_copies + rank, tails.shape[0])
        targets = get_at(new, tokens.starts[:-1])
        src, dst = update_all(Update(copies.src, place, tails), Update(copies.dst, place, targets))
        return BlockCopies(src, dst, copies.num_copies + num_more)

    return run_if(mask.any(), add, copies)
