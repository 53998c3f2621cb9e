"""Simulated replicas: hits of a plain LRU, seconds that are added by hand, and what policies find."""

import json
import math

import pytest

from experiments.fleet import __main__ as fleet
from experiments.fleet.simulated import Request, SimulatedReplica
from experiments.serve.simulate import LLAMA, MOST_PROMPT_TOKENS, Machine
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
    for i, request in enumerate(requests):
        length = TOKENS_PER_ID * len(request["hash_ids"])
        before = replica.num_hit_tokens
        replica.push(Request(request["hash_ids"], length, 1, 1e6 * i))
        replica.run(math.inf)
        found.append(replica.num_hit_tokens - before)
    # The last token of a prompt is computed, whatever is there.
    lengths = [TOKENS_PER_ID * len(request["hash_ids"]) for request in requests]
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


def test_policies_that_ask_for_prefixes_find_more(tmp_path, capsys):
    requests = make_requests(1, 400)
    path, picture = write(tmp_path, requests), tmp_path / "picture.png"
    arguments = ["--trace", str(path), "--requests", "400", "--replicas", "3", "--arrivals", "40"]
    assert fleet.main([*arguments, "--json", "--picture", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    rates = {record["policy"]: record["hit_rate"] for record in report["records"]}
    assert [*rates] == [*fleet.POLICIES] and picture.stat().st_size > 1000
    assert min(rates["longest prefix"], rates["cost"]) > max(rates["random"], rates["round robin"])
    assert report["num_requests"] == 400 and report["records"][1]["most_requests"] == 134
    assert [bar["measured"] for bar in report["bars"]] == [
        pytest.approx(rates[policy] / rates["round robin"]) for policy in ("longest prefix", "cost")
    ]
    fleet.show(report)
    assert "400 requests of trace.jsonl; 3 simulated replicas" in capsys.readouterr().out


def test_too_few_requests_are_one_sentence(tmp_path, capsys):
    path = write(tmp_path, make_requests(1, 5))
    with pytest.raises(SystemExit):
        fleet.main(["--trace", str(path)])
    assert "has 5 requests, expected 10000: lower --requests" in capsys.readouterr().err
