"""The operation `rewrite`: reserves the slots of tokens that rows hold, to compute them again in place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import (
    any_of,
    first_true,
    get_at,
    min_at,
    quotient,
    rank_true,
    remainder,
    set_at,
)
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.state import BlockCopies, BlockPool, Cache, Control, Step, mark_used
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange, carry_out, decide
from kvcache_jax.operations.extend import copy_tokens
from kvcache_jax.operations.rows import check_ids


@takes_one
@jax.named_scope("kvcache.rewrite")
def rewrite(cache: Cache, seq_ids: IntRows, indices: Any) -> tuple[Cache, Step]:
    """Reserves the slots of tokens that rows hold, so that the same tokens are computed again in place.

    The token at index `i` attends to places 0 to `i` of its row, with the tokens that the step writes there.
    Blocks that others hold, or that are published, are copied first; with prefix caching the blocks
    after a copied one too, for a published block follows its parent in every row. Rows of one call that share
    a block get a copy each. Call it inside a donated jit: called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated.
      seq_ids: i32[n], active rows, each at most once.
      indices: i32[n, T], places in the row (`Step.cache_positions`), ascending; at the end `max_seq_len`
        where there are fewer. A row with none is left alone, even an idle one.

    Returns:
      The cache and a `Step` with arrays `[n, T]`. `status`: BAD_LENGTH (an index repeats, descends, lies
      outside the row or is the place of a kept token, whose position is not known), WINDOW_LOST
      (a window group released tokens that the token reads), OUT_OF_BLOCKS, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID,
      BAD_SEQ_ID, SKIPPED; such a row has `query_len` 0.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [1], [20])
      >>> cache, _ = kv.extend(cache, [0, 20], max_new=20)
      >>> cache, step = kv.rewrite(cache, [1], [[3, 17, 64]])
      >>> step.positions[0, :2].tolist(), step.slots[0].tolist(), step.query_len.tolist()
      ([3, 17], [[3, 17, 64]], [2])
    """
    cache.config.refuse_states("rewrite")
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    indices = arguments.saturated("indices", indices)
    if indices.ndim != 2 or indices.shape[0] != seq_ids.shape[0]:
        raise ValueError(
            f"indices has shape {indices.shape}, expected ({seq_ids.shape[0]}, T), a line of places per row, "
            "padded with max_seq_len"
        )
    return _rewrite(cache, seq_ids, indices)


@jax.jit
def _rewrite(cache: Cache, seq_ids: jax.Array, indices: jax.Array) -> tuple[Cache, Step]:
    config = cache.config
    control, (seq_ids, indices) = as_varied((cache.control, (seq_ids, indices)))
    seq_ids = jnp.where(seq_ids < 0, control.max_seqs + 1, seq_ids)  # outside, at the other end
    is_token = indices != config.max_seq_len
    status = _checked(control, seq_ids, indices, is_token, config)
    rows = jnp.where((status == Status.OK) & is_token.any(axis=1), seq_ids, control.max_seqs)
    places = jnp.where(is_token, indices, config.max_seq_len)
    indexed_group = config.indexed_group if config.enable_prefix_caching else None
    copied = {
        g: _copied(control.block_pools[g], group, rows, places, is_indexed=g == indexed_group)
        for g, group in config.row_groups.items()
    }
    needs = {g: exchange.need for g, exchange in copied.items()}
    ok, status = decide(control, needs, rows < control.max_seqs, status)
    rows = jnp.where(ok, rows, control.max_seqs)

    control, new = carry_out(control, rows, copied, config)
    copies = {g: _listed(copied[g].entries, new[g], control.block_pools[g].num_blocks) for g in new}
    control = _note_copies(mark_used(control, rows), rows, copies, new, config)
    step = _step(control, seq_ids, rows, indices, is_token & ok[:, None], status, config)
    cache = dataclasses.replace(cache, control=control)
    if cache.pools:
        step = plan_attention(cache, step, is_contiguous=False)
    return storage.copy_all(cache, copies), step


def _checked(
    control: Control, seq_ids: jax.Array, indices: jax.Array, is_token: jax.Array, config: CacheConfig
) -> jax.Array:
    """Computes the status of each entry as far as blocks do not matter, i32[n]."""
    asks = is_token.any(axis=1)
    context_len = get_at(control.context_len, seq_ids, 0)
    is_outside = is_token & ((indices < 0) | (indices >= context_len[:, None]))
    if control.holes is not None:
        holes = control.holes.of_rows(seq_ids)
        is_outside |= is_token & (holes.of_group(0).is_hidden(indices) | holes.is_kept(indices))
    is_outside |= is_token & config.hooks.is_fixed(control, seq_ids, indices)
    descends = is_token[:, 1:] & (indices[:, 1:] <= indices[:, :-1])
    is_lost = any_of(
        [
            _is_lost(pool, group, seq_ids, indices)
            for pool, group in zip(control.block_pools, config.groups, strict=True)
        ]
    )
    return first_failure(
        *check_ids(control, seq_ids, mask=asks),
        (asks & ~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (is_outside.any(axis=1) | descends.any(axis=1), Status.BAD_LENGTH),
        ((is_token & is_lost).any(axis=1), Status.WINDOW_LOST),
    )


def _is_lost(pool: BlockPool, group: LayerGroup, seq_ids: jax.Array, indices: jax.Array) -> jax.Array:
    """Masks the tokens that read places which a window group released, bool like `indices`."""
    if group.span.keeps_all:
        return jnp.zeros_like(indices, bool)
    # After the sinks a token reads from this column on, and the blocks held are contiguous up to the row's
    # end: if this one is there, all that the token reads are.
    column = group.first_column(jnp.maximum(indices, 0))
    entries = get_at(pool.block_table, (seq_ids[:, None], column), pool.num_blocks)
    return (column * group.block_size <= indices) & (entries == pool.num_blocks)


def _copied(
    pool: BlockPool, group: LayerGroup, rows: jax.Array, places: jax.Array, *, is_indexed: bool
) -> Exchange:
    """Finds the rows' blocks that are copied before they are written."""
    blocks = get_at(pool.block_table, rows, pool.num_blocks)
    order = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    is_written = set_at(jnp.zeros_like(blocks, bool), (order, quotient(places, group.block_size)), True)
    is_kept = block_pool.is_published(pool, blocks) | (block_pool.ref_counts(pool, blocks) > 1)
    is_copied = is_written & is_kept
    if is_indexed:
        # A published block follows its parent in every row: after a block that the row exchanges, it holds no
        # block that is published, or that others may publish.
        is_copied |= is_kept & (lax.cummax(is_copied.astype(jnp.int32), axis=1) > 0)
    is_copied &= blocks < pool.num_blocks
    return Exchange(blocks, is_taken=is_copied, is_released=is_copied)


