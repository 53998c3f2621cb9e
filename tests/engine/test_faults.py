"""What goes wrong around an engine costs no token: raised dispatches, interrupts, cancelled consumers."""

import asyncio
import threading

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine.events import Reader
from kvcache_jax.engine.shards import Shards
from kvcache_jax.engine.state import Phase
from tests.engine.exact_engine import SIZES, ask, expect, make_engine
from tests.engine.exact_model import (
    NAN_TOKEN,
    check_idle,
    check_state,
    collect,
    config,
    decode_alone,
    forward,
    make_params,
    note,
)


@pytest.mark.slow
def test_a_model_that_raises_while_it_is_traced_loses_nothing():
    """Requests, ends and new weights that were packed for the dispatch are told to the next one."""
    is_broken = []

    def sometimes(params, tokens, cache, step):
        if is_broken:
            raise RuntimeError("out of order")
        return forward(params, tokens, cache, step)

    engine = kv.Engine(sometimes, make_params(), config(num_blocks=11), **SIZES)
    requests = [ask([i, 7, 3], 5, i, num_samples=1 + i % 2) for i in range(4)]
    assert engine.push(requests) == 4
    engine.set_params(make_params(shift=1))
    is_broken.append(True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            engine.drain()
    assert engine.cancel(0) and engine.push([ask([9], 3, 9)]) == 1
    is_broken.clear()
    said = {}
    note(said, engine)
    assert said[0, 0] == ([], [], "cancelled")
    expect(said, [*requests[1:], ask([9], 3, 9)], shift=1)
    check_idle(engine)


def test_a_dispatch_that_raises_keeps_what_it_was_to_end(monkeypatch):
    engine, said = make_engine(), {}
    requests = [ask([i] * 5, 30, i) for i in range(3)]
    assert engine.push(requests) == 3
    engine.drain(max_steps=2)
    assert engine.cancel(1) and engine.push([ask([4], 3, 4)]) == 1

    def fail(*_):
        raise MemoryError("no memory for the inbox")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Shards, "run", fail)
        engine.drain(max_steps=2)
    note(said, engine)
    assert said[1, 0][2] == "cancelled"
    expect(said, [requests[0], requests[2], ask([4], 3, 4)])
    check_idle(engine)


def test_new_weights_reach_rows_though_a_dispatch_raised(monkeypatch):
    """A row that runs across them publishes nothing, also if a dispatch with them raised."""
    engine, said = make_engine(), {}
    request, words = ask([1, 2, 3, 4, 6, 7], 30, "across"), kv.namespace(weights="new")
    assert engine.push([request]) == 1
    engine.drain(max_steps=8)
    engine.set_params(make_params(shift=1), words)

    def fail(*_):
        raise MemoryError("no memory for the inbox")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Shards, "run", fail)
        engine.drain(max_steps=8)
    note(said, engine.take_events())
    note(said, engine)
    tokens = [[*request.prompt, *said["across", 0][0]]]
    assert len(tokens[0]) == 36
    published = engine.state.cache
    assert [kv.lookup(published, tokens, [36], of).tolist() for of in (None, engine.namespace_of())] == [
        [20],
        [0],
    ]


def test_an_interrupt_while_a_report_is_awaited_loses_no_token(monkeypatch):
    """As Ctrl-C does: the report is read again."""
    engine, said, read, num_reads = make_engine(), {}, Reader.__call__, [0]

    def interrupted(reader, array):
        num_reads[0] += 1
        if num_reads[0] % 2:
            raise KeyboardInterrupt
        return read(reader, array)

    requests = [ask([i, 5], 20, i) for i in range(5)]
    assert engine.push(requests) == 5
    monkeypatch.setattr(Reader, "__call__", interrupted)
    while engine.num_unfinished and num_reads[0] < 40:
        with pytest.raises(KeyboardInterrupt):
            engine.drain(max_steps=8)
        engine.drain(max_steps=8)
        note(said, engine.take_events())
    assert engine.num_unfinished == 0
    expect(said, requests)


def test_consumers_that_are_cancelled_leave_the_order_of_tokens(monkeypatch):
    """A caller that gives up leaves a thread which still waits; the next one must not pass it."""
    engine, said, read = make_engine(), {}, Reader.__call__
    is_slow, goes_on = [True], threading.Event()

    def slow(reader, array):
        found = read(reader, array)
        if is_slow:
            is_slow.clear()
            assert goes_on.wait(20)
        return found

    monkeypatch.setattr(Reader, "__call__", slow)
    requests = [ask([i, 5], 30, i) for i in range(3)]
    assert engine.push(requests) == 3

    async def consume():
        async for event in engine:
            note(said, [event])

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consume(), timeout=0.1)
        second = asyncio.create_task(consume())
        await asyncio.sleep(0.1)
        goes_on.set()
        await second

    asyncio.run(main())
    expect(said, requests)


