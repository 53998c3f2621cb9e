"""The demo: what it prints is what runs, its maps are the state's, and its sentences are true."""

import re

import pytest

import kvcache_jax as kv
from experiments.decode import __main__ as decode
from experiments.decode import block_map_demo
from tests.inspect.block_map_reader import ANSI, read_groups, recount


def run_demo(capsys, *arguments):
    assert decode.main(["--map", *arguments]) == 0
    return capsys.readouterr().out


def test_the_demo_shows_the_state_and_what_was_done(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    states = []
    block_map_demo.play(lambda step, status, texts, cache: states.append((status, texts, recount(cache, 0))))
    output = run_demo(capsys, "--no-color")
    assert "\x1b" not in output
    assert ANSI.sub("", run_demo(capsys)) == output
    steps = re.split(r"^(?=\d+\. )", output.split("kv.stats(cache)")[0], flags=re.MULTILINE)[1:]
    assert len(steps) == len(states) == len(block_map_demo.STEPS)
    for text, step, (status, texts, state) in zip(steps, block_map_demo.STEPS, states, strict=True):
        sentence, code, *rest = text.splitlines()
        assert sentence.split(". ", 1)[1] == step.sentence
        assert code == f"   {step.code}  # {status}"
        assert read_groups("\n".join(rest)) == {0: state}
        assert re.findall(r"  row \d+ reads: (.*)", text) == [words for words in texts.values() if words]
    assert [status for status, _, _ in states].count("OUT_OF_BLOCKS") == 1
    assert {status for status, _, _ in states} == {"OK", "OUT_OF_BLOCKS"}


def test_the_demo_does_what_its_sentences_say(capsys):
    texts, cells = [], []
    block_map_demo.play(lambda _, __, t, cache: (texts.append(t), cells.append(recount(cache, 0)[0])))
    assert cells[0][:7] == ["~0"] * 3 + ["~1"] * 4
    assert cells[2][:3] == ["#3"] * 3
    assert cells[3][2] == "#2" and cells[3].count("2") == 2
    assert texts[3][0] == texts[3][3] and texts[3][2] == texts[3][0] + " with big eyes"
    assert cells[5] == cells[4] and texts[5] == texts[4]
    assert cells[6][2] == "3" and cells[7] == cells[6]
    assert set(cells[-1]) == {"."}
    counters = dict(re.findall(r"^  (\w+) +([\d,]+)$", run_demo(capsys), flags=re.MULTILINE))
    assert counters["num_copies"] == "1" and counters["num_forks"] == "2"
    assert counters["num_blocks_free"] == counters["num_blocks_total"] == "20"


def test_the_demo_reports_violations(capsys, monkeypatch):
    monkeypatch.setattr(kv, "check_invariants", lambda cache: ["block 3 is lost"])
    assert decode.main(["--map"]) == 1
    assert "block 3 is lost" in capsys.readouterr().out


@pytest.mark.parametrize("others", [["a prompt"], ["--json"], ["--samples", "2"], ["--checkpoint", "x"]])
def test_the_demo_decodes_nothing(capsys, others):
    with pytest.raises(SystemExit) as error:
        decode.main(["--map", *others])
    assert error.value.code == 2 and "got --map with" in capsys.readouterr().err
