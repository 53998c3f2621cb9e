"""What other threads do while one is in `drain`: what is under way ends soon, and no token is lost or wrong.

That a dispatch ends early is counted in its steps. It is held back until others have done what they do, and
then it is run as it was launched, but for what they wrote into its length.
"""

import threading
import time

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine import engine as engines
from kvcache_jax.engine.alarm import alarm
from kvcache_jax.engine.pace import Length, Pace
from kvcache_jax.engine.shards import Shards
from tests.engine.exact_engine import RandomPace, ask, expect, make_engine
from tests.engine.exact_model import check_idle, decode_alone, make_params, note, random_request

NUM_THREADS, NUM_REQUESTS = 3, 20


class LongPace(Pace):
    """Dispatches that news end after a step."""

    num_ahead = 1

    def choose(self, now, has_free_row):
        return Length(1, 8), self.num_ahead


class Held:
    """Reports of a dispatch that runs when it is asked for them, after another thread has done something."""

    def __init__(self, run, act, failures):
        self.run, self.act, self.failures = run, act, failures

    def is_ready(self):
        return False

    def __array__(self, *arguments, **options):
        if act := self.act():

            def do():
                try:
                    act()
                except BaseException as error:
                    self.failures.append(error)

            thread = threading.Thread(target=do)
            thread.start()
            thread.join(60)
            self.failures += ["it waits"] * thread.is_alive()
        return np.asarray(self.run())


class Meanwhile:
    """An engine whose dispatches are held back, what it said, and what others do before the next ones run."""

    def __init__(self, monkeypatch):
        self.engine, self.said, self.acts, self.failures, run = make_engine(), {}, [], [], Shards.run
        self.engine._pace = LongPace(8, self.engine._device.shorten)
        device = self.engine._device

        def run_late(shards, model, options, params, state, inboxes, numbers):
            def now():
                device._state, reports = run(shards, model, options, params, device._state, inboxes, numbers)
                return reports

            return state, Held(now, lambda: self.acts.pop(0) if self.acts else None, self.failures)

        monkeypatch.setattr(Shards, "run", run_late)

    def num_steps(self, act=None):
        """Drains, and counts the steps of the dispatch whose report comes after another thread's act."""
        before = self.engine.figures().counts[kv.engine.Counter.STEPS]
        self.acts = [act]
        self.engine.drain()
        assert not self.acts and not self.failures
        note(self.said, self.engine.take_events())
        return self.engine.figures().counts[kv.engine.Counter.STEPS] - before

    def push(self, *requests):
        assert self.engine.push(requests) == len(requests)

    def finish(self, requests):
        """All end, and these say what they say alone."""
        note(self.said, self.engine)
        expect(self.said, requests)
        check_idle(self.engine)


@pytest.fixture
def meanwhile(monkeypatch):
    return Meanwhile(monkeypatch)


def test_who_comes_and_who_leaves_ends_the_dispatch_under_way(meanwhile):
    engine, requests = meanwhile.engine, [ask([i, 1], 40 - i, i) for i in range(6)]

    def look():
        assert engine.figures().running and engine.metrics() and engine.num_unfinished == 1
        assert engine.namespace_of() is not None and not engine.cancel("nothing")

    meanwhile.push(requests[0])
    assert meanwhile.num_steps() == 1  # its first token
    assert meanwhile.num_steps() == meanwhile.num_steps(look) == 8
    assert meanwhile.num_steps(lambda: meanwhile.push(requests[1])) == 1
    assert meanwhile.num_steps() == 1 and meanwhile.said.keys() == {(0, 0), (1, 0)}
    assert meanwhile.num_steps(lambda: engine.cancel(1)) == 1
    assert meanwhile.said[1, 0][2] == "cancelled" and len(meanwhile.said[1, 0][0]) == 1
    meanwhile.push(*requests[2:5])
    assert meanwhile.num_steps() == 1
    assert meanwhile.num_steps(lambda: meanwhile.push(requests[5])) > 1  # no row is free
    due = ask([6, 1], 2, "due", deadline=1e6)
    assert meanwhile.num_steps(lambda: meanwhile.push(due)) == 1  # for its alarm is set by the next drain
    assert engine.cancel(0)
    meanwhile.finish([*requests[2:], due])


def test_new_weights_wait_for_no_dispatch(meanwhile):
    meanwhile.push(ask([3, 1], 30, "old"))
    assert meanwhile.num_steps() == 1
    assert meanwhile.num_steps(lambda: meanwhile.engine.set_params(make_params(shift=1))) == 8
    meanwhile.push(ask([4, 1], 9, "new"))
    note(meanwhile.said, meanwhile.engine)
    expect(meanwhile.said, [ask([4, 1], 9, "new")], shift=1)


def test_a_stop_string_ends_the_dispatch_that_was_launched_before_it_was_read(meanwhile):
    meanwhile.engine._pace.num_ahead = 2

    def detokenize(tokens):
        return "".join(f"<{token}>" for token in tokens)

    other, (first, *_) = ask([5, 2], 30, "other"), decode_alone(ask([3, 1], 1))[0]
    stops = kv.engine.StopStrings([f"<{first}>"], detokenize)
    meanwhile.push(other, ask([3, 1], 30, "it", stop_strings=stops))
    assert meanwhile.num_steps() == 1 and meanwhile.said["it", 0] == ([], [], "stop")
    assert meanwhile.num_steps() == 1
    meanwhile.finish([other])


