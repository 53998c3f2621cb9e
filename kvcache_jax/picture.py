"""Pictures of who holds which block: as text for a terminal or a log, and as a figure.

Both read the control state alone, on the host, and say the same with or without colour.
"""

import dataclasses
import enum
import operator
import string
from typing import Any, NamedTuple

import jax
import numpy as np

from kvcache_jax.config import LayerGroup, SlidingWindow, ceil_div
from kvcache_jax.state import Cache

# One glyph per row; `_MANY` stands for every row behind them.
_GLYPHS = string.digits + string.ascii_lowercase + string.ascii_uppercase
_MANY = "*"
# Bounds of a picture, whatever the size of the cache.
_MAX_LINES, _MAX_ROWS, _MAX_ENTRIES = 16, 16, 16
_MAX_CELLS, _FEW_CELLS = 2048, 320
# Rows take these in turn: indices into the xterm colour cube, which terminals and the figure share.
_COLORS = (74, 172, 71, 176, 179, 167, 98, 37, 137, 148)
_BLACK, _WHITE, _DARK_GREY, _MIDDLE_GREY = 16, 231, 240, 245


class BlockState(enum.Enum):
    """What a picture says about a block."""

    FREE = "free"
    """No row holds it."""
    RESERVED = "reserved"
    """One row holds it for tokens to come."""
    OWN = "own"
    """It holds tokens of one row."""
    SHARED = "shared"
    """It holds tokens of two rows or more."""


@dataclasses.dataclass(frozen=True, eq=False)
class GroupView:
    """One layer group as the pictures see it, in numpy.

    Attributes:
      group_id: Index of the group.
      group: Its kind and sizes.
      is_active: bool[max_seqs].
      context_len: i32[max_seqs].
      block_table: i32[max_seqs, max_blocks_per_seq].
      ref_count: i32[num_blocks].
      owner: i32[num_blocks], the lowest row that holds the block; `max_seqs` for none.
      is_reserved: bool[num_blocks], held by one row that has not filled it.
    """

    group_id: int
    group: LayerGroup
    is_active: np.ndarray
    context_len: np.ndarray
    block_table: np.ndarray
    ref_count: np.ndarray
    owner: np.ndarray
    is_reserved: np.ndarray

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; also the id that means nowhere."""
        return len(self.ref_count)

    def state(self, block_id: int) -> BlockState:
        """What to say about the block."""
        if self.ref_count[block_id] == 0:
            return BlockState.FREE
        if self.ref_count[block_id] > 1:
            return BlockState.SHARED
        return BlockState.RESERVED if self.is_reserved[block_id] else BlockState.OWN

    def columns(self, row: int) -> list[int]:
        """The row's blocks in order; nowhere (`num_blocks`) where a window gave one back."""
        entries = self.block_table[row]
        held = np.flatnonzero(entries < self.num_blocks)
        num_token_columns = ceil_div(int(self.context_len[row]), self.group.block_size)
        return entries[: max(num_token_columns, held[-1] + 1 if len(held) else 0)].tolist()

    def counts(self, first_block: int = 0) -> str:
        """The blocks from `first_block` on in figures."""
        ref_count, is_reserved = self.ref_count[first_block:], self.is_reserved[first_block:]
        num_used = int((ref_count > 0).sum())
        return (
            f"{num_used:,} used ({int((ref_count > 1).sum()):,} shared, {int(is_reserved.sum()):,} reserved), "
            f"{len(ref_count) - num_used:,} free"
        )

    @property
    def title(self) -> str:
        """Kind, layers and blocks of the group."""
        kind, num_layers = self.group.kind, self.group.num_layers
        name = type(kind).__name__ + (f"({kind.window})" if isinstance(kind, SlidingWindow) else "")
        layers = f"{num_layers} layer{'s' if num_layers > 1 else ''}"
        return f"group {self.group_id}: {name} x {layers}, {self.num_blocks:,} blocks of {self.group.block_size} tokens"


