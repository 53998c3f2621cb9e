"""Pictures against the state: every glyph and every entry is recounted by `block_map_reader`."""

import dataclasses
import re
import sys

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.inspect.block_map import block_map, draw_block_map
from kvcache_jax.inspect.block_view import row_rgb
from tests.inspect.block_map_reader import ANSI, read_groups, recount
from tests.support.random_script import Driver
from tests.support.script_configs import grouped_config

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import colors, pyplot  # noqa: E402

LEGEND = "0 owned by row 0   ~0 reserved by row 0   #2 shared by 2 rows   5*2 block 5, shared   . free"


def check(cache):
    """The text shows what the tables say, with and without colour."""
    text = block_map(cache)
    assert read_groups(text) == {g: recount(cache, g) for g in range(len(cache.config.groups))}
    assert ANSI.sub("", block_map(cache, color=True)) == text
    return text


def small_config(layers=None, *, num_blocks=12, max_seqs=4, max_seq_len=40):
    layers = layers or [kv.FullAttention(1, 8)]
    return kv.CacheConfig(
        layers, num_blocks, block_size=4, max_seqs=max_seqs, max_seq_len=max_seq_len, max_query_len=8
    )


@pytest.fixture(scope="module")
def branched():
    """Row 0 half filled, rows 1 and 3 share two blocks and differ in the third, row 2 idle."""
    cache, _ = kv.allocate(kv.init(small_config(), storage=False), [0, 1], [18, 10])
    cache, _ = kv.extend(cache, [8, 8, 0, 0], max_new=8)
    cache, _ = kv.extend(cache, [0, 2, 0, 0], max_new=8)
    cache, _ = kv.fork(cache, [1], [3])
    cache, _ = kv.extend(cache, [0, 0, 0, 1], max_new=8)
    return cache


def test_owners_shared_reserved_and_free_blocks(branched):
    assert check(branched) == "\n".join(
        [
            "group 0: FullAttention x 1 layer, 12 blocks of 4 tokens: 9 used (2 shared, 3 reserved), 3 free",
            "        0  1  2  3  4  5  6  7  8  9 10 11",
            "    0   0  0 ~0 ~0 ~0 #2 #2  1  3  .  .  .",
            "  row 0   8 tokens  [ 0  1  ~2  ~3  ~4 ]",
            "  row 1  10 tokens  [ 5*2  6*2  7 ]",
            "  row 3  11 tokens  [ 5*2  6*2  8 ]",
            LEGEND,
        ]
    )


def test_width_breaks_the_lines_and_nothing_else(branched):
    lines = block_map(branched, width=5).splitlines()
    assert lines[1:5] == [
        "        0  1  2  3  4",
        "    0   0  0 ~0 ~0 ~0",
        "    5  #2 #2  1  3  .",
        "   10   .  .",
    ]
    assert read_groups("\n".join(lines)) == read_groups(block_map(branched, width=12))


def test_a_damaged_table_can_be_looked_at(branched):
    [pool] = branched.control.block_pools
    pool = dataclasses.replace(pool, block_table=pool.block_table.at[1, 1:3].set(np.array([99, -1])))
    lengths = branched.control.context_len.at[2].set(-20)
    is_active = branched.control.is_active.at[2].set(True)
    damaged = dataclasses.replace(
        branched.control, block_pools=(pool,), context_len=lengths, is_active=is_active
    )
    lines = block_map(dataclasses.replace(branched, control=damaged)).splitlines()
    assert "  row 1  10 tokens  [ 5*2  99?  -1? ]" in lines
    assert "  row 2  -20 tokens  [ ]" in lines


def test_an_empty_cache():
    text = check(kv.init(small_config(), storage=False))
    assert "0 used (0 shared, 0 reserved), 12 free" in text
    assert "no row is active" in text


def test_a_row_without_a_block_and_a_row_of_one_token():
    cache, _ = kv.allocate(kv.init(small_config(), storage=False), [0, 3], [0, 1])
    cache, _ = kv.extend(cache, [0, 0, 0, 1], max_new=8)
    assert check(cache).splitlines()[-3:-1] == ["  row 0  0 tokens  [ ]", "  row 3  1 token   [ 0 ]"]


@pytest.mark.slow
def test_random_scripts_over_several_groups():
    """A full and two window groups of different block sizes; the text is recounted after every operation."""
    driver, seen = Driver(grouped_config(), seed=0), ""
    for _ in range(80):
        driver.step()
        seen += check(driver.cache)
    for mark in (
        "~0 ",
        "#2",
        "#3",
        r"\[.*\(\d gone\).* \]",
        r"\[ \]",
        r"Window\(6(, \w+ \d)*\) x 2 layers,",
    ):
        assert re.search(mark, seen), f"the script never showed {mark!r}"


