"""Fleets: hits and seconds of simulated replicas by hand, what policies find, a front without replicas."""

import math

import numpy as np
import pytest

import kvcache_jax as kv
from experiments.fleet import __main__ as fleet
from experiments.fleet.__main__ import Request, SimulatedReplica
from experiments.fleet.routing import Knowledge, Summary, rest_of, total
from experiments.serve.simulate import LLAMA, MOST_PROMPT_TOKENS, Machine
from kvcache_jax.processes import prompt_hashes
from tests.experiments.trace_maker import LONGEST, TOKENS_PER_ID, lru_hits, make_requests, write


def machine(num_blocks):
    """A machine with so many blocks beside the model, on which bytes cost nothing."""
    memory = (LLAMA.num_params * 2 + (num_blocks + 0.5) * LLAMA.bytes_per_token * TOKENS_PER_ID) / 0.9
    return Machine("test", 1e20, 1e15, memory)


def seconds(num_tokens, num_pairs):
    return (2 * LLAMA.num_params * num_tokens + 4 * 32 * 32 * 128 * num_pairs) / 1e15


@pytest.mark.parametrize("num_blocks", [LONGEST + 1, 40, 10_000])
def test_hits_of_requests_that_do_not_meet_are_those_of_an_lru(num_blocks):
    requests, found = make_requests(), []
    expected, _ = lru_hits(requests, num_blocks)
    replica = SimulatedReplica(machine(num_blocks), LLAMA, TOKENS_PER_ID)
    for i, each in enumerate(requests):
        before, length = replica.num_hit_tokens, TOKENS_PER_ID * len(each["hash_ids"])
        replica.push(Request(each["hash_ids"], length, 1, 1e6 * i))
        replica.run(math.inf)
        found.append(replica.num_hit_tokens - before)
    # The last token of a prompt is computed, whatever is there.
    lengths = [TOKENS_PER_ID * len(each["hash_ids"]) for each in requests]
    assert found == [min(TOKENS_PER_ID * n, length - 1) for n, length in zip(expected, lengths, strict=True)]
    known = replica.known(Request(requests[-1]["hash_ids"], lengths[-1], 0, 0.0))
    assert known == (lengths[-1], 0, 0) and replica.num_requests == len(requests)


def test_seconds_are_those_of_chunks_beside_rows():
    """A prompt of two chunks; another one comes meanwhile, and is computed beside the end of the first."""
    replica = SimulatedReplica(machine(100), LLAMA, TOKENS_PER_ID)
    first, second = MOST_PROMPT_TOKENS + 2000, 1000
    replica.push(Request([1], first, 3, 0.0))
    replica.run(1e-9)
    assert replica.known(Request([1], first, 1, 0.0)) == (0, 2000, 0)
    replica.push(Request([2], second, 2, 1e-9))
    assert replica.longest_queue == 2 and replica.known(Request([], 1, 1, 0.0)).num_queued == 3000
    replica.run(math.inf)
    a = seconds(MOST_PROMPT_TOKENS, MOST_PROMPT_TOKENS**2 / 2)
    b = a + seconds(3000, 2000 * (MOST_PROMPT_TOKENS + 1000) + second**2 / 2)
    assert replica.first_token_s == pytest.approx([b, b - 1e-9], rel=1e-12)
    c = b + seconds(2, first + second + 1)
    assert replica.clock == pytest.approx(c + seconds(1, first + 1), rel=1e-6)
    assert replica.known(Request([1], first, 1, 0.0)) == (TOKENS_PER_ID, 0, 0)


def test_rows_decode_beside_a_prompt():
    replica = SimulatedReplica(machine(100), LLAMA, TOKENS_PER_ID)
    replica.push(Request([1], 5000, 3, 0.0))
    replica.run(1e-9)
    a = seconds(5000, 5000 * 2500)
    assert replica.clock == pytest.approx(a) and replica.known(Request([], 1, 1, 0.0)) == (0, 0, 5000)
    replica.push(Request([2], 1000, 2, replica.clock))
    replica.run(math.inf)
    b = seconds(1001, 1000 * 500 + 5000)
    assert replica.first_token_s == pytest.approx([a, b])
    assert replica.clock == pytest.approx(a + b + seconds(2, 5001 + 1000 + 1))