class _Span(NamedTuple):
    """Text with ANSI colour parameters; "" for the terminal's own colours."""

    text: str
    style: str = ""


def block_map(cache: Cache, *, group: int | None = None, color: bool = False, width: int = 20) -> str:
    """The blocks of each layer group as text: who owns which, who shares, what is reserved or free.

    A block is two characters wide: the glyph of the row that holds it (`0`-`9`, `a`-`z`, `A`-`Z`, then
    `*`) behind a blank, or behind `~` while it holds no token; `#` and the number of owners (`+` from
    ten on) when rows share it; `.` when it is free. Below, each active row has its tokens and its
    blocks in order. Large pools, many rows and long rows are cut short, and the text says by how much.

    Host side: waits for the device. Reads the control state alone.

    Args:
      cache: Concrete (not traced, not batched); not changed.
      group: A layer group. Default: all, one after the other.
      color: Add ANSI colours, one per row. Without them the text says the same.
      width: Blocks per line.

    Returns:
      Lines without a newline at the end.

    Raises:
      TypeError: the cache is traced or has no values.
      ValueError: the cache is batched, or `group` or `width` is out of range.

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
    if isinstance(width, bool) or not isinstance(width, int | np.integer) or width < 1:
        raise ValueError(f"width is {width!r}, expected a positive int, the number of blocks per line")
    views = group_views(cache, "block_map", group)
    lines: list[list[_Span]] = []
    for view in views:
        lines.append([_Span(f"{view.title}: {view.counts()}", "1")])
        lines += _grid_lines(view, width) + _row_lines(view)
    lines.append(_legend_line(views))
    return "\n".join("".join(_painted(span) if color else span.text for span in line) for line in lines)


def group_views(cache: Cache, caller: str, group: int | None) -> list[GroupView]:
    """The layer group, or all of them for None, of a concrete cache; `caller` is named in errors."""
    num_groups = len(cache.config.groups)
    if group is not None and group not in range(num_groups):
        raise ValueError(f"group is {group!r}, expected 0 <= group < {num_groups}, or see config.groups")
    control = cache.control
    for leaf in jax.tree.leaves(control):
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                f"{caller} got a cache without values (a {type(leaf).__name__} in place of an array), expected a concrete "
                f"one: call it outside of jit, vmap, scan and eval_shape, or hand the cache to jax.debug.callback"
            )
    if control.is_active.ndim != 1:
        raise ValueError(
            f"{caller} got a batched cache (is_active has shape {control.is_active.shape}, expected (max_seqs,)): "
            "draw one at a time, jax.tree.map(lambda x: x[i], cache)"
        )
    group_ids = range(num_groups) if group is None else [int(group)]
    return [_view(cache, group_id) for group_id in group_ids]


def _view(cache: Cache, group_id: int) -> GroupView:
    pool, group = cache.control.block_pools[group_id], cache.config.groups[group_id]
    table, context_len = np.asarray(pool.block_table), np.asarray(cache.control.context_len)
    rows, columns = np.nonzero((table >= 0) & (table < pool.num_blocks))
    held = table[rows, columns]
    owner = np.full(pool.num_blocks, len(context_len))
    np.minimum.at(owner, held, rows)
    is_reserved = np.zeros(pool.num_blocks, bool)
    is_reserved[held[columns * group.block_size >= context_len[rows]]] = True
    return GroupView(
        group_id=group_id,
        group=group,
        is_active=np.asarray(cache.control.is_active),
        context_len=context_len,
        block_table=table,
        ref_count=np.asarray(pool.ref_count),
        owner=owner,
        is_reserved=is_reserved,
    )


def row_glyph(row: int) -> str:
    """The character that stands for a row."""
    return _GLYPHS[row] if row < len(_GLYPHS) else _MANY


def row_rgb(row: int) -> tuple[int, int, int]:
    """The colour that stands for a row, `[0, 255]` each; colours repeat, glyphs and numbers do not."""
    levels, index = (0, 95, 135, 175, 215, 255), _row_color(row) - 16
    return levels[index // 36], levels[index // 6 % 6], levels[index % 6]


def _row_color(row: int) -> int:
    return _COLORS[row % len(_COLORS)]


def _is_bright(row: int) -> bool:
    """Whether black is easier to read than white on the row's colour."""
    red, green, blue = row_rgb(row)
    return 0.299 * red + 0.587 * green + 0.114 * blue > 128


