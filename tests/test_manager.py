"""`CacheManager`: requests by id, errors that change nothing, threads, steps that fail, and its figures."""

import dataclasses
import functools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.helpers import leaf_bytes, says

CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 5)] * 2,
    num_blocks=12,
    block_size=4,
    max_seqs=4,
    max_seq_len=40,
    enable_prefix_caching=True,
)
PLAIN = dataclasses.replace(CONFIG, enable_prefix_caching=False)
BOTH = pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["prefix caching", "plain"])


def write_step(cache, batch):
    """Stands for a model: the tokens are their own keys and values."""
    return testing.write_tokens(cache, batch.tokens, batch.step), batch.step.query_len


def fill(manager, new):
    """Appends and writes the tokens of some requests."""
    return manager.run(write_step, manager.append_tokens(new))


def start(manager, request_id, text, **options):
    """A request with its whole prompt written and, where that is possible, committed. Returns its hit."""
    num_cached = manager.allocate_request(request_id, text, **options)
    fill(manager, {request_id: text[num_cached:]})
    if manager.query(lambda cache: cache.config.enable_prefix_caching):
        manager.commit_tokens(request_id)
    return num_cached


def check(manager, texts):
    """The manager holds exactly these texts."""
    assert sorted(manager.request_ids(), key=repr) == sorted(texts, key=repr)
    rows = {manager.request(name).seq_id: text for name, text in texts.items()}
    assert manager.query(kv.check_invariants) == []
    assert manager.query(testing.check_tokens, rows) == []
    for name, text in texts.items():
        assert manager.num_computed_tokens(name) == len(text)


def state_of(manager):
    """All that a failed call must leave alone."""
    return manager.query(leaf_bytes), manager.request_ids(), manager.hit_rate()


def unchanged(manager, error, call, match=None):
    """The call raises the error, which is returned, and nothing is different."""
    before = state_of(manager)
    with pytest.raises(error, match=match) as caught:
        call()
    assert state_of(manager) == before
    return caught.value


@BOTH
def test_the_life_of_requests(config):
    with kv.CacheManager(config) as manager:
        text = list(range(1, 11))
        assert start(manager, "a", text) == 0
        second = text[:9] + [50]
        assert start(manager, ("b", 2), second) == (8 if config.enable_prefix_caching else 0)
        manager.fork_request("a", "c")
        fill(manager, {"a": [20], "c": [30, 31], ("b", 2): []})
        check(manager, {"a": [*text, 20], "c": [*text, 30, 31], ("b", 2): second})
        manager.truncate_request("c", 5)
        manager.free_request("a")
        assert manager.request_ids() == [("b", 2), "c"] and "a" not in manager and "c" in manager
        assert start(manager, "a", [7]) == 0
        check(manager, {"c": text[:5], ("b", 2): second, "a": [7]})
        assert manager.request_ids() == [("b", 2), "c", "a"]


