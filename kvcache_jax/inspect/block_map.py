"""Pictures of the owners of blocks: text for a terminal or a log, and a figure.

Both read the control state alone, on the host, and say the same without colour.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache_jax.arrays.number_checks import as_integer, static_count, static_flag
from kvcache_jax.core.state import Cache
from kvcache_jax.inspect.block_view import (
    GLYPHS,
    GroupView,
    counts,
    group_views,
    is_bright,
    row_color,
    row_glyph,
    row_rgb,
)
from kvcache_jax.layers.span import ceil_div

_GREY, _SHARED = "38;5;245", "1;38;5;231;48;5;240"
# Bounds of a picture, whatever the size of the cache.
_MAX_LINES, _MAX_ROWS, _MAX_ENTRIES, _MAX_CELLS = 16, 16, 12, 2048

Paint = Callable[[str, str], str]
"""(text, ANSI colour parameters) -> text."""


def block_map(cache: Cache, *, group: int | None = None, color: bool = False, width: int = 20) -> str:
    """Draws the blocks of each layer group as text: their owners, shared, reserved, cached and free ones.

    A block is two characters wide: the glyph of its row (`0`-`9`, `a`-`z`, `A`-`Z`, then `*`), after
    `~` while it holds no token; `#` and the number of owners (`+` from ten on) when several share it;
    `:` when only the prefix cache keeps it, `=` when only an extra does; `.` when it is free. Below, each
    active row has its tokens and its blocks in order. Large pools, many rows and long rows are cut short, and
    the text says by how much. Host side: waits for the device.

    Args:
      cache: Concrete (not traced, not batched); not changed.
      group: A layer group. Default: all, one after the other.
      color: Add ANSI colours, one per row. Without them the text says the same.
      width: Blocks per line.

    Returns:
      Lines, without a newline at the end.

    Raises:
      TypeError: the cache is traced or has no values, or `width` is no integer.
      ValueError: the cache is batched or was donated, or `group` or `width` is out of range.

    Example:
      >>> import kvcache_jax as kv
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=6, max_seqs=3, max_seq_len=64)
      >>> cache, _ = kv.allocate(kv.init(config), [0, 1], [40, 16])
      >>> cache, _ = kv.extend(cache, [20, 16, 0], max_new=20)
      >>> cache, _ = kv.fork(cache, [1], [2])
      >>> print(kv.block_map(cache))
      group 0: FullAttention x 1 layer, 6 blocks of 16 tokens: 4 used (1 shared, 1 reserved), 2 free
              0  1  2  3  4  5
          0   0  0 ~0 #2  .  .
        row 0  20 tokens  [ 0  1  ~2 ]
        row 1  16 tokens  [ 3*2 ]
        row 2  16 tokens  [ 3*2 ]
      0 owned by row 0   ~0 reserved by row 0   #2 shared by 2 rows   5*2 block 5, shared   . free
    """
    width, color = static_count("width", width), static_flag("color", color)
    views = group_views(cache, "block_map", group)

    def paint(text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if color and style else text

    lines = []
    for view in views:
        lines.append(f"{view.title}: {counts(view)}")
        lines += _grid_lines(view, width, paint) + _row_lines(view, paint)
    return "\n".join([*lines, paint(_legend(views), _GREY)])


def _grid_lines(view: GroupView, width: int, paint: Paint) -> list[str]:
    """Draws the blocks in order, `width` to a line after the first one's id; many free lines become one."""
    num_blocks = len(view.state)
    label_len = max(5, len(str(num_blocks)) + 2)
    offsets = range(min(width, num_blocks))
    cell_len = max(2, len(str(offsets[-1])))
    lines = [paint(" " * (label_len + 1) + "".join(f" {i:>{cell_len}}" for i in offsets), _GREY)]
    used, first = np.append(np.flatnonzero(view.state != "free"), num_blocks), 0
    while first < num_blocks and len(lines) <= _MAX_LINES:
        next_used = int(used[np.searchsorted(used, first)])
        num_free_lines = (next_used - first) // width
        if num_free_lines > 2:
            end = num_blocks if next_used == num_blocks else first + num_free_lines * width
            cells = " " + paint(f"... {end - first:,} free blocks ...", _GREY)
        else:
            end = min(first + width, num_blocks)
            texts = [_cell_text(view, b).rjust(cell_len) for b in range(first, end)]
            cells = "".join(" " + paint(text, _style(view, first + i)) for i, text in enumerate(texts))
        lines.append(f"{first:>{label_len}} {cells}")
        first = end
    if first < num_blocks:
        lines.append(f"{'':{label_len}}  ... {num_blocks - first:,} more blocks: {counts(view, first)}")
    return lines


