"""A model that calls the host: once in each step; and where that raises, no request ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine import device
from kvcache_jax.engine.pace import Length, Pace
from tests.engine.exact_engine import SIZES, ask, expect
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
from tests.support.helpers import compiled_programs

COUNT = kv.engine.Counter


class Callback:
    """Is called by the model in each of its calls, and raises after as many as it was told."""

    def __init__(self):
        self.num_left: int | None = None
        self.shapes = []
        self.calls = []  # of the host, for the next calls of the model: a function or None each

    def __call__(self, tokens):
        self.shapes.append(tokens.shape)
        if self.calls and (call := self.calls.pop(0)):
            call()
        if self.num_left is not None:
            self.num_left -= 1
            if self.num_left < 0:
                self.num_left = None
                raise RuntimeError("the callback is out of order")
        return np.int32(0)


callback = Callback()


class LongPace(Pace):
    """Dispatches that news end after a step."""

    def choose(self, now, has_free_row):
        return Length(1, 8), 1


def model(params, tokens, cache, step, logits_at=None):
    zero = jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.int32), tokens)
    return forward(params, tokens + zero, cache, step, logits_at)


@pytest.fixture
def engine():
    """With a window beside, that holds a step's tokens of a row and no more."""
    sizes = config(num_layers=2, num_blocks=14, max_query_len=6, enable_prefix_caching=False)
    return kv.Engine(model, make_params(), sizes, **SIZES)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_calls_the_model_once(engine, seed):
    """Rows end, are preempted and forked, and prompts are computed while others decode."""
    rng = np.random.default_rng(seed)
    requests = [random_request(rng, i) for i in range(8)]
    callback.shapes.clear()
    said, counts = collect(engine, requests), engine.figures().counts
    assert len(callback.shapes) == counts[COUNT.STEPS]
    with_prompts = [shape for shape in callback.shapes if shape != (4, 1)]
    assert set(with_prompts) == {(12, 1)} and len(with_prompts) == counts[COUNT.PREFILL_STEPS]
    assert counts[COUNT.GENERATED_TOKENS] > counts[COUNT.STEPS]  # else no row decoded beside another's prompt
    for request in requests:
        for i in range(request.num_samples):
            assert said[request.id, i][0] == decode_alone(request, num_layers=2, sample_id=i)[0]


def test_a_dispatch_ends_with_the_step_in_which_it_is_shortened(engine, monkeypatch):
    """But not one whose length the caller chose; tokens are the same."""
    under_way, said = [], {}
    requests = [ask([i, 1], 30, i) for i in range(2)]

    class Kept(device.LiveLength):
        def begin(self, *values):
            under_way[:] = [self]
            return super().begin(*values)

    monkeypatch.setattr(device, "LiveLength", Kept)
    engine._device._lengths.clear()
    engine._pace = LongPace(8)

    def steps_of(calls, max_steps=None):
        before, callback.calls = engine.figures().counts[COUNT.STEPS], calls
        engine.drain(max_steps)
        note(said, engine.take_events())
        assert not callback.calls
        return engine.figures().counts[COUNT.STEPS] - before

    def shorten():
        under_way[0].shorten()

    assert engine.push(requests) == 2 and engine._device.hears
    assert steps_of([None]) == 1  # first tokens
    assert steps_of([None, None, shorten]) == 3
    assert steps_of([shorten]) == 1
    assert steps_of([None] * 8) == 8
    assert steps_of([shorten, None, None, None], max_steps=4) == 4
    note(said, engine)
    expect(said, requests, num_layers=2)


def test_an_error_of_a_callback_names_itself_and_ends_no_request(engine):
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
    expect(said, [*requests, ask([9], 3, "late")], num_layers=2)
    after = engine.figures().counts
    assert all(0 <= after[counter] - before[counter] < 1000 for counter in before)
    check_idle(engine)


@pytest.mark.slow
def test_a_callback_raises_at_every_step_of_200_requests_in_turn(engine):
    """After each reset a step later: tokens, ends and figures are as in an undisturbed run."""
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
    expect(said, requests, num_layers=2)
    check_idle(engine)
    assert num_failures > 40