def test_what_is_asked_is_read_from_the_cache():
    manager = kv.CacheManager(CONFIG)
    tenant = kv.namespace(tenant="a")
    start(manager, "x", list(range(9)), priority=3, namespace=tenant)
    request = manager.request("x")
    assert (request.request_id, request.context_len, request.num_blocks) == ("x", 9, (3,))
    assert (request.num_published, request.priority, request.namespace) == (2, 3, tuple(tenant.tolist()))
    table = manager.block_table("x")
    assert table.dtype == np.int32 and len(set(table.tolist())) == 3
    before = state_of(manager)
    assert [manager.slot_for("x", i) for i in range(9)] == [4 * table[i // 4] + i % 4 for i in range(9)]
    assert state_of(manager) == before
    for position in (-1, 9, 11):
        with pytest.raises(IndexError, match=says("position", position, 9)):
            manager.slot_for("x", position)
    assert manager.usage() == pytest.approx(3 / 12)
    # A step that extends on its own is seen: the manager keeps no lengths.
    manager.run(
        lambda cache: kv.append(cache, *[jnp.ones((2, 4, 1, 1, 5))] * 2, [1] + [0] * 3, tokens=[[5]] * 4)
    )
    assert manager.num_computed_tokens("x") == 10


def test_blocks_of_windows_have_holes():
    window = kv.SlidingWindow(1, 5, window=4, num_sink_tokens=2, block_size=2)
    config = kv.CacheConfig(
        [window], num_blocks=20, block_size=2, max_seqs=2, max_seq_len=40, max_query_len=4
    )
    manager = kv.CacheManager(config)
    manager.allocate_request("x", list(range(16)))
    for i in range(0, 16, 4):
        fill(manager, {"x": list(range(i, i + 4))})
    fill(manager, {"x": [16]})
    entries = manager.block_table("x")
    assert len(entries) == 9 and entries[0] < 20 and (entries == 20).any() and entries[-1] < 20
    assert manager.slot_for("x", 16) == entries[8] * 2
    with pytest.raises(IndexError, match="left the window"):
        manager.slot_for("x", int(np.flatnonzero(entries == 20)[0]) * 2)
    with pytest.raises(kv.WindowLost, match="raise max_rollback"):
        manager.truncate_request("x", 3)


# --- errors ---


def test_typed_errors_change_nothing():
    manager = kv.CacheManager(CONFIG)
    start(manager, "a", list(range(1, 21)))
    start(manager, "b", list(range(31, 47)))
    for call in (
        lambda: manager.append_tokens("z", [1]),
        lambda: manager.append_tokens({"a": [1], "z": [1]}),
        lambda: manager.commit_tokens("z"),
        lambda: manager.commit_tokens({"a": None, "z": None}),
        lambda: manager.fork_request("z", "y"),
        lambda: manager.truncate_request("z", 0),
        lambda: manager.free_request("z"),
        lambda: manager.request("z"),
        lambda: manager.num_computed_tokens("z"),
        lambda: manager.block_table("z"),
        lambda: manager.slot_for("z", 0),
    ):
        assert unchanged(manager, kv.UnknownRequest, call, "no request 'z'").request_id == "z"
    for call in (lambda: manager.allocate_request("a", [1]), lambda: manager.fork_request("b", "a")):
        assert unchanged(manager, kv.DuplicateRequest, call, "'a' exists").request_id == "a"

    # 12 blocks: 5 and 4 are held, 3 are free.
    error = unchanged(manager, kv.OutOfBlocks, lambda: manager.allocate_request("c", [9] * 13), says(4, 3))
    assert (error.request_id, error.needed, error.available) == ("c", 4, 3)
    # Blocks that others hold are shared, not taken.
    prompt = [*range(1, 21), *[9] * 16]
    error = unchanged(manager, kv.OutOfBlocks, lambda: manager.allocate_request("c", prompt), says(4, 3))
    assert (error.needed, error.available) == (4, 3)
    error = unchanged(manager, kv.OutOfBlocks, lambda: manager.append_tokens({"a": [1] * 8, "b": [1] * 8}))
    assert (error.needed, error.available) == (4, 3) and error.request_id == "b"

    error = unchanged(manager, kv.TooLong, lambda: manager.allocate_request("c", [1] * 41), says(41, 40))
    assert (error.needed, error.available) == (41, 40)
    error = unchanged(
        manager, kv.TooLong, lambda: manager.append_tokens({"b": [1], "a": [1] * 21}), says(41, 40)
    )
    assert (error.request_id, error.needed, error.available) == ("a", 41, 40)
    error = unchanged(manager, kv.TooLong, lambda: manager.append_tokens("a", [1] * 41), "in one call")
    error = unchanged(manager, kv.TooLong, lambda: manager.truncate_request("b", 17), says(16, 17))
    assert (error.needed, error.available) == (17, 16)
    manager.fork_request("a", "c"), manager.fork_request("a", "d")
    for call in (lambda: manager.allocate_request("e", [1]), lambda: manager.fork_request("a", "e")):
        error = unchanged(manager, kv.OutOfRows, call, says("max_seqs", 4))
        assert (error.needed, error.available) == (1, 0)
    for name in ("OutOfBlocks", "OutOfRows", "TooLong", "UnknownRequest", "DuplicateRequest", "WindowLost"):
        assert issubclass(getattr(kv, name), kv.CacheError)


def test_absurd_arguments_change_nothing():
    manager = kv.CacheManager(CONFIG)
    start(manager, "a", [1, 2, 3])
    for error, match, call in (
        (TypeError, "integers", lambda: manager.allocate_request("b", [1.5])),
        (ValueError, "one sequence", lambda: manager.allocate_request("b", [[1, 2]])),
        (ValueError, "uint32", lambda: manager.allocate_request("b", [1], namespace=[1, 2, 3, 4])),
        (TypeError, "unhashable", lambda: manager.allocate_request(["b"], [1])),
        (TypeError, "a request id and its token_ids", lambda: manager.append_tokens("a")),
        (TypeError, "a request id and its token_ids", lambda: manager.append_tokens({"a": [1]}, [1])),
        (ValueError, "at least one", lambda: manager.append_tokens({})),
        (ValueError, "at least one", lambda: manager.commit_tokens({})),
        (ValueError, "at least 0", lambda: manager.commit_tokens("a", -1)),
        (ValueError, "at least 0", lambda: manager.truncate_request("a", -1)),
        (ValueError, "at least 0", lambda: manager.evict(-1)),
        (TypeError, "expected a function", lambda: manager.run(3)),
    ):
        unchanged(manager, error, call, match)
    with pytest.raises(ValueError, match="without prefix caching"):
        plain = kv.CacheManager(PLAIN)
        plain.allocate_request("a", [1])
        plain.commit_tokens("a")
    with pytest.raises(TypeError, match="expected a CacheConfig or a Cache"):
        kv.CacheManager(3)
    for widths in ([], [0], [41]):
        with pytest.raises(ValueError, match="widths"):
            kv.CacheManager(CONFIG, widths=widths)


def test_replace_ends_the_old_request_only_if_the_new_one_fits():
    manager = kv.CacheManager(CONFIG)
    text = list(range(1, 30))
    start(manager, "a", text)
    start(manager, "b", [40] * 16)
    error = unchanged(manager, kv.OutOfBlocks, lambda: manager.allocate_request("a", [3] * 33, replace=True))
    assert (error.needed, error.available) == (9, 8)
    # What the old one published is found by the new one.
    assert start(manager, "a", [*text[:20], 7], replace=True) == 20
    check(manager, {"a": [*text[:20], 7], "b": [40] * 16})
    assert start(manager, "c", [5], replace=True) == 0
    assert manager.request_ids() == ["b", "a", "c"]


# --- steps ---


def test_a_step_that_cannot_be_traced_loses_nothing():
    manager = kv.CacheManager(CONFIG)
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
        (TypeError, "other shapes or dtypes", lambda cache: (jax.tree.map(lambda x: x[None], cache), None)),
        (kv.ManagerBusy, "free_request was called by a step function", calls_back),
        (kv.ManagerBusy, "close was called", lambda cache: (cache, manager.close())),
    ):
        unchanged(manager, error, lambda step_fn=step_fn: manager.run(step_fn), match)
    assert fill(manager, {"a": [4]}).tolist() == [1]
    check(manager, {"a": [1, 2, 3, 4]})


@pytest.mark.parametrize("where", ["storage", "control alone"])
def test_a_step_that_fails_on_the_device_is_told_and_the_manager_starts_over(where):
    hash_key = jnp.array([5, 6], jnp.uint32)
    cache = kv.init(CONFIG, storage=where == "storage")
    cache = dataclasses.replace(cache, control=dataclasses.replace(cache.control, hash_key=hash_key))
    manager = kv.CacheManager(cache)
    manager.allocate_request("a", [1, 2, 3])
    manager.allocate_request("b", [1])

    def fail(x):
        raise RuntimeError("the device is on fire")

    def step_fn(cache):
        x = jax.pure_callback(fail, jax.ShapeDtypeStruct((4,), np.int32), cache.context_len)
        control = dataclasses.replace(cache.control, context_len=x)
        return dataclasses.replace(cache, control=control), x

    with pytest.raises(kv.CacheLost, match="2 requests are lost") as caught:
        manager.run(step_fn)
        manager.num_computed_tokens("a")
    assert caught.value.request_ids == ["a", "b"]
    assert "on fire" in str(caught.value.__cause__)
    assert manager.request_ids() == [] and manager.query(kv.check_invariants) == []
    assert manager.query(lambda cache: cache.control.hash_key.tolist()) == [5, 6]
    assert manager.allocate_request("a", [1, 2, 3]) == 0
    assert manager.stats()["num_allocations"] >= 1
    assert len(manager.query(lambda cache: cache.pools)) == (1 if where == "storage" else 0)


def test_a_result_outlives_the_next_step():
    manager = kv.CacheManager(CONFIG)
    start(manager, "a", [1, 2, 3])
    lengths, counters, pool = manager.run(lambda c: (c, (c.context_len, c.control.counters, c.pools[0].k)))
    batch = manager.append_tokens("a", [4])
    for _ in range(2):
        manager.run(write_step, batch)
    fill(manager, {"a": [4]})
    assert lengths.tolist() == [3, 0, 0, 0] and counters[0] == 1 and pool.shape == (24, 1, 4, 5)
    assert batch.step.context_len.tolist() == [4]


def test_the_pools_are_updated_in_place():
    manager = kv.CacheManager(CONFIG)
    pointers = manager.query(lambda cache: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.pools)])
    start(manager, "a", [1, 2, 3, 4, 5])
    manager.fork_request("a", "b")
    fill(manager, {"a": [6], "b": [7]})
    manager.free_request("a")
    manager.evict(1)
    assert pointers == manager.query(
        lambda cache: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.pools)]
    )