@pytest.mark.slow
def test_cached_blocks_are_neither_used_nor_free():
    """Of two rows one ends: its published blocks stay for prompts to come, the rest of it is free."""
    config = dataclasses.replace(small_config(), enable_prefix_caching=True)
    tokens = np.arange(32, dtype=np.int32).reshape(4, 8)
    cache, _ = kv.allocate(kv.init(config, storage=False), [0, 1], [8, 8], tokens=tokens[:2])
    cache, _ = kv.extend(cache, [8, 8, 0, 0], max_new=8, tokens=tokens)
    cache, _ = kv.extend(cache, [1, 1, 0, 0], max_new=8, tokens=tokens)
    cache, _ = kv.commit(cache, [0, 1])
    assert "cached" not in check(cache)
    cache, _ = kv.free(cache, [0])
    title, *lines = check(cache).splitlines()
    assert title.endswith("4 tokens: 3 used (0 shared, 0 reserved), 2 cached, 7 free")
    assert lines == [
        "        0  1  2  3  4  5  6  7  8  9 10 11",
        "    0   :  :  1  1  .  1  .  .  .  .  .  .",
        "  row 1  9 tokens  [ 2  3  5 ]",
        LEGEND,
        ": cached, held by no row",
    ]
    figures = kv.stats(cache)
    assert (int(figures.num_blocks_cached), int(figures.num_blocks_free)) == (2, 7)
    ax = draw_block_map(cache, ax=pyplot.figure().add_subplot())
    pyplot.close("all")
    cells = cells_of(ax)
    greys = [name for name, patch in cells.items() if patch.get_facecolor() == colors.to_rgba("0.85")]
    assert greys == ["block 0", "block 1"]
    assert [text.get_text() for text in ax.texts] == ["1", "1", "1"]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["row 1", "shared", "reserved", "cached", "free"]


def test_a_window_shows_its_hole():
    window = kv.SlidingWindow(1, 8, window=6, num_sink_tokens=4)
    cache, _ = kv.allocate(kv.init(small_config([window]), storage=False), [2], [8])
    for _ in range(4):
        cache, _ = kv.extend(cache, [0, 0, 8, 0], max_new=8)
    text = check(cache)
    first, hole, *rest = read_groups(text)[0][1][2][1]
    assert (first, hole) == ("0", "(3 gone)")
    held = np.asarray(cache.control.block_pools[0].block_table)[2]
    assert [int(block) for block in (first, *rest)] == held[held < 12].tolist()
    assert text.splitlines()[-1] == "(3 gone) 3 blocks left the window"


def test_one_group_or_all():
    layers = [kv.FullAttention(1, 8), kv.FullAttention(2, 8, num_blocks=7), kv.FullAttention(1, 8)]
    cache = kv.init(small_config(layers), storage=False)
    assert list(read_groups(block_map(cache))) == [0, 1]
    only = block_map(cache, group=1)
    assert only.startswith("group 1: FullAttention x 1 layer, 7 blocks")
    assert list(read_groups(only)) == [1]
    assert "group 0: FullAttention x 2 layers, 12 blocks" in block_map(cache, group=0)


@pytest.mark.slow
def test_glyphs_of_many_rows_and_many_owners():
    config = small_config(num_blocks=90, max_seqs=70)
    for rows in ([9, 10, 35, 36, 61, 62, 69], [0, 33, 34]):
        cache, _ = kv.allocate(kv.init(config, storage=False), rows, [4] * len(rows))
        num_new = np.zeros(70, np.int32)
        num_new[rows[1:]] = 4
        cache, _ = kv.extend(cache, num_new, max_new=4)
        text = check(cache)
        assert ("* owned by a row above 61" in text) == (62 in rows)
    cache, _ = kv.fork(cache, [33] * 9, list(range(1, 10)))
    text = check(cache)
    assert "#+" in read_groups(text)[0][0]
    assert text.count("*10 ]") == 10
    assert text.splitlines()[-1] == "#+ shared by 10 or more"


# --- size ---


@pytest.fixture(scope="module")
def large():
    """40 rows of 250 blocks each in a pool of 65,536."""
    config = small_config(num_blocks=65_536, max_seqs=40, max_seq_len=1000)
    cache, _ = kv.allocate(kv.init(config, storage=False), list(range(40)), [1000] * 40)
    return cache


