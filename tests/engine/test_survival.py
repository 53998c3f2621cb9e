"""What kills an engine's state costs no request: resets, failures, interrupts at any moment."""

import signal
import threading

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine.shards import Shards
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import check_idle, decode_alone, make_params, note, random_request


class LateReports:
    """Reports that are there when a gate is open."""

    def __init__(self, reports, gate):
        self.reports, self.gate = reports, gate

    def is_ready(self):
        return self.gate.is_set()

    def __array__(self, *arguments, **options):
        assert self.gate.wait(60)
        return np.asarray(self.reports)


def test_an_end_is_told_while_the_device_computes(monkeypatch):
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
    assert engine.cancel("cancelled") and consumer.is_alive()
    note(said, engine.take_events())
    assert said == {("cancelled", 0): ([], [], "cancelled")}
    gate.set()
    consumer.join(60)
    note(said, engine)
    expect(said, [request])
    check_idle(engine)


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
