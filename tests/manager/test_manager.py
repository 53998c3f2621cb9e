"""`CacheManager`: requests by id, errors that change nothing, and its figures."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.manager.manager_user import (
    BOTH,
    CONFIG,
    PLAIN,
    check,
    fill,
    new_manager,
    start,
    state_of,
    unchanged,
    write_step,
)
from tests.support.helpers import assert_same, compiled_programs, says


@pytest.mark.quick_cases("prefix caching")
@BOTH
def test_the_life_of_requests(config):
    with new_manager(config) as manager:
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
        assert start(manager, "a", [7, 8]) == 0
        check(manager, {"c": text[:5], ("b", 2): second, "a": [7, 8]})
        assert manager.request_ids() == [("b", 2), "c", "a"]


def test_what_is_asked_is_read_from_the_cache():
    manager = new_manager()
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
    manager = kv.CacheManager(config, widths=[4])
    manager.allocate_request("x", list(range(16)))
    for i in range(0, 16, 4):
        fill(manager, {"x": list(range(i, i + 4))})
    fill(manager, {"x": [16]})
    entries = manager.block_table("x")
    assert len(entries) == 9 and entries[0] < 20 and (entries == 20).any() and entries[-1] < 20
    assert manager.slot_for("x", 16) == entries[8] * 2
    with pytest.raises(IndexError, match="left the window"):
        manager.slot_for("x", int(np.flatnonzero(entries == 20)[0]) * 2)
    with pytest.raises(kv.manager.WindowLost, match="raise max_rollback"):
        manager.truncate_request("x", 3)


def test_a_token_without_a_state_has_no_slot_among_states():
    config = kv.CacheConfig([kv.Mamba2(1, 1, state_dim=1)], block_size=4, max_seqs=2, max_seq_len=16)
    manager = kv.CacheManager(config, widths=[6])
    manager.allocate_request("x", [1] * 6)
    manager.append_tokens("x", [1] * 6)
    assert manager.slot_for("x", 5, group=0) % 4 == 1 and len(manager.block_table("x", group=1)) == 1
    found = ""
    try:
        manager.slot_for("x", 5, group=1)
    except IndexError as error:
        found = str(error)
    assert found == "position 5 of request 'x' is in no block of group 1, Mamba2 points"


# --- errors ---


def test_typed_errors_change_nothing():
    manager = new_manager()
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
        assert unchanged(manager, kv.manager.UnknownRequest, call, "no request 'z'").request_id == "z"
    for call in (lambda: manager.allocate_request("a", [1]), lambda: manager.fork_request("b", "a")):
        assert unchanged(manager, kv.manager.DuplicateRequest, call, "'a' exists").request_id == "a"

    # 12 blocks: 5 and 4 are held, 3 are free.
    error = unchanged(
        manager, kv.manager.OutOfBlocks, lambda: manager.allocate_request("c", [9] * 13), says(4, 3)
    )
    assert (error.request_id, error.needed, error.available) == ("c", 4, 3)
    # Blocks that others hold are shared, not taken.
    prompt = [*range(1, 21), *[9] * 16]
    error = unchanged(
        manager, kv.manager.OutOfBlocks, lambda: manager.allocate_request("c", prompt), says(4, 3)
    )
    assert (error.needed, error.available) == (4, 3)
    error = unchanged(
        manager, kv.manager.OutOfBlocks, lambda: manager.append_tokens({"a": [1] * 8, "b": [1] * 8})
    )
    assert "request 'b' finds too few blocks of layer group 0: the call needs 4, and 3 are free" in str(error)
    assert (error.needed, error.available) == (4, 3) and error.request_id == "b"

    error = unchanged(
        manager, kv.manager.TooLong, lambda: manager.allocate_request("c", [1] * 41), says(41, 40)
    )
    assert (error.needed, error.available) == (41, 40)
    error = unchanged(
        manager, kv.manager.TooLong, lambda: manager.append_tokens({"b": [1], "a": [1] * 21}), says(41, 40)
    )
    assert (error.request_id, error.needed, error.available) == ("a", 41, 40)
    error = unchanged(
        manager, kv.manager.TooLong, lambda: manager.append_tokens("a", [1] * 41), "in one call"
    )
    error = unchanged(manager, kv.manager.TooLong, lambda: manager.truncate_request("b", 17), says(16, 17))
    assert (error.needed, error.available) == (17, 16)
    manager.fork_request("a", "c"), manager.fork_request("a", "d")
    for call in (lambda: manager.allocate_request("e", [1]), lambda: manager.fork_request("a", "e")):
        error = unchanged(manager, kv.manager.OutOfRows, call, says("max_seqs", 4))
        assert (error.needed, error.available) == (1, 0)
    for name in ("OutOfBlocks", "OutOfRows", "TooLong", "UnknownRequest", "DuplicateRequest", "WindowLost"):
        assert issubclass(getattr(kv.manager, name), kv.manager.CacheError)


def test_absurd_arguments_change_nothing():
    manager = new_manager()
    start(manager, "a", [1, 2, 3])
    for error, match, call in (
        (TypeError, "expected integer", lambda: manager.allocate_request("b", [1.5])),
        (ValueError, "token id 1099511627776", lambda: manager.allocate_request("b", [2**40])),
        (ValueError, "token id 1099511627776", lambda: manager.append_tokens("a", [2**40])),
        (ValueError, "expected a list of token ids", lambda: manager.allocate_request("b", [[1, 2]])),
        (ValueError, "uint32", lambda: manager.allocate_request("b", [1], namespace=[1, 2, 3, 4])),
        (TypeError, "store is 5, expected a kv.tiers.AttachedStore", lambda: kv.CacheManager(PLAIN, store=5)),
        (TypeError, "unhashable", lambda: manager.allocate_request(["b"], [1])),
        (ValueError, "does not equal itself", lambda: manager.allocate_request(float("nan"), [1])),
        (TypeError, "a request id and its token_ids", lambda: manager.append_tokens("a")),
        (TypeError, "a request id and its token_ids", lambda: manager.append_tokens({"a": [1]}, [1])),
        (ValueError, "at least one", lambda: manager.append_tokens({})),
        (ValueError, "at least 0", lambda: manager.commit_tokens("a", -1)),
        (ValueError, "at least 0", lambda: manager.truncate_request("a", -1)),
        (ValueError, "at least 0", lambda: manager.evict(-1)),
        (TypeError, "final_len of request 'a' is 1.5", lambda: manager.commit_tokens("a", 1.5)),
        (TypeError, "new_len is 2.9, expected an integer", lambda: manager.truncate_request("a", 2.9)),
        (TypeError, "new_len is '2', expected an integer", lambda: manager.truncate_request("a", "2")),
        (TypeError, "num_blocks is True", lambda: manager.evict(True)),
        (TypeError, "num_blocks is 1.5", lambda: manager.evict(1.5)),
        (
            TypeError,
            "priority has dtype float64, expected integers",
            lambda: manager.allocate_request("b", [1], priority=1.5),
        ),
        (ValueError, "priority is 2147483648", lambda: manager.allocate_request("b", [1], priority=2**31)),
        (TypeError, "position is 0.5", lambda: manager.slot_for("a", 0.5)),
        (ValueError, "group is -1, expected 0 <= group < 1", lambda: manager.slot_for("a", 0, group=-1)),
        (ValueError, "group is 1, expected 0 <= group < 1", lambda: manager.block_table("a", group=1)),
        (TypeError, "group is None", lambda: manager.block_table("a", group=None)),
        (TypeError, "expected a function", lambda: manager.run(3)),
    ):
        unchanged(manager, error, call, match)
    before = manager.stats()
    manager.commit_tokens({})  # a step in which no request got on
    assert_same(before, manager.stats())
    with pytest.raises(ValueError, match="without prefix caching"):
        plain = new_manager(PLAIN)
        plain.allocate_request("a", [1])
        plain.commit_tokens("a")
    with pytest.raises(TypeError, match="expected a CacheConfig or a Cache"):
        kv.CacheManager(3)
    for widths in ([], [0], [41]):
        with pytest.raises(ValueError, match="widths"):
            kv.CacheManager(CONFIG, widths=widths)


def test_replace_ends_the_old_request_only_if_the_new_one_fits():
    manager = new_manager()
    text = list(range(1, 30))
    start(manager, "a", text)
    start(manager, "b", [40] * 16)
    error = unchanged(
        manager, kv.manager.OutOfBlocks, lambda: manager.allocate_request("a", [3] * 33, replace=True)
    )
    assert (error.needed, error.available) == (9, 8)
    # What the old one published is found by the new one.
    assert start(manager, "a", [*text[:20], 7], replace=True) == 20
    check(manager, {"a": [*text[:20], 7], "b": [40] * 16})
    assert start(manager, "c", [5], replace=True) == 0
    assert manager.request_ids() == ["b", "a", "c"]


# --- figures ---


def test_no_query_yet_is_not_a_hit_rate_of_zero():
    manager = new_manager()
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
    plain = new_manager(PLAIN)
    plain.allocate_request("a", [1])
    assert plain.hit_rate() is None


def test_counts_go_on_where_the_cache_wraps():
    cache = kv.init(CONFIG)
    control = dataclasses.replace(cache.control, counters=jnp.full_like(cache.control.counters, 2**32 - 2))
    manager = new_manager(dataclasses.replace(cache, control=control))
    assert manager.stats()["num_allocations"] == 2**32 - 2
    for i in range(3):
        manager.allocate_request(i, [1])
    stats = manager.stats()
    assert stats["num_allocations"] == 2**32 + 1 and stats["num_frees"] == 2**32 - 2
    assert (stats["num_requests"], stats["num_active_seqs"], stats["usage"]) == (3, 3, 0.25)
    assert set(stats) == {field.name for field in dataclasses.fields(kv.state.Stats)} | {
        "num_requests", "usage", "hit_rate"
    }  # fmt: skip
    assert all(type(value) in (int, float) for value in stats.values())


def test_one_line_is_logged_per_admission(caplog):
    manager = new_manager()
    with caplog.at_level(logging.INFO, logger="kvcache_jax"):
        caplog.clear()
        start(manager, "a", [1] * 6)
        manager.allocate_request("b", [1] * 6)
        unchanged(manager, kv.manager.DuplicateRequest, lambda: manager.allocate_request("b", [1] * 6))
    assert [record.getMessage() for record in caplog.records] == [
        "allocate_request: request='a' prompt_tokens=6 cached_tokens=0 new_tokens=6 blocks=2",
        "allocate_request: request='b' prompt_tokens=6 cached_tokens=4 new_tokens=2 blocks=2",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.slow
def test_few_programs_serve_two_hundred_prompt_lengths():
    config = kv.CacheConfig(
        [kv.FullAttention(1, 5)], block_size=16, num_blocks=128, max_seqs=3, max_seq_len=1024,
        enable_prefix_caching=True,
    )  # fmt: skip
    jax.clear_caches()  # Programs of other tests.
    manager = kv.CacheManager(config)
    with compiled_programs() as programs:
        for i, length in enumerate([*range(1, 201, 2), *range(201, 1001, 8)]):
            num_cached = manager.allocate_request(i, [i] * length)
            manager.append_tokens(i, [i] * (length - num_cached))
            manager.commit_tokens(i)
            if i:
                manager.free_request(i - 1)
    assert 0 < len(programs) <= 9, len(programs)


# --- the prefix cache ---


@pytest.mark.slow
def test_items_are_found_whole():
    """An image at 5 to 14 and one at 18 to 25, of a prompt that is cut where 20 tokens are cached."""
    manager, items = new_manager(), [[5, 15], [18, 26]]
    images = [kv.item_tokens(name, length) for name, length in ((b"cat", 10), (b"dog", 8))]
    prompt = np.concatenate([range(1, 6), images[0], range(6, 9), images[1], [8, 9]]).astype(np.int32)
    manager.allocate_request("first", prompt, items=items)
    manager.append_tokens("first", prompt)
    manager.commit_tokens("first")
    cut = prompt[:22]
    for found, request_items in ((16, items), (20, [items[0], [0, 0]]), (16, items[::-1]), (20, None)):
        assert manager.allocate_request("second", cut, items=request_items, replace=True) == found
    with pytest.raises(ValueError, match=r"items has shape \(2,\), expected \(any, 2\)"):
        manager.allocate_request("second", cut, items=items[0], replace=True)
    for first, end in ((15, 5), (-1, 5)):
        with pytest.raises(ValueError, match=rf"items has \[{first}, {end}\], expected .* 0 <= first <= end"):
            manager.allocate_request("second", cut, items=[[0, 0], [first, end]], replace=True)


def test_eviction_and_reset():
    manager = new_manager()
    start(manager, "a", list(range(9)))
    start(manager, "b", list(range(20, 29)))
    manager.free_request("a")
    assert manager.evict(0) == 0 and manager.evict(1) == 1
    assert manager.allocate_request("c", list(range(9))) == 4
    assert manager.reset_prefix_cache() == 3
    assert manager.evict(100) == 0
    assert manager.allocate_request("d", list(range(9))) == 0
    assert new_manager(PLAIN).evict(3) == new_manager(PLAIN).reset_prefix_cache() == 0


def test_requests_drop_tokens_in_place_of_ending():
    manager = new_manager(dataclasses.replace(PLAIN, extras=[kv.compression.Dropping()]))
    start(manager, "a", list(range(16)))
    start(manager, "b", [50, 51])
    kept, before = kv.compression.Streaming(window=4, num_sink_tokens=4), manager.usage()
    drop = functools.partial(kv.compression.drop_to_utilization, streaming=kept)
    assert manager.preempt_to_utilization(before, operation=drop) == []
    assert manager.preempt_to_utilization(0.0, operation=drop) == ["a"]
    assert manager.request_ids() == ["a", "b"] and manager.usage() < before
    assert manager.request("a").context_len == 8
    assert manager.preempt_to_utilization(0.0, "lru") == ["a", "b"]
    assert manager.request_ids() == [] and manager.usage() == 0


def test_whole_requests_give_way():
    manager = new_manager()
    texts = {"a": list(range(9)), "b": list(range(20, 33)), "c": list(range(9)), "d": [50]}
    for name, text in texts.items():
        start(manager, name, text, priority=3 if name == "d" else 0)
    assert manager.usage() == pytest.approx(9 / 12)
    before = state_of(manager)
    # The first two blocks of "a" and "c" are shared.
    assert manager.select_requests_to_preempt("longest", 2) == ["b", "a"]
    assert manager.select_requests_to_preempt("priority", 4) == ["a", "b", "c", "d"]
    assert manager.select_requests_to_preempt("priority", 99) == ["a", "b", "c", "d"]
    assert manager.select_requests_to_preempt("priority", 0) == []
    assert state_of(manager) == before
    assert manager.preempt_to_utilization(0.8) == []
    assert manager.preempt_to_utilization(0.45, "longest") == ["b"]
    check(manager, {name: texts[name] for name in "acd"})
    assert manager.preempt_to_utilization(0.1) == ["a", "c"]
    check(manager, {"d": [50]})
    assert manager.allocate_request("b", texts["b"]) == 12
    with pytest.raises(ValueError, match="expected 0 <= target <= 1"):
        manager.preempt_to_utilization(2)
    with pytest.raises(ValueError, match="policy is 'newest'"):
        manager.select_requests_to_preempt("newest", 1)


def test_drafts_and_namespaces():
    manager = new_manager()
    tenant = kv.namespace(tenant="a")
    manager.allocate_request("a", [1] * 6, namespace=tenant)
    fill(manager, {"a": [1] * 6 + [8, 8, 8]})
    with pytest.raises(TypeError, match="final_len = 6, expected {request_id: final_len}"):
        manager.commit_tokens({"a": None}, final_len=6)
    manager.commit_tokens("a", final_len=6)
    assert manager.allocate_request("b", [1] * 6 + [8, 8, 8], namespace=tenant) == 4
    assert manager.allocate_request("c", [1] * 6) == 0
    manager.commit_tokens({"a": None, "b": None})
    assert manager.allocate_request("d", [1] * 6 + [8, 8, 8], namespace=tenant) == 8


# --- the whole ---


def test_a_restored_cache_still_hits():
    manager = new_manager()
    start(manager, "a", list(range(9)))
    with pytest.raises(ValueError, match="1 active rows, expected none"):
        manager.query(kv.CacheManager)
    manager.free_request("a")
    leaves, tree = jax.tree.flatten(manager.query(jax.device_get))
    manager.close()
    with new_manager(jax.tree.unflatten(tree, leaves)) as restored:  # of numpy's arrays
        assert start(restored, "b", list(range(9))) == 8
        check(restored, {"b": list(range(9))})
        with pytest.raises(ZeroDivisionError):
            restored.run(lambda cache: 1 / 0)


def test_closing():
    manager = new_manager()
    manager.allocate_request("a", [1])
    assert repr(manager).startswith("CacheManager(1 requests; Cache(1 groups")
    with manager as same:
        assert same is manager
    manager.close()
    assert repr(manager) == "CacheManager(0 requests; closed)"
    calls = (manager.request_ids, manager.stats, manager.usage, manager.hit_rate, manager.reset_prefix_cache,
             lambda: manager.commit_tokens({}))  # fmt: skip
    for call in (*calls, lambda: manager.run(write_step, 1), lambda: manager.allocate_request("a", [1]),
                 manager.__enter__):  # fmt: skip
        with pytest.raises(kv.manager.ManagerClosed, match="closed"):
            call()
