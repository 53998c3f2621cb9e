"""A store beside a loop: nothing waits for it, and what it cannot take is counted."""

import asyncio
import dataclasses
import threading
import weakref
from unittest.mock import Mock

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.tiers import attached_store
from tests.support.prefix_user import CONFIG, TENANT_A, TENANT_B, PrefixUser

pytestmark = pytest.mark.contract


class SlowStore(kv.tiers.MemoryStore):
    """A store that answers once it may."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def contains(self, keys):
        self.is_asked.set()
        assert self.may_answer.wait(60)
        return super().contains(keys)


@pytest.fixture
def store():
    return SlowStore()


def attached(store, **options):
    return kv.tiers.AttachedStore(store, weights="w", **{"timeout": 60} | options)


def served(*texts, namespace=None):
    user = PrefixUser(CONFIG)
    for text in texts:
        user.start(0, user.new_text(*text), namespace)
        user.free(0)
    return user


def test_nothing_waits_for_a_slow_store(store):
    """`save` returns, `find` says later, and both are done once the store answers."""
    user, link = served((1, 17)), attached(store)
    assert link.save(user.cache).num_saved == 4
    assert link.save(user.cache).num_saved == 0  # it was handed over
    user.start(0, user.new_text(2, 9))
    assert link.save(user.cache).num_saved == 2
    prompt = user.new_text(1, 17)
    cold = PrefixUser(CONFIG)
    for _ in range(3):
        cold.cache, is_done = link.find(cold.cache, prompt)
        assert not is_done and cold.lookup(prompt) == 0
    store.may_answer.set()
    link.flush()
    cold.cache, is_done = link.find(cold.cache, prompt)
    assert is_done and cold.start(1, prompt) == 16
    assert link.close() and not link.report().reasons and link.num_dropped == 0
    again, report = kv.tiers.load(store, kv.init(CONFIG), weights="w")
    assert report.num_loaded == 6 and not report.reasons  # all are listed


class OpenFiles(kv.tiers.MemoryStore):
    """A store that counts the values that are held of those it gave: of a `DirectoryStore`, open files."""

    def __init__(self):
        super().__init__()
        self.num_open = self.most_open = 0

    def get(self, keys):
        found = [value and memoryview(value) for value in super().get(keys)]
        for value in found:
            if value is not None:
                self.num_open += 1
                weakref.finalize(value, self.close_one)
        self.most_open = max(self.most_open, self.num_open)
        return found

    def close_one(self):
        self.num_open -= 1


def test_a_long_prompt_holds_few_files_open(monkeypatch):
    monkeypatch.setattr(attached_store, "_MOST_VALUES", 3)
    store = OpenFiles()
    user, cold = served((1, 29)), PrefixUser(CONFIG)
    kv.tiers.save(user.cache, store, weights="w")
    link, prompt = attached(store), user.new_text(1, 29)
    cold.cache, is_done = link.find(cold.cache, prompt)
    assert not is_done and link.close()
    cold.cache, is_done = link.find(cold.cache, prompt)
    assert is_done and cold.start(1, prompt) == 28
    assert 3 <= store.most_open < 7 and store.num_open == 0


def test_what_the_queue_has_no_room_for_is_dropped_and_counted(store):
    link = attached(store, max_queued=1)
    users = [served((start, 9)) for start in (1, 2, 3, 4)]
    saved = [link.save(users[0].cache).num_saved]
    assert store.is_asked.wait(60)  # the first job left the queue
    saved += [link.save(user.cache).num_saved for user in users[1:]]
    assert saved[-1] == 0 and link.num_dropped >= 2
    store.may_answer.set()
    link.flush()
    assert link.save(users[-1].cache).num_saved == 2  # what was dropped is tried again
    assert link.close()


def test_what_was_handed_over_is_listed_though_the_end_comes_first(store):
    user, link = served((1, 9)), attached(store)
    assert link.save(user.cache).num_saved == 2 and not link.close(timeout=0.01)
    store.may_answer.set()
    assert link.close()
    assert kv.tiers.load(store, kv.init(CONFIG), weights="w")[1].num_loaded == 2


def ends(call):
    """Whether a call ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_a_store_that_is_closed_does_nothing():
    """No prompt waits for it, and what it is given is not said to be saved."""
    store, user = kv.tiers.MemoryStore(), served((1, 17))
    link = attached(store)
    link.save(user.cache)
    assert link.close() and link.close()
    later = served((1, 17), (2, 9))
    assert link.save(later.cache).num_saved == 0 and len(store._values) == 6
    later.cache, is_done = link.find(later.cache, later.new_text(3, 9))
    assert is_done and ends(link.flush) and link.num_dropped == 0


def test_a_store_may_raise_anything():
    """Errors that end tasks and threads elsewhere are failures like others here."""

    def cancel(keys):
        raise asyncio.CancelledError

    store, user = kv.tiers.MemoryStore(), served((1, 17))
    link, cold, prompt = attached(store), PrefixUser(CONFIG), user.new_text(1, 17)
    store.contains = cancel
    link.find(cold.cache, prompt)
    assert ends(link.flush)
    cold.cache, is_done = link.find(cold.cache, prompt)
    assert is_done and link.report().reasons == {"CancelledError": 1}
    del store.contains
    assert link.save(user.cache).num_saved == 4 and ends(link.flush) and len(store._values) == 6
    link.close()