def test_a_large_pool_is_summarised(large):
    lines = block_map(large).splitlines()
    assert len(lines) == 1 + 1 + 16 + 1 + 16 + 1 + 1  # title, header, blocks, rest, rows, rest, legend
    assert max(map(len, lines)) < 130
    assert "10,000 used (0 shared, 10,000 reserved), 55,536 free" in lines[0]
    shown = [cell for line in lines[2:18] for cell in line.split()[1:]]
    assert shown == recount(large, 0)[0][:320]
    assert lines[18].strip() == ("... 65,216 more blocks: 9,680 used (0 shared, 9,680 reserved), 55,536 free")
    assert lines[-2].strip() == "... 24 more rows with 0 tokens"


def test_a_long_row_loses_its_middle(large):
    first = block_map(large).splitlines()[19]
    assert first == (
        "  row 0       0 tokens  [ ~0  ~1  ~2  ~3  ~4  ~5  ... 238 more ...  "
        "~244  ~245  ~246  ~247  ~248  ~249 ]"
    )


def test_long_runs_of_free_blocks_are_one_line(large):
    cache, _ = kv.free(large, list(range(1, 39)))  # leaves 0-249 and 9,750-9,999
    lines = block_map(cache, width=50).splitlines()
    assert [line for line in lines if "free blocks" in line] == [
        "    250  ... 9,500 free blocks ...",
        "  10000  ... 55,536 free blocks ...",
    ]
    assert len(lines) == 2 + 5 + 1 + 5 + 1 + 2 + 1
    assert not any("more blocks" in line for line in lines)


@pytest.mark.parametrize(
    ("num_between", "expected"),
    [
        (4, ["    2   .  .", "    4   .  .", "    6   2  2"]),
        (6, ["    2  ... 6 free blocks ...", "    8   2  2"]),
        (7, ["    2  ... 6 free blocks ...", "    8   .  2", "   10   2  ."]),
    ],
)
def test_what_lies_behind_free_blocks_is_shown(num_between, expected):
    cache = kv.init(small_config(), storage=False)
    cache, _ = kv.allocate(cache, [0, 1, 2], [8, 4 * num_between, 8])
    cache, _ = kv.extend(cache, [8, 0, 8, 0], max_new=8)
    cache, _ = kv.free(cache, [1])
    check(cache)
    lines = block_map(cache, width=2).splitlines()
    assert lines[2 : 3 + len(expected)] == ["    0   0  0", *expected]
    assert read_groups("\n".join(lines)) == read_groups(block_map(cache))


# --- colour ---