def _cell_text(view: GroupView, block_id: int) -> str:
    match view.state[block_id]:
        case "free":
            return "."
        case "cached":
            return ":"
        case "extra":
            return "="
        case "shared":
            return f"#{view.ref_count[block_id]}" if view.ref_count[block_id] < 10 else "#+"
        case state:
            return ("~" if state == "reserved" else "") + row_glyph(view.owner[block_id])


def _row_lines(view: GroupView, paint: Paint) -> list[str]:
    """Writes one line per active row: name, tokens, blocks in order."""
    rows = np.flatnonzero(view.is_active).tolist()
    names = {row: f"row {row}" + (f" = {row_glyph(row)}" if row > 9 else "") for row in rows[:_MAX_ROWS]}
    name_len = max(map(len, names.values()), default=0)
    lines = [] if rows else ["  no row is active"]
    for row, name in names.items():
        length = int(view.length[row])
        tokens = f"{length:>{len(str(view.length.max()))}} {'token ' if length == 1 else 'tokens'}"
        entries = " ".join(f" {paint(text, style)}" for text, style in _row_entries(view, row))
        lines.append(f"  {paint(name, _row_style(row))}{'':{name_len - len(name)}}  {tokens}  [{entries} ]")
    if left_out := rows[_MAX_ROWS:]:
        num_tokens = view.length[left_out].sum()
        lines.append(f"  ... {len(left_out):,} more rows with {num_tokens:,} tokens")
    return lines


def _row_entries(view: GroupView, row: int) -> list[tuple[str, str]]:
    """Lists (text, style) of the row's blocks in order; holes are one entry, long rows lose their middle.

    An entry that is no block is shown with a question mark.
    """
    nowhere, block_ids = len(view.state), view.block_table[row].tolist()
    num_token_columns = max(ceil_div(int(view.length[row]), view.group.block_size), 0)
    while len(block_ids) > num_token_columns and block_ids[-1] == nowhere:
        block_ids.pop()
    entries = []
    for is_gone, run in itertools.groupby(block_ids, lambda block_id: block_id == nowhere):
        if is_gone:
            entries.append((f"({len(list(run))} gone)", _GREY))
            continue
        for block_id in run:
            if not 0 <= block_id < nowhere:  # the picture of a damaged cache
                entries.append((f"{block_id}?", _GREY))
                continue
            before = "~" if view.state[block_id] == "reserved" else ""
            after = f"*{view.ref_count[block_id]}" if view.state[block_id] == "shared" else ""
            entries.append((f"{before}{block_id}{after}", _style(view, block_id)))
    if len(entries) > _MAX_ENTRIES:
        half = _MAX_ENTRIES // 2
        entries[half:-half] = [(f"... {len(entries) - 2 * half} more ...", "")]
    return entries


def _legend(views: list[GroupView]) -> str:
    """Explains the glyphs; a second line has the rarer ones that occur."""
    common = "0 owned by row 0   ~0 reserved by row 0   #2 shared by 2 rows   5*2 block 5, shared   . free"
    rare = []
    if any((view.state == "cached").any() for view in views):
        rare.append(": cached, held by no row")
    if any((view.state == "extra").any() for view in views):
        rare.append("= held by an extra alone")
    if any((view.ref_count > 9).any() for view in views):
        rare.append("#+ shared by 10 or more")
    if any(view.is_active[len(GLYPHS) - 1 :].any() for view in views):
        rare.append(f"* owned by a row above {len(GLYPHS) - 2}")
    if not all(view.group.span.keeps_all for view in views):
        rare.append("(3 gone) 3 blocks left the window")
    return common + ("\n" + "   ".join(rare) if rare else "")


def _row_style(row: int) -> str:
    return f"38;5;{16 if is_bright(row) else 231};48;5;{row_color(row)}"


def _style(view: GroupView, block_id: int) -> str:
    """Chooses ANSI parameters: filled blocks are tiles in the owner's colour, reserved ones its letters."""
    row = int(view.owner[block_id])
    styles = {
        "free": _GREY,
        "cached": _GREY,
        "extra": _GREY,
        "reserved": f"38;5;{row_color(row)}",
        "own": _row_style(row),
        "shared": _SHARED,
    }
    return styles[view.state[block_id]]


