"""The operation `truncate`: drops tokens from the end of rows."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import any_of, get_at, quotient, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.rows import check_ids, on_rows, partial_tails


@takes_one
@jax.named_scope("kvcache.truncate")
def truncate(cache: Cache, seq_ids: IntRows, new_len: IntRows) -> tuple[Cache, jax.Array]:
    """Drops tokens from the end of rows; releases blocks left without a token, reserved ones too.

    A row's source stays. A row of a window group that is longer than the window can be rolled back by at most
    `max_rollback` tokens, and not always into a prefix that it found cached.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows, each at most once.
      new_len: i32[n], tokens to keep, hidden ones counted; a row cannot end among tokens that it dropped, nor
        among kept ones, whose positions are not known; see `Holes`.

    Returns:
      The cache and status i32[n]: TOO_LONG (`new_len` exceeds the row), BAD_LENGTH, WINDOW_LOST,
      SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.
    """
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    new_len = arguments.int_column("new_len", new_len, seq_ids.shape[0])
    return on_rows(truncate_rows, cache, seq_ids, new_len)


def truncate_rows(
    control: Control, seq_ids: jax.Array, new_len: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Drops the tokens of rows `seq_ids` from `new_len` on, i32[n] both."""
    context_len = get_at(control.context_len, seq_ids, 0)
    groups = config.row_groups.items()
    is_lost = any_of(
        [_is_lost(control.block_pools[g], group, seq_ids, context_len, new_len) for g, group in groups]
    )
    status = first_failure(
        *check_ids(control, seq_ids),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (new_len < 0, Status.BAD_LENGTH),
        (_ends_hidden(control, seq_ids, new_len), Status.BAD_LENGTH),
        (new_len > context_len, Status.TOO_LONG),
        (is_lost, Status.WINDOW_LOST),
    )
    rows = jnp.where(status == Status.OK, seq_ids, control.max_seqs)
    control = config.hooks.truncate(control, rows, new_len)
    pools = list(control.block_pools)
    for g, group in groups:
        pools[g] = _shortened(pools[g], group, rows, new_len)
    control = dataclasses.replace(
        control,
        context_len=set_at(control.context_len, rows, new_len),
        holes=_cut(control, rows, new_len),
        block_pools=tuple(pools),
    )
    return _count_published(control, rows, config), status


def _ends_hidden(control: Control, seq_ids: jax.Array, new_len: jax.Array) -> jax.Array:
    """Masks the rows that would end among tokens that they dropped, or among kept ones."""
    if control.holes is None:
        return jnp.zeros_like(new_len, bool)
    holes = control.holes.of_rows(seq_ids)
    return (new_len > holes.prefix_len) & (new_len < holes.end)


def _cut(control: Control, rows: jax.Array, new_len: jax.Array) -> Holes | None:
    """Forgets the holes of `rows` where only tokens before them are left."""
    if control.holes is None:
        return None
    kept = control.holes.of_rows(rows)
    return control.holes.with_rows(rows, kept.forgotten(new_len <= kept.prefix_len))


def _is_lost(
    pool: BlockPool, group: LayerGroup, seq_ids: jax.Array, context_len: jax.Array, new_len: jax.Array
) -> jax.Array:
    """Masks the rows that cannot return to `new_len`: the next token would read past the window's start."""
    if group.span.keeps_all:
        return jnp.zeros_like(new_len, bool)
    is_beyond = group.span.is_beyond_rollback(context_len, new_len)
    # After the sinks the next token reads from the first column on. A window's blocks are contiguous up to
    # the tail: if its first one is there, all that it reads are.
    order = jnp.arange(group.span.num_read_blocks(group.block_size), dtype=jnp.int32)
    columns = group.first_column(new_len)[:, None] + order[None]
    entries = get_at(pool.block_table, (seq_ids[:, None], columns), pool.num_blocks)
    is_missing = (columns < group.num_columns(new_len)[:, None]) & (entries == pool.num_blocks)
    return is_beyond | is_missing.any(axis=1)


def _shortened(pool: BlockPool, group: LayerGroup, rows: jax.Array, new_len: jax.Array) -> BlockPool:
    """Releases the blocks of `rows` without a token below `new_len`; `max_seqs` is skipped."""
    entries = get_at(pool.block_table, rows, pool.num_blocks)
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
    is_dropped = columns[None] >= group.num_columns(new_len)[:, None]
    pool = block_pool.release(pool, jnp.where(is_dropped, entries, pool.num_blocks)[:, ::-1])
    kept = jnp.where(is_dropped, pool.num_blocks, entries)
    return dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, kept))


def _count_published(control: Control, rows: jax.Array, config: CacheConfig) -> Control:
    """Counts the published blocks of rows that lost tokens, a last one that they cut into included."""
    group, pool = config.groups[config.indexed_group], control.block_pools[config.indexed_group]
    num_full = quotient(get_at(control.context_len, rows), group.block_size)
    num_published = jnp.minimum(get_at(control.num_published, rows), num_full)
    has_published_tail = block_pool.is_published(pool, partial_tails(control, config, rows))
    num_published = jnp.where(has_published_tail, num_full + 1, num_published)
    return dataclasses.replace(control, num_published=set_at(control.num_published, rows, num_published))
