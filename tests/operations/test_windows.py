"""Sliding-window groups: what a row holds, what it can still see, and what it may take back.

Every step's attention is compared with a dense float64 reference (window and sink tokens included), on pools
whose unowned slots, also those that a row has just given back, are NaN.
"""

import math

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from kvcache_jax.testing import poison
from tests.support.attention_driver import AttentionDriver
from tests.support.helpers import (
    assert_invariants,
    assert_same,
    leaf_bytes,
    num_free,
    statuses,
    table,
)

WIDTH = 5  # max_query_len of every configuration here


def window_layer(window, num_sink_tokens=0, max_rollback=0, **sizes):
    return kv.SlidingWindow(
        num_kv_heads=2,
        head_dim=8,
        window=window,
        num_sink_tokens=num_sink_tokens,
        max_rollback=max_rollback,
        **sizes,
    )


def most_blocks(group):
    """The promise: what a row of a window group holds at most, whatever its length."""
    kind = group.kind
    in_reach = math.ceil((kind.window + WIDTH + kind.max_rollback) / group.block_size) + 1
    return in_reach + math.ceil(kind.num_sink_tokens / group.block_size)


class WindowDriver(AttentionDriver):
    """Also checks, after every step, what the rows hold in every window group."""

    def __init__(self, config, **options):
        super().__init__(config, num_q_heads=4, width=WIDTH, **options)

    def step(self, new_lens, expected=None, twice=False):
        before = {seq_id: self.length(seq_id) for seq_id in self.history}
        result = super().step(new_lens, expected, twice)
        failed = expected or {}
        self.check_blocks(
            before, {seq_id for seq_id, count in new_lens.items() if count and seq_id not in failed}
        )
        return result

    def check_blocks(self, length_before, stepped=()):
        """`length_before`: row lengths before the last `extend`; `stepped`: the rows that it extended."""
        assert_invariants(self.cache)
        for group_id, group in enumerate(self.config.groups):
            block_table = np.asarray(self.cache.control.block_pools[group_id].block_table)
            is_valid = block_table < group.num_blocks
            held = {seq_id: set(table(self.cache, seq_id, group_id)) for seq_id in self.history}
            assert num_free(self.cache, group_id) == group.num_blocks - len(set().union(*held.values()))
            if not isinstance(group.kind, kv.SlidingWindow):
                continue
            sinks = math.ceil(group.kind.num_sink_tokens / group.block_size)
            reach = group.kind.window + group.kind.max_rollback
            for seq_id in self.history:
                assert len(held[seq_id]) == is_valid[seq_id].sum() <= most_blocks(group)
                ends = (
                    np.arange(is_valid.shape[1]) + 1
                ) * group.block_size  # one past each column's last position
                length = self.length(seq_id)
                # In reach of the next token: held. Left the window before the last extend: given back by it.
                in_reach = (ends > length - group.kind.window + 1) & (ends - group.block_size < length)
                assert is_valid[seq_id][in_reach].all()
                assert is_valid[seq_id][: min(sinks, math.ceil(length / group.block_size))].all()
                if seq_id in stepped:
                    has_left = ends <= length_before[seq_id] - reach + 1
                    has_left[:sinks] = False
                    assert not is_valid[seq_id][has_left].any()


LAYERS = {
    "window 7, 5 sinks": window_layer(7, num_sink_tokens=5),
    "window 1": window_layer(1),
    "window 3, 4 sinks, rollback 2": window_layer(3, num_sink_tokens=4, max_rollback=2),
}


def config_of(kind, *, block_size=4, num_rows=2, max_seqs=4, max_seq_len=80, num_layers=1):
    """A pool of exactly what `num_rows` rows may hold at most."""
    probe = kv.CacheConfig(layers=[kind], num_blocks=1, block_size=block_size)
    return kv.CacheConfig(
        layers=[kind] * num_layers,
        num_blocks=num_rows * most_blocks(probe.groups[0]),
        block_size=block_size,
        max_seqs=max_seqs,
        max_seq_len=max_seq_len,
        max_query_len=WIDTH,
    )