def test_a_request_waits_for_blocks_and_one_that_never_fits_is_refused():
    replica = SimulatedReplica(machine(4), LLAMA, TOKENS_PER_ID)
    for ids in ([1, 2], [3, 4], [1, 2]):
        replica.push(Request(ids, 2 * TOKENS_PER_ID + 9, 5, 0.0))
    replica.run(math.inf)
    # Each needs three of four blocks: the second takes one of two that the third would have found.
    assert replica.num_hit_tokens == TOKENS_PER_ID and len(replica.first_token_s) == 3
    num = 2 * TOKENS_PER_ID + 9
    alone = seconds(num, num * (num // 2))
    assert replica.first_token_s[0] == pytest.approx(alone) and replica.first_token_s[1] > 2 * alone
    replica.push(Request([1], 5 * TOKENS_PER_ID, 1, 0.0))
    with pytest.raises(ValueError, match="a request of 5 blocks does not fit"):
        replica.run(math.inf)


def test_policies_that_ask_for_prefixes_find_more(tmp_path, capsys, report_of):
    requests = make_requests(1, 400)
    path, picture = write(tmp_path, requests), tmp_path / "picture.png"
    arguments = ["--trace", str(path), "--requests", "400", "--replicas", "3", "--arrivals", "40"]
    report = report_of(fleet, *arguments, "--picture", picture)
    rates = {record["policy"]: record["hit_rate"] for record in report["records"]}
    assert [*rates] == [*fleet.POLICIES] and picture.stat().st_size > 1000
    assert min(rates["longest prefix"], rates["cost"]) > max(rates["random"], rates["round robin"])
    assert report["num_requests"] == 400 and report["records"][1]["most_requests"] == 134
    assert [bar["measured"] for bar in report["bars"]] == [
        pytest.approx(rates[policy] / rates["round robin"]) for policy in ("longest prefix", "cost")
    ]
    fleet.show(report)
    assert "400 requests of trace.jsonl; 3 simulated replicas" in capsys.readouterr().out


def test_too_few_requests_are_one_sentence(tmp_path, refusal):
    path = write(tmp_path, make_requests(1, 5))
    assert "has 5 requests, expected 10000: lower --requests" in refusal(fleet, "--trace", path)


# --- the front of replicas on Ray Serve, without Ray ---


def request(tokens, num_new=4, **more):
    return kv.GenerationRequest(tokens, num_new, id="a", **more)


def test_the_router_knows_what_it_sent_and_what_replicas_said():
    now = [0.0]
    knowledge = Knowledge(2, "longest prefix", clock=lambda: now[0])
    text, silent = [1, 2, 3, 4, 5], {"number": 0, "hashes": []}
    stats = {"x": silent, "y": silent, "z": silent}
    assert knowledge.rank(request(text), stats) == ["x", "y", "z"]
    knowledge.send(request(text), 1, "y", stats["y"])
    # What was sent is held at once, also where a summary comes that is older.
    assert knowledge.rank(request(text), stats)[0] == "y"
    stats["y"] = {"number": 1, "hashes": []}
    assert knowledge.rank(request(text), stats)[0] == "y"
    # What a summary should have by now and has not is gone.
    now[0], stats["y"] = 100.0, {"number": 2, "hashes": []}
    assert knowledge.rank(request(text), stats)[0] != "y"
    stats["z"] = {"number": 1, "hashes": list(prompt_hashes(text, 2)[:1])}
    assert knowledge.rank(request(text), stats)[0] == "z"
    tenant = kv.namespace(tenant="b")
    stats["x"] = {"number": 1, "hashes": list(prompt_hashes(text, 2, namespace=tenant))}
    assert knowledge.rank(request(text, namespace=tenant), stats)[0] == "x"
    assert knowledge.rank(request(text), stats)[0] == "z"


def test_the_router_counts_what_has_not_ended():
    knowledge, stats = Knowledge(2, "cost"), {"x": {}, "y": {}}
    text = [1, 2, 3, 4, 5, 6, 7]
    knowledge.send(request(text), 1, "x", {})
    # Of the prompt one token is to be computed there, after the seven before it.
    assert knowledge.rank(request(text), stats)[0] == "y"
    knowledge.end(1)
    assert knowledge.rank(request(text), stats)[0] == "x"
    knowledge.send(request(text), 2, "x", {})
    assert knowledge.rank(request(text[:6] + [9, 9, 9]), stats)[0] == "x"
    assert knowledge.rank(request([9, 9, 9]), stats)[0] == "y"


def test_a_replicas_summary_is_its_index():
    config = kv.CacheConfig(
        [kv.FullAttention(1, 4)], block_size=2, max_seqs=1, max_seq_len=8, enable_prefix_caching=True
    )
    summary, cache, tokens = Summary(), kv.init(config), np.array([[5, 6, 7, 8]])
    summary.look(cache)
    assert summary.stats == {"number": 0, "hashes": []}
    cache, _ = kv.allocate(cache, [0], [4], tokens=tokens)
    cache, _ = kv.commit(kv.extend(cache, [4], max_new=4, tokens=tokens)[0])
    for _ in range(2):
        summary.look(cache)
        assert summary.stats == {"number": 1, "hashes": sorted(prompt_hashes([5, 6, 7, 8], 2))}


def test_another_replica_goes_on_with_a_request():
    whole = request([1, 2], 5, stop_tokens=[9], sampling=kv.decoding.SamplingParams(temperature=0.5, seed=7))
    assert rest_of(whole, []) is whole
    rest = rest_of(whole, [3, 4])
    assert [*rest.prompt] == [1, 2, 3, 4] and rest.max_new_tokens == 3 and rest.id == "a"
    assert rest.sampling == whole.sampling and [*rest.stop_tokens] == [9]
    assert rest_of(whole, [3, 9]).finish_reason == "stop"
    end = rest_of(whole, [3] * 5)
    assert (end.id, end.finish_reason, end.tokens) == ("a", "length", [])
    several = request([1, 2], 5, num_samples=2)
    assert rest_of(several, []) is several and rest_of(several, [3]) is None
    stops = kv.engine.StopStrings(["x"], str)
    assert rest_of(request([1], 5, stop_strings=stops), [3]) is None


def test_metrics_of_replicas_are_added_up():
    def engine(n):
        buckets = {"buckets": {0.1: n, math.inf: 2 * n}, "sum": 1.5 * n, "count": 2 * n}
        return {
            "vllm:prompt_tokens": n,
            "vllm:kv_cache_usage_perc": 0.1 * n,
            "time": buckets,
            "ends": {"stop": n},
        }

    assert total([engine(1), engine(3)]) == engine(4) | {"vllm:kv_cache_usage_perc": pytest.approx(0.2)}
    assert total([engine(1), {"ends": {"length": 2}}])["ends"] == {"stop": 1, "length": 2}
    assert total([]) == {}
