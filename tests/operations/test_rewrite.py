"""`rewrite`: who copies which block, what a copy costs, and what stays findable."""

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from tests.support.helpers import assert_invariants, num_copies, statuses
from tests.support.prefix_user import CONFIG, PrefixUser
from tests.support.row_calls import NOWHERE, NUM_ENTRIES, NUM_ROWS, call, make_crowded


@pytest.fixture(scope="module")
def crowded():
    return make_crowded().cache


def rewritten(cache, rows, indices):
    cache, step = kv.rewrite(cache, rows, np.array(indices))
    assert_invariants(cache)
    return cache, statuses(step.status)


def test_private_blocks_are_written_in_place_and_shared_ones_copied(crowded):
    tables = np.asarray(crowded.control.block_pools[0].block_table)
    cache, found = call("rewrite", crowded, [4, 2], [[0, 4], 6])
    assert_invariants(cache)
    assert found == [Status.OK] * 2 and num_copies(cache) == 1
    after = np.asarray(cache.control.block_pools[0].block_table)
    assert (after[4] == tables[4]).all() and (after != tables).nonzero() == ([2], [1])


def test_scarce_blocks_go_in_the_order_of_the_entries(crowded):
    """3 of 13 blocks are free; rows 0 and 2 share two."""
    cache, found = call("rewrite", crowded, [2, 0, 4], [[0, 4], [1, 5], [1, 2]])
    assert_invariants(cache)
    assert found == [Status.OK, Status.OUT_OF_BLOCKS, Status.OK] and num_copies(cache) == 2
    cache, found = call("rewrite", cache, [0], [[1, 5]])  # the only owner by now
    assert_invariants(cache)
    assert found == [Status.OK] and num_copies(cache) == 2


def test_a_row_without_indices_is_left_alone(crowded):
    rows = [6, 0, NUM_ROWS, NUM_ROWS]
    after, step = kv.rewrite(crowded, rows, np.full((NUM_ENTRIES, 2), NOWHERE))
    assert statuses(step.status)[:2] == [Status.OK] * 2 and not step.query_len.any()
    assert int(after.control.clock) == int(crowded.control.clock)


def row_of_text():
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 15)
    user.admit(0, text)
    user.append({0: text})
    return user, text


def published_row():
    user, text = row_of_text()
    user.commit(0)
    return user, text


@pytest.mark.slow
def test_published_blocks_behind_a_copied_one_are_copied_too():
    user, text = published_row()
    user.cache, found = rewritten(user.cache, [0], [[5, 48]])
    assert found == [Status.OK] and num_copies(user.cache) == 2  # of columns 1 and 2, not of the private tail
    assert user.cache.control.num_published.tolist() == [1, 0, 0, 0]
    assert user.admit(1, text) == 12  # what was published is as it was
    user.cache, num_evicted = kv.evict(user.cache, 24)
    assert int(num_evicted) == 0
    user.check()


@pytest.mark.slow
def test_shared_blocks_behind_a_copied_one_are_copied_too():
    """Another row may publish them, after a parent that this row does not hold."""
    cache, _ = kv.fork(row_of_text()[0].cache, [0], [1])
    cache, found = rewritten(cache, [1], [[5, 48]])
    assert found == [Status.OK] and num_copies(cache) == 3  # of columns 1 to 3, not of column 0
    cache, _ = kv.commit(cache, [0])
    assert_invariants(cache)


@pytest.mark.slow
def test_what_was_copied_is_given_back_when_it_is_committed():
    user, text = published_row()
    num_free = int(kv.stats(user.cache).num_blocks_free)
    user.cache, _ = rewritten(user.cache, [0], [[5, 48]])
    user.commit(0)
    assert user.cache.control.num_published.tolist() == [3, 0, 0, 0]
    assert int(kv.stats(user.cache).num_blocks_free) == num_free


def test_wrong_shapes_are_refused(crowded):
    for indices in ([1, 2], [[1], [2], [3]]):
        with pytest.raises(ValueError, match=r"expected \(2, T\), a line of places per row"):
            kv.rewrite(crowded, [0, 2], indices)
    with pytest.raises(TypeError, match="indices has dtype float"):
        kv.rewrite(crowded, [0], [[1.5]])
