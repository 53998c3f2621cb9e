"""The operation `allocate`: starts rows on cached prefixes of their prompts, and reserves their blocks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import (
    add_at,
    first_of_equal,
    get_at,
    num_true,
    quotient,
    remainder,
    set_at,
)
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.state import Admission, BlockPool, Cache, Control, mark_used
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.rows import check_ids, on_rows
from kvcache_jax.prefix import eviction, group_links, partial_hit, prefix_index, snapshots


@takes_one
@jax.named_scope("kvcache.allocate")
def allocate(
    cache: Cache,
    seq_ids: IntRows,
    num_tokens: IntRows,
    *,
    tokens: ArrayLike | None = None,
    namespace: ArrayLike | None = None,
    priority: IntRows | None = None,
    reuse: ArrayLike = True,
    items: ArrayLike | None = None,
) -> tuple[Cache, Admission]:
    """Starts rows and reserves the blocks of their whole prompts.

    `extend` uses the reserved blocks first. A window group reserves no more than a row may hold, and for a
    source nothing is reserved: `write_source` takes its blocks.
    `context_len` is then `num_cached`; nothing is written yet. Prompts are looked up before the call, so that
    equal ones of one call do not find each other. All hits of successful rows are held before anything is
    evicted.

    With `partial_hits` a row may begin inside a shared block. The copy that its next `extend` makes is needed
    here too, and not held: that `extend` may lack a block for it.

    Args:
      cache: Not changed.
      seq_ids: i32[n], idle rows.
      num_tokens: i32[n], prompt lengths; 0 starts an empty row.
      tokens: i32[n, P], the prompts, `P` at least the longest; required with prefix caching, else unused.
      namespace: u32[4] or u32[n, 4], who may share the rows' blocks. Default: all zero.
      priority: i32[n], for eviction policies. Default: 0.
      reuse: bool[] or bool[n], look for cached prefixes; without prefix caching there are none.
      items: i32[n, I, 2], first position and end of each multimodal item (see `item_tokens`), equal ones
        where a row has fewer: an item is reused whole or not at all.

    Returns:
      The cache and an `Admission` with `status` (SEQ_IN_USE, TOO_LONG, BAD_LENGTH, OUT_OF_BLOCKS,
      SKIPPED, BAD_SEQ_ID) and `num_cached`. A row that fails takes nothing; smaller rows after it
      may still succeed.

    Raises:
      ValueError, TypeError: no `tokens` with prefix caching, or shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, admission = kv.allocate(cache, [0, 1], [40, 20])
      >>> [kv.Status(s).name for s in admission.status.tolist()]
      ['OK', 'OUT_OF_BLOCKS']
    """
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_rows = seq_ids.shape[0]
    num_tokens = arguments.int_column("num_tokens", num_tokens, num_rows)
    token_arguments.require_tokens("allocate", tokens, cache)
    tokens = None if tokens is None else token_arguments.token_ids(tokens, num_rows, None)
    items = token_arguments.item_spans(items, num_rows)
    if cache.control.prefix_index is None:  # prompts of any width are one program
        tokens, items = None, None
    priority = np.zeros(num_rows, np.int32) if priority is None else arguments.priorities(priority, num_rows)
    prompts: dict[str, Any] = {
        "num_tokens": num_tokens,
        "namespace": arguments.namespace_words(namespace, num_rows),
        "priority": priority,
        "tokens": tokens,
        "reuse": arguments.flags("reuse", reuse, num_rows),
        "items": items,
    }
    return on_rows(allocate_rows, cache, seq_ids, Prompts(**prompts))


class Prompts(NamedTuple):
    """The prompts that rows start with."""

    num_tokens: jax.Array  # i32[n]
    namespace: jax.Array  # u32[n, 4]
    priority: jax.Array  # i32[n]
    tokens: jax.Array | None  # i32[n, P]; None without prefix caching
    reuse: jax.Array  # bool[n], whether to look for a cached prefix
    items: (
        jax.Array | None
    )  # i32[n, I, 2], first position and end of each item, equal ones for no item; or None


class Hits(NamedTuple):
    """The cached blocks that rows start on."""

    block_ids: list[
        jax.Array
    ]  # per layer group i32[n, max_blocks_per_seq], by column, nowhere; past it a keeper's
    num_tokens: jax.Array  # i32[n], their tokens
    junction: jax.Array  # i32[n], tokens whose keys are cached, where these are more, else 0


def allocate_rows(
    control: Control, seq_ids: jax.Array, prompts: Prompts, found: Hits | None = None, *, config: CacheConfig
) -> tuple[Control, Admission]:
    """Starts rows `seq_ids` i32[n] on the cached prefixes of their prompts and reserves the rest.

    A caller that looked the prompts up in this state hands on the hits that it `found`, for rows that it
    knows to have blocks: by `required_blocks`, without those that an earlier row revives.
    """
    num_tokens = prompts.num_tokens
    hits, num_cached, junction = found or find_hits(control, prompts, config)
    num_new = _num_new(prompts, hits, num_cached, config)
    most = config.max_seq_len if prompts.tokens is None else prompts.tokens.shape[1]
    status = first_failure(
        *check_ids(control, seq_ids),
        (get_at(control.is_active, seq_ids), Status.SEQ_IN_USE),
        (num_tokens < 0, Status.BAD_LENGTH),
        (num_tokens > config.max_seq_len, Status.TOO_LONG),
        (num_tokens > most, Status.BAD_LENGTH),
    )
    ok = status == Status.OK
    if found is None:
        control, ok = with_blocks(control, ok, hits, num_new)
    status = jnp.where((status == Status.OK) & ~ok, jnp.int32(Status.OUT_OF_BLOCKS), status)
    rows = jnp.where(ok, seq_ids, control.max_seqs)
    num_cached, junction = jnp.where(ok, num_cached, 0), jnp.where(ok, junction, 0)
    num_partial = _num_partial(num_cached, config)
    num_new = [jnp.where(ok, num_blocks, 0) for num_blocks in num_new]
    hits = [
        jnp.where(ok[:, None], ids, pool.num_blocks)
        for ids, pool in zip(hits, control.block_pools, strict=True)
    ]
    control = mark_used(
        control,
        rows,
        is_active=True,
        context_len=num_cached,
        priority=prompts.priority,
        namespace=prompts.namespace,
        num_published=quotient(num_cached, config.groups[config.indexed_group].block_size) + num_partial,
        **_marks(control, num_tokens, num_cached, junction, config),
    )
    if control.prefix_index is not None:
        index = prefix_index.note_hits(
            control.prefix_index, hits[config.indexed_group], control.clock, prompts.priority
        )
        index = snapshots.note_wanted(index, hits)
        control = dataclasses.replace(control, prefix_index=index)
    is_new = {}
    for g, group in config.row_groups.items():
        columns = jnp.arange(group.max_blocks_per_seq, dtype=jnp.int32)[None]
        first = quotient(num_cached, group.block_size)[:, None]
        is_kept = _is_kept(hits[g], group)
        num_fresh = num_new[g] - jnp.sum(is_kept, axis=1, dtype=jnp.int32)
        # The copy of a block that is hit in part was needed and is not held: `extend` takes it.
        is_new[g] = (columns >= first + num_partial[:, None]) & (columns < first + num_fresh[:, None])
        is_new[g] |= is_kept
    control, held = hold_and_take(control, rows, hits, num_new, is_new, config)
    pools = [
        dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, held[g])) if g in held else pool
        for g, pool in enumerate(control.block_pools)
    ]
    indexed = config.groups[config.indexed_group]
    num_promoted = jnp.sum(_is_kept(hits[config.indexed_group], indexed), axis=1, dtype=jnp.int32)
    num_items_cached = jnp.zeros_like(num_cached)
    if prompts.items is not None:
        first, end = prompts.items[..., 0], prompts.items[..., 1]
        is_cached = (end > first) & (end <= num_cached[:, None])
        num_items_cached = jnp.sum(is_cached, axis=1, dtype=jnp.int32)
    return dataclasses.replace(
        control,
        counters=_count_admissions(control, ok, prompts, num_cached, junction, config),
        block_pools=tuple(pools),
    ), Admission(
        status=status,
        num_cached=num_cached,
        num_items_cached=num_items_cached,
        junction=junction,
        num_promoted=num_promoted * indexed.block_size,
    )


def _marks(
    control: Control, num_tokens: jax.Array, num_cached: jax.Array, junction: jax.Array, config: CacheConfig
) -> dict[str, jax.Array]:
    """Computes the lengths of prompts at which states are kept, as a field of `Control`, where it has one."""
    if control.marks is None:
        return {}
    unit = config.prefix_unit
    end = quotient(jnp.maximum(num_tokens - 1, 0), unit) * unit  # the whole prompt is never a hit
    end = jnp.where(config.snapshots.at_prompt_end & (end > num_cached), end, 0)
    junction = jnp.where(config.snapshots.at_junctions, junction, 0)
    end = jnp.where(end == junction, 0, end)
    return {"marks": jnp.stack([junction, end], axis=1)}


def hold_and_take(
    control: Control,
    rows: jax.Array,
    hits: list[jax.Array],
    num_needed: Sequence[jax.Array],
    is_new: Mapping[int, jax.Array],
    config: CacheConfig,
) -> tuple[Control, dict[int, jax.Array]]:
    """Holds hits for rows, then evicts and takes blocks; the caller has checked that there are enough.

    Args:
      control: The state.
      rows: i32[n], the rows that start; `max_seqs` for none.
      hits: Per layer group i32[n, C], blocks by column, as in `Hits`.
      num_needed: Per layer group i32[n], blocks that must be free.
      is_new: Per layer group bool[n, C], the columns that get a block.
      config: The cache's.

    Returns:
      The control state; and per layer group i32[n, C], the blocks held, or nowhere.
    """
    if control.prefix_index is not None:
        pools = tuple(
            block_pool.reuse(pool, ids) if group.span.is_in_prefix else pool
            for pool, ids, group in zip(control.block_pools, hits, config.groups, strict=True)
        )
        control = dataclasses.replace(control, block_pools=pools)
        control = config.keeper.hold(control, hits, config)
        needs = {g: jnp.sum(num_blocks, dtype=jnp.int32) for g, num_blocks in enumerate(num_needed)}
        control = eviction.make_room(control, needs, config)
    pools, held = list(control.block_pools), {}
    for g, mask in is_new.items():
        pools[g], new = block_pool.take(pools[g], mask)
        held[g] = jnp.minimum(hits[g], new)  # each column has a hit, a new block, or nowhere twice
    control = dataclasses.replace(control, block_pools=tuple(pools))
    return config.keeper.restore(control, rows, hits, held, config), held


def find_hits(
    control: Control, prompts: Prompts, config: CacheConfig, read: prefix_index.ReadTokens | None = None
) -> Hits:
    """Finds the cached blocks to start from.

    A caller that has the prompts' tokens elsewhere may `read` them from there as far as hits reach.
    """
    if control.prefix_index is None:
        rows = prompts.num_tokens[:, None]
        nowhere = [
            jnp.full_like(rows, pool.num_blocks, shape=(rows.shape[0], pool.max_blocks_per_seq))
            for pool in control.block_pools
        ]
        return Hits(nowhere, *[jnp.zeros_like(prompts.num_tokens)] * 2)

    assert prompts.tokens is not None
    found = prefix_index.find_prefixes(
        control.prefix_index,
        control.hash_key,
        read or prefix_index.reader_of(prompts.tokens),
        prompts.tokens.shape[1] // config.groups[config.indexed_group].block_size,
        prompts.num_tokens,
        prompts.namespace,
    )

    def find(found, tokens, num_tokens, namespace, reuse, items):
        found = jnp.where(reuse, found, control.block_pools[config.indexed_group].num_blocks)
        most = jnp.where(reuse, jnp.maximum(num_tokens - 1, 0), 0)
        columns = group_links.find_columns(control, found, config)
        columns = config.keeper.find(control, tokens, most, namespace, columns, config)
        columns, num_cached, junction = group_links.usable_prefix(control, columns, items, config)
        if config.partial_hits:
            columns, num_cached = partial_hit.with_partial_hit(
                control, columns, num_cached, tokens, num_tokens, most, namespace, items, config
            )
        return columns, num_cached, junction

    columns = prompts.tokens, prompts.num_tokens, prompts.namespace, prompts.reuse, prompts.items
    return Hits(*jax.vmap(find)(found, *columns))


def required_blocks(control: Control, prompts: Prompts, hits: Hits, config: CacheConfig) -> list[jax.Array]:
    """Counts the blocks that must be available for each prompt alone, per group i32[n]; unowned hits too."""
    num_new = _num_new(prompts, hits.block_ids, hits.num_tokens, config)
    return [
        num_blocks + jnp.sum(block_pool.has_no_owner(pool.ref_count, ids), axis=1, dtype=jnp.int32)
        for num_blocks, ids, pool in zip(num_new, hits.block_ids, control.block_pools, strict=True)
    ]


def _num_new(
    prompts: Prompts, hits: list[jax.Array], num_cached: jax.Array, config: CacheConfig
) -> list[jax.Array]:
    """Counts the blocks to take, per group i32[n]; a window group reserves no more than a row may hold.

    For a block that is hit in part its copy counts, and for those that a keeper has the blocks that get them.
    """
    num_new, num_partial = [jnp.zeros_like(num_cached)] * len(hits), _num_partial(num_cached, config)
    for g, group in config.row_groups.items():
        if not group.span.is_read_later:  # else `extend` takes them: the pool has enough for all rows
            num_hits = jnp.sum(hits[g] != group.num_blocks, axis=1, dtype=jnp.int32) - num_partial
            num_blocks = group.num_columns(prompts.num_tokens)
            num_blocks -= quotient(num_cached, group.block_size)
            num_new[g] = jnp.minimum(num_blocks, group.max_held_blocks - num_hits)
        num_new[g] += jnp.sum(_is_kept(hits[g], group), axis=1, dtype=jnp.int32)
    return num_new


def _is_kept(hits: jax.Array, group: LayerGroup) -> jax.Array:
    """Masks the hits that a keeper has, and that new blocks get."""
    return hits > group.num_blocks


def _num_partial(num_cached: jax.Array, config: CacheConfig) -> jax.Array:
    """Counts the blocks that are hit in part, per row i32[n], 0 or 1 in each group."""
    if not config.partial_hits:
        return jnp.zeros_like(num_cached)
    is_partial = remainder(num_cached, config.groups[config.indexed_group].block_size) > 0
    return is_partial.astype(jnp.int32)


def with_blocks(
    control: Control, wants: jax.Array, hits: list[jax.Array], num_new: list[jax.Array]
) -> tuple[Control, jax.Array]:
    """Keeps the rows of bool[n] for which there are blocks, in entry order.

    A row needs its new blocks, and the blocks of its hits that no row holds and no earlier row revives. Where
    there are blocks for all, no row is looked at alone. The control state has the same values: continue with
    it, not with the argument, so that XLA counts owners in place instead of copying the array.
    """
    num_rows = wants.shape[0]
    pools = control.block_pools
    available = jnp.stack([block_pool.num_available(pool) for pool in pools])
    needed, counts = [], []
    for pool, ids, num_blocks in zip(pools, hits, num_new, strict=True):
        need = jnp.sum(jnp.where(wants, num_blocks, 0), dtype=jnp.int32)
        ref_count = pool.ref_count
        if pool.cached is not None:
            # A hit that no row holds is no longer available for others, however many rows revive it.
            is_unowned = wants[:, None] & block_pool.has_no_owner(ref_count, ids)
            is_revived, ref_count = first_of_equal(ref_count, is_unowned, ids, held=0)
            need += num_true(is_revived)
        needed.append(need)
        counts.append(ref_count)
    is_short = (jnp.stack(needed) > available).any()

    def admit_row(state):
        row, free, ok, ref_counts = state
        left = []
        # Hits that an earlier row revived have an owner by now, and cost this row nothing.
        for g, (ids, num_blocks) in enumerate(zip(hits, num_new, strict=True)):
            num_revived = num_true(block_pool.has_no_owner(ref_counts[g], ids[row]))
            left.append(free[g] - num_blocks[row] - num_revived)
        # A row starts in all layer groups or in none; one that fails leaves its hits without owner.
        row_ok = wants[row] & (jnp.stack(left) >= 0).all()
        ref_counts = tuple(
            add_at(counts, jnp.where(row_ok, ids[row], counts.shape[0]), 1)
            for counts, ids in zip(ref_counts, hits, strict=True)
        )
        return row + 1, jnp.where(row_ok, jnp.stack(left), free), ok.at[row].set(row_ok), ref_counts

    state = jnp.where(is_short, 0, num_rows), available, wants, tuple(counts)
    _, _, ok, counts = lax.while_loop(lambda state: state[0] < num_rows, admit_row, state)
    # Owners were only counted to decide: the caller adds them, before anything is evicted.
    restored: list[BlockPool] = []
    for pool, ref_count, ids in zip(pools, counts, hits, strict=True):
        held = jnp.where((ok & is_short)[:, None], ids, pool.num_blocks)
        restored.append(dataclasses.replace(pool, ref_count=add_at(ref_count, held, -1)))
    return dataclasses.replace(control, block_pools=tuple(restored)), ok


def _count_admissions(
    control: Control,
    ok: jax.Array,
    prompts: Prompts,
    num_cached: jax.Array,
    junction: jax.Array,
    config: CacheConfig,
) -> jax.Array:
    """Returns the counters after an admission."""
    block_size = config.groups[config.indexed_group].block_size
    asked = ok & prompts.reuse if control.prefix_index is not None else jnp.zeros_like(ok)
    num_asked = jnp.where(asked, prompts.num_tokens, 0)

    def total(counts: jax.Array) -> jax.Array:
        return jnp.sum(counts, dtype=jnp.int32)

    events = {
        Counter.ALLOCATIONS: num_true(ok),
        Counter.REQUEST_QUERIES: num_true(asked),
        Counter.REQUEST_HITS: num_true(num_cached > 0),
        Counter.BLOCK_QUERIES: total(quotient(num_asked, block_size)),
        Counter.BLOCK_HITS: total(quotient(num_cached, block_size)),
        Counter.TOKEN_QUERIES: total(num_asked),
        Counter.TOKEN_HITS: total(num_cached),
        Counter.TOKENS_WITHOUT_STATE: total(jnp.maximum(junction - num_cached, 0)),
    }
    return count_events(control.counters, events)
