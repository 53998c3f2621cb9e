"""Who held which block when: the timeline of `kv.generate` as text."""

import itertools
import shutil
import sys
from collections.abc import Sequence

import numpy as np

import kvcache_jax as kv
from kvcache_jax.inspect.block_view import is_bright, row_color, row_glyph
from kvcache_jax.layers.layer_group import LayerGroup

MAX_CHECK_INS, MAX_BLOCKS = 20, 100
"""Lines of the text, blocks in a line."""
_GREY, _SHARED = "38;5;245", "1;38;5;231;48;5;240"
_FREE, _SHARED_BLOCK = -1, -2


def owners(block_table: np.ndarray, num_blocks: int) -> np.ndarray:
    """i64[num_blocks]: the row that holds the block, `_SHARED_BLOCK` or `_FREE`."""
    rows, columns = np.nonzero(block_table < num_blocks)
    held = block_table[rows, columns]
    result = np.full(num_blocks, _FREE)
    result[held] = rows
    result[np.bincount(held, minlength=num_blocks) > 1] = _SHARED_BLOCK
    return result


def map_line(block_table: np.ndarray, num_blocks: int, width: int, color: bool) -> str:
    """One character per block, `width` of them: the row's glyph, `#` where rows share it, `.` if free."""
    text = ""
    for owner, run in itertools.groupby(owners(block_table, num_blocks)[:width].tolist()):
        glyph = {_FREE: ".", _SHARED_BLOCK: "#"}.get(owner) or row_glyph(owner)
        glyphs = glyph * len(list(run))
        text += f"\x1b[{_style(owner)}m{glyphs}\x1b[0m" if color else glyphs
    return text


def _style(owner: int) -> str:
    """ANSI parameters, as `kv.block_map` has them."""
    if owner < 0:
        return _GREY if owner == _FREE else _SHARED
    return f"38;5;{16 if is_bright(owner) else 231};48;5;{row_color(owner)}"


def timeline_text(timeline: Sequence[kv.decoding.Snapshot], config: kv.CacheConfig, color: bool) -> str:
    """One line per check-in, each layer group by itself; what is too long is cut, and the text says so."""
    chosen = sorted({round(i) for i in np.linspace(0, len(timeline) - 1, MAX_CHECK_INS)})
    width = (
        min(MAX_BLOCKS, shutil.get_terminal_size((120, 24)).columns - 13)
        if sys.stdout.isatty()
        else MAX_BLOCKS
    )
    width = max(width, 20)
    lines = []
    for group_id, group in enumerate(config.groups):
        lines += ["", f"Blocks over time, {_title(group)}"]
        lines.append(f"{'step':>6} {'used':>5} ")
        for check_in in (timeline[i] for i in chosen):
            table = check_in.block_tables[group_id]
            num_used = int((owners(table, group.num_blocks) != _FREE).sum())
            line = map_line(table, group.num_blocks, width, color)
            lines.append(f"{check_in.num_steps:>6} {num_used:>5} {line}")
        if group.num_blocks > width:
            lines.append(f"{'':>13}... and {group.num_blocks - width:,} blocks more")
    if len(chosen) < len(timeline):
        lines.append(f"{len(chosen)} of {len(timeline)} check-ins are shown.")
    lines.append("0 held by row 0   # shared by rows   . free")
    return "\n".join(lines)


def _title(group: LayerGroup) -> str:
    return (
        f"{group.kind.label} x {group.num_layers} layer{'s' * (group.num_layers > 1)}: "
        f"{group.num_blocks:,} blocks of {group.block_size} tokens"
    )
