"""The operation `extend`: reserves slots for the next tokens of each row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import (
    get_at,
    min_at,
    quotient,
    rank_true,
    read_first,
    remainder,
    set_at,
)
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.state import BlockCopies, BlockPool, Cache, Control, Step, mark_used
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.extend_plan import (
    ExtendPlan,
    GroupPlan,
    decide,
    packed_tokens,
    padded_tokens,
    propose,
)
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

    In this order: the blocks that left the windows of rows that grow are released; cached blocks are evicted
    where free ones do not suffice; rows take blocks, after those that `allocate` reserved; last blocks are
    copied, and their originals released. Scarce blocks are assigned in entry order, and a smaller row may
    grow after a larger one failed. Call it inside a donated jit: called eagerly it copies the pools.

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
        most = (2**31 - 1) // max(num_rows, 1) - 1  # the rows' numbers are added up
        num_tokens = static_count("num_tokens", num_tokens, most=most, most_name="2**31 over the rows")
    num_new = arguments.int_column("num_new", num_new, num_rows)
    token_arguments.require_tokens("extend", tokens, cache)
    if tokens is not None:
        tokens = token_arguments.token_ids(
            tokens, *((num_rows, max_new) if num_tokens is None else (num_tokens,))
        )
    if cache.control.prefix_index is None:
        tokens = None
    cache, step = _extend(cache, seq_ids, num_new, tokens, max_new=max_new, num_tokens=num_tokens)
    return cache, step.watched()


def extend_packed(
    cache: Cache, num_new: jax.Array, tokens: jax.Array, seq_ids: jax.Array, kept_len: jax.Array
) -> tuple[Cache, Step]:
    """Extends rows by packed tokens as `extend`; windows keep what those from `kept_len` i32[n] on read."""
    recorded = None if cache.control.prefix_index is None else tokens
    return _extend(cache, seq_ids, num_new, recorded, kept_len, max_new=None, num_tokens=tokens.size)


@functools.partial(jax.jit, static_argnames=("max_new", "num_tokens"))
def _extend(
    cache: Cache,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: jax.Array | None,
    kept_len: jax.Array | None = None,
    *,
    max_new: int | None,
    num_tokens: int | None,
) -> tuple[Cache, Step]:
    config = cache.config
    columns = seq_ids, num_new, tokens, kept_len
    control, (seq_ids, num_new, tokens, kept_len) = as_varied((cache.control, columns))
    if num_tokens is not None:
        layout, limit = packed_tokens(num_new, num_tokens), num_tokens
    else:
        assert max_new is not None
        layout, limit = padded_tokens(num_new.shape[0], max_new), max_new
    most = min(limit, config.query_len_limit)
    control, plan = propose(control, seq_ids, num_new, layout, most, config, kept_len=kept_len)
    control, plan = decide(control, plan, config)
    control, copies = take_blocks(control, plan, config)
    control, step = grow(control, plan, config)
    if tokens is not None:
        control = record_tokens(control, tokens, step, copies[config.indexed_group], config)
    cache = dataclasses.replace(cache, control=control)
    if cache.pools:
        step = plan_attention(cache, step)
    return storage.copy_all(cache, copies), step


def take_blocks(
    control: Control, plan: ExtendPlan, config: CacheConfig, *, evicts: bool = True
) -> tuple[Control, dict[int, BlockCopies]]:
    """Gives back, evicts, takes and releases the blocks of a decided plan; the caller copies the contents.

    A caller that knows of enough free blocks goes without the loops that look for more (`evicts=False`). Of a
    plan in which no row may copy there are no copies.

    All blocks that left windows are released before any is evicted. Originals of copies are released last, so
    that no block of the call is the place of another's copy.
    """
    pools = [
        _give_back(pool, group, plan) for pool, group in zip(control.block_pools, plan.groups, strict=True)
    ]
    control = dataclasses.replace(control, block_pools=tuple(pools))
    if evicts and control.prefix_index is not None:
        needs = {
            g: jnp.sum(jnp.where(plan.grows, group.need, 0), dtype=jnp.int32)
            for g, group in enumerate(plan.groups)
        }
        control = eviction.make_room(control, needs, config)
    pools, copies = list(control.block_pools), {}
    for g, group in config.row_groups.items():
        pools[g], new = _take_group(pools[g], group, plan.groups[g], plan)
        if plan.may_copy:
            pools[g], copies[g] = _release_originals(pools[g], new, plan.groups[g], plan)
    num_copies = sum((copied.num_copies for copied in copies.values()), start=jnp.int32(0))
    control = dataclasses.replace(
        control,
        block_pools=tuple(pools),
        counters=count_events(control.counters, {Counter.COPIES: num_copies}),
    )
    return control, copies


def _give_back(pool: BlockPool, planned: GroupPlan, plan: ExtendPlan) -> BlockPool:
    """Releases the blocks that left the windows of rows that grow."""
    if planned.leaving.shape[1] == 0:
        return pool
    leaving = jnp.where(plan.grows[:, None], planned.leaving, pool.num_blocks)
    # Rows that fail keep theirs: such a row is bit for bit as it was.
    rows = jnp.where(leaving < pool.num_blocks, plan.seq_ids[:, None], pool.block_table.shape[0])
    table = set_at(pool.block_table, (rows, planned.leaving_columns), pool.num_blocks)
    return dataclasses.replace(block_pool.release(pool, leaving), block_table=table)


def _take_group(
    pool: BlockPool, group: LayerGroup, planned: GroupPlan, plan: ExtendPlan
) -> tuple[BlockPool, jax.Array]:
    """Takes the blocks of one group; returns the new block of each token too, i32[tokens], or nowhere."""
    tokens = plan.tokens
    is_new = planned.opens_block & tokens.spread(plan.grows, False)
    if plan.may_copy:
        # The copy takes the place of the block that the row's first new token goes into.
        is_new |= tokens.spread(planned.copies_tail, False) & (tokens.offset == 0)
    pool, new = block_pool.take(pool, is_new)
    rows = jnp.where(is_new, tokens.spread(plan.seq_ids, 0), pool.block_table.shape[0])
    table = set_at(pool.block_table, (rows, quotient(plan.positions, group.block_size)), new)
    return dataclasses.replace(pool, block_table=table), new


def _release_originals(
    pool: BlockPool, new: jax.Array, planned: GroupPlan, plan: ExtendPlan
) -> tuple[BlockPool, BlockCopies]:
    """Releases the originals of blocks that are copied, each to the block `new` of its row's first token."""
    copies_tail = planned.copies_tail
    tails = jnp.where(copies_tail, planned.tail, pool.num_blocks)
    rank, num_copies = rank_true(copies_tail)
    place = jnp.where(copies_tail, rank, rank.shape[0])
    # Made of the rows' ids: a constant would lose their mesh.
    nowhere = jnp.full_like(tails, pool.num_blocks)
    copied = BlockCopies(
        src=set_at(nowhere, place, tails),
        dst=set_at(nowhere, place, plan.tokens.first(new)),
        num_copies=num_copies,
    )
    return block_pool.release(pool, tails), copied


