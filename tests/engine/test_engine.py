"""The engine from outside: what it takes, refuses, delivers and survives."""

import asyncio

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine.table import TokenRuns
from kvcache_jax.operations.reserve import needs
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import (
    NAN_TOKEN,
    check_idle,
    check_state,
    collect,
    decode_alone,
    make_params,
    note,
    random_request,
)


def test_a_pool_that_one_request_fills_never_stands_still():
    """After every step one more token is computed, though each request wants all blocks."""
    engine = make_engine()
    requests = [ask([i + 1] * (5 * i + 2), 40 - 5 * i, i) for i in range(6)]
    figures, steps = [engine.figures().counts], []

    def on_drain():
        figures.append(engine.figures().counts)
        before, after = figures[-2:]
        done = [kv.engine.Counter.PREFILL_TOKENS, kv.engine.Counter.GENERATED_TOKENS]
        num_steps = after[kv.engine.Counter.STEPS] - before[kv.engine.Counter.STEPS]
        steps.append(num_steps)
        assert sum(after[c] - before[c] for c in done) >= num_steps

    expect(collect(engine, requests, on_drain), requests)
    assert figures[-1][kv.engine.Counter.PREEMPTIONS] > 2
    assert sum(steps) <= sum(request.num_tokens for request in requests)


def test_the_worst_row_gives_way():
    """Three rows of 3 blocks want a fourth each, and there are 11."""
    engine, said = make_engine(), {}
    requests = [ask([i] * 10, 20, i) for i in range(3)]
    assert engine.push(requests) == 3
    while engine.figures().counts[kv.engine.Counter.PREEMPTIONS] == 0:
        engine.drain(max_steps=1)
        note(said, engine.take_events())
    assert engine.state.num_preemptions[:3].tolist() == [0, 0, 1]
    note(said, engine)
    expect(said, requests)


