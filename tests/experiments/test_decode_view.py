"""What `python -m experiments.decode` shows: the map of owners, plain text, a terminal."""

import io
import re

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

import kvcache_jax as kv
from experiments.decode import view as decode_view
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
    assert decode_view.map_line(np.array(TABLE), 12, 100, color=False) == "##101.2....."
    assert decode_view.map_line(np.array(TABLE), 12, 4, color=False) == "##10"
    colored = decode_view.map_line(np.array(TABLE), 12, 100, color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == "##101.2....." and colored.count("\x1b[0m") == 7


def test_long_timelines_and_wide_pools_are_cut():
    config = kv.CacheConfig([kv.FullAttention(1, 8)] * 2, num_blocks=140, block_size=4, max_seqs=3)
    wide = [check_in(np.where(np.array(TABLE) == 12, 140, TABLE), step) for step in range(50)]
    lines = decode_view.timeline_text(wide, config, color=False).splitlines()
    assert lines[1] == "Blocks over time, FullAttention x 2 layers: 140 blocks of 4 tokens"
    maps = [line.split() for line in lines if "#" * 2 in line]
    assert len(maps) == 20 and [maps[0][0], maps[-1][0]] == ["0", "49"]
    assert {tuple(line[1:]) for line in maps} == {("6", "##101.2" + "." * 93)}
    assert "... and 40 blocks more" in lines[-3] and lines[-2] == "20 of 50 check-ins are shown."


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


def test_a_terminal_shows_what_is_decoded_and_above_it_what_has_ended(make_view):
    view, output = make_view(True, num_samples=6)
    texts = {(p, s): "".join(f"line {i} of {p}.{s}\n" for i in range(9)) for p in range(2) for s in range(6)}
    rows = {row: key for row, key in enumerate(texts)}
    with view:
        start = len(output.getvalue())
        for (p, s), text in texts.items():
            view.on_tokens(p, s, list(text[:28].encode()))
        view.on_check_in(check_in(TABLE, running=rows))
        live = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output.getvalue()[start:])
        for (p, s), text in texts.items():
            view.on_tokens(p, s, list(text[28:].encode()))
        view.on_check_in(check_in(TABLE, ended=[generation(*key, text) for key, text in texts.items()]))
    assert live.count("\n") < 20 and "line 1 of 0.0" in live and "##101.2....." in live
    assert "step 8, 0.5 s" in live and "6 of 12 blocks used" in live
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output.getvalue())
    for (p, s), text in texts.items():
        assert f"prompt {p}, sample {s}, stop after 126 tokens\n  | line 0 of {p}.{s}\n" in shown
        assert all(f"  | {line}\n" in shown for line in text.splitlines())


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_text(make_view):
    view, _ = make_view(True, TERM="dumb")
    assert type(view) is decode_view.TextView
