"""The evaluation: what is asked, what sharing saves, and runs that are killed and go on."""

import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import byte_model
from experiments.common.command import InputError
from experiments.evaluate import __main__ as evaluate
from experiments.evaluate import items
from experiments.evaluate.__main__ import Results
from experiments.evaluate.items import BLOCK_SIZE, Item, Task
from experiments.train.bits_per_byte import empty_cache, losses
from models import checkpoint
from tests.experiments import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = tiny.config(**tiny.ONE_LAYER, max_seq_len=512)


@pytest.fixture
def folder(tmp_path):
    """Files of the two benchmarks, of 30 problems."""
    (tmp_path / "text").mkdir()
    lines = [json.dumps({"question": f"{i} é?", "answer": "yes " * (i % 7 + 1)}) for i in range(30)]
    (tmp_path / items.GSM8K).write_text("\n".join(lines))
    with gzip.open(tmp_path / items.HUMAN_EVAL, "wt") as file:
        for i in range(30):
            file.write(json.dumps({"prompt": f"def f{i}(x):\n", "canonical_solution": f"    {i}\n"}) + "\n")
    return tmp_path


# --- items ---


def test_items_of_a_task_share_its_prefix_and_nothing_else(folder):
    """The prefix is whole blocks, and the first block after it tells each item from the others."""
    for task in (
        items.grade_school(folder, 20, 3),
        items.programs(folder, 20, 3),
        items.source(20, 3),
    ):
        assert len(task.prefix) % BLOCK_SIZE == 0 and len(task.items) == 20
        assert len({item.own[:BLOCK_SIZE] for item in task.items}) == 20
        assert len({item.id for item in task.items}) == 20
        for item in task.items:
            assert len(set(item.choices)) == 4 and 0 <= item.right < 4
        assert len({item.right for item in task.items}) == 4


def test_the_right_choice_is_the_problems_own(folder):
    for item in items.programs(folder, 20, 3).items:
        number = int(item.id.split()[-1])
        assert item.own == f"# No. {number}\ndef f{number}(x):\n".encode()
        assert item.choices[item.right] == f"    {number}\n".encode()
    task = items.grade_school(folder, 5, 3)
    assert task.prefix.decode().startswith("Question: 0 é?\nAnswer: yes \n\nQuestion: 1 é?")
    assert task.prefix.decode().count("Question") == 8
    assert all(int(item.own.decode().split("Question: ")[1].split()[0]) >= 8 for item in task.items)


def test_items_are_those_of_the_seed(folder):
    first, again, other = (items.programs(folder, 9, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 items, expected 30: lower --items"),
        ("{}", "expected openai's gsm8k"),
        ("no", "expected"),
        *((json.dumps({"question": ask, "answer": "3"}), "expected") for ask in ("\ud800", 3, None)),
    ],
)
def test_files_that_do_not_fit_are_refused(folder, text, said):
    (folder / items.GSM8K).write_text(text)
    with pytest.raises(InputError, match=said):
        items.grade_school(folder, 30, 0)
    (folder / items.GSM8K).write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    with pytest.raises(InputError, match="has 0 items, expected 4"):
        items.grade_school(folder, 1, 0)
    (folder / items.GSM8K).unlink()
    with pytest.raises(InputError, match="No such file"):
        items.grade_school(folder, 30, 0)


# --- the file of results ---


@pytest.mark.parametrize("torn", [b"", b'{"id": "c", "sums": [1', b'{"id": "c"}', b"\xff"])
def test_results_go_on_and_a_line_that_was_cut_is_taken_off(tmp_path, torn):
    path, settings = tmp_path / "results.jsonl", {"seed": 1}
    results = Results(path, settings)
    for name in "ab":
        results.add({"id": name, "sums": [0.1 + 0.2]})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    results = Results(path, settings)
    assert results.num_found == 2 and "a" in results and "c" not in results
    assert results["b"]["sums"] == [0.1 + 0.2] and path.read_bytes() == whole
    results.add({"id": "c"})
    assert path.read_bytes() == whole + b'{"id": "c"}\n'
    assert "c" in Results(path, settings)


def test_a_file_that_was_cut_before_its_first_line_ended_begins_anew(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"see')
    Results(path, {"seed": 1}).add({"id": "a"})
    assert path.read_text().splitlines() == ['{"seed": 1}', '{"id": "a"}']


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"seed": 2}\n', "whose seed is 2, expected 1: name another file"),
        ("3\n", "first line is no settings"),
        ("no\n", "cannot be gone on with"),
    ],
)
def test_another_runs_results_are_refused(tmp_path, text, said):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        Results(path, {"seed": 1})
    assert path.read_text() == text
    with pytest.raises(InputError, match="No such file"):
        Results(tmp_path / "nowhere" / "x", {"seed": 1})


# --- scores ---


