"""Prompts that are alike are computed once: samples by fork, copies in one batch, prefixes in the cache."""

import pytest

import kvcache_jax as kv
from kvcache_jax import EngineCounter
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import collect, decode_alone, note


def counted(engine, *names):
    counts = engine.figures().counts
    return tuple(counts[EngineCounter[name]] for name in names)


@pytest.mark.slow
def test_samples_fork_the_prompt():
    """18 tokens, of which all but the last are computed once; each sample draws with a seed of its own."""
    engine = make_engine()
    request = ask([5] * 17 + [2], 6, "a", num_samples=4, temperature=1.5, seed=3)
    said = collect(engine, [request])
    expected = [decode_alone(request, sample_id=i)[0] for i in range(4)]
    assert [said["a", i][0] for i in range(4)] == expected
    assert len(set(map(tuple, expected))) > 1
    assert counted(engine, "ADMISSIONS", "FORKS", "PREFILL_TOKENS", "CACHED_TOKENS") == (1, 3, 17, 0)
    for tokens in expected:  # 23 were computed, and the sixth block was never full
        text = [[*request.prompt, *tokens]]
        assert kv.lookup(engine.state.cache, text, [24]).tolist() == [20]


def test_samples_without_a_row_find_the_prompt_in_the_cache():
    engine = make_engine()
    requests = [ask([7] * 9, 4, "a", num_samples=6, temperature=1.0)]
    said = collect(engine, requests)
    for i in range(6):
        assert said["a", i][0] == decode_alone(requests[0], sample_id=i)[0]
    assert counted(engine, "ADMISSIONS", "FORKS", "CACHED_TOKENS") == (3, 3, 16)


def test_of_equal_prompts_in_one_batch_one_is_computed():
    """Four copies of 16 tokens in 4 blocks and one more: three find all four blocks."""
    engine = make_engine()
    requests = [ask([3, 1, 4, 1] * 4 + [5], 3, i) for i in range(4)]
    expect(collect(engine, requests), requests)
    assert counted(engine, "ADMISSIONS", "PREFILL_TOKENS", "CACHED_TOKENS") == (4, 16, 48)


def test_those_that_wait_for_blocks_are_passed_by_others():
    engine = make_engine()
    copies = [ask([3] * 30, 2, i) for i in range(3)]
    other = ask([4, 4], 2, "other")
    assert engine.push([*copies, other]) == 4
    said = {}
    while ("other", 0) not in said:
        engine.drain(max_steps=1)
        note(said, engine.take_events())
    assert list(said) == [("other", 0)]
    note(said, engine)
    expect(said, [*copies, other])


@pytest.mark.parametrize("namespace", [None, kv.namespace(tenant="b")])
def test_only_those_of_one_namespace_wait_for_each_other(namespace):
    engine = make_engine()
    requests = [ask([3] * 17, 3, 0), ask([3] * 17, 3, 1, namespace=namespace)]
    expect(collect(engine, requests), requests)
    cached = 16 if namespace is None else 0
    assert counted(engine, "PREFILL_TOKENS", "CACHED_TOKENS") == (32 - cached, cached)


def test_when_the_first_ends_another_computes():
    engine = make_engine()
    requests = [ask([3] * 40, 2, i) for i in range(3)]
    assert engine.push(requests) == 3
    engine.drain(max_steps=1)
    engine.cancel(0)
    said = {}
    note(said, engine)
    assert said[0, 0] == ([], [], "cancelled")
    expect(said, requests[1:])


def test_a_preempted_request_finds_what_it_had_published():
    """Two that need 7 blocks of 11 each: one gives way, and comes back to its own blocks."""
    engine = make_engine()
    requests = [ask([i] * 8, 20, i) for i in (3, 4)]
    expect(collect(engine, requests), requests)
    num_preempted, num_cached = counted(engine, "PREEMPTIONS", "CACHED_TOKENS")
    assert num_preempted >= 1 and num_cached >= 8
