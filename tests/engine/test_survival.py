"""What kills an engine's state costs no request: errors of callbacks, resets, interrupts at any moment."""

import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine.shards import Shards
from tests.engine.exact_engine import SIZES, ask, expect, make_engine
from tests.engine.exact_model import (
    check_idle,
    check_state,
    config,
    decode_alone,
    forward,
    make_params,
    note,
    random_request,
)
from tests.support.helpers import compiled_programs


class Callback:
    """Is called by the model in each of its calls, and raises after as many as it was told."""

    def __init__(self):
        self.num_left: int | None = None

    def __call__(self, _):
        if self.num_left is not None:
            self.num_left -= 1
            if self.num_left < 0:
                self.num_left = None
                raise RuntimeError("the callback is out of order")
        return np.int32(0)


def make_fragile(**options):
    """An engine whose model has a callback, and the callback."""
    callback = Callback()

    def model(params, tokens, cache, step):
        zero = jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.int32), step.query_len.sum())
        return forward(params, tokens + zero, cache, step)

    return kv.Engine(model, make_params(), config(num_blocks=11), **SIZES | options), callback


def test_an_error_of_a_callback_names_itself_and_ends_no_request():
    engine, callback = make_fragile()
    requests, said = [ask([i, 7, 3], 20, i, num_samples=1 + i % 2) for i in range(3)], {}
    assert engine.push([*requests, ask([5], 40, "cancelled")]) == 4
    engine.drain(max_steps=4)
    note(said, engine.take_events())
    assert engine.cancel("cancelled")
    note(said, engine.take_events())
    assert said["cancelled", 0][2] == "cancelled"
    callback.num_left = 3
    with pytest.raises(kv.engine.EngineFailed, match=r"expected engine.reset\(\): all requests") as failed:
        while engine.num_unfinished:
            engine.drain(max_steps=4)
            note(said, engine.take_events())
    assert "the callback is out of order" in str(failed.value.__cause__)
    assert engine.push([ask([9], 3, "late")]) == 1
    for use in (engine.drain, engine.lower, lambda: engine.state, lambda: next(iter(engine))):
        with pytest.raises(kv.engine.EngineFailed):
            use()
    before = engine.figures().counts
    with compiled_programs() as programs:
        engine.reset()
        note(said, engine)
    assert programs == []
    expect(said, [*requests, ask([9], 3, "late")])
    after = engine.figures().counts
    assert all(0 <= after[counter] - before[counter] < 1000 for counter in before)
    check_idle(engine)


class LateReports:
    """Reports that are there when a gate is open."""

    def __init__(self, reports, gate):
        self.reports, self.gate = reports, gate

    def is_ready(self):
        return self.gate.is_set()

    def __array__(self, *arguments, **options):
        return np.asarray(self.reports)


def test_a_consumer_that_waits_for_the_device_hears_of_an_end_at_once(monkeypatch):
    engine, said, run, gate = make_engine(), {}, Shards.run, threading.Event()

    def run_late(*arguments):
        state, reports = run(*arguments)
        return state, LateReports(reports, gate)

    monkeypatch.setattr(Shards, "run", run_late)
    request = ask([7, 3], 9, "it")
    assert engine.push([request, ask([5], 40, "cancelled")]) == 2
    consumer = threading.Thread(target=engine.drain)
    consumer.start()
    while not engine._device.num_in_flight:
        assert consumer.is_alive()
    assert engine.cancel("cancelled")
    consumer.join(10)
    is_told = not consumer.is_alive()
    gate.set()
    assert is_told
    note(said, engine.take_events())
    assert said == {("cancelled", 0): ([], [], "cancelled")}
    note(said, engine)
    expect(said, [request])
    check_idle(engine)


@pytest.mark.slow
def test_a_callback_raises_at_every_step_of_200_requests_in_turn():
    """After each reset a step later: tokens, ends and figures are as in an undisturbed run."""
    engine, callback = make_fragile()
    rng, said, num_failures = np.random.default_rng(6), {}, 0
    requests = [random_request(rng, i, longest=24) for i in range(200)]
    waiting = requests
    while waiting or engine.num_unfinished:
        waiting = waiting[engine.push(waiting) :]
        if callback.num_left is None:
            callback.num_left = num_failures % 40
        try:
            engine.drain(max_steps=1 + num_failures % 8)
        except kv.engine.EngineFailed:
            num_failures += 1
            engine.reset()
        check_state(engine.state)
        note(said, engine.take_events())
    expect(said, requests)
    check_idle(engine)
    assert num_failures > 40


def test_a_healthy_engine_may_be_reset_at_any_time():
    """Between drains, also those under which dispatches are on their way, and new weights."""
    engine, said = make_engine(), {}
    drawn = kv.decoding.SamplingParams(temperature=1.5, seed=3)
    requests = [ask([i, 7, 3], 20, i, num_samples=1 + i % 2, sampling=drawn) for i in range(4)]
    assert engine.push(requests) == 4
    while engine.num_unfinished:
        engine.drain(max_steps=5)
        note(said, engine.take_events())
        engine.drain(max_steps=3)
        engine.reset()
        note(said, engine.take_events())
    expect(said, requests)
    engine.set_params(make_params(shift=1))
    engine.reset()
    assert engine.push([ask([4, 4], 9, "new weights")]) == 1
    note(said, engine)
    expect(said, [ask([4, 4], 9, "new weights")], shift=1)


def test_a_state_that_a_failed_dispatch_donated_is_lost_by_name(monkeypatch):
    """An error in between leaves deleted arrays, and the engine says so in its own words."""
    engine, said, run = make_engine(), {}, Shards.run
    request = ask([1, 2, 3], 20, "a")
    assert engine.push([request]) == 1
    engine.drain(max_steps=3)
    note(said, engine.take_events())

    def fail(*arguments):
        run(*arguments)
        raise RuntimeError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(Shards, "run", fail)
        with pytest.raises(RuntimeError) as failed:
            engine.drain(max_steps=3)
    assert isinstance(failed.value, kv.engine.EngineFailed)
    assert "the link is down" in str(failed.value.__cause__)
    engine.reset()
    note(said, engine)
    expect(said, [request])


def test_interrupts_at_any_moment_of_a_drain_lose_no_token():
    """SIGINT comes after a random time: while a dispatch is packed, launched, awaited or taken in."""
    engine, rng, said, num_caught = make_engine(), np.random.default_rng(8), {}, 0
    engine.compile()
    requests = [random_request(rng, i) for i in range(30)]
    waiting = requests
    # A job in the background, as a shell starts it, ignores SIGINT.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        while waiting or engine.num_unfinished:
            waiting = waiting[engine.push(waiting) :]
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.exponential(2e-3) + 1e-6)
                engine.drain()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_caught += 1
            except kv.engine.EngineFailed:
                raise AssertionError("an interrupt lost the state") from None
            note(said, engine.take_events())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, interrupts)
    assert num_caught > 10
    for request in requests:
        for i in range(request.num_samples):
            tokens, _, reason = decode_alone(request, sample_id=i)
            assert (said[request.id, i][0], said[request.id, i][2]) == (tokens, reason)
    check_idle(engine)