def test_what_could_never_run_is_refused_at_once():
    """44 tokens are 11 blocks; the last token that is drawn is not stored."""
    engine = make_engine()
    fits = [ask([1] * 40, 5, "all blocks"), ask([2, 3], 2, "small")]
    refused = [
        ask([1] * 40, 6, "one token more"),
        ask([1] * 46, 1, "longer than the pool"),
        ask([1] * 50, 1, "longer than a row"),
        ask([1], 49, "long answer", num_samples=2),
    ]
    said = collect(engine, [*refused[:2], *fits, *refused[2:]])
    expect(said, fits)
    samples = [(request.id, i) for request in refused for i in range(request.num_samples)]
    assert [said[sample] for sample in samples] == [([], [], "refused")] * 5
    assert engine.figures().counts[kv.engine.Counter.REFUSED] == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ask([], 1), "prompt has 0 tokens, expected at least 1"),
        (lambda: ask([1], 0), "max_new_tokens is 0, expected at least 1"),
        (lambda: ask("text", 1), "expected integer token ids"),
        (
            lambda: ask([1], 1, sampling=kv.decoding.SamplingParams(top_p=0.0)),
            "top_p is 0.0, expected above 0, at most 1",
        ),
        (
            lambda: ask([1], 1, sampling=kv.decoding.SamplingParams(temperature=-1.0)),
            "temperature is -1.0, expected 0 to 8e37",
        ),
        (
            lambda: ask([1], 1, sampling=kv.decoding.SamplingParams(seed=[1, 2])),
            r"sampling has the seeds \(1, 2\), expected one",
        ),
        (lambda: ask([1], 1, sampling=0.8), r"sampling is 0.8, expected kv.decoding.SamplingParams\("),
        (lambda: make_engine(limits=9), r"limits is 9, expected kv.engine.Limits\(max_requests, max_tokens,"),
        (lambda: make_engine(schedule=None), r"schedule is None, expected kv.engine.Schedule\(watermark,"),
        (lambda: kv.engine.Limits(max_items=None), "max_items is None, expected an integer"),
        (lambda: ask([1], 1, stop_tokens=[-1]), "stop_tokens has -1, expected token ids"),
        (lambda: ask([1], 1, items=[(0, 2)]), r"items has \(0, 2\), expected first < end <= 1"),
        (lambda: make_engine(token_budget=4), "token_budget is 4, expected more than 4"),
        (lambda: make_engine(policy="lifo"), "policy is 'lifo', expected one of 'fcfs'"),
        (lambda: kv.engine.Schedule(watermark=1.0), "watermark is 1.0, expected 0 to below 1"),
        (
            lambda: make_engine().push([ask([1], 1, stop_tokens=range(9))]),
            "has 9 stop tokens, expected",
        ),
        (lambda: make_engine().push([ask([1], 1, client=8)]), "has 8 as its client, expected at most 7"),
        (lambda: make_engine().push([ask([1], 1, num_samples=8)]), "has 8 samples, expected at most 7"),
        (lambda: make_engine().push([ask([1], 1, "a"), ask([2], 1, "a")]), "has the id 'a', which another"),
        (lambda: make_engine().set_params([1]), "params has the structure"),
        (
            lambda: make_engine().set_params(make_params() | {"shift": "text"}),
            r"params\['shift'\] is 'text', expected arrays alone",
        ),
        (
            lambda: make_engine().set_params(make_params() | {"shift": np.int32([1])}),
            r"params\['shift'\] is int32\[1\], expected int32\[\] like the engine's",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_an_id_is_free_again_when_its_request_has_ended():
    engine = make_engine()
    assert engine.push([ask([1], 2, "a")]) == 1
    with pytest.raises(ValueError, match="has the id 'a'"):
        engine.push([ask([2], 2, "b"), ask([2], 2, "a")])
    assert len(list(engine)) >= 1
    assert engine.push([ask([2], 2, "a")]) == 1
    assert {event.id for event in engine} == {"a"}


def test_push_says_how_many_it_took():
    engine = make_engine()
    requests = [ask([i], 3, i) for i in range(9)]
    assert engine.push(requests) == 7
    said = {}
    note(said, engine)
    assert engine.push(requests[7:]) == 2
    note(said, engine)
    expect(said, requests)


def test_one_long_request_takes_the_place_of_many():
    """Runs of the token buffer are reused, and joined again, whatever the order in which they come back."""
    engine = make_engine(limits=kv.engine.Limits(max_requests=7, max_tokens=98))
    assert engine.push([ask([i] * 4, 17, i) for i in range(5)]) == 4
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        runs = TokenRuns(84)
        starts = [runs.take(21) for _ in range(4)]
        assert starts == [0, 21, 42, 63] and runs.take(1) is None
        for i in order:
            runs.give_back(starts[i], 21)
        assert runs.num_free == 84 and runs.take(84) == 0


def test_the_first_token_may_be_the_last():
    engine = make_engine()
    first = decode_alone(ask([3, 4], 1))[0][0]
    requests = [ask([3, 4], 9, i, stop_tokens=[first, 1]) for i in range(4)] + [ask([3, 4], 1, 4)]
    said = collect(engine, requests)
    assert [said[i, 0][0::2] for i in range(4)] == [([first], "stop")] * 4
    assert said[4, 0][0::2] == ([first], "length")


def test_all_rows_end_in_one_step():
    engine = make_engine()
    requests = [ask([i], 6, i) for i in range(1, 8)]
    expect(collect(engine, requests), requests)


def test_a_row_with_nan_logits_ends_alone():
    """None of what it computed since is published, and no other request hears of it."""
    engine = make_engine()
    bad = ask([1, 2, 3, 4, 5, 6, 7, NAN_TOKEN], 9, "bad")
    others = [ask([1, 2, 3, 4, 5, 6, 7, 8 + i], 6, i) for i in range(3)]
    said = collect(engine, [others[0], bad, *others[1:]])
    assert said["bad", 0] == ([], [], "nan_logits")
    expect(said, [*others, bad])
    assert kv.lookup(engine.state.cache, [[*bad.prompt, 0]], [9]).tolist() == [4]


@pytest.mark.parametrize("num_drains", [0, 1, 2, 4])
def test_cancel_in_every_phase(num_drains):
    """Not sent yet, waiting, computing its prompt, decoding; each is told once, and leaves nothing behind."""
    engine = make_engine(steps_per_dispatch=8)
    requests = [ask([i] * 12, 20, i) for i in range(6)]
    assert engine.push(requests) == 6
    said = {}
    for _ in range(num_drains):
        engine.drain()
        note(said, engine.take_events())
    cancelled = [i for i in (0, 3, 5) if engine.cancel(i)]
    assert cancelled and not any(map(engine.cancel, ("unknown", *cancelled)))
    events = engine.take_events()
    assert [(event.id, event.finish_reason) for event in events] == [(i, "cancelled") for i in cancelled]
    note(said, events)
    again = ask([7, 3], 5, cancelled[-1])
    assert engine.push([again]) == 1, "an id is free once the end was told"
    answer = {}
    while engine.num_unfinished:
        engine.drain()
        check_state(engine.state)
        events = engine.take_events()
        note(answer, [event for event in events if event.id == again.id])
        note(said, [event for event in events if event.id != again.id])
    check_idle(engine)
    expect(answer, [again])
    expect(said, [request for request in requests if request.id not in (0, 3, 5)])
    for i in cancelled:
        tokens, _, _ = decode_alone(requests[i])
        assert said[i, 0][2] == "cancelled"
        assert said[i, 0][0] == tokens[: len(said[i, 0][0])]
    assert num_drains > 2 or said[5, 0][2] == "cancelled"
    assert not engine.cancel(0)


def test_a_deadline_ends_a_request():
    engine = make_engine()
    requests = [ask([1, 2], 30, "late", deadline=0.0), ask([3], 4, "fine", deadline=3600.0)]
    said = collect(engine, requests)
    assert said["late", 0][2] == "deadline"
    expect(said, requests[1:])


def test_a_consumer_that_raises_leaves_the_engine_usable():
    engine = make_engine()
    requests = [ask([i, 2], 9, i) for i in range(5)]
    assert engine.push(requests) == 5
    said = {}
    with pytest.raises(RuntimeError, match="consumer"):
        for event in engine:
            note(said, [event])
            raise RuntimeError("consumer")
    assert engine.push([ask([9], 3, 9)]) == 1
    note(said, engine)
    expect(said, [*requests, ask([9], 3, 9)])
    check_idle(engine)


def test_an_async_consumer_gets_the_same():
    engine = make_engine()
    requests = [ask([i, 5], 8, i) for i in range(5)]

    async def consume():
        engine.push(requests)
        said = {}
        async for event in engine:
            note(said, [event])
            await asyncio.sleep(0)
        return said

    expect(asyncio.run(consume()), requests)


def test_new_weights_between_dispatches():
    """Rows that run keep their place, and what they computed is not found under the new weights."""
    engine = make_engine()
    before, across = ask([1, 2, 3, 4, 5], 2, "before"), ask([1, 2, 3, 4, 6, 7], 30, "across")
    said = collect(engine, [before])
    assert engine.push([across]) == 1
    engine.drain()
    engine.set_params(make_params(shift=1), kv.namespace(weights="new"))
    after = ask([1, 2, 3, 4, 5], 6, "after")
    assert engine.push([after]) == 1
    note(said, engine.take_events())
    note(said, engine)
    expect(said, [before])
    expect(said, [after], shift=1)
    assert len(said["across", 0][0]) == 30
    assert said["across", 0][0] != decode_alone(across)[0]
    check_idle(engine)
    assert engine.figures().counts[kv.engine.Counter.UPDATES] == 1
    tokens = [[*across.prompt, *said["across", 0][0]]]
    words = engine.namespace_of()
    assert kv.lookup(engine.state.cache, tokens, [36], words).tolist() == [4]  # what "after" published


def test_the_host_reads_once_per_dispatch_and_nowhere_else(reads_are_refused):
    engine = make_engine()
    for num_requests in (1, 7):
        requests = [ask([i, 7], 40, i) for i in range(num_requests)]
        before, said = engine.figures(), {}
        with reads_are_refused():
            assert engine.push(requests) == num_requests
            while engine.num_unfinished:
                engine.drain(max_steps=8)
                note(said, engine.take_events())
            after = engine.figures()
        expect(said, requests)
        num_steps = after.counts[kv.engine.Counter.STEPS] - before.counts[kv.engine.Counter.STEPS]
        assert 0 < after.num_reads - before.num_reads <= num_steps // 8 + 2


def test_random_mixes_under_cancellation():
    engine = make_engine()
    rng = np.random.default_rng(7)
    requests = [random_request(rng, i) for i in range(14)]

    def on_drain():
        engine.cancel(int(rng.integers(14)))

    said = collect(engine, requests, on_drain)
    assert {reason for *_, reason in said.values()} >= {"cancelled", "length"}
    for request in requests:
        for i in range(request.num_samples):
            tokens, _, reason = decode_alone(request, sample_id=i)
            found, _, why = said[request.id, i]
            assert found == tokens[: len(found)] and why in ("cancelled", reason)


def test_the_program_can_be_lowered_at_any_time():
    """That runs nothing and takes no request; all of the cache is donated."""
    engine = make_engine()
    request = ask([1, 2, 3], 9, "a")
    assert engine.push([request]) == 1
    program = engine.lower().compile()
    assert engine.num_unfinished == 1 and engine.figures().num_reads == 0
    said = {}
    note(said, engine)
    expect(said, [request])
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= kv.memory_bytes(engine.config) > 0


# --- prompts that are alike are computed once: by fork, in one batch, through the cache ---


def counted(engine, *names):
    counts = engine.figures().counts
    return tuple(counts[kv.engine.Counter[name]] for name in names)


@pytest.mark.slow
def test_samples_fork_the_prompt():
    """18 tokens, of which all but the last are computed once; each sample draws with a seed of its own."""
    engine = make_engine()
    request = ask(
        [5] * 17 + [2], 6, "a", num_samples=4, sampling=kv.decoding.SamplingParams(temperature=1.5, seed=3)
    )
    said = collect(engine, [request])
    expected = [decode_alone(request, sample_id=i)[0] for i in range(4)]
    assert [said["a", i][0] for i in range(4)] == expected
    assert len(set(map(tuple, expected))) > 1
    assert counted(engine, "ADMISSIONS", "FORKS", "PREFILL_TOKENS", "CACHED_TOKENS") == (1, 3, 17, 0)
    for tokens in expected:  # 23 were computed, and the sixth block was never full
        text = [[*request.prompt, *tokens]]
        assert kv.lookup(engine.state.cache, text, [24]).tolist() == [20]


def test_the_copy_of_a_shared_last_block_counts_among_what_a_row_needs():
    cache, _ = kv.allocate(make_engine().state.cache, [0], [5], tokens=np.ones((1, 5), np.int32))
    num_new = [5, *[0] * (cache.max_seqs - 1)]
    cache, _ = kv.extend(cache, num_new, max_new=5, tokens=np.ones((cache.max_seqs, 5), np.int32))
    cache, _ = kv.fork(cache, [0], [1])
    wanted = np.int32(np.arange(cache.max_seqs) < 2)
    count = jax.jit(needs, static_argnames="config")
    shared, alone = (count(c.control, wanted, config=c.config) for c in (cache, kv.free(cache, [0])[0]))
    for need, num_copies in ((shared, 1), (alone, 0)):
        assert need.copies.tolist() == [(num_copies * wanted > 0).tolist()]
    assert shared.num_blocks.tolist() == [wanted.tolist()]


def test_samples_without_a_row_find_the_prompt_in_the_cache():
    engine = make_engine()
    requests = [ask([7] * 9, 4, "a", num_samples=6, sampling=kv.decoding.SamplingParams(temperature=1.0))]
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


def test_the_first_that_does_not_fit_is_not_overtaken():
    """Of 11 blocks the first takes 8: the second lacks three, the third needs one."""
    engine = make_engine()
    requests = [ask([2] * 30, 2, "large"), ask([3] * 24, 2, "second"), ask([4] * 3, 2, "small")]
    said = collect(engine, requests)
    assert [name for name, _ in said] == ["large", "second", "small"]
    expect(said, requests)


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


def test_the_end_of_a_request_says_what_the_cache_had_when_it_began():
    """Of 16 tokens in 4 blocks; what a preempted one finds of its own does not count, forks find none."""
    engine = make_engine()

    def cached(requests):
        assert engine.push(requests) == len(requests)
        return {
            (event.id, event.sample_id): event.num_cached_tokens
            for event in engine
            if event.finish_reason is not None
        }

    copies = [ask([3, 1, 4, 1] * 4 + [5], 3, i) for i in range(3)]
    assert cached(copies) == {(0, 0): 0, (1, 0): 16, (2, 0): 16}
    assert cached([ask([7] * 9, 4, "a", num_samples=2)]) == {("a", 0): 0, ("a", 1): None}
    assert engine.push([ask([2], 3, "b")]) and engine.cancel("b")
    assert [(event.id, event.num_cached_tokens) for event in engine] == [("b", None)]
    before = counted(engine, "PREEMPTIONS", "CACHED_TOKENS")
    assert cached([ask([i] * 8, 20, i) for i in (3, 4)]) == {(3, 0): 0, (4, 0): 0}
    after = counted(engine, "PREEMPTIONS", "CACHED_TOKENS")
    assert after[0] > before[0] and after[1] > before[1]