def grow(control: Control, plan: ExtendPlan, config: CacheConfig) -> tuple[Control, Step]:
    """Advances the rows that grow; the slots follow the block tables as they are now."""
    tokens, context_len, positions = plan.tokens, plan.context_len, plan.positions
    query_len = jnp.where(plan.grows, plan.num_new, 0)
    new_len = context_len + query_len
    rows = jnp.where(plan.grows, plan.seq_ids, control.max_seqs)
    token_rows = tokens.spread(rows, control.max_seqs)
    is_token = tokens.offset < tokens.spread(query_len, 0)
    # Tokens of rows that fail, and padding, have their slot nowhere: they are written into no row's block.
    slots = []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        if group.holds_sources:
            nowhere = jnp.full_like(positions, pool.num_blocks * group.block_size)
            slots.append(nowhere.reshape(tokens.shape))
            continue
        column = quotient(positions, group.block_size)
        block_ids = get_at(pool.block_table, (token_rows, column), pool.num_blocks)
        slot = block_ids * group.block_size + remainder(positions, group.block_size)
        is_stored = is_token & (block_ids < pool.num_blocks)
        slots.append(jnp.where(is_stored, slot, pool.num_blocks * group.block_size).reshape(tokens.shape))
    shift = None
    if control.holes is not None:
        shift = tokens.spread(get_at(control.holes.num_dropped, plan.seq_ids, 0), 0)
        positions, shift = (positions + shift).reshape(tokens.shape), shift.reshape(tokens.shape)
    control = mark_used(control, rows, context_len=new_len)
    if control.prefix_index is not None and plan.may_copy:
        # A row that copied its last block no longer holds a published block after its full ones.
        copies_tail = plan.groups[config.indexed_group].copies_tail
        num_full = quotient(context_len, config.groups[config.indexed_group].block_size)
        copiers = jnp.where(copies_tail, plan.seq_ids, control.max_seqs)
        num_published = min_at(control.num_published, copiers, num_full)
        control = dataclasses.replace(control, num_published=num_published)
    return control, Step(
        status=plan.status,
        seq_ids=plan.seq_ids,
        query_len=query_len,
        context_len=new_len,
        positions=positions.reshape(tokens.shape),
        slots=tuple(slots),
        plans=(),
        cu_query_lens=tokens.starts if tokens.is_packed else None,
        config=config,
        shift=shift,
    )


def record_tokens(
    control: Control, tokens: jax.Array, step: Step, copied: BlockCopies | None, config: CacheConfig
) -> Control:
    """Records the tokens of the indexed group's blocks; copied blocks hold the original's tokens."""
    index = control.prefix_index
    assert index is not None
    block_tokens = index.block_tokens if copied is None else copy_tokens(index.block_tokens, copied)
    slots, block_size = step.slots[config.indexed_group], block_tokens.shape[1]
    # By block and offset, for XLA would copy the array to see it flat.
    places = quotient(slots, block_size), remainder(slots, block_size)
    index = dataclasses.replace(index, block_tokens=set_at(block_tokens, places, tokens))
    return dataclasses.replace(control, prefix_index=index)


def copy_tokens(block_tokens: jax.Array, copied: BlockCopies) -> jax.Array:
    """Gives copied blocks the tokens of their originals, `block_tokens` i32[num_blocks, block_size]."""
    originals, block_tokens = read_first(get_at(block_tokens, copied.src), block_tokens)
    return set_at(block_tokens, copied.dst, originals)