def test_batches_have_the_rows_of_the_call_and_the_widths_of_the_manager():
    manager = kv.CacheManager(CONFIG, widths=[3, 24])
    manager.allocate_request("a", [1] * 9)
    manager.allocate_request("b", [2] * 9)
    one = manager.append_tokens("b", [2, 2])
    assert one.tokens.tolist() == [[2, 2, 0]] and one.step.seq_ids.tolist() == [1]
    two = manager.append_tokens({"b": [2], "a": np.array([1] * 4)})
    assert two.tokens.shape == (4, 24) and two.step.seq_ids.tolist() == [1, 0, 4, 4]
    assert two.step.query_len.tolist() == [1, 4, 0, 0] and two.step.context_len.tolist() == [3, 4, 0, 0]


# --- figures ---


def test_no_query_yet_is_not_a_hit_rate_of_zero():
    manager = kv.CacheManager(CONFIG)
    assert manager.hit_rate() is None and manager.stats()["hit_rate"] is None
    manager.allocate_request("a", [1] * 5, reuse=False)
    assert manager.hit_rate() is None
    manager.allocate_request("b", [1] * 5)
    assert manager.hit_rate() == 0.0
    fill(manager, {"b": [1] * 5})
    manager.commit_tokens("b")
    assert manager.allocate_request("c", [1] * 5) == 4
    assert manager.hit_rate() == 4 / 10
    manager.free_request("b")
    for i in range(999):  # Only the last 1,000 requests count: the miss falls out.
        manager.allocate_request("b", [1] * 5)
        manager.free_request("b")
        assert manager.hit_rate() == (4 * (i + 2)) / (5 * (i + 3) if i < 998 else 5 * 1000)
    plain = kv.CacheManager(PLAIN)
    plain.allocate_request("a", [1])
    assert plain.hit_rate() is None


