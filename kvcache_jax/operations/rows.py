"""Helpers of the row operations: checks of ids, tables and lengths, and the jitted call.

All rows of a call act on the state before it. A row operation is a function of the control state, columns
i32[n] and the config that returns `(control, result)`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import any_of, get_at, min_at, quotient
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.backends import computed_once
from kvcache_jax.core.cache_form import is_traced
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Cache, Control, mark_used, row_fields, row_len
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup


def on_rows(operation: Callable, cache: Cache, *columns: Any) -> tuple[Cache, Any]:
    """Runs a row operation, jitted over the control state; the pools are attached again by reference."""
    num_rows = columns[0].shape[0]
    num_more = 0
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(columns)) and not is_traced(
        cache.control
    ):
        # Lists of five to eight rows are one program, and so on.
        num_more = (1 << (num_rows - 1).bit_length()) - num_rows
        columns = _padded(columns, num_more, cache.max_seqs)
    cache, result = on_control(operation, cache, *columns)
    return cache, _first_rows(result, num_rows) if num_more else result


def on_control(operation: Callable, cache: Cache, *columns: Any) -> tuple[Cache, Any]:
    """Runs an operation as `on_rows`, whose columns are as they are."""
    control, result = _run(cache.control, *columns, operation=operation, config=cache.config)
    return dataclasses.replace(cache, control=control), result


def _padded(columns: tuple[Any, ...], num_more: int, nobody: int) -> tuple[Any, ...]:
    """Adds `num_more` entries that are skipped to the columns, all of them in numpy."""

    def padded(column: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.pad(column, [(0, num_more)] + [(0, 0)] * (column.ndim - 1), constant_values=fill)

    return padded(columns[0], nobody), *jax.tree.map(padded, columns[1:])


@functools.partial(jax.jit, static_argnames="num_rows")
def _first_rows(result: Any, num_rows: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:num_rows], result)


@functools.partial(jax.jit, static_argnames=("operation", "config"))
def _run(control: Control, *columns: Any, operation: Callable, config: CacheConfig) -> tuple[Control, Any]:
    control, columns = as_varied((control, columns))
    return operation(control, *columns, config=config)


def check_ids(
    control: Control, seq_ids: jax.Array, *others: jax.Array, mask: jax.Array | bool = True
) -> tuple[tuple[jax.Array, Status], ...]:
    """Makes the checks of ids i32[n]: in range, not skipped, and no row to change named twice.

    `others`, such as parents, may repeat. Entries outside `mask` bool[n] name no row.
    """
    ids = (seq_ids, *others)
    is_skipped = any_of([column == control.max_seqs for column in ids])
    is_outside = any_of([(column < 0) | (column > control.max_seqs) for column in ids])
    names_row = ~(is_skipped | is_outside) & mask
    order = jnp.arange(seq_ids.shape[0], dtype=jnp.int32)
    rows = jnp.where(names_row, seq_ids, control.max_seqs)
    first = min_at(jnp.full_like(order, order.size, shape=control.max_seqs), rows, order)
    is_repeated = names_row & (get_at(first, rows, 0) < order)
    return (
        (is_outside, Status.BAD_SEQ_ID),
        (is_skipped, Status.SKIPPED),
        (is_repeated, Status.DUPLICATE_SEQ_ID),
    )


def active_rows(control: Control, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns status and row i32[n] of an operation that asks for active rows alone; `max_seqs` for none."""
    is_idle = ~get_at(control.is_active, seq_ids)
    status = first_failure(*check_ids(control, seq_ids), (is_idle, Status.SEQ_NOT_ACTIVE))
    return status, jnp.where(status == Status.OK, seq_ids, control.max_seqs)