def draw_block_map(cache: Cache, ax: Any = None, group: int = 0) -> Any:
    """Draws one layer group's blocks as a grid: coloured by owner, shared ones hatched, free ones blank.

    A block that one row holds carries its number, and is pale while it holds no token. A shared block
    carries its owners' colours side by side and their number. Cached blocks, which no row holds, are grey.
    Pools beyond 2,048 blocks are cut short, and the title says by how much. Host side, as `block_map`.

    Args:
      cache: Concrete (not traced, not batched); not changed.
      ax: matplotlib Axes to draw on. Default: the axes of a new pyplot figure.
      group: A layer group.

    Returns:
      The Axes. The cell of block `b` is the patch whose `get_gid()` is `f"block {b}"`.

    Raises:
      ImportError: matplotlib is missing; the extra `pictures` brings it.
      TypeError, ValueError: as `block_map`.
    """
    try:
        from matplotlib import patches, pyplot, transforms
    except ImportError as error:
        raise ImportError(
            "draw_block_map needs matplotlib, of the extra `pictures`: pip install 'kvcache_jax[pictures]'"
        ) from error
    [view] = group_views(cache, "draw_block_map", as_integer("group", group))
    num_blocks = len(view.state)
    num_cells = min(num_blocks, _MAX_CELLS)
    num_columns = min(num_cells, 20 if num_cells <= 320 else 64)
    num_lines = ceil_div(num_cells, num_columns)
    if ax is None:
        size = (max(7, 0.3 * num_columns + 1), 0.3 * num_lines + 1.2)
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    elif not hasattr(ax, "get_position"):
        raise TypeError(f"ax is {ax!r}, expected Axes of matplotlib, or None")
    cell_points = 72 * ax.figure.get_figwidth() * ax.get_position().width / num_columns
    for block_id in range(num_cells):
        line, column = divmod(block_id, num_columns)
        _draw_block(ax, view, block_id, column + 0.06, line + 0.06, 0.88, min(0.35 * cell_points, 9))
    title = f"{view.title}: {counts(view)}"
    if num_cells < num_blocks:
        title += f"\n{num_blocks - num_cells:,} more blocks: {counts(view, num_cells)}"
    ax.set_title(title, fontsize=9, loc="left")
    ax.set(xlim=(0, num_columns), ylim=(num_lines, 0), aspect="equal")
    columns = np.arange(0, num_columns, ceil_div(num_columns, 20))
    lines = np.arange(0, num_lines, ceil_div(num_lines, 16))
    ax.set_xticks(columns + 0.5, columns, fontsize=7, color="0.4")
    ax.set_yticks(lines + 0.5, lines * num_columns, fontsize=7, color="0.4")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)

    rows = np.flatnonzero(view.is_active).tolist()
    keys = [patches.Patch(**_looks("own", row_rgb(row)), label=f"row {row}") for row in rows[:_MAX_ROWS]]
    if len(rows) > _MAX_ROWS:
        keys.append(patches.Patch(visible=False, label=f"and {len(rows) - _MAX_ROWS:,} rows"))
    states = ["shared", "reserved", *["cached"] * bool((view.state == "cached").any()), "free"]
    keys += [patches.Patch(**_looks(s, (0.5,) * 3), label=s) for s in states]
    below = transforms.offset_copy(ax.transAxes, ax.figure, y=-18, units="points")
    place = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below, "ncols": 8}
    ax.legend(handles=keys, fontsize=7, frameon=False, **place)
    return ax


def _draw_block(
    ax: Any, view: GroupView, block_id: int, left: float, top: float, side: float, font_size: float
) -> None:
    """Draws one cell; with several owners on strips of their colours."""
    from matplotlib import patches

    state, row = view.state[block_id], int(view.owner[block_id])
    text, style = str(row), {"color": "white" if state == "own" and not is_bright(row) else "black"}
    if state == "shared":
        owners = np.flatnonzero((view.block_table == block_id).any(axis=1)).tolist()
        for i, owner in enumerate(owners):
            strip = (left + i * side / len(owners), top), side / len(owners), side
            ax.add_patch(patches.Rectangle(*strip, color=row_rgb(owner), linewidth=0))
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
        text, style = f"\u00d7{view.ref_count[block_id]}", {"weight": "bold", "bbox": box}
    looks = _looks(state, row_rgb(row))
    ax.add_patch(patches.Rectangle((left, top), side, side, gid=f"block {block_id}", **looks))
    if state not in ("free", "cached", "extra"):
        middle = left + side / 2, top + side / 2
        ax.text(*middle, text, ha="center", va="center_baseline", fontsize=font_size, **style)


def _looks(state: str, color: tuple[float, ...]) -> dict[str, Any]:
    """Chooses how a cell is filled."""
    return {
        "free": {"facecolor": "white", "edgecolor": "0.85"},
        "cached": {"facecolor": "0.85", "edgecolor": "0.6"},
        "extra": {"facecolor": "0.85", "edgecolor": "0.2", "linestyle": ":"},
        "reserved": {"facecolor": (*color, 0.25), "edgecolor": color, "linestyle": "--"},
        "own": {"facecolor": color, "edgecolor": color},
        "shared": {"facecolor": "none", "edgecolor": "0.2", "hatch": "////"},
    }[state]
