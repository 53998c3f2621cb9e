"""`CacheManager` runs steps: those that fail, those that come from many threads, and what outlives them."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.manager.manager_user import (
    BOTH,
    CONFIG,
    PLAIN,
    check,
    fill,
    new_manager,
    start,
    unchanged,
    write_step,
)

# --- steps ---


@pytest.mark.slow
def test_a_step_that_cannot_be_traced_loses_nothing():
    manager = new_manager()
    start(manager, "a", [1, 2, 3])

    def wrong_shape(cache):
        return kv.append(
            cache, jnp.ones((2, 4, 1, 1, 6)), jnp.ones((2, 4, 1, 1, 6)), [1, 0, 0, 0], tokens=[[1]] * 4
        )

    def calls_back(cache):
        manager.free_request("a")
        return cache, None

    for error, match, step_fn in (
        (ValueError, "k has shape", wrong_shape),
        (ZeroDivisionError, "division", lambda cache: (cache, 1 / 0)),
        (TypeError, "expected a tuple", lambda cache: cache),
        (TypeError, "expected a tuple", lambda cache: (None, cache)),
        (
            TypeError,
            r"\] as Cache\.control",
            lambda cache: (jax.tree.map(lambda x: x[None], cache), None),
        ),
        (kv.manager.ManagerBusy, "free_request was called by a step function", calls_back),
        (kv.manager.ManagerBusy, "close was called", lambda cache: (cache, manager.close())),
    ):
        unchanged(manager, error, lambda step_fn=step_fn: manager.run(step_fn), match)
    assert fill(manager, {"a": [4]}).tolist() == [1]
    check(manager, {"a": [1, 2, 3, 4]})


@pytest.mark.slow
def test_a_request_whose_row_was_ended_can_be_freed_or_replaced():
    """A step function must not end rows; when one did, its requests are told of and can go."""
    manager = new_manager()
    for name in ("a", "b", "c"):
        start(manager, name, [1, 2, 3])
    manager.run(lambda cache: kv.free(cache, jnp.array([0, 2])))
    for call in (
        lambda: manager.request("a"),
        lambda: manager.num_computed_tokens("a"),
        lambda: manager.block_table("a"),
        lambda: manager.slot_for("a", 0),
        lambda: manager.append_tokens("a", [4]),
        lambda: manager.commit_tokens("a"),
        lambda: manager.fork_request("a", "d"),
        lambda: manager.truncate_request("a", 1),
    ):
        error = unchanged(manager, kv.manager.OutOfSync, call, "row of request 'a'.*free_request ends")
        assert error.request_id == "a"
    manager.free_request("a")
    assert manager.request_ids() == ["b", "c"]
    assert manager.allocate_request("c", [4, 5], replace=True) == 0
    fill(manager, {"c": [4, 5]})
    check(manager, {"b": [1, 2, 3], "c": [4, 5]})


@pytest.mark.slow
def test_a_row_that_a_step_function_started_is_nobodys():
    manager = new_manager(PLAIN)
    start(manager, "a", [1, 2, 3])
    manager.run(lambda cache: kv.allocate(cache, jnp.array([2]), jnp.array([5])))
    for call in (
        lambda: manager.select_requests_to_preempt("longest", 2),
        lambda: manager.preempt_to_utilization(0.0),
    ):
        error = unchanged(
            manager, kv.manager.OutOfSync, call, "row 2 is active and no request has it, expected"
        )
        assert error.request_id is None
    assert manager.preempt_to_utilization(0.5) == []
    manager.run(lambda cache: kv.free(cache, jnp.array([2])))
    manager.run(lambda cache: kv.allocate(cache, jnp.array([1]), jnp.array([1])))
    message = "row 1 is active and no request has it, expected"
    unchanged(manager, kv.manager.OutOfSync, lambda: manager.fork_request("a", "b"), message)
    unchanged(manager, kv.manager.OutOfSync, lambda: manager.allocate_request("b", [1]), message)
    manager.run(lambda cache: kv.free(cache, jnp.array([1])))
    assert manager.preempt_to_utilization(0.0) == ["a"]


CALLS = {
    "allocate_request": ("b", [1]),
    "append_tokens": ("a", [1]),
    "find_stored": ([1],),
    "commit_tokens": ("a",),
    "fork_request": ("a", "b"),
    "truncate_request": ("a", 1),
    "free_request": ("a",),
    "run": (lambda cache: (cache, None),),
    "query": (kv.check_invariants,),
    "request_ids": (),
    "request": ("a",),
    "num_computed_tokens": ("a",),
    "block_table": ("a",),
    "slot_for": ("a", 0),
    "usage": (),
    "hit_rate": (),
    "stats": (),
    "evict": (1,),
    "select_requests_to_preempt": ("lru", 1),
    "preempt_to_utilization": (0.5,),
    "reset_prefix_cache": (),
    "close": (),
}


@pytest.mark.slow
def test_every_call_takes_its_turn():
    """None works within a step, and none but `close` after the end."""
    methods = {name for name in dir(kv.CacheManager) if not name.startswith("_")}
    assert CALLS.keys() == methods
    manager = new_manager()
    start(manager, "a", [1, 2, 3])
    for name, arguments in CALLS.items():

        def step_fn(cache, name=name, arguments=arguments):
            return cache, getattr(manager, name)(*arguments)

        unchanged(
            manager,
            kv.manager.ManagerBusy,
            lambda step_fn=step_fn: manager.run(step_fn),
            f"{name} was called",
        )
    manager.close()
    for name, arguments in CALLS.items():
        if name != "close":
            with pytest.raises(kv.manager.ManagerClosed, match=f"{name} was called"):
                getattr(manager, name)(*arguments)
    manager.close()


@pytest.mark.parametrize("where", ["storage", "control alone"])
def test_a_step_that_fails_on_the_device_is_told_and_the_manager_starts_over(where):
    hash_key = jnp.array([5, 6], jnp.uint32)
    cache = kv.init(CONFIG, storage=where == "storage")
    cache = dataclasses.replace(cache, control=dataclasses.replace(cache.control, hash_key=hash_key))
    manager = new_manager(cache)
    manager.allocate_request("a", [1, 2, 3])
    manager.allocate_request("b", [1])

    def fail(x):
        raise RuntimeError("the device is on fire")

    def step_fn(cache):
        x = jax.pure_callback(fail, jax.ShapeDtypeStruct((4,), np.int32), cache.context_len)
        control = dataclasses.replace(cache.control, context_len=x)
        return dataclasses.replace(cache, control=control), x

    with pytest.raises(kv.manager.CacheLost, match="2 requests are lost") as caught:
        manager.run(step_fn)
        manager.num_computed_tokens("a")
    assert caught.value.request_ids == ["a", "b"]
    assert "on fire" in str(caught.value.__cause__)
    assert manager.request_ids() == [] and manager.query(kv.check_invariants) == []
    assert manager.query(lambda cache: cache.control.hash_key.tolist()) == [5, 6]
    assert manager.allocate_request("a", [1, 2, 3]) == 0
    assert manager.stats()["num_allocations"] >= 1
    assert len(manager.query(lambda cache: cache.pools)) == (1 if where == "storage" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["run", "allocate_request", "stats", "evict"])
def test_a_cache_donated_elsewhere_is_told_and_the_manager_starts_over(call):
    cache = kv.init(CONFIG)
    manager = new_manager(cache)
    kv.donate(lambda cache: kv.evict(cache, 1))(cache)
    arguments = {**CALLS, "run": (lambda cache: (cache, 1),)}[call]
    with pytest.raises((kv.manager.CacheError, RuntimeError)) as caught:
        getattr(manager, call)(*arguments)
    assert isinstance(caught.value, kv.manager.CacheLost)
    assert "another caller" in str(caught.value) and caught.value.request_ids == []
    start(manager, "a", [1, 2, 3])
    check(manager, {"a": [1, 2, 3]})


def test_a_result_outlives_the_next_step():
    manager = new_manager()
    start(manager, "a", [1, 2, 3])
    lengths, counters, pool = manager.run(lambda c: (c, (c.context_len, c.control.counters, c.pools[0].k)))
    batch = manager.append_tokens("a", [4])
    for _ in range(2):
        manager.run(write_step, batch)
    fill(manager, {"a": [4]})
    assert lengths.tolist() == [3, 0, 0, 0] and counters[0] == 1 and pool.shape == (24, 1, 4, 5)
    assert batch.step.context_len.tolist() == [4]


def test_the_pools_are_updated_in_place():
    manager = new_manager()
    pointers = manager.query(lambda cache: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.pools)])
    start(manager, "a", [1, 2, 3, 4, 5])
    manager.fork_request("a", "b")
    fill(manager, {"a": [6], "b": [7]})
    manager.free_request("a")
    manager.evict(1)
    assert pointers == manager.query(
        lambda cache: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.pools)]
    )


@pytest.mark.slow
def test_batches_have_the_rows_of_the_call_and_the_widths_of_the_manager():
    manager = kv.CacheManager(CONFIG, widths=jnp.array([24, 3]).tolist() + [np.int32(3)])
    manager.allocate_request("a", [1] * 9)
    manager.allocate_request("b", [2] * 9)
    one = manager.append_tokens("b", [2, 2])
    assert one.tokens.tolist() == [[2, 2, 0]] and one.step.seq_ids.tolist() == [1]
    two = manager.append_tokens({"b": [2], "a": np.array([1] * 4)})
    assert two.tokens.shape == (4, 24) and two.step.seq_ids.tolist() == [1, 0, 4, 4]
    assert two.step.query_len.tolist() == [1, 4, 0, 0] and two.step.context_len.tolist() == [3, 4, 0, 0]


@pytest.mark.quick_cases("prefix caching")
@BOTH
def test_threads_take_turns(config):
    """Each thread lives its own requests through; whatever the order, every one reads its own tokens."""
    manager = new_manager(config)
    start(manager, "warm", [1, 2, 3, 4, 5])
    manager.free_request("warm")
    failures, done = [], []
    stop = threading.Event()

    def serve(name):
        rng = np.random.default_rng(name)
        try:
            for i in range(12):
                # At most 12 tokens: four such requests fill the 12 blocks.
                text = [1, 2, 3, 4, 5, 6, 7][: rng.integers(1, 8)] + rng.integers(9, 99, 5).tolist()
                request_id = (name, i)
                num_cached = manager.allocate_request(request_id, text)
                try:
                    manager.allocate_request(request_id, text)
                    failures.append("allocated twice")
                except kv.manager.DuplicateRequest:
                    pass
                pieces = [text[num_cached:-2], text[-2:]]
                for piece in pieces:
                    fill(manager, {request_id: piece})
                if config.enable_prefix_caching:
                    manager.commit_tokens(request_id)
                row = manager.request(request_id).seq_id
                found = manager.query(testing.check_tokens, {row: text})
                if found or manager.num_computed_tokens(request_id) != len(text):
                    failures.append((request_id, found))
                manager.free_request(request_id)
            done.append(name)
        except Exception as error:
            failures.append(repr(error))

    def watch():
        try:
            while not stop.is_set():
                stats = manager.stats()
                if stats["num_requests"] != stats["num_active_seqs"]:
                    failures.append(stats)
                repr(manager), manager.request_ids(), manager.usage()
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=functools.partial(serve, i)) for i in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert failures == [] and sorted(done) == [0, 1, 2, 3]
    check(manager, {})
    assert manager.stats()["num_blocks_used"] == 0


def test_what_cannot_be_run_or_asked_is_named():
    manager = new_manager()

    class Unhashable:
        __hash__ = None

        def __call__(self, cache):
            return cache, 1

    for step_fn in (Unhashable(), 3):
        with pytest.raises(TypeError, match="step_fn is .*, expected a function"):
            manager.run(step_fn)
    with pytest.raises(TypeError, match="question is None, expected a function of the cache"):
        manager.query(None)
    with pytest.raises(TypeError, match="operation is 3, expected a function"):
        manager.preempt_to_utilization(0.5, operation=3)
    with pytest.raises(TypeError, match="widths is 4, expected a list"):
        kv.CacheManager(CONFIG, widths=4)
    for call in (
        manager.free_request,
        manager.request,
        manager.num_computed_tokens,
        manager.commit_tokens,
        lambda request_id: manager.append_tokens(request_id, [1]),
    ):
        with pytest.raises(TypeError, match=r"request_id is \[1\] .*expected one that can be hashed"):
            call([1])
    with pytest.raises(TypeError, match=r"request_id is \[1\] .*expected one that can be hashed"):
        manager.allocate_request([1], [1, 2])

    manager.allocate_request("a", [1, 2])
    with pytest.raises(kv.manager.TooLong, match=f"'a' has 0 tokens, .* got {10**30}") as error:
        manager.truncate_request("a", 10**30)
    assert error.value.needed == 10**30
    for option in ("reuse", "replace"):
        with pytest.raises(TypeError, match=f"{option} is 'no', expected True or False"):
            manager.allocate_request("a", [1, 2], **{"replace": True, option: "no"})
    assert manager.request_ids() == ["a"]

    def with_another_config(cache):
        return dataclasses.replace(cache, config=dataclasses.replace(CONFIG, tile_tokens=64)), 1

    with pytest.raises(TypeError, match="step_fn returned a cache of another config"):
        manager.run(with_another_config)
    assert manager.query(lambda cache: cache.config) == CONFIG


def test_a_question_runs_no_step():
    manager = new_manager()
    manager.allocate_request("a", [1, 2, 3])

    def question(cache):
        with pytest.raises(kv.manager.ManagerBusy, match="run was called by a question"):
            manager.run(lambda cache: (cache, 1))
        return np.asarray(cache.is_active).sum(), manager.request_ids()

    assert manager.query(question) == (1, ["a"])
    assert manager.run(lambda cache: (cache, 7)) == 7


# --- batches that come too late ---


def end_by_replacing(manager):
    manager.allocate_request("a", [9], replace=True)


def commit_next_to_a_twin(manager):
    """The full block of "a" is published already, by a request of the same tokens."""
    start(manager, "b", [1, 2, 3, 4, 5])
    manager.commit_tokens("a")


def within_a_step(change):
    """What a step function may do to the row of "a", which is the first."""
    return lambda manager: manager.run(lambda cache: change(cache)[:2])


CHANGES = {
    "free": lambda manager: manager.free_request("a"),
    "replace": end_by_replacing,
    "truncate": lambda manager: manager.truncate_request("a", 4),
    "evict": lambda manager: manager.preempt_to_utilization(0.0),
    "commit": commit_next_to_a_twin,
    "truncate in a step": within_a_step(lambda cache: kv.truncate(cache, np.array([0]), np.array([4]))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_batch_whose_slots_may_be_anothers_is_refused(change):
    manager = new_manager()
    for name in ("a", "idle"):
        manager.allocate_request(name, [1, 2, 3, 4, 5])
    batch = manager.append_tokens({"a": [1, 2, 3, 4, 5], "idle": []})
    change(manager)
    if "idle" in manager:
        manager.free_request("idle")
    start(manager, "c", [7, 8, 9])
    for args in ((batch,), ({"deep": [batch.step]},)):
        run = functools.partial(manager.run, lambda cache, *args: (cache, None), *args)
        error = unchanged(manager, kv.manager.StaleBatch, run, "the batch is stale: request 'a' has ended")
        assert error.request_id == "a"
    rows = {manager.request("c").seq_id: [7, 8, 9]}
    assert manager.query(testing.check_tokens, rows) == []


def test_a_batch_of_another_manager_is_refused():
    """Of one that still is, and of one that is gone."""
    manager, other = new_manager(), new_manager()
    start(manager, "a", [1, 2, 3])
    other.allocate_request("a", [7, 8, 9])
    batch = other.append_tokens("a", [7, 8, 9])
    run = functools.partial(manager.run, write_step, batch)
    error = unchanged(
        manager, kv.manager.StaleBatch, run, "made by another manager, expected one of this manager's"
    )
    assert error.request_id is None
    other.run(write_step, batch)
    check(other, {"a": [7, 8, 9]})
    other.close()
    del other
    unchanged(manager, kv.manager.StaleBatch, run, "made by another manager")
    check(manager, {"a": [1, 2, 3]})


def test_a_batch_of_tokens_that_a_step_took_back_is_refused():
    manager = new_manager()
    manager.allocate_request("a", [])
    batch = manager.append_tokens("a", [1, 2, 3])
    manager.run(write_step, batch)
    within_a_step(lambda cache: kv.truncate(cache, np.array([0]), np.array([2])))(manager)
    fill(manager, {"a": [9]})
    unchanged(manager, kv.manager.StaleBatch, lambda: manager.run(write_step, batch), "request 'a'")
    check(manager, {"a": [1, 2, 9]})


@pytest.mark.slow
def test_a_batch_whose_blocks_left_a_window_is_refused():
    window = kv.SlidingWindow(1, 5, window=4, block_size=2)
    config = kv.CacheConfig([window], num_blocks=12, max_seqs=2, max_seq_len=40, max_query_len=8)
    manager = kv.CacheManager(config)
    manager.allocate_request("a", [])
    early = manager.append_tokens("a", list(range(8)))
    manager.append_tokens("a", list(range(8, 16)))
    unchanged(manager, kv.manager.StaleBatch, lambda: manager.run(write_step, early), "request 'a'")


def test_batches_may_be_run_late_and_twice():
    """Where others changed, or its own request in ways that move nothing."""
    manager = new_manager()
    text = list(range(1, 10))
    for name in "ab":
        manager.allocate_request(name, text if name == "a" else [50])
    first, second = (manager.append_tokens("a", part) for part in (text[:3], text[3:]))
    other, mixed = manager.append_tokens({"b": [50]}), manager.append_tokens({"b": [], "a": []})
    manager.free_request("b")
    for batch in (second, first, first, mixed):
        manager.run(write_step, batch)
    manager.commit_tokens("a")
    manager.run(write_step, second)
    manager.truncate_request("a", 9)
    manager.fork_request("a", "c")
    manager.run(write_step, second)
    check(manager, {"a": text, "c": text})
    unchanged(manager, kv.manager.StaleBatch, lambda: manager.run(write_step, other), "request 'b'")