def inherit(control: Control, rows: jax.Array, parent_ids: jax.Array, **fields: ArrayLike) -> Control:
    """Marks `rows` as used and gives them all that their parents have, except the blocks."""
    names = "context_len", "priority", "namespace", "num_published", "source_len", "marks"
    held = row_fields(control)
    inherited = {name: get_at(held[name], parent_ids) for name in names if name in held}
    control = mark_used(control, rows, **inherited, **fields)
    if (holes := control.holes) is not None:
        control = dataclasses.replace(control, holes=holes.with_rows(rows, holes.of_rows(parent_ids)))
    return control


def prefix_len(control: Control, seq_ids: jax.Array, length: jax.Array, config: CacheConfig) -> jax.Array:
    """Counts the first tokens of rows that are as computed in their text, i32[n], at most `length` i32[n]."""
    if (holes := control.holes) is not None:
        holes = holes.of_rows(seq_ids)
        length = jnp.where(holes.is_plain, length, jnp.minimum(holes.prefix_len, length))
    return config.hooks.prefix_len(control, seq_ids, length)


def num_blocks_for(num_tokens: jax.Array, block_size: int) -> jax.Array:
    """Counts the blocks that hold `num_tokens` tokens."""
    return quotient(num_tokens + block_size - 1, block_size)


class RowNeeds(NamedTuple):
    """Blocks of one layer group, or of each, that rows lack for their next tokens."""

    num_blocks: jax.Array  # i32[..., n], new blocks and copies
    copies: jax.Array  # bool[..., n], the last block must be copied first

    @property
    def of_all_rows(self) -> jax.Array:
        """i32[...], the blocks together."""
        return jnp.sum(self.num_blocks, axis=-1, dtype=jnp.int32)


def needs_of(
    pool: BlockPool,
    group: LayerGroup,
    entries: jax.Array,  # i32[n, max_blocks_per_seq], the rows' blocks
    context_len: jax.Array,  # i32[n]
    num_new: jax.Array,  # i32[n]
    ref_count: jax.Array,  # i32[num_blocks], owners of the blocks
) -> RowNeeds:
    """Counts the blocks that each row lacks by itself for `num_new` tokens; none for 0."""
    # Apart from what is before and after it, this is the same code at each call, and is compiled once.
    entries, context_len, num_new, ref_count = computed_once((entries, context_len, num_new, ref_count))
    columns, order = (lax.broadcasted_iota(jnp.int32, entries.shape, axis) for axis in (1, 0))
    first = group.num_columns(context_len)[:, None]
    end = group.num_columns(context_len + num_new)[:, None]
    is_new = (columns >= first) & (columns < end) & (entries == pool.num_blocks)
    column, is_partial = group.tail_column(context_len)
    tail = get_at(entries, (order[:, 0], column), pool.num_blocks)
    is_kept = (get_at(ref_count, tail, 0) > 1) | block_pool.is_published(pool, tail)
    copies = (num_new > 0) & is_partial & is_kept
    num_blocks = jnp.sum(is_new, axis=1, dtype=jnp.int32) + copies.astype(jnp.int32)
    return computed_once(RowNeeds(num_blocks, copies))


def token_blocks(pool: BlockPool, group: LayerGroup, control: Control, seq_ids: jax.Array) -> jax.Array:
    """Reads the rows' blocks that hold tokens, i32[n, max_blocks_per_seq]; nowhere for reserved ones."""
    num_held = group.num_columns(get_at(row_len(control, group.kind), seq_ids))
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
    return jnp.where(columns[None] < num_held[:, None], get_at(pool.block_table, seq_ids), pool.num_blocks)


def partial_tails(control: Control, config: CacheConfig, seq_ids: jax.Array) -> jax.Array:
    """Reads the rows' last blocks of the indexed group if they are not full, else nowhere; i32[n]."""
    group, pool = config.groups[config.indexed_group], control.block_pools[config.indexed_group]
    context_len = get_at(control.context_len, seq_ids, 0)
    columns, is_partial = group.tail_column(context_len)
    tails = get_at(pool.block_table, (seq_ids, columns), pool.num_blocks)
    return jnp.where(is_partial, tails, pool.num_blocks)
