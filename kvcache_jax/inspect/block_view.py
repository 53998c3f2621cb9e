"""The blocks of a layer group as pictures show them, read from the control state into numpy.

Also the glyph and the colour of each row, which the text and the figure share.
"""

import string
from typing import NamedTuple

import numpy as np

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.arguments import group_ids
from kvcache_jax.core.cache_checks import require_values
from kvcache_jax.core.state import Cache, row_len
from kvcache_jax.layers.layer_group import LayerGroup

# One glyph per row; the last one is for all further rows.
GLYPHS = string.digits + string.ascii_lowercase + string.ascii_uppercase + "*"
# Rows take these in turn: indices into the xterm colour cube.
_COLORS = (74, 172, 71, 176, 179, 167, 98, 37, 137, 148)


class GroupView(NamedTuple):
    """One layer group as the pictures see it, in numpy; see `BlockPool` for the other fields.

    Attributes:
      title: Kind, layers and blocks of the group.
      group: LayerGroup.
      is_active: bool[max_seqs].
      length: i32[max_seqs], tokens of each row, or of its source.
      block_table: i32[max_seqs, max_blocks_per_seq].
      ref_count: i32[num_blocks].
      owner: i64[num_blocks], the lowest row that holds the block; `max_seqs` for none.
      state: str[num_blocks], "free", "cached" (published, held by no row), "reserved" (one row holds it for
        tokens to come), "extra" (held by an extra alone), "own" or "shared".
    """

    title: str
    group: LayerGroup
    is_active: np.ndarray
    length: np.ndarray
    block_table: np.ndarray
    ref_count: np.ndarray
    owner: np.ndarray
    state: np.ndarray


@explicit_transfers
def group_views(cache: Cache, caller: str, group: int | None) -> list[GroupView]:
    """Reads one layer group, or all for None; errors name the `caller`."""
    require_values(caller, cache)
    return [_group_view(cache, g) for g in group_ids(cache.config, group)]


def _group_view(cache: Cache, group_id: int) -> GroupView:
    pool, group = cache.control.block_pools[group_id], cache.config.groups[group_id]
    table, ref_count = np.asarray(pool.block_table), np.asarray(pool.ref_count)
    length = np.asarray(row_len(cache.control, group.kind))
    rows, columns = np.nonzero((table >= 0) & (table < pool.num_blocks))
    held = table[rows, columns]
    owner = np.full(pool.num_blocks, len(length))
    np.minimum.at(owner, held, rows)
    others = [*cache.config.hooks.held_blocks(cache.control, group_id)]
    for of_rows in (np.asarray(held.block_ids) for held in others if held.is_of_rows):
        rows_of_extras, columns_of_extras = np.nonzero(of_rows < pool.num_blocks)
        np.minimum.at(owner, of_rows[rows_of_extras, columns_of_extras], rows_of_extras)
    state = np.where(ref_count > 0, "own", "free").astype("<U8")
    if pool.cached is not None:
        state[(ref_count == 0) & np.asarray(pool.cached.is_published)] = "cached"
    state[held[columns * group.block_size >= length[rows]]] = "reserved"
    if others:
        state[(ref_count > 0) & (owner == len(length))] = "extra"
    state[ref_count > 1] = "shared"
    layers = f"{group.kind.label} x {group.num_layers} layer{'s' * (group.num_layers > 1)}"
    return GroupView(
        title=f"group {group_id}: {layers}, {pool.num_blocks:,} blocks of {group.block_size} tokens",
        group=group,
        is_active=np.asarray(cache.control.is_active),
        length=length,
        block_table=table,
        ref_count=ref_count,
        owner=owner,
        state=state,
    )


def counts(view: GroupView, first_block: int = 0) -> str:
    """Describes the blocks from `first_block` on in figures."""
    state = view.state[first_block:]
    states = "free", "cached", "shared", "reserved"
    num_free, num_cached, num_shared, num_reserved = ((state == s).sum() for s in states)
    num_used = len(state) - num_free - num_cached
    cached = f" {num_cached:,} cached," if num_cached else ""
    return f"{num_used:,} used ({num_shared:,} shared, {num_reserved:,} reserved),{cached} {num_free:,} free"


def row_glyph(row: int) -> str:
    """Returns the character that represents the row."""
    return GLYPHS[min(row, len(GLYPHS) - 1)]


def row_color(row: int) -> int:
    """Returns the row's colour in the xterm palette; colours repeat, glyphs and numbers do not."""
    return _COLORS[row % len(_COLORS)]


def row_rgb(row: int) -> tuple[float, float, float]:
    """Returns the row's colour, `[0, 1]` each."""
    levels, index = (0, 95 / 255, 135 / 255, 175 / 255, 215 / 255, 1), row_color(row) - 16
    return levels[index // 36], levels[index // 6 % 6], levels[index % 6]


def is_bright(row: int) -> bool:
    """Tests whether black is easier to read than white on the row's colour."""
    return float(np.dot(row_rgb(row), (0.299, 0.587, 0.114))) > 0.5
