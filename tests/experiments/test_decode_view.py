"""What `python -m experiments.decode` shows: the map of owners, plain text, a terminal."""

import io
import re

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

import kvcache_jax as kv
from experiments.decode import timeline
from experiments.decode import view as decode_view
from kvcache_jax.inspect.block_view import row_rgb
from models.tokenizer import ByteTokenizer


def check_in(table, step=8, running=None, ended=()):
    table = np.asarray(table, np.int32)
    held = table[table < 12]
    return kv.decoding.Snapshot(
        num_steps=step,
        seconds=0.5,
        num_blocks_used=len(set(held.tolist())),
        num_refs=len(held),
        num_active_seqs=len(table),
        running=running or {},
        ended=list(ended),
        block_tables=[table],
    )


TABLE = [[0, 1, 3, 12], [0, 1, 2, 4], [6, 12, 12, 12]]
CONFIG = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=12, block_size=4, max_seqs=3, max_seq_len=16)


def test_a_line_of_the_map_names_owners():
    assert timeline.map_line(np.array(TABLE), 12, 100, color=False) == "##101.2....."
    assert timeline.map_line(np.array(TABLE), 12, 4, color=False) == "##10"
    colored = timeline.map_line(np.array(TABLE), 12, 100, color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == "##101.2....." and colored.count("\x1b[0m") == 7


def test_long_timelines_and_wide_pools_are_cut():
    config = kv.CacheConfig([kv.FullAttention(1, 8)] * 2, num_blocks=140, block_size=4, max_seqs=3)
    wide = [check_in(np.where(np.array(TABLE) == 12, 140, TABLE), step) for step in range(50)]
    lines = timeline.timeline_text(wide, config, color=False).splitlines()
    assert lines[1] == "Blocks over time, FullAttention x 2 layers: 140 blocks of 4 tokens"
    maps = [line.split() for line in lines if "#" * 2 in line]
    assert len(maps) == 20 and [maps[0][0], maps[-1][0]] == ["0", "49"]
    assert {tuple(line[1:]) for line in maps} == {("6", "##101.2" + "." * 93)}
    assert "... and 40 blocks more" in lines[-3] and lines[-2] == "20 of 50 check-ins are shown."


def test_the_picture_has_the_owners_colours(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = tmp_path / "out.png"
    timeline.draw_timeline([check_in(TABLE, step) for step in (0, 8, 16)], CONFIG, path)
    image = pyplot.imread(path)[:, :, :3]
    num_pixels = image.shape[0] * image.shape[1]
    shares = {}
    for name, color in {0: row_rgb(0), 1: row_rgb(1), 2: row_rgb(2), "shared": (0.25,) * 3}.items():
        shares[name] = (np.abs(image - color).max(axis=2) < 0.01).sum() / num_pixels
    # Two blocks are shared, two are row 1's, and one each is row 0's and row 2's.
    assert 0.02 < shares[0] < shares[1] and shares[2] < shares["shared"]
    assert 1.6 < shares[1] / shares[0] < 2.1


def test_each_step_is_labelled_once(monkeypatch, tmp_path):
    """Of check-ins at one step the first is; blocks are whole."""
    figures = pytest.importorskip("matplotlib.figure")
    saved = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    for steps, expected in (
        ((0, 0, 8, 16, 16, 16, 1024), {0: "0", 2: "8", 3: "16", 6: "1,024"}),
        ((0, *range(40)), {**{1 + i: f"{i}" for i in range(3, 40, 3)}, 0: "0"}),
    ):
        timeline.draw_timeline([check_in(TABLE, step) for step in steps], CONFIG, tmp_path / "out.png")
        chart, blocks = saved.pop().axes
        labels = {
            round(place): label.get_text()
            for place, label in zip(blocks.get_xticks(), blocks.get_xticklabels(), strict=True)
        }
        assert labels == expected
        assert all(float(place).is_integer() for ax in (chart, blocks) for place in ax.get_yticks())


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def make_view(monkeypatch):
    """Views of prompts "first" and "second" with two samples each, and what they wrote."""

    def make(is_terminal, num_samples=2, prompts=(("first", 5), ("second", 6)), **environment):
        output = Terminal() if is_terminal else io.StringIO()
        monkeypatch.setattr("sys.stdout", output)
        for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "20", **environment}.items():
            monkeypatch.setenv(name, value)
        tokenizer = ByteTokenizer((0,))
        view = decode_view.make_view("heading", prompts, num_samples, tokenizer, False, num_blocks=12)
        return view, output

    return make


def generation(prompt_id, sample_id, text):
    tokens = list(text.encode()) if isinstance(text, str) else text
    return kv.decoding.Generation(prompt_id, sample_id, tokens, [-1.0] * len(tokens), "stop")


def test_plain_text_is_shown_when_a_continuation_ends(make_view):
    view, output = make_view(False)
    with view:
        view.on_tokens(0, 1, [0xE6, 0x97])
        view.on_tokens(0, 0, list(b"dis\x1b[31mplay\n"))
        view.on_check_in(check_in(TABLE, running={0: (0, 0), 1: (0, 1)}))
        assert "dis" not in output.getvalue()
        view.on_tokens(0, 1, [0xA5, *b"\tx", 0])
        view.on_check_in(check_in(TABLE, running={0: (0, 0), 1: (0, 1)}, ended=[generation(0, 1, "日\tx\0")]))
        assert output.getvalue().endswith("prompt 0, sample 1, stop after 6 tokens\n  | 日    x\n")
        view.on_check_in(check_in(TABLE, running={0: (0, 0)}, ended=[generation(0, 0, "dis\x1b[31mplay\n")]))
    assert output.getvalue().startswith("heading\n\nprompt 0, 5 tokens\n  | first\nprompt 1, 6 tokens\n")
    assert output.getvalue().endswith("\n  | dis\u241b[31mplay\n")


def test_a_lone_continuation_is_streamed_without_half_characters(make_view):
    view, output = make_view(False, num_samples=1, prompts=[("first", 5)])
    with view:
        start = len(output.getvalue())
        seen = []
        for tokens in ([0x61, 0xE6], [0x97], [0xA5, 0x62], [0xE6, 0]):
            view.on_tokens(0, 0, tokens)
            seen.append(output.getvalue()[start:])
        assert seen == ["a", "a", "a日b", "a日b"]
        view.on_check_in(check_in(TABLE, running={0: (0, 0)}, ended=[generation(0, 0, [0x61] * 7)]))
    assert output.getvalue()[start:] == "a日b\ufffd\n[stop after 7 tokens]\n"


def frames(output):
    """What stood on the screen after each refresh."""
    clear = re.compile(r"(?:\r?\x1b\[2K(?:\x1b\[1A)?)+")
    return [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", part) for part in clear.split(output)]


def test_a_terminal_shows_what_is_decoded_and_in_the_end_everything(make_view):
    view, output = make_view(True, num_samples=6)
    texts = {(p, s): "".join(f"line {i} of {p}.{s}\n" for i in range(9)) for p in range(2) for s in range(6)}
    rows = {row: key for row, key in enumerate(texts)}
    with view:
        for start, end in ((0, 28), (28, 56), (56, 126)):
            for (p, s), text in texts.items():
                view.on_tokens(p, s, list(text[start:end].encode()))
            ended = [generation(*key, text) for key, text in texts.items() if end == 126]
            view.on_check_in(check_in(TABLE, running=rows, ended=ended))
    *live, last = frames(output.getvalue().removeprefix("heading\n\n"))
    assert len(live) >= 3 and all(screen.count("\n") < 20 for screen in live)
    assert "line 1 of 0.0" in live[0] and "line 3 of 1.0" in live[1]
    assert "step 8, 0.5 s" in live[0] and "6 of 12 blocks used, 8 without sharing" in live[0].replace(
        "\n", " "
    )
    assert "##101.2....." in live[0]
    for key, text in texts.items():
        for line in text.splitlines():
            assert line in last, key
    assert last.count("[stop after 126 tokens]") == 12


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_text(make_view):
    view, _ = make_view(True, TERM="dumb")
    assert type(view) is decode_view.TextView
