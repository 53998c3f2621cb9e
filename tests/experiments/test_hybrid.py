"""The study of snapshots: what its records say is what its requests found, and its verdicts can fail."""

import copy

import pytest

from experiments.hybrid import __main__ as hybrid
from experiments.hybrid import bytes_moved, tables
from experiments.hybrid.tables import Writer, random_params


def test_a_turn_repeats_the_chat_before_it():
    requests = tables.chats(Writer(0), 2, 3, system_len=20, lengths=(5, 9))
    assert len(requests) == 6
    for nth, (prompt, _) in enumerate(requests):
        assert prompt[:20] == requests[0].prompt[:20]
        if nth % 3:
            before = sum(requests[nth - 1], [])
            assert prompt[: len(before)] == before and len(prompt) > len(before)
    assert requests[3].prompt[20:] != requests[0].prompt[20:]


def test_a_decode_step_reads_a_state_and_writes_one_in_every_block():
    assert bytes_moved.point_bytes() == 36 * (2 * 2**20 + 48 * 2**10)
    state, entry = 2 * 2**20, 16 * 128 * 2 + 32 * 128 * 2 + 32 * 4
    moved = bytes_moved.of_decode()
    assert moved["state read"] == state + 16 * entry
    assert moved["state written"] == entry
    assert moved["state folded"] == (2 * state + 16 * entry) / 16


@pytest.fixture(scope="module")
def found():
    writer = Writer(0)
    named = {
        "few-shot": tables.few_shot(writer, 4, 70),
        "chats": tables.chats(writer, 2, 2, 40, (20, 40)),
        "two levels": tables.few_shot(writer, 4, 50),
    }
    work = hybrid.Workloads(named, {17: tables.repeated_prefix(writer, 17, 3)})
    scarce = {name: hybrid.SCARCE[name] for name in (hybrid.DEFAULT, hybrid.SAVED)}  # those that bars name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid, "SCARCE", scarce)
        return hybrid.measure(work, random_params())


@pytest.mark.slow
def test_the_command_reports_what_it_measured(found, monkeypatch, report_of):
    by_policy = {(one["workload"], one["policy"]): one for one in found["policies"]}
    few = {policy: by_policy["few-shot", policy] for policy in hybrid.POLICIES}
    num_tokens = few["none"]["num_tokens"]
    assert few["none"]["num_computed"] == num_tokens and not few["none"]["num_snapshots"]
    assert few["every block"]["num_computed"] == num_tokens - 3 * 64
    assert few["junctions"]["num_computed"] == num_tokens - 2 * 64 and few["junctions"]["num_snapshots"] == 1
    assert few["ends"]["num_computed"] == num_tokens
    assert by_policy["chats", "ends"]["num_computed"] < by_policy["chats", "junctions"]["num_computed"]
    assert found["prefixes"][0]["cached"] == [0, 0, 16]
    assert found["num_different"] == 0 < found["num_compared"]
    assert 3 in found["maps"]["few-shot"][3]["snapshots"]  # the junction, after 64 tokens
    monkeypatch.setattr(hybrid, "measure", lambda *_: found)
    assert report_of(hybrid)["num_compared"] == found["num_compared"]


@pytest.mark.slow
def test_bars_can_fail(found):
    worse = copy.deepcopy(found)
    for one in [*worse["policies"], *worse["limited"]]:
        one["share_of_saved"], one["share_of_bytes"] = 0.9, 0.2
    for one in worse["few_points"]:
        one["saved"] = 0.0
    worse["prefixes"][0]["cached"] = [0, 0, 0]
    worse["num_different"], worse["decode_bytes"] = 1, {"state read": 3 * 2**20}
    assert not any(bar["holds"] for bar in hybrid.bars_of(worse))