def test_a_block_that_is_not_read_is_counted_once():
    store, user = kv.tiers.MemoryStore(), served((1, 17))
    kv.tiers.save(user.cache, store, weights="w")
    store.get = Mock(side_effect=ConnectionError("connection refused"))
    link, cold, prompt = attached(store), PrefixUser(CONFIG), user.new_text(1, 18)
    link.find(cold.cache, prompt)
    link.flush()
    cold.cache, is_done = link.find(cold.cache, prompt)
    assert is_done and link.report().reasons == {"ConnectionError": 4}
    link.close()


def test_a_prompt_waits_no_longer_than_it_may(store):
    link, cache, user = attached(store, timeout=0.02), kv.init(CONFIG), PrefixUser(CONFIG)
    assert not link.find(cache, user.new_text(1, 9))[1]
    assert store.is_asked.wait(60)
    threading.Event().wait(0.03)  # after this the prompt and the job have both taken too long
    assert link.find(cache, user.new_text(1, 9))[1]
    assert link.num_dropped == 1
    assert link.find(cache, user.new_text(2, 9))[1]  # while the store hangs no prompt waits at all
    assert link.num_dropped == 2 and link.metrics()["vllm:external_prefix_cache_hits"] == 0
    store.may_answer.set()
    assert link.close()


def test_a_namespace_is_found_by_its_name_alone(store):
    store.may_answer.set()
    user, link = served((1, 9), namespace=TENANT_A), attached(store)
    link.save(user.cache)
    link.flush()
    prompt, cold = user.new_text(1, 9), PrefixUser(CONFIG)
    for space, hit in ((None, 0), (TENANT_A, 8)):
        cold.cache, _ = link.find(cold.cache, prompt, space)
        link.flush()
        cold.cache, is_done = link.find(cold.cache, prompt, space)
        assert is_done and cold.lookup(prompt, space) == hit
    assert link.close()


def test_a_store_of_one_namespace_sees_no_other(store):
    store.may_answer.set()
    user, link = served((1, 9), namespace=TENANT_A), attached(store, namespace=TENANT_A)
    prompt = user.new_text(1, 9)
    user.start(0, user.new_text(2, 9))
    user.start(1, user.new_text(3, 9), TENANT_B)
    assert link.save(user.cache).num_saved == 2
    link.flush()
    # They are not listed for those who name no namespace.
    assert kv.tiers.load(store, kv.init(CONFIG), weights="w")[1].num_loaded == 0
    cold = PrefixUser(CONFIG)
    for space in (None, TENANT_B):
        assert link.find(cold.cache, prompt, space)[1]  # at once
    assert not link.find(cold.cache, prompt, TENANT_A)[1]
    link.flush()
    cold.cache, is_done = link.find(cold.cache, prompt, TENANT_A)
    assert is_done and cold.lookup(prompt, TENANT_A) == 8
    again, report = link.load(kv.init(CONFIG))
    assert report.num_loaded == 2 and not report.reasons and link.close()


def test_a_store_of_one_namespace_counts_no_links_of_others(store):
    """Blocks of windows that others get and lose, while the queue is full."""
    config = dataclasses.replace(CONFIG, layers=[kv.SlidingWindow(1, 5, window=6), kv.FullAttention(1, 5)])
    user, link = PrefixUser(config), attached(store, max_queued=1, namespace=TENANT_A)
    user.start(0, user.new_text(1, 9), TENANT_A)
    link.save(user.cache)
    assert store.is_asked.wait(60)
    user.start(1, user.new_text(2, 9), TENANT_A)
    link.save(user.cache)  # waits in the queue
    user.start(2, user.new_text(3, 17), TENANT_B)
    assert not link.save(user.cache).reasons and link.num_dropped == 0
    store.may_answer.set()
    assert link.close()


@pytest.mark.slow
def test_a_manager_goes_on_where_another_ended():
    def step_fn(cache, batch):
        return testing.write_tokens(cache, batch.tokens, batch.step), batch.tokens.sum()

    store, prompt = kv.tiers.MemoryStore(), list(range(5, 22))
    for num_found in (0, 16):
        with kv.CacheManager(CONFIG, store=attached(store)) as manager:
            assert manager.find_stored(prompt) in (True, False)
            num_cached = manager.allocate_request("a", prompt)
            assert num_cached == num_found
            batch = manager.append_tokens("a", prompt[num_cached:])
            manager.run(step_fn, batch)
            manager.commit_tokens("a")
    # What another process saved meanwhile is found when it is asked for.
    other = served((7, 13))
    with kv.CacheManager(CONFIG, store=attached(store)) as manager:
        assert kv.tiers.save(other.cache, store, weights="w").num_saved == 3
        new = other.new_text(7, 13)
        while not manager.find_stored(np.array(new)):
            threading.Event().wait(0.01)
        assert manager.allocate_request("b", new) == 12
    assert kv.CacheManager(CONFIG).find_stored(prompt)


def test_arguments_that_are_refused(store):
    with pytest.raises(TypeError, match="store is a dict, expected one with contains, get, put"):
        attached({})
    with pytest.raises((TypeError, ValueError), match="max_queued"):
        attached(store, max_queued=0)
    with pytest.raises(TypeError, match="weights is '', expected a digest"):
        kv.tiers.AttachedStore(store, weights="")