def speculative_config(block_size, num_sink_tokens):
    """Window 6, of which 3 tokens may be taken back, and room for four rows: shared by several tests."""
    kind = window_layer(6, num_sink_tokens=num_sink_tokens, max_rollback=3)
    return config_of(kind, block_size=block_size, num_rows=4)


NARROW = config_of(window_layer(4, num_sink_tokens=2, max_rollback=4), block_size=2, num_rows=3)


@pytest.mark.quick_cases("window 7, 5 sinks")
@pytest.mark.parametrize("name", LAYERS)
def test_long_prompt_and_long_decode_in_a_bounded_pool(name):
    """Two rows of up to 80 tokens live in a pool that holds two windows, and never run out of blocks."""
    driver = WindowDriver(config_of(LAYERS[name]))
    driver.start(2, 41)
    driver.start(1, 33)
    for _ in range(8):
        driver.step({2: 5, 1: 4})  # prefill in pieces: 40 and 32 tokens
    driver.step({2: 1, 1: 1})
    for i in range(36):
        driver.step({2: 1, 1: i % 2}, twice=i == 20)
    driver.step({2: 4, 1: 5}, expected={2: Status.TOO_LONG})
    driver.step({2: 3, 1: 2})  # row 2 ends in the last place
    driver.free(2)
    driver.start(3, 18)  # the other row goes on beside a new one
    for _ in range(4):
        driver.step({3: 4, 1: 3})
    driver.free(1)
    driver.free(3)
    assert num_free(driver.cache) == driver.config.groups[0].num_blocks


@pytest.mark.slow
def test_blocks_that_left_the_window_come_back_at_the_next_extend():
    """Block 2, one token a step: in steady state each step that takes a block gives one back."""
    config = NARROW
    driver = WindowDriver(config)
    driver.start(1, 0)
    free = []
    for _ in range(40):
        driver.step({1: 1})
        free.append(num_free(driver.cache))
    assert len(set(free[10:])) <= 2 and free[10:-2] == free[12:]
    # Another row can take what came back: the pool never held 40 tokens at once.
    driver.start(2, 11)
    driver.step({2: 5, 1: 5})
    driver.step({2: 5})
    assert int(kv.stats(driver.cache).peak_used) <= 2 * most_blocks(config.groups[0])


@pytest.mark.slow
def test_forks_of_windowed_rows():
    """Forks diverge in the middle of a block; one rolls on while the other waits with the older blocks."""
    config = speculative_config(3, 5)
    driver = WindowDriver(config)
    driver.start(0, 18)
    for count in (5, 5, 5, 3):
        driver.step({0: count})
    used = config.groups[0].num_blocks - num_free(driver.cache)
    driver.fork(0, 3)
    driver.fork(3, 1)
    assert config.groups[0].num_blocks - num_free(driver.cache) == used  # a fork takes no block
    driver.step({0: 1, 1: 1, 3: 1})
    for _ in range(14):
        driver.step({0: 1, 3: 2})  # row 1 waits
    driver.step({1: 3})  # and finds its window as it was
    driver.free(0)
    driver.step({1: 5, 3: 1})
    driver.fork(1, 2)
    driver.free(1)
    driver.step({2: 4, 3: 4})
    driver.free(3)
    for _ in range(4):
        driver.step({2: 5})
    driver.free(2)
    assert num_free(driver.cache) == config.groups[0].num_blocks


@pytest.mark.slow
def test_a_block_that_is_copied_is_not_free_for_an_earlier_copy():
    """Row 1 copies a block that leaves row 2's window then; row 0, before both, needs one to copy into."""
    driver = WindowDriver(speculative_config(4, 0))
    driver.start(0, 2)
    driver.step({0: 2})
    driver.fork(0, 3)
    driver.start(2, 4)
    driver.step({2: 4})
    driver.fork(2, 1)
    assert driver.truncate(1, 2) == Status.OK
    driver.step({2: 5})
    driver.step({2: 3})
    (shared,) = table(driver.cache, 1)
    assert shared in table(driver.cache, 2)
    driver.step({0: 1, 1: 1, 2: 1})
    assert shared not in table(driver.cache, 0) + table(driver.cache, 1)
    driver.step({0: 3, 1: 3, 2: 3, 3: 3})