def _grid_lines(view: GroupView, width: int) -> list[list[_Span]]:
    """The blocks in order, `width` to a line, behind the id of its first; three free lines or more are one."""
    label_len = max(5, len(str(view.num_blocks)) + 2)
    offsets = range(min(width, view.num_blocks))
    cell_len = max(2, len(str(offsets[-1])))
    header = " ".join(f"{offset:>{cell_len}}" for offset in offsets)
    lines = [[_Span(" " * (label_len + 2) + header, f"38;5;{_MIDDLE_GREY}")]]
    first, num_blocks = 0, view.num_blocks
    while first < num_blocks and len(lines) <= _MAX_LINES:
        next_used = (
            int(np.argmax(view.ref_count[first:] > 0)) if view.ref_count[first:].any() else num_blocks - first
        )
        num_free_lines = ceil_div(next_used, width) if first + next_used == num_blocks else next_used // width
        line, end = [_Span(f"{first:>{label_len}} ")], min(first + width, num_blocks)
        if num_free_lines > 2:
            end = min(first + num_free_lines * width, num_blocks)
            line.append(_Span(f" ... {end - first:,} free blocks ...", f"38;5;{_MIDDLE_GREY}"))
        else:
            for block_id in range(first, end):
                line += [
                    _Span(" "),
                    _Span(_cell_text(view, block_id).rjust(cell_len), _style(view, block_id)),
                ]
        lines.append(line)
        first = end
    if first < num_blocks:
        rest = f"... {num_blocks - first:,} more blocks: {view.counts(first)}"
        lines.append([_Span(" " * (label_len + 2) + rest)])
    return lines


def _cell_text(view: GroupView, block_id: int) -> str:
    state, num_refs = view.state(block_id), view.ref_count[block_id]
    if state == BlockState.FREE:
        return "."
    if state == BlockState.SHARED:
        return f"#{num_refs}" if num_refs < 10 else "#+"
    return ("~" if state == BlockState.RESERVED else "") + row_glyph(view.owner[block_id])


def _style(view: GroupView, block_id: int) -> str:
    """Filled blocks are tiles in the owner's colour; reserved ones only have its letters."""
    state, row = view.state(block_id), int(view.owner[block_id])
    if state == BlockState.FREE:
        return f"38;5;{_MIDDLE_GREY}"
    if state == BlockState.SHARED:
        return f"1;38;5;{_WHITE};48;5;{_DARK_GREY}"
    return f"38;5;{_row_color(row)}" if state == BlockState.RESERVED else _row_style(row)


def _row_style(row: int) -> str:
    return f"38;5;{_BLACK if _is_bright(row) else _WHITE};48;5;{_row_color(row)}"


def _row_lines(view: GroupView) -> list[list[_Span]]:
    """One line per active row: name, tokens, blocks in order."""
    rows = np.flatnonzero(view.is_active).tolist()
    if not rows:
        return [[_Span("  no row is active")]]
    shown = rows[:_MAX_ROWS]
    names = [f"row {row}" + (f" = {row_glyph(row)}" if row > 9 else "") for row in shown]
    name_len = max(map(len, names))
    num_len = max(len(str(view.context_len[row])) for row in shown)
    lines = []
    for row, name in zip(shown, names, strict=True):
        tokens = f"{view.context_len[row]:>{num_len}} token{' ' if view.context_len[row] == 1 else 's'}"
        line = [_Span("  "), _Span(name, _row_style(row)), _Span(" " * (name_len - len(name)))]
        line.append(_Span(f"  {tokens}  ["))
        for entry in _row_entries(view, row):
            line += [_Span(" "), entry, _Span(" ")]
        lines.append([*line, _Span("]")])
    if len(rows) > len(shown):
        num_rows, num_tokens = len(rows) - len(shown), int(view.context_len[rows[_MAX_ROWS:]].sum())
        lines.append([_Span(f"  ... {num_rows:,} more rows with {num_tokens:,} tokens")])
    return lines


