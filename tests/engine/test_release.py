"""The memory of an engine's cache, given back between rollouts and taken again."""

import jax
import pytest

import kvcache_jax as kv
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import check_idle, check_state, collect, make_params, note
from tests.support.helpers import compiled_programs


def _counted(engine, *names):
    counts = engine.figures().counts
    return [counts[kv.engine.Counter[name]] for name in names]


@pytest.mark.parametrize("keep", [False, True])
def test_no_token_is_told_twice_or_left_out(keep):
    engine, said = make_engine(), {}
    drawn = kv.decoding.SamplingParams(temperature=1.5, seed=3)
    requests = [ask([i, 7, 3] * 3, 20, i, num_samples=1 + i % 2, sampling=drawn) for i in range(4)]
    assert engine.push(requests) == 4
    engine.drain(max_steps=3)
    engine.drain(max_steps=3)
    leaves = jax.tree.leaves(engine.state)
    engine.release(keep=keep)
    assert all(leaf.is_deleted() for leaf in leaves)
    for call in (engine.drain, engine.release):
        with pytest.raises(RuntimeError, match=r"expected engine\.restore\(\)"):
            call()
    late = ask([2, 7] * 4, 5, "late")
    assert engine.push([late]) == 1
    note(said, engine.take_events())
    with compiled_programs() as programs:
        engine.restore()
        engine.drain()
    assert not programs
    check_state(engine.state)
    note(said, engine)
    expect(said, [*requests, late])
    check_idle(engine)


def test_with_what_is_kept_every_step_is_that_of_an_engine_that_was_left_alone():
    counts = []
    for releases in (False, True):
        engine, said = make_engine(), {}
        requests = [ask([3, 1, 4, i % 3] * 3, 12, i) for i in range(7)]
        assert engine.push(requests) == 7
        while engine.num_unfinished:
            engine.drain(max_steps=2)
            note(said, engine.take_events())
            if releases and engine.num_unfinished:
                engine.release(keep=True)
                engine.restore()
        expect(said, requests)
        counts.append(_counted(engine, "PREFILL_TOKENS", "GENERATED_TOKENS", "ADMISSIONS", "PREEMPTIONS"))
    assert counts[0] == counts[1]


def test_what_is_kept_is_found_and_what_is_not_is_forgotten():
    engine, prompt = make_engine(), [3, 1, 4, 1, 5] * 4
    collect(engine, [ask(prompt, 2, "first")])
    for keep, num_cached in ((True, 16), (False, 0)):
        engine.release(keep=keep)
        engine.restore()
        [before] = _counted(engine, "CACHED_TOKENS")
        expect(collect(engine, [ask(prompt, 2, keep)]), [ask(prompt, 2, keep)])
        assert _counted(engine, "CACHED_TOKENS")[0] - before == num_cached


def test_other_weights_come_while_the_memory_is_away():
    engine = make_engine()
    collect(engine, [ask([3] * 17, 2, "before")])
    engine.release(keep=True)
    engine.set_params(make_params(1))
    engine.restore()
    [before] = _counted(engine, "CACHED_TOKENS")
    request = ask([3] * 17, 3, "after")
    expect(collect(engine, [request]), [request], shift=1)
    assert _counted(engine, "CACHED_TOKENS") == [before]


def test_what_was_not_released_is_not_restored():
    engine = make_engine()
    with pytest.raises(RuntimeError, match=r"expected engine\.release\(\) before"):
        engine.restore()
    with pytest.raises(TypeError, match="keep is 1, expected"):
        engine.release(keep=1)  # type: ignore
    engine.release()
    engine.reset()  # is as good
    request = ask([1, 2, 3], 4, 0)
    expect(collect(engine, [request]), [request])


def test_without_memory_nothing_is_lost(monkeypatch):
    engine = make_engine()
    request = ask([1, 2, 3], 9, 0)
    assert engine.push([request]) == 1
    engine.drain(max_steps=2)
    engine.release(keep=True)
    device_put = jax.device_put

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(jax.errors.JaxRuntimeError):
        engine.restore()
    monkeypatch.setattr(jax, "device_put", device_put)
    with pytest.raises(RuntimeError, match=r"expected engine\.restore\(\)"):
        engine.drain()
    engine.restore()
    said = {}
    note(said, engine)
    expect(said, [request])
