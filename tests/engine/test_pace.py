"""How long dispatches are, when they end, and when their tokens came."""

import math

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine.pace import Length, Pace
from tests.engine.exact_engine import SIZES, ask, expect, make_engine
from tests.engine.exact_model import NAN_TOKEN, config, forward, make_params, note
from tests.support.helpers import compiled_programs


class FixedPace(Pace):
    """Dispatches that news end after one step."""

    def choose(self, now, has_free_row):
        return Length(1, 8), 1


def run(pace, num, host_s, step_s, now=0.0, has_news=False):
    """Dispatches one after the other, and returns the steps of each and the host's share of their time."""
    steps, begun = [], now
    for _ in range(num):
        (least, most), num_ahead = pace.choose(now, True)
        num_steps = least if has_news else most
        now += num_steps * step_s + host_s * (num_ahead == 1)
        if has_news:
            pace.note_news(now)
        pace.note(now, host_s, num_steps, num_steps * step_s)
        steps.append(num_steps)
    return steps, host_s * num / (now - begun), now


@pytest.mark.parametrize(("host_s", "step_s"), [(1e-3, 5e-3), (5e-4, 5e-3), (1e-3, 0.2), (1e-3, 1e-4)])
@pytest.mark.parametrize("has_news", [False, True])
def test_dispatches_are_as_short_as_the_hosts_share_allows(host_s, step_s, has_news):
    """A fiftieth of the time, or 3% more than the longest with news; half as long where two are under way."""
    pace = Pace(32)
    pace.note_news(0.0)
    if has_news:
        _, _, now = run(pace, 50, host_s, step_s, has_news=True)
        steps, share, _ = run(pace, 200, host_s, step_s, now, has_news=True)
        assert share < 0.035 + host_s / (32 * step_s + host_s)
        assert min(steps) == 1 or host_s > 0.03 * 32 * step_s
        return
    steps, _, now = run(pace, 300, host_s, step_s)
    wanted = min(max(host_s / (0.02 * step_s), 1), 32)
    assert steps[0] == 1 and steps[5] == pytest.approx(wanted, abs=1)
    assert now - 0.0 > 1.0 or step_s < 1e-3
    if now > 1.5:
        assert steps[-1] == pytest.approx(max(wanted / 2, 1), abs=1)
        assert pace.choose(now, True)[1] == 2
    pace.note_news(now)
    assert (pace.choose(now, True)[1], pace.choose(now, False)[1]) == (1, 2)
    assert pace.choose(now, False)[0].most == pytest.approx(wanted, abs=1)


def test_dispatches_that_can_be_shortened_take_a_quarter_of_the_share_and_are_as_long_with_a_free_row():
    host_s, step_s = 1e-3, 10e-3
    pace = Pace(32, lambda: None)
    pace.note_news(0.0)
    steps, _, now = run(pace, 300, host_s, step_s)
    assert steps[5] == steps[-1] == 20 and pace.choose(now, True) == (Length(1, 20), 2)
    _, _, now = run(pace, 50, host_s, step_s, now, has_news=True)
    _, share, _ = run(pace, 200, host_s, step_s, now, has_news=True)
    assert 0.005 < share < 0.00875 + host_s / (32 * step_s + host_s)


class Clock:
    """A device and a consumer on a clock of their own: dispatches one after the other, and who comes."""

    def __init__(self, pace, host_s, step_s):
        self.pace, self.host_s, self.step_s = pace, host_s, step_s
        self.now, self.flights = 0.0, []  # begun at, least, most
        pace._shorten = self.shorten if pace._shorten else None

    def end(self, nth=0):
        begun, _, most = self.flights[nth]
        return begun + most * self.step_s

    def shorten(self):
        """Ends dispatches at the next step after now."""
        for i, (begun, least, _) in enumerate(self.flights):
            begun = begun if i == 0 else self.end(i - 1)
            num_steps = max(least, math.ceil((self.now - begun) / self.step_s))
            self.flights[i] = begun, least, min(num_steps, self.flights[i][2])

    def waits_of(self, arrivals):
        """Steps that each waits until a dispatch begins that has heard of it, and the host's share."""
        arrivals, waits, told, num = sorted(arrivals), [], [], 0
        while arrivals or told:
            length, num_ahead = self.pace.choose(self.now, has_free_row=True)
            while len(self.flights) < num_ahead:
                self.now += self.host_s
                num += 1
                begun = max([self.now, *(self.end(i) for i in range(len(self.flights)))])
                self.flights.append((begun, *length))
                waits += [(begun - at) / self.step_s for at in told]
                told = []
            while arrivals and arrivals[0] < self.end():
                self.now = max(self.now, arrivals[0])
                self.pace.note_news(self.now, is_awaited=True)
                told.append(arrivals.pop(0))
            device_s, most = self.end() - self.flights[0][0], self.flights[0][2]
            self.now = max(self.now, self.end())
            self.flights.pop(0)
            self.pace.note(self.now, self.host_s, most, device_s)
        return np.array(waits), self.host_s * num / self.now