def _row_entries(view: GroupView, row: int) -> list[_Span]:
    """The row's blocks in order, a hole as one entry, the middle of long rows left out."""
    entries, num_gone = [], 0
    for block_id in [*view.columns(row), None]:
        if block_id == view.num_blocks:
            num_gone += 1
            continue
        if num_gone:
            entries.append(_Span(f"({num_gone} gone)", f"38;5;{_MIDDLE_GREY}"))
            num_gone = 0
        if block_id is not None:
            entries.append(_Span(_entry_text(view, block_id), _style(view, block_id)))
    if len(entries) <= _MAX_ENTRIES:
        return entries
    num_first = _MAX_ENTRIES // 2
    num_left_out = len(entries) - _MAX_ENTRIES
    return [*entries[:num_first], _Span(f"... {num_left_out} more ..."), *entries[-num_first:]]


def _entry_text(view: GroupView, block_id: int) -> str:
    if view.state(block_id) == BlockState.SHARED:
        return f"{block_id}*{view.ref_count[block_id]}"
    return f"~{block_id}" if view.state(block_id) == BlockState.RESERVED else str(block_id)


def _legend_line(views: list[GroupView]) -> list[_Span]:
    """What the glyphs mean; rare ones only if they occur."""
    meanings = [
        "0 owned by row 0",
        "~0 reserved by row 0",
        "#2 shared by 2 rows",
        "5*2 block 5, shared",
        ". free",
    ]
    if any((view.ref_count > 9).any() for view in views):
        meanings.append("#+ shared by 10 or more")
    if any(view.is_active[len(_GLYPHS) :].any() for view in views):
        meanings.append(f"{_MANY} owned by a row above {len(_GLYPHS) - 1}")
    if any(isinstance(view.group.kind, SlidingWindow) for view in views):
        meanings.append("(3 gone) 3 blocks left the window")
    return [_Span("   ".join(meanings), f"38;5;{_MIDDLE_GREY}")]


def _painted(span: _Span) -> str:
    return f"\x1b[{span.style}m{span.text}\x1b[0m" if span.style else span.text


