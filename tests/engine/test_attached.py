"""What is attached to an engine: stores that have prompts, or fail in any way, and followers of the index."""

import gc
import threading
import weakref

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine import Attachment, Counter
from tests.engine.exact_engine import ask, expect, linked, make_engine, num_cached
from tests.engine.exact_model import check_idle, config, make_params, note, random_request
from tests.tiers.lying_store import LyingStore


def engine_of(*attached, **options):
    engine = make_engine(**options)
    for attachment in attached:
        engine.attach(attachment)
    return engine


def test_a_new_engine_computes_what_a_warm_cache_would():
    store, prompts = kv.tiers.MemoryStore(), [[i, *range(1, 12)] for i in range(2)]
    requests = [ask(prompt, 5, i) for i, prompt in enumerate(prompts)]
    link = linked(store)
    engine = engine_of(link)
    assert num_cached(engine, requests) == 0
    warm = num_cached(engine, requests)
    assert warm == 2 * 8
    link.flush()
    assert link.close() and link.num_dropped == 0 and not link.report().reasons
    link = linked(store)
    engine = engine_of(link)
    forked = ask([*prompts[1], 9], 3, "forked", num_samples=3)
    assert num_cached(engine, requests) == warm
    assert num_cached(engine, [forked, ask(prompts[0], 3, "whole", prompt_logprobs=False)]) == 12 + 8
    metrics = engine.metrics()
    assert metrics["vllm:external_prefix_cache_hits"] == warm  # of more, the cache had it
    assert metrics["vllm:external_prefix_cache_queries"] == 4 * 12 + 1
    check_idle(engine)
    # Under other weights nothing of it is found, and what these write no other engine finds.
    engine.set_params(make_params(1))
    said = {}
    assert engine.push([ask(prompts[0], 5, "new")]) == 1
    note(said, engine)
    expect(said, [ask(prompts[0], 5, "new")], shift=1)
    assert engine.metrics()["vllm:external_prefix_cache_hits"] == warm
    assert link.close()


def test_one_engine_computes_prompts_and_another_one_goes_on():
    prompts = [[i, *range(1, 14 - i)] for i in range(2)]
    with kv.tiers.Giver(config(num_blocks=11), weights="w") as giver:
        peers = kv.tiers.PeerStore(timeout=60.0)
        link, tickets = linked(peers), [giver.offer(prompt) for prompt in prompts]
        assert num_cached(engine_of(giver), [ask(prompt, 1, i) for i, prompt in enumerate(prompts)]) == 0
        for ticket in tickets:
            peers.expect(ticket)
            giver.finish(ticket)
        engine = engine_of(link)
        requests = [ask(prompt, 9, i, num_samples=2) for i, prompt in enumerate(prompts)]
        assert num_cached(engine, requests) >= 2 * 12
        assert engine.metrics()["vllm:external_prefix_cache_hits"] == 2 * 12
        assert link.close() and not link.report().reasons
        peers.release()
        assert giver.num_offers == 0
        check_idle(engine)


class Broken(kv.tiers.MemoryStore):
    def get(self, keys):
        raise ConnectionError

    contains = put = get  # type: ignore


class Hanging(kv.tiers.MemoryStore):
    """A store that answers nothing before the test has ended."""

    def __init__(self):
        super().__init__()
        self.may_end = threading.Event()

    def contains(self, keys):
        self.may_end.wait(60)
        return super().contains(keys)


@pytest.mark.parametrize(
    "store", [LyingStore(1, rate=0.6), Broken(), Hanging()], ids=lambda x: type(x).__name__
)
def test_a_store_that_fails_costs_hits_alone(store):
    rng = np.random.default_rng(3)
    requests = [random_request(rng, i) for i in range(20)]
    is_hanging = isinstance(store, Hanging)
    for _ in range(2):  # a new process over the same store
        link = linked(store, 0.05 if is_hanging else 60.0, max_queued=4)
        engine = engine_of(link)
        num_cached(engine, requests)
        check_idle(engine)
        if is_hanging:
            assert link.num_dropped > 0
        else:
            link.flush()
            assert link.report().num_dropped > 0
            assert link.close()
    if is_hanging:
        store.may_end.set()


def test_a_store_tells_the_loop_that_it_has_an_answer():
    """And keeps no engine that is gone."""
    link, told = linked(kv.tiers.MemoryStore()), threading.Event()
    link.wake, cache = told.set, kv.init(config())
    cache, _ = link.find(cache, range(9))
    assert told.wait(60)
    assert link.find(cache, range(9))[1]
    engine = weakref.ref(engine_of(link))
    gc.collect()
    assert engine() is None
    link.wake()
    assert link.close()


class Later(Attachment):
    """Has an answer about some prompts when it may, about others at once."""

    def __init__(self):
        self.may_answer = False

    def find(self, cache, prompt, namespace=None):
        return cache, self.may_answer or prompt[0] != 7