@pytest.mark.parametrize("step_s", [1e-4, 1e-3, 1e-2])
def test_who_comes_waits_for_a_step_or_two_where_dispatches_can_be_shortened(step_s):
    """With a host's part of half a step, and of five; else for as many as the host's share asks for."""
    rng, host_s = np.random.default_rng(0), 5e-4
    arrivals = 2 + np.cumsum(rng.exponential(0.7, 100))
    waits, share = Clock(Pace(32, lambda: None), host_s, step_s).waits_of(arrivals)
    assert len(waits) == 100
    assert waits.mean() < 1.6 + host_s / step_s and waits.max() <= 2 + 2 * host_s / step_s
    longer, longer_share = Clock(Pace(32), host_s, step_s).waits_of(arrivals)
    assert longer.mean() > waits.mean() and share < longer_share + 0.03
    if host_s / step_s >= 0.5:
        assert longer.mean() > 3 * waits.mean()


def test_a_dispatch_ends_with_a_first_token_or_an_end():
    """A prompt of one step and one of two; a refused, a NaN and a cancelled request: a report for each."""
    engine = make_engine()
    engine._pace = FixedPace(8)

    def steps_of_a_drain():
        before = engine.figures().counts[kv.engine.Counter.STEPS]
        engine.drain()
        return engine.figures().counts[kv.engine.Counter.STEPS] - before

    said, requests = {}, [ask([1, 2], 40, "a"), ask([3] * 18, 4, "b"), ask([1] * 7 + [NAN_TOKEN], 9, "NaN")]
    assert engine.push(requests[:1]) == 1
    assert [steps_of_a_drain() for _ in range(2)] == [1, 8]
    assert engine.push([ask([1], 60, "refused")]) == 1
    assert steps_of_a_drain() == 1
    assert engine.push(requests[2:]) == 1
    assert steps_of_a_drain() == 1
    assert engine.push(requests[1:2]) == 1
    assert steps_of_a_drain() == 2  # of nine tokens each
    assert engine.cancel("a")
    assert steps_of_a_drain() == 1
    assert steps_of_a_drain() == 2  # "b" ends
    note(said, engine)
    expect(said, requests[1:])
    assert (said["a", 0][2], said["refused", 0][2]) == ("cancelled", "refused")


def test_who_finds_a_row_free_and_who_is_cancelled_ends_what_is_under_way():
    engine, shortened = make_engine(), []
    engine._pace._shorten = lambda: shortened.append(True)
    requests = [ask([i], 4, i) for i in range(6)]
    assert engine.push(requests[:4]) == 4 and len(shortened) == 4
    assert engine.push(requests[4:]) == 2 and len(shortened) == 4  # they wait for a row
    assert engine.cancel(5) and len(shortened) == 5


def test_compile_is_all_that_the_first_request_would_wait_for():
    def model(*arguments):
        return forward(*arguments)

    engine, said = kv.Engine(model, make_params(), config(num_blocks=11), **SIZES), {}
    with compiled_programs() as programs:
        engine.compile()
    assert len(programs) == 1 and engine.figures().num_reads == 0
    request = ask([1, 2, 3], 9, "a")
    with compiled_programs() as programs:
        assert engine.push([request]) == 1
        note(said, engine)
    assert programs == []
    expect(said, [request])


def test_times_and_metrics_are_of_the_engines_clock():
    """A clock that each drain sets forward by a second: who waits for a row is queued as long."""
    engine, now, said = make_engine(), [100.0], {}
    engine.clock = lambda: now[0]
    requests = [ask([i, 5], 6, i) for i in range(5)]
    assert engine.push(requests) == 5
    ends, num_first = {}, 0
    while engine.num_unfinished:
        now[0] += 1
        engine.drain(max_steps=3)
        events = engine.take_events()
        for event in events:
            num_first += len(event.tokens) if (event.id, 0) not in said else 0
            note(said, [event])
            if event.finish_reason is None:
                assert event.time_queued is None and event.time_to_first_token is None
            else:
                ends[event.id] = event.time_queued, event.time_to_first_token
    expect(said, requests)
    queued, first = np.array([ends[i] for i in range(5)]).T
    assert (first[:4] == 1).all() and first[4] > 1
    assert (queued[:4] <= 1).all() and 1 < queued[4] <= first[4]
    metrics = engine.metrics()
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    reasons = [reason for *_, reason in said.values()]
    assert metrics["vllm:request_success"] == {reason: reasons.count(reason) for reason in reasons}
    lens = np.array([len(tokens) for tokens, *_ in said.values()])
    assert (metrics["vllm:prompt_tokens"], metrics["vllm:generation_tokens"]) == (10, lens.sum())
    for name, values in (("time_to_first_token_seconds", first), ("request_queue_time_seconds", queued)):
        histogram = metrics[f"vllm:{name}"]
        assert histogram["count"] == 5 and histogram["sum"] == pytest.approx(values.sum())
        assert all(num == (values <= bound).sum() for bound, num in histogram["buckets"].items())
    assert metrics["vllm:request_generation_tokens"]["buckets"][5] == (lens <= 5).sum() < 5
    assert metrics["vllm:request_generation_tokens"]["buckets"][10] == 5
    assert metrics["vllm:inter_token_latency_seconds"]["count"] == lens.sum() - num_first