def test_every_row_has_its_colour(branched):
    text = block_map(branched, color=True)
    assert "\x1b" not in block_map(branched)
    cube = (0, 95, 135, 175, 215, 255)

    def styles(glyphs):
        return {found[2:].split("m")[0] for found in re.findall(rf"\x1b\[[0-9;]*m *{glyphs}\x1b", text)}

    for row in (0, 1, 3):
        [tile] = styles(f"row {row}")
        assert styles(f" {row}") == {tile}  # the blocks of a row look like its name
        index = int(tile.split(";48;5;")[1]) - 16
        rgb = (cube[index // 36], cube[index // 6 % 6], cube[index % 6])
        assert row_rgb(row) == pytest.approx(np.array(rgb) / 255)
    assert styles("~0") == {styles("row 0").pop().split(";48;")[1].replace("5;", "38;5;", 1)}
    assert len(styles("#2") | styles(r"\.") | styles("row 0") | styles("row 1") | styles("row 3")) == 5


# --- refusals ---


@pytest.mark.parametrize("draw", [block_map, draw_block_map])
def test_traced_and_batched_caches_are_refused(draw):
    name, config = draw.__name__, small_config()
    cache = kv.init(config, storage=False)
    for transform in (jax.jit, lambda f: lambda c: jax.vmap(f)(jax.tree.map(lambda x: x[None], c))):
        with pytest.raises(TypeError, match=f"{name} got .*Tracer.* outside of jit.*jax.debug.callback"):
            transform(lambda cache: draw(cache) and 0)(cache)
    with pytest.raises(TypeError, match=f"{name} got a ShapeDtypeStruct .*with values"):
        draw(jax.eval_shape(lambda: kv.init(config, storage=False)))
    batch = jax.tree.map(lambda x: jax.numpy.stack([x, x, x]), cache)
    with pytest.raises(ValueError, match=rf"{name} .*batched.* \(3, 4\), expected \(max_seqs,\).* x\[i\]"):
        draw(batch)
    # What the messages advise works.
    assert block_map(jax.tree.map(lambda x: x[1], batch)) == block_map(cache)
    seen = []
    jax.jit(lambda cache: jax.debug.callback(lambda c: seen.append(block_map(c)), cache))(cache)
    jax.effects_barrier()
    assert seen == [block_map(cache)]


@pytest.mark.parametrize(
    ("group", "error", "expected"),
    [(-1, ValueError, "0 <= group < 1"), (1, ValueError, "0 <= group < 1"), ("0", TypeError, "an integer")],
)
def test_unknown_groups_are_refused(branched, group, error, expected):
    for show in (block_map, draw_block_map):
        with pytest.raises(error, match=f"group is {group!r}, expected {expected}"):
            show(branched, group=group)


@pytest.mark.parametrize(
    ("width", "error", "expected"),
    [
        (0, ValueError, "at least 1"),
        (-3, ValueError, "at least 1"),
        *((width, TypeError, "an integer") for width in (2.0, True, None)),
    ],
)
def test_bad_widths_are_refused(branched, width, error, expected):
    with pytest.raises(error, match=f"width is {width!r}, expected {expected}"):
        block_map(branched, width=width)


# --- the figure ---


@pytest.fixture
def axes():
    yield pyplot.figure().add_subplot()
    pyplot.close("all")


def cells_of(ax):
    return {patch.get_gid(): patch for patch in ax.patches if patch.get_gid()}


def test_the_figure_has_one_cell_per_block(branched, axes):
    assert draw_block_map(branched, ax=axes) is axes
    cells = cells_of(axes)
    assert list(cells) == [f"block {block}" for block in range(12)]
    assert len({patch.get_xy() for patch in cells.values()}) == 12
    for block, owner in ((0, 0), (1, 0), (7, 1), (8, 3)):
        assert colors.to_rgb(cells[f"block {block}"].get_facecolor()) == pytest.approx(row_rgb(owner))
        assert cells[f"block {block}"].get_facecolor()[3] == 1
    assert cells["block 2"].get_facecolor() == pytest.approx((*row_rgb(0), 0.25))
    assert cells["block 9"].get_facecolor() == (1, 1, 1, 1)
    hatched = [name for name, patch in cells.items() if patch.get_hatch()]
    assert hatched == ["block 5", "block 6"]
    strips = [p.get_facecolor()[:3] for p in axes.patches if not p.get_gid() and 5 < p.get_x() < 6]
    assert strips == [row_rgb(1), row_rgb(3)]
    written = {int(text.get_position()[0]): text.get_text() for text in axes.texts}
    assert written == {0: "0", 1: "0", 2: "0", 3: "0", 4: "0", 5: "×2", 6: "×2", 7: "1", 8: "3"}
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["row 0", "row 1", "row 3", "shared", "reserved", "free"]
    assert axes.get_title(loc="left") == block_map(branched).splitlines()[0]


@pytest.mark.parametrize("num_blocks", [1, 12, 45, 400])
def test_the_labels_of_a_column_and_a_line_add_up_to_the_block(num_blocks, axes):
    draw_block_map(kv.init(small_config(num_blocks=num_blocks), storage=False), ax=axes)
    columns, lines = (
        {place: int(label.get_text()) for place, label in zip(axis.get_majorticklocs(), labels, strict=True)}
        for axis, labels in ((axes.xaxis, axes.get_xticklabels()), (axes.yaxis, axes.get_yticklabels()))
    )
    assert len(set(columns.values())) == len(columns) and len(set(lines.values())) == len(lines)
    num_found = 0
    for name, cell in cells_of(axes).items():
        x, y = (corner + 0.44 for corner in cell.get_xy())
        if any(abs(x - place) < 0.1 for place in columns) and any(abs(y - place) < 0.1 for place in lines):
            column = next(label for place, label in columns.items() if abs(x - place) < 0.1)
            line = next(label for place, label in lines.items() if abs(y - place) < 0.1)
            assert name == f"block {column + line}"
            num_found += 1
    assert num_found >= min(num_blocks, 12)


@pytest.mark.slow
def test_the_figure_of_a_large_pool_is_cut(large, axes):
    draw_block_map(large, ax=axes)
    assert len(cells_of(axes)) == 2048
    assert "63,488 more blocks: 7,952 used" in axes.get_title(loc="left")
    assert axes.get_legend().get_texts()[16].get_text() == "and 24 rows"


def test_the_figure_draws_one_group_on_new_axes():
    cache = kv.init(small_config([kv.FullAttention(1, 8), kv.FullAttention(2, 8, num_blocks=45)]))
    try:
        ax = draw_block_map(cache, group=1)
        assert len(cells_of(ax)) == 45
        assert [int(label.get_text()) for label in ax.get_yticklabels()] == [0, 20, 40]
        assert pyplot.get_fignums() == [ax.figure.number]
        ax.figure.canvas.draw()
    finally:
        pyplot.close("all")


def test_without_matplotlib_the_extra_is_named(branched, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib.*extra `pictures`.*kvcache_jax\[pictures\]"):
        draw_block_map(branched)
    assert block_map(branched)
