"""Replaying a trace: hits equal those of an LRU in plain Python, and bad input is one sentence."""

import json
import os
from pathlib import Path

import jax
import pytest

from tests.experiments.trace_maker import LONGEST, TOKENS_PER_ID, lru_hits, make_requests, write

pytest.importorskip("rich")

from experiments.traces import replay as trace_replay
from experiments.traces.trace import read_trace


def run(capsys, *arguments):
    assert trace_replay.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_hits_equal_those_of_a_dict(tmp_path, capsys):
    requests = make_requests()
    path = write(tmp_path, requests)
    report = json.loads(run(capsys, "--trace", path, "--blocks", "infinite", LONGEST, "--json"))
    num_distinct = len({block for request in requests for block in request["hash_ids"]})
    assert report["trace"]["num_distinct"] == num_distinct
    assert [record["num_blocks"] for record in report["records"]] == [LONGEST, num_distinct]
    rates = []
    for record in report["records"]:
        hits, num_evictions = lru_hits(requests, record["num_blocks"])
        num_ids = [len(request["hash_ids"]) for request in requests]
        lengths = [request["input_length"] for request in requests]
        tokens = [min(n * TOKENS_PER_ID, length) for n, length in zip(hits, lengths, strict=True)]
        assert record["hit_rate_blocks"] == pytest.approx(sum(hits) / sum(num_ids))
        assert record["hit_rate_tokens"] == pytest.approx(sum(tokens) / sum(lengths))
        assert record["num_evictions"] == num_evictions
        half = len(requests) // 2
        assert record["halves"][1]["hit_rate_blocks"] == pytest.approx(sum(hits[half:]) / sum(num_ids[half:]))
        rates.append(record["hit_rate_blocks"])
    assert rates == sorted(rates) and len(set(rates)) == len(rates)  # the sizes make a difference
    assert report["records"][0]["num_evictions"] > 0 == report["records"][-1]["num_evictions"]


@pytest.mark.slow
def test_a_half_without_requests_has_no_rate(tmp_path, capsys):
    path = write(tmp_path, make_requests()[:1])
    (record,) = json.loads(run(capsys, "--trace", path, "--blocks", 25, "--json"))["records"]
    assert record["hit_rate_blocks"] == 0 == record["halves"][1]["hit_rate_blocks"]
    assert record["halves"][0] == {"hit_rate_blocks": None, "hit_rate_tokens": None}
    assert "– +0.00" in run(capsys, "--trace", path, "--blocks", 25)


@pytest.mark.slow
def test_the_replayed_cache_is_sound(tmp_path):
    """Nothing is cut: what was published and not evicted is there."""
    requests = make_requests(seed=1, num_requests=129)
    trace = read_trace(write(tmp_path, requests), TOKENS_PER_ID)
    record = trace_replay.replay(trace, 25, "lru")
    assert record["hit_rate_blocks"] == sum(lru_hits(requests, 25)[0]) / trace.num_ids.sum()


@pytest.mark.slow
def test_the_table_compares_with_lru(tmp_path, capsys):
    arguments = "--trace", write(tmp_path, make_requests()), "--blocks", 25, "--policy", "lru", "hyperbolic"
    shown = run(capsys, *arguments)
    assert "trace.jsonl: 130 requests" in shown and "+0.00 +0.00" in shown
    lru, other = json.loads(run(capsys, *arguments, "--json"))["records"]
    halves = zip(other["halves"], lru["halves"], strict=True)
    gains = [100 * (own["hit_rate_blocks"] - of_lru["hit_rate_blocks"]) for own, of_lru in halves]
    assert " ".join(f"{gain:+.2f}" for gain in gains) in shown and any(gains)


@pytest.mark.slow
def test_an_id_behind_others_is_another_one(tmp_path):
    """As in the cache: what an id stands for depends on what is before it."""
    chains = [[1, 2], [3, 2], [1, 2], [2], [1, 1]]
    requests = [{"hash_ids": ids, "input_length": TOKENS_PER_ID * len(ids)} for ids in chains]
    trace = read_trace(write(tmp_path, requests), TOKENS_PER_ID)
    assert trace.num_distinct == 6
    record = trace_replay.replay(trace, trace.num_distinct, "lru")
    assert record["num_evictions"] == 0 and record["hit_rate_blocks"] == 3 / 9


