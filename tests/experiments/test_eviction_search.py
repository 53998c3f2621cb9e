"""The simulated hits are those of the cache, and the search says what it found."""

import json

import numpy as np
import pytest

from tests.experiments.trace_maker import LONGEST, TOKENS_PER_ID, lru_hits, make_requests, write

pytest.importorskip("rich")

import kvcache_jax as kv
from experiments.traces import search
from experiments.traces.replay import replay
from experiments.traces.simulator import simulate
from experiments.traces.trace import full_blocks_only, read_trace

pytestmark = pytest.mark.slow

NAMES = [candidate.name for candidate in search.candidates()]


@kv.policies.eviction_policy("test: everything that a trace has", needs=["num_hits", "depth", "idle", "age"])
def everything(blocks):
    return blocks.num_hits * 5 - blocks.idle * 3 + blocks.age - blocks.depth * 2


def recurring_requests(seed=0, num_requests=200):
    """Prompts of 1 to 9 blocks, of 14 sequences that come back more or less often."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 15)
    for sequence in rng.choice(14, num_requests, p=share / share.sum()):
        length = int(rng.integers(1, LONGEST + 1))
        # The first two blocks are common to two sequences each.
        chain = [1000 * (sequence // 2 if i < 2 else sequence) + 10 * (i < 2) + i for i in range(length)]
        yield {"input_length": TOKENS_PER_ID * length, "hash_ids": [int(block) for block in chain]}


def trace_of(tmp_path, requests):
    return read_trace(write(tmp_path, requests), TOKENS_PER_ID)


@pytest.mark.parametrize("policy", ["hyperbolic", "test: everything that a trace has"])
def test_simulated_hits_are_those_of_the_cache(tmp_path, policy):
    trace = trace_of(tmp_path, list(recurring_requests()))
    num_hits = simulate(trace, 40, search.of_library(policy))
    record = replay(trace, 40, policy)
    assert search.half_rates(trace, num_hits) == [half["hit_rate_blocks"] for half in record["halves"]]
    assert record["num_evictions"] > 100, record["num_evictions"]
    assert (num_hits != simulate(trace, 40, search.lru)).sum() > 10


def test_simulated_lru_is_that_of_a_dict(tmp_path):
    requests = make_requests(seed=3, num_requests=200)
    trace = trace_of(tmp_path, requests)
    assert simulate(trace, 17, search.lru).tolist() == lru_hits(requests, 17)[0]
    full = full_blocks_only(trace)
    chains = [{"hash_ids": ids[:n]} for ids, n in zip(trace.ids.tolist(), full.num_ids, strict=True)]
    assert (full.num_ids == [request["input_length"] // TOKENS_PER_ID for request in requests]).all()
    assert simulate(full, 17, search.lru).tolist() == [
        hits if len(chain["hash_ids"]) else 0
        for chain, hits in zip(chains, lru_hits(chains, 17)[0], strict=True)
    ]


def test_an_id_behind_others_is_another_one(tmp_path):
    """As in the cache: what an id stands for depends on what is before it."""
    chains = [[1, 2], [3, 2], [1, 2], [2], [1, 1]]
    trace = trace_of(tmp_path, [{"hash_ids": ids, "input_length": 512 * len(ids)} for ids in chains])
    assert trace.num_distinct == 6
    record = replay(trace, trace.num_distinct, "lru")
    assert record["num_evictions"] == 0 and record["hit_rate_blocks"] == 3 / 9
    assert simulate(trace, trace.num_distinct, search.lru).tolist() == [0, 0, 2, 0, 1]


def test_a_single_request_is_replayed_too(tmp_path):
    """Its first half has no rate."""
    trace = trace_of(tmp_path, make_requests()[:1])
    records = search.confirm({"one": trace}, [25], lambda *_: None)
    assert [record["policy"] for record in records] == ["lru", "hyperbolic"]


def test_what_the_cache_does_not_note(tmp_path):
    """Prompts of 3, 4 and 2 blocks, of which the second goes on from the first one's first two."""
    chains = [[1, 2, 3], [1, 2, 4, 5], [6, 7], [8]]
    requests = [{"hash_ids": chain, "input_length": 512 * len(chain)} for chain in chains]
    seen = {}

    def key(field):
        def evict_high(blocks):
            return -getattr(blocks, field)

        return evict_high

    def left(field):
        """Which single-block prompt is found after one block of nine had to go."""
        for chain in chains[:3]:
            again = [*requests, {"hash_ids": chain, "input_length": 512 * len(chain)}]
            seen[tuple(chain)] = int(simulate(trace_of(tmp_path, again), 7, key(field))[-1])
        return seen

    # Leaves are 3, 5 and 7; their prompts had 3, 4 and 2 blocks, none was used twice or gone on from.
    assert left("prompt_len") == {(1, 2, 3): 3, (1, 2, 4, 5): 3, (6, 7): 2}
    assert left("gap") == left("num_extensions") == {(1, 2, 3): 2, (1, 2, 4, 5): 4, (6, 7): 2}


def test_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(search, "SIZES", (LONGEST, 25))
    monkeypatch.setattr(search, "JUDGED_SIZE", 25)
    monkeypatch.setattr(search, "FAMILIES", {search.hits_last: (), search.hits_age_slower: (1, 2)})
    monkeypatch.setattr(search, "IN_LIBRARY", ("hyperbolic",))
    path = write(tmp_path, make_requests(num_requests=60))
    assert search.main(["--trace", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = ["lru", "hyperbolic", "hits last", "hits age slower: 1", "hits age slower: 2"]
    assert [record["policy"] for record in report["candidates"]] == names
    for record in report["candidates"]:
        assert {len(by_size) for by_size in record["gains"].values()} == {2}
        assert record["second_half"]["worst"] == min(
            gain[1] for by_size in record["gains"].values() for gain in by_size
        )
    # Ages that all count alike are LRU.
    for i in (0, 3):
        assert not np.any(list(report["candidates"][i]["gains"].values()))
    assert search.main(["--trace", str(path)]) == 0
    assert "trace, full blocks: points above LRU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        search.main(["--trace", str(tmp_path / "none")])
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "again").mkdir()
    namesake = write(tmp_path / "again", make_requests(num_requests=60))
    with pytest.raises(SystemExit):
        search.main(["--trace", str(path), str(namesake)])
    assert "got two files called trace, expected different names" in capsys.readouterr().err


def test_the_choice_looks_at_the_first_halves_alone():
    def record(family, parameter, first, second):
        gains = {"t": [[first[0], second[0]], [first[1], second[1]]]}
        verdicts = {
            half: search.judge(gains, (5, 10_000), i) for i, half in enumerate(["first_half", "second_half"])
        }
        return {"policy": f"{family} {parameter}", "family": family, "gains": gains, **verdicts}

    records = [
        record("lru", None, [0, 0], [0, 0]),
        record("a", 1, [0, 0.01], [0, 0.02]),
        record("a", 2, [-0.002, 0.02], [-0.01, 0.02]),
        record("a", 3, [-0.004, 0.03], [0, 0.02]),
        record("b", 1, [-0.1, 0.9], [0, 0.9]),
    ]
    assert [chosen["policy"] for chosen in search.chosen_per_family(records)] == ["a 2"]
    assert [r["second_half"]["reaches_bar"] for r in records] == [False, True, False, True, True]
