"""Admission: a row starts on the cached prefix of its prompt and reserves blocks for the rest."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import any_of, get_at, num_true, quotient, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Admission, Cache, Control, Counter, count_events
from kvcache_jax.core.status import Status
from kvcache_jax.operations.row_calls import on_rows
from kvcache_jax.operations.rows import check_seq_ids, first_failure, mark_used, num_blocks_for
from kvcache_jax.prefix import eviction, group_links, prefix_index


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

    `extend` uses the reserved blocks first. A window group reserves no more than a row may hold.
    `context_len` is then `num_cached`; nothing is written yet.

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
      SKIPPED, BAD_SEQ_ID) and `num_cached`. A row that fails takes nothing; smaller rows behind it
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
    arguments.require_tokens("allocate", tokens, cache)
    tokens = None if tokens is None else arguments.token_ids(tokens, num_rows, None)
    items = arguments.item_spans(items, num_rows)
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
    return on_rows(allocate_row, cache, seq_ids, Prompt(**prompts))


class Prompt(NamedTuple):
    """What a row is to start with.

    Attributes:
      num_tokens: i32[].
      namespace: u32[4].
      priority: i32[].
      tokens: i32[P]; None without prefix caching.
      reuse: bool[], whether to look for a cached prefix.
      items: i32[I, 2], first position and end of each multimodal item, equal ones for no item; or None.
    """

    num_tokens: jax.Array
    namespace: jax.Array
    priority: jax.Array
    tokens: jax.Array | None
    reuse: jax.Array
    items: jax.Array | None


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
) -> tuple[Control, Admission]:
    """Starts a row on the cached prefix of its prompt and reserves the rest.

    A window group reserves no more than a row may hold. The result is of one row.
    """
    num_tokens = prompt.num_tokens
    hits, num_cached, need, required = reservation(control, prompt, config)
    lacks = [
        num_blocks > block_pool.num_available(pool)
        for num_blocks, pool in zip(required, control.block_pools, strict=True)
    ]
    is_unknown = num_tokens > (config.max_seq_len if prompt.tokens is None else prompt.tokens.shape[0])
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
    control = mark_used(
        control,
        row,
        ok,
        is_active=True,
        context_len=num_cached,
        priority=prompt.priority,
        namespace=prompt.namespace,
        num_published=quotient(num_cached, config.groups[config.indexed_group].block_size),
    )
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
        pool = dataclasses.replace(pool, block_table=set_at(pool.block_table, row, ids))
        is_new = (columns >= first) & (columns < first + num_blocks)
        pools.append(block_pool.take(pool, is_new, row, columns)[0])
    num_items_cached = jnp.zeros_like(num_cached)
    if prompt.items is not None:
        first, end = prompt.items[:, 0], prompt.items[:, 1]
        num_items_cached = num_true((end > first) & (end <= num_cached))
    return dataclasses.replace(
        control,
        counters=_count_admission(control, ok, prompt, num_cached, config),
        block_pools=tuple(pools),
    ), Admission(status=status, num_cached=num_cached, num_items_cached=num_items_cached)


def find_hits(control: Control, prompt: Prompt, config: CacheConfig) -> tuple[list[jax.Array], jax.Array]:
    """Per group i32[max_blocks_per_seq] cached blocks by column, or nowhere; and i32[], their tokens."""
    if control.prefix_index is None:
        nowhere = [
            jnp.full(pool.max_blocks_per_seq, pool.num_blocks, jnp.int32) for pool in control.block_pools
        ]
        return nowhere, jnp.int32(0)
    assert prompt.tokens is not None
    found = prefix_index.find_prefix(
        control.prefix_index, control.hash_key, prompt.tokens, prompt.num_tokens, prompt.namespace
    )
    found = jnp.where(prompt.reuse, found, control.block_pools[config.indexed_group].num_blocks)
    return group_links.usable_prefix(control, found, prompt.items, config)


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