def test_a_deadline_that_passes_ends_the_dispatch_under_way(meanwhile, monkeypatch):
    alarms, now = [], [10.0]

    def set_alarm(seconds, ring):
        alarms.append((seconds, ring))
        return alarm(np.inf, ring)

    def pass_by():
        now[0] = 13.5
        alarms[-1][1]()

    monkeypatch.setattr(engines, "alarm", set_alarm)
    meanwhile.engine.clock = lambda: now[0]
    other = ask([0, 1], 40, "other")
    meanwhile.push(other, ask([1, 1], 40, "late", deadline=3.5), ask([2, 1], 40, "later", deadline=9.0))
    assert meanwhile.num_steps() == 1
    now[0] = 11.0
    assert meanwhile.num_steps() == 8
    assert meanwhile.num_steps(pass_by) == 1
    assert [seconds for seconds, _ in alarms] == [3.5, 2.5, 2.5]
    tokens, _, reason = meanwhile.said["late", 0]
    assert reason == "deadline" and len(tokens) == 9  # what came later is not told
    assert meanwhile.engine.cancel("later")
    meanwhile.finish([other])
    assert alarms[-1][0] == np.inf


def test_an_alarm_rings_in_a_thread_of_its_own_while_the_block_lasts():
    rung = threading.Event()
    with alarm(0.0, rung.set):
        assert rung.wait(60)
    rung.clear()
    before = threading.active_count()
    with alarm(1e9, rung.set):
        assert threading.active_count() == before
    with alarm(5.0, rung.set):
        [timer] = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert timer.daemon
    timer.join(60)
    assert not rung.is_set()


class Later(kv.engine.Attachment):
    """Has an answer about some prompts when it may, about others at once."""

    may_answer = is_hasty = False

    def find(self, cache, prompt, namespace=None):
        if prompt[0] == 7 and self.is_hasty:
            self.answer()
            return cache, False
        return cache, prompt[0] != 7 or self.may_answer

    def answer(self):
        self.may_answer, self.is_hasty = True, False
        assert self.wake is not None
        self.wake()


def test_an_answer_of_a_store_ends_the_dispatch_under_way(meanwhile):
    """One that comes while it runs, or before it runs, right after the question; unless no row is free."""
    later, said = Later(), meanwhile.said
    meanwhile.engine.attach(later)
    requests = [ask([7, i], 20, f"waits {i}") for i in range(3)]
    meanwhile.push(ask([0, 1], 40, "runs"), requests[0])
    assert meanwhile.num_steps() == 1 and meanwhile.num_steps() == 8
    assert meanwhile.num_steps(later.answer) == 1 and ("waits 0", 0) not in said
    assert meanwhile.num_steps() == 1 and said["waits 0", 0][0]
    later.may_answer, later.is_hasty = False, True
    meanwhile.push(requests[1])
    assert meanwhile.num_steps() == 1 and ("waits 1", 0) not in said
    assert meanwhile.num_steps() == 1 and said["waits 1", 0][0]
    others = [ask([i, 1], 10, f"other {i}") for i in (1, 2)]
    meanwhile.push(*others)
    assert meanwhile.num_steps() == 1
    later.may_answer = False
    meanwhile.push(requests[2])
    assert meanwhile.num_steps(later.answer) > 1
    assert meanwhile.engine.cancel("runs")
    meanwhile.finish([*requests, *others])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_others_push_and_cancel_while_one_drains(seed):
    engine, said, was_cancelled, errors = make_engine(), {}, set(), []
    engine._pace = RandomPace(8, np.random.default_rng(seed), engine._device.shorten)
    requests = [
        [random_request(np.random.default_rng([seed, i, j]), (i, j)) for j in range(NUM_REQUESTS)]
        for i in range(NUM_THREADS)
    ]

    def come_and_go(i):
        try:
            rng = np.random.default_rng([seed, i])
            for request in requests[i]:
                while not engine.push([request]):
                    assert not errors
                    time.sleep(1e-3)
                time.sleep(rng.exponential(3e-3))
                earlier = i, int(rng.integers(request.id[1] + 1))
                if rng.random() < 0.4 and engine.cancel(earlier):
                    was_cancelled.add(earlier)
                assert engine.metrics() and engine.figures()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(i,)) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) or engine.num_unfinished:
            engine.drain()
            note(said, engine.take_events())
        note(said, engine)
    except Exception as error:
        errors.append(error)
    assert not errors and 1 < len(was_cancelled) < NUM_THREADS * NUM_REQUESTS
    check_idle(engine)
    for request in sum(requests, []):
        for i in range(request.num_samples):
            tokens, _, reason = decode_alone(request, sample_id=i)
            found, _, why = said[request.id, i]
            is_whole = (found, why) == (tokens, reason)
            is_part = why == "cancelled" and found == tokens[: len(found)] and request.id in was_cancelled
            assert is_whole or is_part, (request, i)
    ended = {name for (name, _), (_, _, why) in said.items() if why == "cancelled"}
    assert ended == was_cancelled
