"""Runs of thousands of requests and steps, and the bounds that policies promise."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import (
    check_idle,
    check_state,
    collect,
    config,
    decode_alone,
    forward,
    make_params,
    note,
    random_request,
)

pytestmark = pytest.mark.slow


def look_up(params, tokens, cache, step):
    """The next token is one more, modulo 16."""
    return 9.0 * (jnp.arange(16)[None, None] == (tokens[..., None] + 1) % 16).astype(jnp.float32), cache


def test_ten_thousand_requests_through_32_rows_and_a_pool_that_fits_8():
    """Of 200 different ones, each many times in other company; the state is checked now and then."""
    rng = np.random.default_rng(0)
    kinds = [random_request(rng, num_samples=1, stop_tokens=()) for _ in range(150)]
    kinds += [ask(rng.integers(0, 20, n).tolist(), 44 - n) for n in rng.integers(1, 40, 50)]
    alone = [decode_alone(kind) for kind in kinds]
    engine = kv.Engine(
        forward,
        make_params(),
        config(max_seqs=32, num_blocks=8 * 11),
        token_budget=96,
        schedule=kv.engine.Schedule(watermark=0.05),
    )
    which = rng.integers(len(kinds), size=10_000)
    waiting = [dataclasses.replace(kinds[k], id=i) for i, k in enumerate(which)]
    said, num_drains = {}, 0
    while waiting or engine.num_unfinished:
        waiting = waiting[engine.push(waiting[:200]) :]
        engine.drain(max_steps=32)
        num_drains += 1
        if num_drains % 20 == 0:
            check_state(engine.state)
        note(said, engine.take_events())
    note(said, engine)
    check_idle(engine)
    assert len(said) == 10_000
    for i, k in enumerate(which):
        tokens, _, reason = alone[k]
        assert (said[i, 0][0], said[i, 0][2]) == (tokens, reason)
    figures = engine.figures()
    assert figures.counts[kv.engine.Counter.PREEMPTIONS] > 50
    assert figures.num_reads <= figures.counts[kv.engine.Counter.STEPS] / 16


@pytest.mark.parametrize("num_requests", [1, 64])
def test_reads_of_the_host_at_1_and_at_64_rows(num_requests, reads_are_refused):
    """At most one per 16 steps, however many rows run."""
    cache = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=1024, max_seqs=64, max_seq_len=256)
    engine, said = kv.Engine(look_up, {}, cache, token_budget=96), {}
    with reads_are_refused():
        assert engine.push([ask([i % 16], 250, i) for i in range(num_requests)]) == num_requests
        while engine.num_unfinished:
            engine.drain(max_steps=32)
            note(said, engine.take_events())
        figures = engine.figures()
    assert [len(tokens) for tokens, *_ in said.values()] == [250] * num_requests
    assert 0 < figures.num_reads <= figures.counts[kv.engine.Counter.STEPS] / 16


def test_a_pool_of_one_requests_need_for_ten_thousand_steps():
    """All requests want all blocks: no request waits for ever, and no step is lost."""
    engine = make_engine()
    rng = np.random.default_rng(1)
    done, said, number = 0, {}, 0
    while engine.figures().counts[kv.engine.Counter.STEPS] < 10_000:
        requests = []
        for _ in range(7):
            prompt_len = int(rng.integers(1, 40))
            requests.append(ask(rng.integers(0, 20, prompt_len).tolist(), 45 - prompt_len, number))
            number += 1
        said = collect(engine, requests)
        expect(said, requests)
        done += len(said)
    counts = engine.figures().counts
    computed = counts[kv.engine.Counter.PREFILL_TOKENS] + counts[kv.engine.Counter.GENERATED_TOKENS]
    assert done == number and computed >= counts[kv.engine.Counter.STEPS] - number
    assert counts[kv.engine.Counter.PREEMPTIONS] > 100


def test_a_client_who_floods_does_not_slow_another():
    """Of two clients with work, neither gets more than twice the larger of a prompt and what runs at once."""
    cache = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=16, block_size=4, max_seqs=4, max_seq_len=32)
    engine = kv.Engine(
        look_up, {}, cache, policy="fair", token_budget=12, limits=kv.engine.Limits(64), steps_per_dispatch=4
    )
    rng, number = np.random.default_rng(2), 0

    def some(client, num):
        nonlocal number
        requests = []
        for _ in range(num):
            number += 1
            prompt = rng.integers(16, size=int(rng.integers(1, 16))).tolist()
            requests.append(ask(prompt, int(rng.integers(1, 16)), number, client=client))
        return requests

    # Weighted: 16 of a prompt once, and 2 for each token that the pool holds.
    bound = 2 * max(16, 2 * 64)
    service, prompts, started = np.zeros(2), {}, set()
    flood, fair = some(0, 400), some(1, 100)
    prompts = {request.id: request for request in flood + fair}
    waiting_flood, waiting_fair = list(flood), list(fair)
    engine.push(waiting_flood[:40])
    waiting_flood = waiting_flood[40:]
    gaps = []
    while waiting_fair:
        # The second always has a few that wait, the first as many as there is room for.
        waiting_fair = waiting_fair[engine.push(waiting_fair[: max(6 - _num_of(engine, 1), 0)]) :]
        waiting_flood = waiting_flood[engine.push(waiting_flood[: max(40 - _num_of(engine, 0), 0)]) :]
        engine.drain(max_steps=4)
        for event in engine.take_events():
            request = prompts[event.id]
            if event.id not in started:
                started.add(event.id)
                service[request.client] += len(request.prompt)
            service[request.client] += 2 * len(event.tokens)
        gaps.append(abs(service[0] - service[1]))
    assert max(gaps) <= bound and service.min() > 1000


def _num_of(engine, client):
    return sum(sample.request.client == client for table in engine._tables for sample in table)


def test_nobody_waits_longer_than_ageing_allows():
    """P priorities, Q steps each: a request that waited for P * Q steps goes before all that come later."""
    num_priorities, ageing = 4, 32
    cache = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=8, block_size=4, max_seqs=1, max_seq_len=32)
    engine = kv.Engine(
        look_up,
        {},
        cache,
        policy="priority",
        schedule=kv.engine.Schedule(ageing_steps=ageing),
        token_budget=9,
        limits=kv.engine.Limits(320),
        steps_per_dispatch=1,
    )
    rng = np.random.default_rng(3)
    came, ended, step = {}, {}, 0
    costs = {}
    for number in range(300):
        request = ask([1], int(rng.integers(1, 8)), number, priority=int(rng.integers(num_priorities)))
        came[number], costs[number] = (step, request.priority), request.max_new_tokens
        assert engine.push([request]) == 1
        for _ in range(int(rng.integers(1, 6))):
            engine.drain()
            step = engine.figures().counts[kv.engine.Counter.STEPS]
            ended |= {event.id: step for event in engine.take_events() if event.finish_reason}
    while engine.num_unfinished:
        engine.drain()
        step = engine.figures().counts[kv.engine.Counter.STEPS]
        ended |= {event.id: step for event in engine.take_events() if event.finish_reason}
    assert len(ended) == 300
    waits = []
    for number, (start, priority) in came.items():
        # Ahead: those that could come before it until it has aged past every priority.
        ahead = sum(
            costs[other] + 2
            for other, (other_start, other_priority) in came.items()
            if other != number
            and ended[other] > start
            and other_start - ageing * other_priority <= start - ageing * priority + 2
        )
        waits.append(ended[number] - start)
        assert waits[-1] <= num_priorities * ageing + ahead + costs[number] + 4
    assert max(waits) > ageing


def test_many_rows_are_full_within_some_dozens_of_steps():
    """Four admissions a step would take 16 dispatches of 16 steps; what enters grows with the rows, too."""
    num_rows = 1024
    sizes = kv.CacheConfig(
        [kv.FullAttention(1, 1)], num_blocks=8 * num_rows, max_seqs=num_rows, max_seq_len=128
    )
    engine = kv.Engine(look_up, {}, sizes, steps_per_dispatch=16)
    assert engine.push(ask([1, 2, 3], 120) for _ in range(num_rows)) == num_rows
    for _ in range(7):
        engine.drain(max_steps=16)
    assert engine.figures().running == num_rows
    tokens = {}
    for event in engine:
        tokens.setdefault(event.id, []).extend(event.tokens)
    assert [*tokens.values()] == [[(3 + i) % 16 for i in range(1, 121)]] * num_rows