def draw_block_map(cache: Cache, ax: Any = None, group: int = 0) -> Any:
    """Draws one layer group's blocks as a grid: coloured by owner, shared ones hatched, free ones blank.

    Blocks that one row holds carry its number, pale while they are reserved and hold no token. Shared
    blocks carry the colours of their owners side by side, and how many there are. Pools of more than
    2,048 blocks are cut short, and the title says by how much. Host side, as `block_map`.

    Args:
      cache: Concrete (not traced, not batched); not changed.
      ax: matplotlib Axes to draw on. Default: those of a new figure.
      group: A layer group.

    Returns:
      The Axes. The cell of block `b` is the patch whose `get_gid()` is `f"block {b}"`.

    Raises:
      ImportError: matplotlib is not there; the extra `pictures` brings it.
      TypeError, ValueError: as `block_map`.
    """
    try:
        from matplotlib.patches import Patch
        from matplotlib.transforms import offset_copy
    except ImportError as error:
        raise ImportError(
            "draw_block_map needs matplotlib; get it with the extra `pictures`: pip install 'kvcache_jax[pictures]'"
        ) from error
    [view] = group_views(cache, "draw_block_map", operator.index(group))
    num_shown = min(view.num_blocks, _MAX_CELLS)
    num_columns = min(num_shown, 20 if num_shown <= _FEW_CELLS else 64)
    num_lines = ceil_div(num_shown, num_columns)
    if ax is None:
        from matplotlib import pyplot

        size = (max(6.0, 0.3 * num_columns + 1), max(1.5, 0.3 * num_lines + 1.2))
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    cell_points = ax.get_position().width * ax.figure.get_figwidth() * 72 / num_columns
    for block_id in range(num_shown):
        _draw_block(
            ax, view, block_id, block_id % num_columns, block_id // num_columns, min(0.35 * cell_points, 9)
        )

    ax.set(xlim=(0, num_columns), ylim=(num_lines, 0), aspect="equal")
    step = 1 if num_columns <= 20 else 8
    ax.set_xticks(np.arange(0, num_columns, step) + 0.5, range(0, num_columns, step), fontsize=7, color="0.4")
    step = ceil_div(num_lines, 16)
    ax.set_yticks(
        np.arange(0, num_lines, step) + 0.5, range(0, num_shown, num_columns * step), fontsize=7, color="0.4"
    )
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    rest = f"\n{view.num_blocks - num_shown:,} more blocks: {view.counts(num_shown)}"
    ax.set_title(
        f"{view.title}: {view.counts()}" + (rest if num_shown < view.num_blocks else ""),
        fontsize=9,
        loc="left",
    )

    rows = np.flatnonzero(view.is_active).tolist()
    handles = [Patch(**_looks(BlockState.OWN, row), label=f"row {row}") for row in rows[:_MAX_ROWS]]
    if len(rows) > _MAX_ROWS:
        handles.append(Patch(visible=False, label=f"{len(rows) - _MAX_ROWS:,} more rows"))
    for state in (BlockState.SHARED, BlockState.RESERVED, BlockState.FREE):
        handles.append(Patch(**_looks(state, None), label=state.value))
    below = offset_copy(ax.transAxes, ax.figure, y=-18, units="points")
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=below,
        ncols=8,
        fontsize=7,
        frameon=False,
    )
    return ax


def _draw_block(ax: Any, view: GroupView, block_id: int, column: int, line: int, font_size: float) -> None:
    """One cell, with strips in its owners' colours beneath if there are several."""
    from matplotlib.patches import Rectangle

    state, row = view.state(block_id), int(view.owner[block_id])
    left, top, side = column + 0.06, line + 0.06, 0.88
    text = {"s": str(row), "color": "black" if state == BlockState.RESERVED or _is_bright(row) else "white"}
    if state == BlockState.SHARED:
        owners = np.flatnonzero((view.block_table == block_id).any(axis=1))[:_MAX_ROWS].tolist()
        for i, owner in enumerate(owners):
            strip = side / len(owners)
            ax.add_patch(Rectangle((left + i * strip, top), strip, side, color=_unit_rgb(owner), linewidth=0))
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
        text = {"s": f"\u00d7{view.ref_count[block_id]}", "weight": "bold", "bbox": box}
    ax.add_patch(Rectangle((left, top), side, side, gid=f"block {block_id}", **_looks(state, row)))
    if state != BlockState.FREE:
        ax.text(column + 0.5, line + 0.5, ha="center", va="center_baseline", fontsize=font_size, **text)


def _looks(state: BlockState, row: int | None) -> dict[str, Any]:
    """How a cell is filled; `row` None is for the legend."""
    color = (0.5, 0.5, 0.5) if row is None else _unit_rgb(row)
    return {
        BlockState.FREE: {"facecolor": "white", "edgecolor": "0.85"},
        BlockState.RESERVED: {"facecolor": (*color, 0.3), "edgecolor": color, "linestyle": "--"},
        BlockState.OWN: {"facecolor": color, "edgecolor": color},
        BlockState.SHARED: {"facecolor": "none", "edgecolor": "0.2", "hatch": "////"},
    }[state]


def _unit_rgb(row: int) -> tuple[float, ...]:
    return tuple(level / 255 for level in row_rgb(row))