@pytest.mark.quick_cases("1-2")
@pytest.mark.parametrize("block_size, num_sink_tokens", [(1, 2), (3, 5)])
def test_truncate_within_the_rollback_then_decode(block_size, num_sink_tokens):
    """Speculative decoding: after every step up to `max_rollback` tokens go, and others come instead."""
    driver = WindowDriver(speculative_config(block_size, num_sink_tokens))
    driver.start(2, 5)
    driver.step({2: 5})
    driver.start(0, 22)
    for _ in range(4):
        driver.step({0: 5, 2: 1})
    for i in range(24):
        driver.step({0: 4, 2: 1 + i % 3})
        assert driver.truncate(0, driver.length(0) - (i % 4)) == Status.OK
        assert driver.truncate(2, driver.length(2) - i % 2) == Status.OK
        if driver.length(0) > 60:
            driver.free(0)
            driver.start(0, 9)
            driver.step({0: 5})
            driver.step({0: 4})


@pytest.mark.slow
def test_truncate_beyond_the_rollback_is_window_lost():
    driver = WindowDriver(speculative_config(3, 5))
    driver.start(1, 6)
    driver.start(3, 17)
    for new_lens in ({1: 5, 3: 5}, {3: 5, 1: 1}, {3: 4}, {3: 3}):
        driver.step(new_lens)
    driver.cache = poison(driver.cache)
    before = leaf_bytes(driver.cache)
    for new_len in (13, 12, 6, 2, 1, 0):
        assert driver.truncate(3, new_len) == Status.WINDOW_LOST
        assert_same(before, leaf_bytes(driver.cache))
    assert driver.truncate(1, 0) == Status.OK  # as long as its window: nothing has left it yet
    driver.step({1: 4, 3: 1})
    assert driver.truncate(3, 15) == Status.OK
    driver.step({1: 2, 3: 5})
    assert driver.length(1) == 6 and driver.length(3) == 20
    # A second truncate on top of the first may reach what was given back: it says so and changes nothing.
    assert driver.truncate(3, 17) == Status.OK
    before = leaf_bytes(driver.cache)
    assert driver.truncate(3, 14) in (Status.OK, Status.WINDOW_LOST)
    if driver.length(3) == 17:
        assert_same(before, leaf_bytes(driver.cache))
    driver.step({3: 4, 1: 1})


@pytest.mark.slow
@pytest.mark.parametrize("max_rollback", [0, 3])
def test_repeated_truncates_see_the_right_keys_or_fail(max_rollback):
    """Each alone is within the rollback, together they are not: OK must mean that all keys are there."""
    sinks = config_of(LAYERS["window 7, 5 sinks"])
    driver = WindowDriver(speculative_config(4, 0) if max_rollback else sinks)
    driver.start(0, 30)
    for _ in range(6):
        driver.step({0: 5})
    for _ in range(6):
        before, length = leaf_bytes(driver.cache), driver.length(0)
        found = driver.truncate(0, length - max(1, max_rollback))
        assert found in ((Status.OK, Status.WINDOW_LOST) if max_rollback else (Status.WINDOW_LOST,))
        if found == Status.WINDOW_LOST:
            assert_same(before, leaf_bytes(driver.cache))
        kept = driver.cache, dict(driver.history)
        driver.step({0: 1})
        driver.cache, driver.history = kept
    driver.step({0: 5})


@pytest.mark.slow
def test_a_window_that_begins_among_the_sinks_and_was_given_back_behind_them_is_lost():
    """Each truncate is within the rollback; the next token would read tokens 1 to 4, and 2 and 3 are gone."""
    driver = WindowDriver(NARROW)
    driver.start(0, 12)
    for _ in range(12):
        driver.step({0: 1})
    assert driver.truncate(0, 8) == Status.OK
    before = leaf_bytes(driver.cache)
    for new_len in (6, 5, 4):
        assert driver.truncate(0, new_len) == Status.WINDOW_LOST
        assert_same(before, leaf_bytes(driver.cache))
    driver.step({0: 1})
    assert driver.truncate(0, 7) == Status.OK
    driver.step({0: 3})


