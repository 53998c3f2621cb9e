"""Rows to preempt: in the order of the policy, counting only blocks that a row alone holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.operations.preempt import row_policies
from tests.support.prefix_user import CONFIG, PrefixUser

ROWS = 5


def make_cache(lengths, num_blocks=20, priority=None, **options):
    """Rows 0.. of these lengths in blocks of 4."""
    config = kv.CacheConfig(
        [kv.FullAttention(1, 5)],
        num_blocks=num_blocks,
        block_size=4,
        max_seqs=ROWS,
        max_seq_len=40,
        **options,
    )
    # Four entries, so that one program serves all; ROWS is skipped.
    columns = [[*x, *[fill] * (4 - len(x))] for x, fill in ((range(len(lengths)), ROWS), (lengths, 0))]
    priority = [*priority, *[0] * (4 - len(priority))] if priority else None
    cache, admission = kv.allocate(kv.init(config, storage=False), *columns, priority=priority)
    kv.raise_for_status(admission.status[: len(lengths)], "allocate")
    return cache


def grow(cache, seq_ids):
    padded = np.array(seq_ids + [ROWS] * (ROWS - len(seq_ids)))  # one shape; ROWS is skipped
    cache, step = kv.extend(cache, np.ones(ROWS, int), max_new=1, seq_ids=padded)
    kv.raise_for_status(step.status[: len(seq_ids)], "extend")
    return cache


def selected(cache, policy, n=ROWS):
    return kv.select_rows_to_preempt(cache, policy, n).tolist()


def test_rows_in_the_order_of_each_policy():
    cache = make_cache([9, 13, 4, 12], priority=[3, -1, 3, 0])
    cache = grow(cache, [2])
    cache = grow(cache, [0])
    for row in (2, 1):  # the clock advances once per call
        cache, _ = kv.touch(cache, [row])
    # Row 3 was used once, row 1 and 0 twice, row 2 three times; last 3, then 0, 2, 1.
    assert selected(cache, "lru") == [3, 0, 2, 1, ROWS]
    assert selected(cache, "lfu") == [3, 0, 1, 2, ROWS]
    assert selected(cache, "longest") == [1, 3, 0, 2, ROWS]  # 4, 3, 3 and 2 blocks
    assert selected(cache, "priority") == [1, 3, 0, 2, ROWS]
    assert selected(cache, "longest", 2) == [1, 3]
    cache, _ = kv.set_priority(cache, [2], [-9])
    assert selected(cache, "priority", 1) == [2]


def test_a_row_policy_returns_a_key_per_row(monkeypatch):
    monkeypatch.setattr(row_policies, "_entries", dict(row_policies._entries))
    cache = make_cache([9, 13, 4])
    for name, keys, found in (
        ("one for all", lambda rows: rows.idle[0], r"int32\[\]"),
        ("unsigned", lambda rows: rows.idle.astype(jnp.uint32), r"uint32\[5\]"),
        ("a list", lambda rows: [*rows.idle], "a list"),
    ):
        kv.policies.row_policy(name)(keys)
        with pytest.raises(TypeError, match=f"row policy '{name}' returned {found}, expected int32\\[5\\]"):
            selected(cache, name)
    kv.policies.row_policy("shortest")(lambda rows: rows.context_len + 1)
    assert selected(grow(grow(cache, [0]), [1]), "shortest") == [2, 0, 1, ROWS, ROWS]
    with pytest.raises(ValueError, match="policy is 3, expected one of 'lru', 'lfu', 'longest', 'priority'"):
        selected(cache, 3)


def test_uses_are_counted_by_call_and_forgotten_with_the_row():
    cache = make_cache([4, 4])
    cache, _ = kv.fork(cache, [0], [2])
    for _ in range(3):
        cache = grow(cache, [0, 2])
    cache, _ = kv.reorder(cache, [2], [0])
    assert cache.control.num_uses.tolist() == [4, 1, 5, 0, 0]
    cache, _ = kv.free(cache, [2])
    assert cache.control.num_uses.tolist() == [4, 1, 0, 0, 0]
    assert not kv.check_invariants(cache)


def test_the_clock_may_wrap_around():
    cache = make_cache([4, 4])
    control = cache.control
    control = dataclasses.replace(
        control, clock=jnp.uint32(3), last_used=jnp.array([2, 2**32 - 2, 0, 0, 0], jnp.uint32)
    )
    assert selected(dataclasses.replace(cache, control=control), "lru", 2) == [1, 0]


def test_case_bb_a_row_whose_blocks_are_all_shared_frees_nothing():
    cache = make_cache([8, 4])
    cache, _ = kv.extend(cache, [8, 4, 0, 0, 0], max_new=8)
    cache, _ = kv.fork(cache, [0], [2])
    assert selected(cache, "longest") == [1, ROWS, ROWS, ROWS, ROWS]
    before = kv.utilization(cache)
    cache, dropped = kv.preempt_to_utilization(cache, 0.0, "longest")
    assert dropped.tolist() == [1, ROWS, ROWS, ROWS, ROWS]
    assert cache.is_active.tolist() == [True, False, True, False, False]
    assert float(before) == pytest.approx(0.15) and float(kv.utilization(cache)) == pytest.approx(0.1)
    assert not kv.check_invariants(cache)


@pytest.mark.parametrize(
    ("target", "policy", "dropped"),
    [
        (1.0, "lru", []),
        (0.5, "lru", []),  # exactly what is used
        (0.49, "lru", [0]),
        (0.3, "lru", [0, 1]),
        (0.3, "longest", [1]),
        (0.2, "priority", [2, 1]),
        (0.0, "longest", [1, 0, 2]),
    ],
)
def test_rows_are_freed_until_the_target_is_met(target, policy, dropped):
    cache = make_cache([12, 20, 7], priority=[9, 2, 1])  # 3, 5 and 2 of 20 blocks
    cache = grow(grow(grow(cache, [0]), [1]), [2])
    after, got = kv.preempt_to_utilization(cache, target, policy)
    assert got.tolist() == dropped + [ROWS] * (ROWS - len(dropped))
    assert float(kv.utilization(after)) <= np.float32(target)
    assert np.flatnonzero(after.is_active).tolist() == [row for row in range(3) if row not in dropped]
    assert not kv.check_invariants(after)


def test_dropping_one_of_two_makes_the_other_worth_dropping():
    """Rows 0 and 2 share one block and have one each; the last holder of the shared block frees it."""
    cache = make_cache([4, 1])
    cache, _ = kv.extend(cache, [4, 1, 0, 0, 0], max_new=8)
    cache, _ = kv.fork(cache, [0], [2])
    cache = grow(cache, [0, 2])
    cache, dropped = kv.preempt_to_utilization(cache, 0.0, "longest")
    assert dropped.tolist() == [1, 0, 2, ROWS, ROWS] and float(kv.utilization(cache)) == 0


@pytest.mark.slow
def test_only_groups_above_the_target_count():
    """The window group is fuller; the row that holds most of it goes, though another is longer."""
    window = kv.SlidingWindow(1, 5, window=4, num_blocks=8)
    config = kv.CacheConfig(
        [kv.FullAttention(1, 5), window], num_blocks=40, block_size=4, max_seqs=3, max_seq_len=40
    )
    cache, _ = kv.allocate(kv.init(config, storage=False), [0, 1], [0, 9])
    for _ in range(5):
        cache, step = kv.extend(cache, [4, 0, 0], max_new=4)
    assert not step.status.any()
    assert [int((pool.block_table[0] < pool.num_blocks).sum()) for pool in cache.control.block_pools] == [
        5,
        2,
    ]
    assert selected_of(cache) == [0, 1]  # 7 blocks and 6, of both groups together
    cache, dropped = kv.preempt_to_utilization(cache, 0.5, "longest")
    assert dropped.tolist() == [1, 3, 3]


def selected_of(cache):
    return kv.select_rows_to_preempt(cache, "longest", 2).tolist()


@pytest.mark.slow
def test_published_blocks_stay_cached():
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 9)
    user.start(0, text)
    user.cache, dropped = kv.preempt_to_utilization(user.cache, 0.0)
    assert dropped[0] == 0 and user.stats().num_blocks_cached == 2
    assert user.lookup(text) == 8


def test_it_runs_inside_jit():
    cache = make_cache([12, 20, 7])
    relieve = jax.jit(lambda cache, target: kv.preempt_to_utilization(cache, target, "longest"))
    assert relieve(cache, 0.3)[1].tolist() == [1, ROWS, ROWS, ROWS, ROWS]
    assert relieve(cache, 0.0)[1].tolist() == [1, 0, 2, ROWS, ROWS]
    assert relieve._cache_size() == 1


def streamed(cache, target, window=6, **options):
    """The rows that drop blocks, in that order, and the blocks that each row holds then."""
    kept = kv.compression.Streaming(window=window, num_sink_tokens=3)
    cache, rows = kv.compression.drop_to_utilization(cache, target, streaming=kept, **options)
    assert not kv.check_invariants(cache)
    held = (np.asarray(cache.control.block_pools[0].block_table) < 20).sum(axis=1)
    return cache, [row for row in rows.tolist() if row < ROWS], held.tolist()


def make_streaming(num_dropped=0):
    """Rows of 9, 18, 27 and 3 tokens in 3, 5, 7 and 1 blocks; row 2 may have dropped after its fifth."""
    cache = make_cache([9, 18, 27, 3], extras=[kv.compression.Dropping()])
    cache, step = kv.extend(cache, [9, 18, 27, 3, 0], max_new=27)
    kv.raise_for_status(step.status, "extend")
    return kv.compression.drop(cache, [2], [5], [num_dropped])[0]


@pytest.mark.parametrize(
    ("target", "dropped", "held"),
    [
        (0.8, [], [3, 5, 7, 1, 0]),
        (0.75, [2], [3, 5, 6, 1, 0]),  # no more than are needed
        (0.6, [2], [3, 5, 3, 1, 0]),  # sinks, the last 6 tokens, and what fills their blocks
        (0.55, [2, 1], [3, 4, 3, 1, 0]),
        (0.0, [2, 1], [3, 3, 3, 1, 0]),  # rows 0 and 3 have no whole block between sinks and window
    ],
)
def test_rows_drop_their_oldest_blocks_in_place_of_ending(target, dropped, held):
    cache = make_streaming()
    after, rows, now = streamed(cache, target)
    assert rows == dropped and now == held
    assert after.is_active.tolist() == cache.is_active.tolist()
    for row, (was, num_blocks) in enumerate(zip((3, 5, 7, 1, 0), held, strict=True)):
        gone = slice(1, 1 + was - num_blocks)  # after the block of the sinks, whose other token stays
        before, left = (np.asarray(c.control.block_pools[0].block_table)[row] for c in (cache, after))
        np.testing.assert_array_equal(left[:num_blocks], np.delete(before[:was], gone))
        num_gone = 4 * (was - num_blocks)
        assert int(after.context_len[row]) == int(cache.context_len[row]) - num_gone
        assert int(after.control.holes.num_dropped[row]) == num_gone
        assert int(after.control.holes.num_hidden[row]) == 0


@pytest.mark.slow
def test_rows_that_stream_go_on_dropping_behind_what_they_dropped():
    cache = make_streaming(num_dropped=3)  # tokens 5 to 7, of which none goes
    cache, rows, held = streamed(cache, 0.75)
    assert rows == [2] and held == [3, 5, 6, 1, 0]
    holes = cache.control.holes
    assert [int(x[2]) for x in (holes.start, holes.num_hidden, holes.num_dropped)] == [5, 3, 4]
    # A block that a fork holds too does not come free, and the policy may be another.
    cache, _ = kv.fork(make_streaming(), [2], [4])
    assert streamed(cache, 0.0)[1] == [1]
    assert streamed(make_streaming(), 0.0, policy="lru")[1] == [1, 2]
    relieve = jax.jit(lambda cache: kv.compression.drop_to_utilization(cache, 0.5))
    assert relieve(make_streaming())[1].tolist() == [ROWS] * ROWS  # 4 + 508 tokens


def test_what_is_refused():
    cache = make_cache([4])
    with pytest.raises(ValueError, match="drop_to_utilization got streaming, expected a cache with extras"):
        kv.compression.drop_to_utilization(cache, 0.5)
    with pytest.raises(
        ValueError, match="policy is 'newest', expected one of 'lru', 'lfu', 'longest', 'prio"
    ):
        kv.select_rows_to_preempt(cache, "newest", 1)
    with pytest.raises(ValueError, match="policy is 'fifo', expected one of"):
        kv.preempt_to_utilization(cache, 0.5, "fifo")
    with pytest.raises(ValueError, match="target is 1.5, expected 0 <= target <= 1"):
        kv.preempt_to_utilization(cache, 1.5)
    with pytest.raises(ValueError, match="n is 6, expected 1 <= n <= max_seqs = 5"):
        kv.select_rows_to_preempt(cache, "lru", 6)