@pytest.mark.slow
@pytest.mark.parametrize("num_compared", [0, 2])
def test_choices_are_scored_behind_their_context_and_the_prefix_is_computed_once(decoder, num_compared):
    task = items.source(5, 0, prefix_len=60, own_len=21, choice_len=9)
    results = Results(None, {})
    for _ in evaluate.evaluate(decoder, [task], results, num_compared):
        pass
    cache = empty_cache(TINY, 1, 128)
    for item in task.items:
        result, context = results[item.id], task.prefix + item.own
        assert result["cached"] == len(task.prefix) == 64
        assert result["computed"] == len(item.own) + 4 * 8 and result["right"] == item.right
        for choice, got in zip(item.choices, result["sums"], strict=True):
            window = np.zeros((1, 129), np.int32)
            window[0, : len(context) + 9] = list(context + choice)
            nats = np.asarray(jax.jit(losses)(decoder, jnp.asarray(window), cache))[0]
            assert got == pytest.approx(-nats[len(context) - 1 :][:9].sum(), abs=1e-3)
    compared = [
        result for result in map(results.__getitem__, (item.id for item in task.items)) if "alone" in result
    ]
    assert [result["uncached"]["cached"] for result in compared] == [0] * num_compared
    found = evaluate.summary(task, results)
    own = sum(len(item.own) for item in task.items)
    assert found["computed"] == own + 5 * 32 and found["computed_uncached"] == own + 5 * (64 + 32)
    assert found["computed_alone"] == 4 * (own + 5 * (64 + 8)) and found["prefix_computed"] == 0
    assert sum(result["alone"]["computed"] for result in compared) == 4 * sum(
        result["context"] + 8 for result in compared
    )
    assert found["hit_rate"] == 5 * 64 / (own + 5 * 64) and found["difference"] < 1e-5


def test_who_is_right_in_sum_need_not_be_per_byte():
    result = {"sums": [-4.0, -3.0], "lengths": [8, 2], "right": 0}
    assert evaluate.is_right(result, per_byte=True) and not evaluate.is_right(result, per_byte=False)


# --- the command ---


def one_task():
    pieces = tuple(bytes([65 + i] * 5) for i in range(4))
    return Task("one", b"", [Item(f"one {i}", b"%d:" % i, pieces, i % 4) for i in range(4)])


def run(*arguments):
    return evaluate.main(["--items", "4", *arguments])


@pytest.mark.slow
def test_a_run_that_is_done_computes_nothing_more(tmp_path, monkeypatch, capsys, decoder):
    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: decoder)
    monkeypatch.setattr(evaluate, "tasks_of", lambda options: [one_task()])
    path = tmp_path / "results.jsonl"
    assert run("--results", str(path)) == 0
    said = capsys.readouterr().out
    assert "0 results of 4 were there" in said and "bars do not hold" in said
    before = path.read_bytes()
    monkeypatch.setattr(evaluate, "Scorer", None)
    assert run("--results", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["found"], found["items"], path.read_bytes()) == (4, 4, before)
    with pytest.raises(SystemExit):
        evaluate.main(["--items", "4", "--seed", "1", "--results", str(path)])
    error = capsys.readouterr().err
    assert "seed is 0, expected 1" in error and len(error.splitlines()) == 1


def test_verdicts_can_be_either():
    times = {"cached": 1.0, "uncached": 1.0, "alone": 3.0}
    good = dict(task="a", prefix=16, prefix_computed=0, compared=1, seconds_compared=times, difference=0.0)
    bad = good | dict(prefix_computed=1, seconds_compared=times | {"alone": 1.5}, difference=1.0)
    assert [bar["holds"] for bar in evaluate.bars_of([good, bad])] == [True] * 3 + [False] * 3
    assert evaluate.bars_of([good | dict(prefix=0, compared=0)]) == []


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_results_of_one_that_is_not(tmp_path, folder, decoder):
    """By SIGKILL, twice; what is in the file by then is not computed again."""
    model, whole, killed = tmp_path / "model", tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    checkpoint.save(model, decoder)
    arguments = ["--checkpoint", str(model), "--data", str(folder), "--items", "16"]
    start = [sys.executable, "-m", "experiments.evaluate", *arguments, "--results"]
    subprocess.run([*start, str(whole)], cwd=ROOT, check=True, capture_output=True)

    def num_lines():
        return killed.read_bytes().count(b"\n") if killed.exists() else 0

    kept = []
    for num_wanted in (4, 20):
        process = subprocess.Popen(
            [*start, str(killed)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        until = time.monotonic() + 100
        while num_lines() < num_wanted and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        kept.append(killed.read_bytes().rpartition(b"\n")[0])
        assert num_wanted <= len(kept[-1].splitlines()) < 49
    subprocess.run([*start, str(killed)], cwd=ROOT, check=True, capture_output=True)
    assert killed.read_bytes().startswith(kept[1]) and kept[1].startswith(kept[0])

    def results(path):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        by_id = {line["id"]: (line["sums"], line["cached"], line["computed"]) for line in lines[1:]}
        assert len(by_id) == len(lines) - 1 == 48
        return lines[0], by_id

    assert results(killed) == results(whole)