def test_a_request_that_waits_for_an_answer_keeps_no_other_waiting():
    later = Later()
    engine = engine_of(Attachment(), later, Attachment())
    requests = [ask([7, 1], 4, "waits", num_samples=2), ask([8, 1], 9, "runs"), ask([9], 20, "runs too")]
    assert engine.push([*requests, ask([7, 2], 4, "cancelled"), ask([7, 3], 4, "late", deadline=0.0)]) == 5
    said, had_ended = {}, []
    for event in engine:
        note(said, [event])
        if event.finish_reason is not None:
            had_ended.append(event.id)
        if had_ended == ["late"]:
            assert engine.cancel("cancelled")
            had_ended.append("")
        later.may_answer = "runs too" in had_ended
    assert said["late", 0][2] == "deadline" and said["cancelled", 0][2] == "cancelled"
    assert set(had_ended[:5]) == {"late", "", "cancelled", "runs", "runs too"}
    expect(said, requests)
    check_idle(engine)


class Recorder(Attachment):
    """Follows the index, and takes the cache with it when it is told to."""

    def __init__(self):
        self.follower, self.known, self.fails, self.num_looks = kv.processes.IndexFollower(), set(), False, 0

    def look(self, cache):
        self.num_looks += 1
        for event in self.follower.update(cache):
            if isinstance(event, kv.processes.BlockStored):
                self.known.update(event.block_hashes)
            elif isinstance(event, kv.processes.BlockRemoved):
                self.known.difference_update(event.block_hashes)
            else:
                self.known.clear()

    def find(self, cache, prompt, namespace=None):
        if self.fails:
            self.fails = False
            for leaf in jax.tree.leaves(cache.pools):
                leaf.delete()
            raise RuntimeError("gone")
        return cache, True


def test_all_that_is_attached_survives_a_failure():
    """What an engine found and wrote is there for the requests that come back."""
    store, recorder = kv.tiers.MemoryStore(), Recorder()
    link = linked(store)
    engine = engine_of(link, recorder)
    long = ask(range(1, 21), 12, "long")
    assert engine.push([long]) == 1
    said = {}
    # The request waits until the link's thread, which may be slow, tells that it has nothing. The link is
    # given the prompt's blocks in the drain after its first token.
    while len(said.get(("long", 0), [[]])[0]) < 5:
        engine.drain(max_steps=2)
        note(said, engine.take_events())
    assert engine.push([ask([7] * 9, 3, "second")]) == 1
    link.flush()
    recorder.fails = True
    with pytest.raises(RuntimeError) as failed:
        while True:
            engine.drain()
            note(said, engine.take_events())
    assert isinstance(failed.value, kv.engine.EngineFailed)
    assert "gone" in str(failed.value.__cause__) and said["long", 0][2] is None
    assert recorder.known
    before = engine.figures().counts[Counter.CACHED_TOKENS]
    engine.reset()
    note(said, engine)
    expect(said, [long, ask([7] * 9, 3, "second")])
    assert engine.figures().counts[Counter.CACHED_TOKENS] - before >= 20
    check_idle(engine)
    # A look after every dispatch: nothing is left to tell.
    assert recorder.num_looks > 5 and recorder.follower.update(engine.state.cache) == []
    assert len(recorder.known) == int(kv.stats(engine.state.cache).num_blocks_cached)
    assert link.close()


def test_what_cannot_be_attached():
    with pytest.raises(TypeError, match="attachment is a MemoryStore, expected such as a kv.tiers.Attached"):
        engine_of(kv.tiers.MemoryStore())
    mesh = jax.make_mesh((1,), ("rows",))
    with pytest.raises(ValueError, match="the engine has a placement, and Attachment sees one cache"):
        engine_of(Attachment(), placement=kv.engine.Placement(mesh, row_axis="rows"))


class Answering(Attachment):
    """Answers with what a function makes of the cache."""

    def __init__(self, answer):
        self.answer = answer

    def find(self, cache, prompt, namespace=None):
        return self.answer(cache)

    def metrics(self):
        return None


def test_answers_that_are_no_cache_are_refused():
    other = kv.init(config(num_blocks=7))
    answers = {
        "NoneType": lambda cache: None,
        "Cache,": lambda cache: cache,
        "'a Cache', 'a bool'": lambda _: (other, True),
    }
    for got, answer in answers.items():
        engine = engine_of(Answering(answer))
        engine.push([ask([7, 1], 4, "asks")])
        with pytest.raises(TypeError, match=rf"Answering.find\(\) returned .*{got}"):
            list(engine)
    with pytest.raises(TypeError, match=r"Answering.metrics\(\) returned a NoneType, expected numbers"):
        engine.metrics()