def test_counts_go_on_where_the_cache_wraps():
    cache = kv.init(CONFIG)
    control = dataclasses.replace(cache.control, counters=jnp.full_like(cache.control.counters, 2**32 - 2))
    manager = kv.CacheManager(dataclasses.replace(cache, control=control))
    assert manager.stats()["num_allocations"] == 2**32 - 2
    for i in range(3):
        manager.allocate_request(i, [1])
    stats = manager.stats()
    assert stats["num_allocations"] == 2**32 + 1 and stats["num_frees"] == 2**32 - 2
    assert (stats["num_requests"], stats["num_active_seqs"], stats["usage"]) == (3, 3, 0.25)
    assert set(stats) == {field.name for field in dataclasses.fields(kv.Stats)} | {
        "num_requests", "usage", "hit_rate"
    }  # fmt: skip
    assert all(type(value) in (int, float) for value in stats.values())


def test_one_line_is_logged_per_admission(caplog):
    manager = kv.CacheManager(CONFIG)
    with caplog.at_level(logging.INFO, logger="kvcache_jax"):
        caplog.clear()
        start(manager, "a", [1] * 6)
        manager.allocate_request("b", [1] * 6)
        unchanged(manager, kv.DuplicateRequest, lambda: manager.allocate_request("b", [1] * 6))
    assert [record.getMessage() for record in caplog.records] == [
        "allocate_request: request='a' prompt_tokens=6 cached_tokens=0 new_tokens=6 blocks=2",
        "allocate_request: request='b' prompt_tokens=6 cached_tokens=4 new_tokens=2 blocks=2",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_few_programs_serve_two_hundred_prompt_lengths():
    layers = [kv.FullAttention(1, 5)]
    for max_seq_len, lengths in ((256, range(1, 201)), (8192, range(1, 8001, 40))):
        config = kv.CacheConfig(
            layers, block_size=16, num_blocks=max_seq_len // 8, max_seqs=3, max_seq_len=max_seq_len,
            enable_prefix_caching=True,
        )  # fmt: skip
        manager = kv.CacheManager(config)
        compiled = []

        def listener(name, *_, compiled=compiled, **__):
            compiled.append(name)

        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            for i, length in enumerate(lengths):
                num_cached = manager.allocate_request(i, [i] * length)
                manager.append_tokens(i, [i] * (length - num_cached))
                manager.commit_tokens(i)
                if i:
                    manager.free_request(i - 1)
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        num_programs = sum("backend_compile" in name for name in compiled)
        assert 0 < num_programs <= 12, num_programs


# --- the prefix cache ---


def test_eviction_and_reset():
    manager = kv.CacheManager(CONFIG)
    start(manager, "a", list(range(9)))
    start(manager, "b", list(range(20, 29)))
    manager.free_request("a")
    assert manager.evict(0) == 0 and manager.evict(1) == 1
    assert manager.allocate_request("c", list(range(9))) == 4
    assert manager.reset_prefix_cache() == 3
    assert manager.evict(100) == 0
    assert manager.allocate_request("d", list(range(9))) == 0
    assert kv.CacheManager(PLAIN).evict(3) == kv.CacheManager(PLAIN).reset_prefix_cache() == 0


def test_drafts_and_namespaces():
    manager = kv.CacheManager(CONFIG)
    tenant = kv.namespace(tenant="a")
    manager.allocate_request("a", [1] * 6, namespace=tenant)
    fill(manager, {"a": [1] * 6 + [8, 8, 8]})
    manager.commit_tokens("a", final_len=6)
    assert manager.allocate_request("b", [1] * 6 + [8, 8, 8], namespace=tenant) == 4
    assert manager.allocate_request("c", [1] * 6) == 0
    manager.commit_tokens({"a": None, "b": None})
    assert manager.allocate_request("d", [1] * 6 + [8, 8, 8], namespace=tenant) == 8


# --- the whole ---


def test_a_restored_cache_still_hits():
    manager = kv.CacheManager(CONFIG)
    start(manager, "a", list(range(9)))
    with pytest.raises(ValueError, match="1 active rows, expected none"):
        manager.query(kv.CacheManager)
    manager.free_request("a")
    leaves, tree = jax.tree.flatten(manager.query(jax.device_get))
    manager.close()
    with kv.CacheManager(jax.tree.unflatten(tree, [jnp.asarray(x) for x in leaves])) as restored:
        assert start(restored, "b", list(range(9))) == 8
        check(restored, {"b": list(range(9))})


def test_closing():
    manager = kv.CacheManager(CONFIG)
    manager.allocate_request("a", [1])
    assert repr(manager).startswith("CacheManager(1 requests; Cache(1 groups")
    with manager as same:
        assert same is manager
    manager.close()
    assert repr(manager) == "CacheManager(0 requests; closed)"
    calls = (manager.request_ids, manager.stats, manager.usage, manager.hit_rate, manager.reset_prefix_cache)
    for call in (*calls, lambda: manager.run(write_step, 1), lambda: manager.allocate_request("a", [1]),
                 lambda: manager.__enter__().request("a")):  # fmt: skip
        with pytest.raises(kv.ManagerClosed, match="closed"):
            call()


@BOTH
def test_threads_take_turns(config):
    """Each thread lives its own requests through; whatever the order, every one reads its own tokens."""
    config = dataclasses.replace(config, max_seqs=6, num_blocks=60)
    manager = kv.CacheManager(config)
    start(manager, "warm", [1, 2, 3, 4, 5])
    manager.free_request("warm")
    failures, done = [], []
    stop = threading.Event()

    def serve(name):
        rng = np.random.default_rng(name)
        try:
            for i in range(12):
                text = [1, 2, 3, 4, 5, 6, 7, 8][: rng.integers(1, 9)] + rng.integers(9, 99, 5).tolist()
                request_id = (name, i)
                num_cached = manager.allocate_request(request_id, text)
                try:
                    manager.allocate_request(request_id, text)
                    failures.append("allocated twice")
                except kv.DuplicateRequest:
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