def phase_of(engine, number):
    """The phase of the request that was pushed as the `number`th, and how many of its tokens are computed."""
    state = engine.state
    slots = np.flatnonzero(np.asarray(state.requests.uid) == number)
    if not len(slots):
        return None, 0
    rows = np.flatnonzero(np.asarray(state.row_request) == slots[0])
    return Phase(int(state.phase[slots[0]])), int(state.cache.context_len[rows[0]]) if len(rows) else 0


# How many others came before, its samples, and the phase of the last one, with how much of it is computed.
MOMENTS = {
    "not sent": (0, 1, lambda phase, num_computed: phase is None),
    "waiting": (4, 1, lambda phase, num_computed: phase == Phase.WAITING),
    "waiting for its fork": (0, 2, lambda phase, num_computed: phase == Phase.WAITING),
    "computing its prompt": (0, 1, lambda phase, num_computed: phase == Phase.RUNNING and num_computed < 11),
    "decoding": (0, 1, lambda phase, num_computed: phase == Phase.RUNNING and num_computed > 13),
    "forked": (0, 2, lambda phase, num_computed: phase == Phase.RUNNING and num_computed > 13),
    "preempted": (0, 1, lambda phase, num_computed: phase == Phase.PREEMPTED),
    "preempted sample": (0, 2, lambda phase, num_computed: phase == Phase.PREEMPTED),
    "back again": (0, 1, lambda phase, num_computed: phase == Phase.RUNNING and num_computed > 25),
    "done, and not heard of": (0, 1, lambda phase, num_computed: phase == Phase.DONE),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_cancel_at_every_moment(moment):
    """Two long requests that cannot both stay: the second gives way, comes back, and is cancelled."""
    num_before, num_samples, is_it = MOMENTS[moment]
    engine, said = make_engine(), {}
    others = [ask([6 + i], 9, f"before {i}") for i in range(num_before)]
    others += [ask([3] * 12, 26, "long"), ask([5], 30, "behind")]
    request = ask([4] * 12, 20, "it", num_samples=num_samples)
    assert engine.push([*others[:-1], request, others[-1]]) == num_before + 3
    number = num_before + num_samples
    while not is_it(*phase_of(engine, number)):
        assert engine.num_unfinished
        engine.drain(max_steps=1)
        note(said, engine.take_events())
    assert engine.cancel("it")
    while engine.num_unfinished:
        engine.drain()
        check_state(engine.state)
        note(said, engine.take_events())
    note(said, engine)
    check_idle(engine)
    expect(said, others)
    for i in range(num_samples):
        tokens, _, _ = decode_alone(request, sample_id=i)
        found, _, why = said["it", i]
        assert found == tokens[: len(found)] and why == "cancelled"


@pytest.mark.slow
def test_nan_logits_behind_drafts_hurt_no_other_row():
    """Drawn at random: rows end behind drafts. Counting: drafts that are not accepted have no numbers."""
    engine, rng = make_engine(num_drafts=3, policy="fair", token_budget=4 * 4 + 8), np.random.default_rng(5)
    random = [
        ask(
            rng.integers(0, 4, 4).tolist(),
            40,
            i,
            sampling=kv.decoding.SamplingParams(temperature=50.0, seed=i),
        )
        for i in range(24)
    ]
    said = collect(engine, random)
    expect(said, random)
    ends = [reason for *_, reason in said.values()]
    assert ends.count("nan_logits") > 3 and ends.count("length") > 3
    assert engine.figures().counts[kv.engine.Counter.ACCEPTED] > 0

    engine.set_params(make_params(counts=True))
    counting = [ask([1, 2, 3, 4, 5, 6, 0, 1, 2], 20, i) for i in range(4)]
    astray = [ask([6] * i + [1, 2, NAN_TOKEN, 1, 2], 9, f"NaN at {i + 2} and {i + 7}") for i in range(4)]
    said = collect(engine, [*counting[:2], *astray, *counting[2:]])
    expect(said, [*counting, *astray], counts=True)
    assert {reason for *_, reason in said.values()} == {"length"}
