"""Conversations that come back to an engine: what is retained for them, and why a turn misses."""

from typing import Any

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine import Conversation
from kvcache_jax.engine.misses import REASONS, Misses
from tests.engine.exact_engine import LIMITS, SIZES, ask, expect, make_engine
from tests.engine.exact_model import check_state, config, forward, make_params
from tests.support.helpers import compiled_programs

KEPT: dict[str, Any] = dict(extras=[kv.policies.Conversations()], eviction_policy="retention")


def last_event(engine, request):
    """Serves a request; its last event, and all of its tokens."""
    assert engine.push([request]) == 1
    events = [*engine]
    return events[-1], [token for event in events for token in event.tokens]


def test_what_a_request_retains_outlives_what_others_leave_until_its_time_is_over():
    engine, now = kv.Engine(forward, make_params(), config(num_blocks=11, **KEPT), **SIZES), [5.0]
    engine.clock = lambda: now[0]
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

    def returns(wait, retain, others_retain=0.0):
        engine.reset()
        _, answer = last_event(engine, ask(prompt, 4, client=Conversation("agent", retain)))
        now[0] += wait
        for i in range(5):  # a cache of 44 tokens sees 80 of others
            last_event(engine, ask([7, i, 1, *range(9)], 4, client=Conversation(None, others_retain)))
            now[0] += 0.1
        turn = ask([*prompt, *answer, 8], 3, "turn", client=Conversation("agent", retain))
        event, tokens = last_event(engine, turn)
        expect({("turn", 0): (tokens, None, event.finish_reason)}, [turn])
        check_state(engine.state)
        kv.check_invariants(engine.state.cache)
        return event.num_cached_tokens

    assert returns(wait=1.0, retain=0.0) == 0
    with compiled_programs() as programs:
        assert returns(wait=1.0, retain=30.0) == 12
        assert returns(wait=31.0, retain=30.0) == 0
        assert returns(wait=1.0, retain=30.0, others_retain=60.0) == 0
        now[0] += 2.0**40  # of the clock's four-byte ticks the end
        assert returns(wait=0.0, retain=2.0**60) == 12
        assert returns(wait=0.0, retain=0.0) == 0
    assert not programs


def test_a_pool_that_is_needed_is_had():
    engine = kv.Engine(forward, make_params(), config(num_blocks=11, **KEPT), **SIZES)
    for i in range(3):
        last_event(engine, ask([i, 7, 1, *range(8)], 2, client=Conversation(i, 1e9)))
    request = ask([*range(1, 41)], 5, "large")
    event, tokens = last_event(engine, request)
    expect({("large", 0): (tokens, None, event.finish_reason)}, [request])
    assert event.finish_reason == "length"


def test_misses_are_counted_by_reason():
    engine, expected, num_prompt, num_cached = make_engine(), dict.fromkeys(REASONS, 0), 0, 0

    def serve(prompt, max_new=3, **options):
        nonlocal num_prompt, num_cached
        event, answer = last_event(engine, ask(prompt, max_new, **options))
        num_prompt, num_cached = num_prompt + len(prompt), num_cached + (event.num_cached_tokens or 0)
        return [*prompt, *answer]

    def flood():
        for i in range(4):
            serve([i, 9, *range(8)])
            expected["unnamed"] += 10

    def counts(**added):
        for reason, num in added.items():
            expected[reason] += num
        assert engine.metrics()["vllm:prefix_cache_misses"] == expected

    text = serve([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], client=Conversation("a"))
    counts(new=10)
    text = serve([*text, 8], client=Conversation("a"))  # 12 tokens of 13 were computed, in whole blocks
    counts(new=2)
    flood()
    text = serve([*text, 8], client=Conversation("a"))
    counts(evicted=16, new=2)
    other = kv.namespace(tenant="b")
    text = serve([*text, 8], client=Conversation("a"), namespace=other)
    counts(other_namespace=20, new=2)
    engine.reset()
    text = serve([*text[:22], 7, 7], client=Conversation("a"), namespace=other)
    counts(reset=20, new=4)
    serve(text[:9], client=Conversation("a"), namespace=other)
    counts(new=1)
    engine.set_params(make_params())
    serve([*text[:9], 0], client=Conversation("a"), namespace=other)
    counts(other_namespace=8, new=2)
    assert sum(expected.values()) == num_prompt - num_cached


def test_misses_are_those_of_lists_of_tokens():
    """Turns that continue, part, shrink and change shards, against common prefixes of lists."""
    rng, misses, left, expected = np.random.default_rng(2), Misses(4), {}, dict.fromkeys(REASONS, 0)
    for _ in range(300):
        name, shard = int(rng.integers(5)), int(rng.integers(2))
        before, where = left.get(name, ([], 0))
        added = rng.integers(0, 3, rng.integers(1, 9)).tolist()
        prompt = [*before[: int(rng.integers(len(before) + 1))], *added]
        common = 0
        while common < min(len(before), len(prompt)) and before[common] == prompt[common]:
            common += 1
        most = min(common, len(before) // 4 * 4, len(prompt) - 1) // 4 * 4
        cached = int(rng.integers(0, most // 4 + 2)) * 4 if rng.random() < 0.5 else most
        cached = min(cached, (len(prompt) - 1) // 4 * 4)
        misses.note_start(name, np.array(prompt, np.int32), b"", shard, cached)
        lost = max(most - cached, 0)
        expected["evicted" if shard == where else "other_shard"] += lost
        expected["new"] += len(prompt) - cached - lost
        assert misses.num_tokens == expected
        misses.note_end(name, np.array(prompt, np.int32), b"", shard)
        left[name] = prompt[:], shard
        if len(prompt) > 40:
            left[name] = [], shard
            misses.note_end(name, np.zeros(0, np.int32), b"", shard)
    assert min(expected["evicted"], expected["other_shard"]) > 20


def test_what_retains_nothing_is_refused():
    with pytest.raises(ValueError, match=r"retain is -1.0, expected seconds, 0 or more"):
        Conversation("a", -1)
    with pytest.raises(ValueError, match=r"retain is inf, expected a finite number"):
        Conversation("a", float("inf"))
    with pytest.raises(TypeError, match=r"name is \[\] .*, expected one that can be hashed"):
        Conversation([])  # type: ignore
    engine = kv.Engine(forward, make_params(), config(num_blocks=11), limits=LIMITS)
    with pytest.raises(ValueError, match=r"has retain = 2.0 and the engine's cache retains nothing"):
        engine.push([ask([1], 1, client=Conversation("a", 2))])
    with pytest.raises(ValueError, match=r"no extra is named 'conversations', expected Conv"):
        config(eviction_policy="retention")
    with pytest.raises(ValueError, match="no prefix cache in which turns leave something"):
        config(extras=[kv.policies.Conversations()], enable_prefix_caching=False)