@pytest.mark.slow
def test_five_windows_and_one_full():
    """Groups interleave in the model's order; each has its own block size and pool."""
    window, full = (
        window_layer(6, max_rollback=2, block_size=4),
        kv.FullAttention(num_kv_heads=1, head_dim=8, block_size=16),
    )
    config = kv.CacheConfig(
        layers=[window] * 3 + [full] + [window] * 2,
        num_blocks=16,
        max_seqs=4,
        max_seq_len=60,
        max_query_len=WIDTH,
    )
    assert [group.num_layers for group in config.groups] == [5, 1]
    assert [tuple(group.layer_ids) for group in config.groups] == [(0, 1, 2, 4, 5), (3,)]
    assert [group.block_size for group in config.groups] == [4, 16]
    driver = WindowDriver(config)
    driver.start(1, 37)
    driver.start(3, 12)
    for _ in range(4):
        driver.step({1: 5, 3: 3})
    driver.step({1: 4, 3: 2})
    driver.fork(1, 0)
    driver.step({0: 1, 1: 3, 3: 1})
    assert driver.truncate(1, 25) == Status.OK
    before = leaf_bytes(driver.cache)
    assert driver.truncate(3, 11) == Status.WINDOW_LOST  # the full group could, the window group cannot
    assert_same(before, leaf_bytes(driver.cache))
    for i in range(6):
        driver.step({0: 1, 1: 5 - i % 2, 3: 1})
    driver.free(1)
    driver.step({0: 5, 3: 5})
    driver.free(0)
    driver.free(3)
    assert [num_free(driver.cache, group) for group in (0, 1)] == [16, 16]


@pytest.mark.slow
def test_two_windows_of_different_lengths():
    """Two window groups roll at different positions; the narrower one decides what may be taken back."""
    narrow, wide = (
        window_layer(3, num_sink_tokens=2, block_size=2),
        window_layer(11, max_rollback=4, block_size=3),
    )
    config = kv.CacheConfig(
        layers=[narrow, wide], num_blocks=20, max_seqs=3, max_seq_len=50, max_query_len=WIDTH
    )
    driver = WindowDriver(config)
    driver.start(2, 10)
    driver.start(0, 21)
    for i in range(5):
        driver.step({2: i, 0: 5 - i % 2})
    for _ in range(12):
        driver.step({2: 1, 0: 1})
    before = leaf_bytes(driver.cache)
    assert driver.truncate(0, driver.length(0) - 1) == Status.WINDOW_LOST
    assert_same(before, leaf_bytes(driver.cache))
    assert driver.truncate(0, driver.length(0)) == Status.OK
    driver.step({2: 3, 0: 2})


def test_sink_tokens_stay():
    """The first tokens stay where they were written, and every later query sees them."""
    config = config_of(LAYERS["window 7, 5 sinks"])
    driver = WindowDriver(config)
    driver.start(1, 3)
    driver.step({1: 3})
    driver.step({1: 5})
    sinks = table(driver.cache, 1)[:2]
    for _ in range(12):
        driver.step({1: 4})
    assert table(driver.cache, 1)[:2] == sinks
    column = np.asarray(driver.cache.control.block_pools[0].block_table)[1]
    assert column[2] == config.groups[0].num_blocks  # the hole after the sinks
    driver.fork(1, 2)
    driver.step({1: 2, 2: 1})
    assert table(driver.cache, 2)[:2] == sinks  # shared, never copied


def test_allocate_of_a_prompt_longer_than_the_pool():
    """The reservation is bounded like the row: 75 tokens start in a pool of far fewer."""
    config = config_of(LAYERS["window 7, 5 sinks"])
    assert config.groups[0].num_blocks * 4 < 75
    cache = kv.init(config)
    cache, admission = kv.allocate(cache, [0], [75])
    assert statuses(admission.status) == [Status.OK]
    assert_invariants(cache)
    driver = WindowDriver(config)
    driver.start(0, 75)
    for _ in range(15):
        driver.step({0: 5})
