"""Who held which block when: the timeline of `kv.generate` and `kv.beam_search` as text and as a picture."""

import itertools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvcache_jax as kv
from kvcache_jax.inspect.block_view import is_bright, row_color, row_glyph, row_rgb
from kvcache_jax.layers.layer_group import LayerGroup

MAX_CHECK_INS, MAX_BLOCKS, MAX_ROWS = 20, 100, 16
"""Lines of the text, blocks in a line, rows in the picture's legend."""
_GREY, _SHARED = "38;5;245", "1;38;5;231;48;5;240"
_FREE, _SHARED_BLOCK = -1, -2  # also the places of their colours


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


def draw_timeline(timeline: Sequence[kv.decoding.Snapshot], config: kv.CacheConfig, path: Path) -> None:
    """Writes a picture: blocks used and referenced above, each layer group's blocks by owner below."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_groups, num_check_ins = len(config.groups), len(timeline)
    figure = Figure(figsize=(9, 2.5 + 4.5 * num_groups), layout="constrained")
    chart, *maps = figure.subplots(
        1 + num_groups, 1, sharex=True, height_ratios=[1.5, *[4.0] * num_groups], squeeze=False
    )[:, 0]
    at = np.arange(num_check_ins)
    used = np.array([check_in.num_blocks_used for check_in in timeline])
    refs = np.array([check_in.num_refs for check_in in timeline])
    chart.step(at, refs, where="mid", color="0.5", linestyle="--", label="without sharing")
    chart.step(at, used, where="mid", color="black", label="used")
    chart.fill_between(at, used, refs, step="mid", color="0.85", label="saved by sharing")
    chart.set(ylabel="blocks", ylim=(0, None))
    chart.legend(fontsize=8, frameon=False, ncols=3, loc="lower right")
    chart.spines[["top", "right"]].set_visible(False)

    rows: set[int] = set()
    for group_id, (ax, group) in enumerate(zip(maps, config.groups, strict=True)):
        held = np.stack(
            [owners(check_in.block_tables[group_id], group.num_blocks) for check_in in timeline], axis=1
        )
        rows |= set(held[held >= 0].tolist())
        colors = np.array([row_rgb(row) for row in range(config.max_seqs)] + [(0.25,) * 3, (1.0,) * 3])
        edges = {"edgecolor": "white", "linewidth": 0.4} if held.size <= 10_000 else {}
        ax.pcolormesh(
            np.arange(num_check_ins + 1) - 0.5, np.arange(group.num_blocks + 1), colors[held], **edges
        )
        ax.set(ylabel="block", ylim=(group.num_blocks, 0))
        ax.set_title(_title(group), fontsize=9, loc="left")
    for ax in (chart, *maps):
        ax.yaxis.get_major_locator().set_params(integer=True)
    # Prompts are computed without a decode step: of check-ins at the same one the first is labelled.
    steps = [check_in.num_steps for check_in in timeline]
    ticks = [i for i in at.tolist() if not i or steps[i] != steps[i - 1]]
    ticks = ticks[:: -(-len(ticks) // 16)]
    maps[-1].set_xticks(ticks, [f"{steps[i]:,}" for i in ticks])
    maps[-1].set_xlabel("decode steps at each check-in of the host")
    keys = [Patch(facecolor=row_rgb(row), label=f"row {row}") for row in sorted(rows)[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        keys.append(Patch(visible=False, label=f"and {len(rows) - MAX_ROWS:,} rows"))
    keys.append(Patch(facecolor="0.25", label="shared by rows"))
    keys.append(Patch(facecolor="white", edgecolor="0.8", label="free"))
    figure.legend(handles=keys, loc="outside lower center", ncols=9, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