def _note_copies(
    control: Control,
    rows: jax.Array,
    copies: dict[int, BlockCopies],
    new: dict[int, jax.Array],
    config: CacheConfig,
) -> Control:
    """Counts the copies, which hold the tokens of the originals and are not published."""
    num_copies = sum((copied.num_copies for copied in copies.values()), start=jnp.int32(0))
    counters = count_events(control.counters, {Counter.COPIES: num_copies})
    control = dataclasses.replace(control, counters=counters)
    if (index := control.prefix_index) is None:
        return control
    g = config.indexed_group
    first_copied = first_true(new[g] < control.block_pools[g].num_blocks)
    return dataclasses.replace(
        control,
        num_published=min_at(control.num_published, rows, first_copied),
        prefix_index=dataclasses.replace(index, block_tokens=copy_tokens(index.block_tokens, copies[g])),
    )


def _listed(originals: jax.Array, new: jax.Array, nowhere: int) -> BlockCopies:
    """Lists the copies in the blocks `new` one after the other."""
    originals, new = originals.reshape(-1), new.reshape(-1)
    rank, num_copies = rank_true(new < nowhere)
    place = jnp.where(new < nowhere, rank, rank.shape[0])
    empty = jnp.full_like(originals, nowhere)
    return BlockCopies(set_at(empty, place, originals), set_at(empty, place, new), num_copies)


def _step(
    control: Control,
    seq_ids: jax.Array,
    rows: jax.Array,
    indices: jax.Array,
    is_token: jax.Array,
    status: jax.Array,
    config: CacheConfig,
) -> Step:
    """Builds the step of the tokens bool[n, T], with the blocks of the tables as they are now."""
    slots = []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        places = jnp.where(is_token, indices, 0)
        block_ids = get_at(
            pool.block_table, (rows[:, None], quotient(places, group.block_size)), pool.num_blocks
        )
        slot = block_ids * group.block_size + remainder(places, group.block_size)
        is_stored = is_token & (not group.holds_sources)
        slots.append(jnp.where(is_stored, slot, pool.num_blocks * group.block_size))
    positions, shift = indices, None
    if control.holes is not None:
        positions = control.holes.of_rows(seq_ids).positions(indices)
        shift = positions - indices
    return Step(
        status=status,
        seq_ids=jnp.minimum(seq_ids, control.max_seqs),
        query_len=jnp.sum(is_token, axis=1, dtype=jnp.int32),
        context_len=get_at(control.context_len, seq_ids, 0),
        positions=positions,
        slots=tuple(slots),
        plans=(),
        cu_query_lens=None,
        config=config,
        shift=shift,
    )