GOOD = {"hash_ids": [1, 2], "input_length": 1000}


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (None, [], "which cannot be read"),
        (None, [], "github.com/kvcache-ai/Mooncake"),
        ("", [], "which is empty, expected one request per line"),
        ("a b", [], "trace.jsonl, line 1 is 'a b', expected a JSON object"),
        ('{"hash_ids": ' + "[" * 100_000, [], 'line 1 is \'{"hash_ids": [[[[['),
        ('{"input_length": ' + "1" * 5000 + "}", [], 'line 1 is \'{"input_length": 111'),
        (json.dumps(GOOD), ["--tokens-per-id", str(10**20)], "expected an integer from 1 to 2147483647"),
        *(
            (
                f"{json.dumps(GOOD)}\n{line}",
                [],
                f"line 2 is {line!r}, expected a JSON object: take conversation",
            )
            for line in ("3", "[1]", "null", '"a"')
        ),
        (
            "{}",
            [],
            "line 1 has hash_ids null and input_length null, expected a list of integers that is not empty",
        ),
        (json.dumps(GOOD | {"hash_ids": []}), [], "line 1 has hash_ids [] and input_length 1000, expected"),
        (
            json.dumps(GOOD | {"hash_ids": [1, "x"]}),
            [],
            'line 1 has "x" as hash_ids[1], expected an integer from 0',
        ),
        (json.dumps(GOOD | {"hash_ids": [1, 2**63]}), [], "line 1 has 9223372036854775808 as hash_ids[1]"),
        (json.dumps(GOOD | {"hash_ids": [-1, 2]}), [], "line 1 has -1 as hash_ids[0], expected an integer"),
        (json.dumps(GOOD | {"hash_ids": [0, True]}), [], "line 1 has true as hash_ids[1], expected an"),
        (json.dumps(GOOD | {"input_length": -5}), [], "input_length -5, expected a list of integers that"),
        (json.dumps(GOOD | {"input_length": 1e3}), [], "input_length 1000.0, expected a list of integers"),
        (json.dumps(GOOD | {"input_length": 1025}), [], "2 hash_ids for 1025 tokens, expected 3"),
        (json.dumps(GOOD), ["--tokens-per-id", "400"], "2 hash_ids for 1000 tokens, expected 3"),
        (json.dumps(GOOD), ["--blocks", "1"], "got --blocks 1, expected at least 2"),
        (
            json.dumps(GOOD),
            ["--blocks", "many"],
            "got 'many', expected an integer from 1 to 1073741824, or 'infinite'",
        ),
        (json.dumps(GOOD), ["--policy", "newest"], "invalid choice: 'newest'"),
        (
            json.dumps(GOOD),
            ["--eviction-batch", "6"],
            "--eviction-batch 6, expected at most the 5 blocks",
        ),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, refusal, text, arguments, said):
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    assert said in refusal(trace_replay, "--trace", path, "--blocks", "5", *arguments)


def test_lines_end_at_newlines_alone(tmp_path):
    """Not at what a text in an object may hold, such as U+2028. A byte order mark is no part of them."""
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps(GOOD | {"note": "a\u2028b\x85c"}, ensure_ascii=False)] * 3
    path.write_bytes("\r\n".join([*lines, ""]).encode("utf-8-sig"))
    assert len(trace_replay.read_trace(path, 512).ids) == 3


def test_a_cache_that_does_not_fit_is_one_sentence(tmp_path, capsys, monkeypatch):
    def replay(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes.")

    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD))
    monkeypatch.setattr(trace_replay, "replay", replay)
    with pytest.raises(SystemExit) as stopped:
        trace_replay.main(["--trace", str(path), "--blocks", "5"])
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (1, "")
    assert "a cache of 5 blocks does not fit in memory: RESOURCE_EXHAUSTED" in captured.err


@pytest.mark.parametrize(
    ("name", "hit_rate"), [("conversation_trace.jsonl", 0.0445), ("synthetic_trace.jsonl", 0.0841)]
)
def test_the_published_figure_of_a_real_trace(name, hit_rate):
    folder = os.environ.get("KVCACHE_DATA_DIR")
    path = Path(folder or "") / "traces" / name
    if not folder or not path.exists():
        pytest.skip(
            f"KVCACHE_DATA_DIR names no folder with traces/{name} (of github.com/kvcache-ai/Mooncake)"
        )
    record = trace_replay.replay(read_trace(path, TOKENS_PER_ID), 1_000, "lru")
    assert round(record["hit_rate_blocks"], 4) == hit_rate
