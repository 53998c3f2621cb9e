"""Every operation x every failure: the status, the untouched rest, and the other rows of the same call.

A failed row must leave exactly the state that a skipped one leaves, bit by bit.
"""

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from kvcache_jax.testing import poison
from tests.support.helpers import (
    assert_invariants,
    assert_same,
    leaf_bytes,
    num_copies,
    num_free,
    statuses,
)
from tests.support.row_calls import (
    ALONE,
    CALLS,
    FAILURES,
    NUM_PACKED,
    NUM_ROWS,
    PARTNERS,
    VALID_ARGUMENT,
    call,
    finite,
    make_crowded,
)

# ---------------------------------------------------------------------------------------
# one row fails


@pytest.fixture(scope="module")
def crowded():
    return make_crowded()


@pytest.mark.parametrize("operation", CALLS)
def test_a_failed_row_changes_nothing(crowded, operation):
    before = leaf_bytes(crowded.cache)
    for name, seq_id, argument, expected in FAILURES + ALONE:
        if name == operation:
            cache, found = call(operation, crowded.cache, [seq_id], [argument])
            assert found == [expected], (seq_id, argument)
            assert_same(before, leaf_bytes(cache))


def with_partners(operation, at, seq_id, argument):
    """Rows and arguments of a call of three: the two partners, and the given row at place `at`."""
    seq_ids, arguments = (list(part) for part in zip(*PARTNERS[operation], strict=True))
    seq_ids.insert(at, seq_id)
    arguments.insert(at, argument)
    return seq_ids, arguments


@pytest.mark.parametrize("operation", CALLS)
def test_the_other_rows_of_the_call_proceed(crowded, operation):
    """First, second or last: the failing row leaves what the same call leaves with that row skipped."""
    for at in range(3):
        entries = with_partners(operation, at, NUM_ROWS, VALID_ARGUMENT.get(operation, 2))
        cache, found = call(operation, crowded.cache, *entries)
        want = [Status.OK] * 3
        want[at] = Status.SKIPPED
        assert found == want
        assert_invariants(cache)
        skipped = leaf_bytes(cache)
        for name, seq_id, argument, expected in FAILURES:
            if name == operation:
                entries = with_partners(operation, at, seq_id, argument)
                cache, found = call(operation, crowded.cache, *entries)
                want[at] = expected
                assert found == want, (seq_id, argument, at)
                assert_same(skipped, leaf_bytes(cache))


def test_rows_are_served_in_the_order_of_the_call(crowded):
    """Not in the order of their ids; and none sees what the entries before it did."""
    cache, admission = kv.allocate(crowded.cache, [7, 1, 5], [8, 8, 3])  # 2 + 2 + 1 blocks, 3 are free
    assert statuses(admission.status) == [Status.OK, Status.OUT_OF_BLOCKS, Status.OK]
    cache, status = kv.fork(crowded.cache, [1, 0, 5, 4], [5, 7, 6, 7])
    assert statuses(status) == [
        Status.SEQ_NOT_ACTIVE,  # row 1 was not started by the call before
        Status.OK,
        Status.SEQ_NOT_ACTIVE,
        Status.DUPLICATE_SEQ_ID,
    ]
    cache, status = kv.truncate(crowded.cache, [0, 4, 0, 2], [6, 4, 2, 7])
    assert statuses(status) == [Status.OK, Status.OK, Status.DUPLICATE_SEQ_ID, Status.OK]
    assert np.asarray(cache.context_len)[[0, 2, 4]].tolist() == [6, 7, 4]
    cache, status = kv.reorder(crowded.cache, [0, 3, 2], [6, 0, 4])  # row 0 fails, row 3 takes what it holds
    assert statuses(status) == [Status.SEQ_NOT_ACTIVE, Status.OK, Status.OK]
    assert np.asarray(cache.context_len)[[0, 2, 3, 4]].tolist() == [7, 5, 7, 5]
    assert_invariants(cache)

    # Three owners of a tail and one block: the one that is first in the call gets the copy.
    cache, _ = call("fork", crowded.cache, [6], [0])
    cache, found = call("allocate", cache, [1], [8])
    assert found == [Status.OK] and num_free(cache) == 1
    for order in ([6, 0, 2], [2, 6, 0], [0, 2, 6]):
        new, found = call("extend", cache, order, [1, 1, 1])
        assert found == [Status.OK, Status.OUT_OF_BLOCKS, Status.OUT_OF_BLOCKS]
        assert np.asarray(new.context_len)[order].tolist() == [8, 7, 7]
        assert_invariants(new)


@pytest.mark.parametrize("wide", [2**32, 2**32 + 4, 2**40 + 1, -(2**32), -(2**33) + 4])
def test_integers_beyond_32_bits_never_wrap_into_a_valid_one(crowded, wide):
    """2**32 + 4 cut to 32 bits would be row 4, or 4 tokens."""
    before = leaf_bytes(crowded.cache)
    too_much = Status.TOO_LONG if wide > 0 else Status.BAD_LENGTH
    for operation, seq_id, argument, expected in (
        *((operation, wide, VALID_ARGUMENT.get(operation, 2), Status.BAD_SEQ_ID) for operation in CALLS),
        ("fork", 6, wide, Status.BAD_SEQ_ID),
        ("reorder", 3, wide, Status.BAD_SEQ_ID),
        ("allocate", 6, wide, too_much),
        ("extend", 4, wide, too_much),
        ("truncate", 4, wide, too_much),
    ):
        cache, found = call(operation, crowded.cache, [seq_id], [argument])
        assert found == [expected], operation
        assert_same(before, leaf_bytes(cache))
    cache, status = kv.free(crowded.cache, np.array([2**32 - 1], np.uint32))
    assert statuses(status) == [Status.BAD_SEQ_ID]


def test_all_rows_at_once_fail_alone(crowded):
    """`extend(seq_ids=None)`: one row of the table fails, the others ask for nothing."""
    before = leaf_bytes(crowded.cache)
    for seq_id, count, expected in (
        (4, 16, Status.OUT_OF_BLOCKS),
        (0, 10, Status.OUT_OF_BLOCKS),
        (3, 1, Status.TOO_LONG),
        (6, 1, Status.SEQ_NOT_ACTIVE),
        (4, -1, Status.BAD_LENGTH),
        (4, 17, Status.TOO_LONG),
    ):
        num_new = np.zeros(NUM_ROWS, np.int32)
        num_new[seq_id] = count
        cache, step = kv.extend(crowded.cache, num_new, max_new=16)
        want = [Status.OK] * NUM_ROWS
        want[seq_id] = expected
        assert statuses(step.status) == want
        assert (np.asarray(step.query_len) == 0).all()
        assert (np.asarray(step.slots[0]) == 13 * 4).all()
        assert_same(before, leaf_bytes(cache))


def test_a_copy_needs_a_block_too(crowded):
    """Row 0 and its fork share 7 tokens in 2 blocks, 3 are free: 9 more tokens need 2 blocks and a copy."""
    copies = num_copies(crowded.cache)
    assert np.asarray(kv.num_blocks_needed(crowded.cache, [9, 10, 1], [0, 0, 0])).tolist() == [3, 4, 1]
    cache, found = call("extend", crowded.cache, [0], [10])
    assert found == [Status.OUT_OF_BLOCKS]
    assert_same(leaf_bytes(crowded.cache), leaf_bytes(cache))
    cache, found = call("extend", crowded.cache, [0], [9])
    assert found == [Status.OK] and num_copies(cache) == copies + 1 and num_free(cache) == 0
    # With its fork gone the same row needs no copy, and 10 tokens fit.
    cache, _ = call("free", crowded.cache, [2], [0])
    cache, found = call("extend", cache, [0], [10])
    assert found == [Status.OK] and num_copies(cache) == copies


def test_packed_rows_past_the_end_fail(crowded):
    """A row whose tokens do not all fit is refused, nothing is cut; those of a row that fails have places."""
    num_new = [14, 3, 4, 0]
    assert sum(num_new[:2]) < NUM_PACKED < sum(num_new)
    cache, step = kv.extend(crowded.cache, num_new, num_tokens=NUM_PACKED, seq_ids=[6, 4, 0, NUM_ROWS])
    found = statuses(step.status)
    assert found[:2] == [Status.SEQ_NOT_ACTIVE, Status.OK]
    assert found[2] not in (Status.OK, Status.SKIPPED)
    assert np.asarray(step.query_len).tolist() == [0, 3, 0, 0]
    assert np.asarray(cache.context_len)[[4, 0]].tolist() == [8, 7]
    skipped = [6, 4, NUM_ROWS, NUM_ROWS]
    want, _ = kv.extend(crowded.cache, num_new, num_tokens=NUM_PACKED, seq_ids=skipped)
    assert_same(leaf_bytes(want), leaf_bytes(cache))


# ---------------------------------------------------------------------------------------
# two groups: all or nothing


def two_groups(num_full_blocks, num_window_blocks):
    return kv.CacheConfig(
        layers=[
            kv.FullAttention(num_kv_heads=2, head_dim=3, block_size=4, num_blocks=num_full_blocks),
            kv.SlidingWindow(
                num_kv_heads=1,
                head_dim=5,
                window=7,
                max_rollback=2,
                block_size=2,
                num_blocks=num_window_blocks,
            ),
        ],
        max_seqs=4,
        max_seq_len=40,
        max_query_len=6,
    )


def append_two(cache, seq_ids, num_new):
    keys = [finite((len(seq_ids), 6, 2, 3)), finite((len(seq_ids), 6, 1, 5))]
    cache, step = kv.append(cache, keys, [-key for key in keys], num_new, seq_ids=seq_ids)
    return cache, statuses(step.status)


@pytest.mark.quick_cases("5-40")
@pytest.mark.parametrize("num_full_blocks, num_window_blocks", [(5, 40), (20, 9)])
def test_failure_in_one_group_leaves_both(num_full_blocks, num_window_blocks):
    cache = kv.init(two_groups(num_full_blocks, num_window_blocks))
    empty = leaf_bytes(cache)
    cache, admission = kv.allocate(
        cache, [2], [40]
    )  # 10 full blocks, or as many window blocks as a row ever holds
    if num_full_blocks == 5:
        assert statuses(admission.status) == [Status.OUT_OF_BLOCKS]
        assert_same(empty, leaf_bytes(cache))
    else:
        assert statuses(admission.status) == [Status.OK]
        cache, _ = kv.free(cache, [2])
    cache, admission = kv.allocate(cache, [2], [5])
    assert statuses(admission.status) == [Status.OK]
    cache, found = append_two(cache, [2], [5])
    assert found == [Status.OK]
    # Full: 2 of 5 blocks, 4 tokens each. Window: 3 of 9 blocks, 2 tokens each.
    cache, admission = kv.allocate(cache, [0], [6])
    assert statuses(admission.status) == [Status.OK]
    cache, found = append_two(cache, [0], [6])
    assert found == [Status.OK]
    short, plenty = (0, 1) if num_full_blocks == 5 else (1, 0)
    left = num_free(cache, short)
    assert left == (1 if short == 0 else 3)
    cache = poison(cache)
    before = leaf_bytes(cache)
    too_many = 6 if short == 0 else 40
    for operation, expected in (
        (lambda c: kv.allocate(c, [1], [too_many]), [Status.OUT_OF_BLOCKS]),
        (lambda c: kv.allocate(c, [0], [1]), [Status.SEQ_IN_USE]),
        (lambda c: kv.allocate(c, [1], [41]), [Status.TOO_LONG]),
        (lambda c: kv.free(c, [1]), [Status.SEQ_NOT_ACTIVE]),
        (lambda c: kv.fork(c, [1], [3]), [Status.SEQ_NOT_ACTIVE]),
        (lambda c: kv.truncate(c, [0], [7]), [Status.TOO_LONG]),
        (lambda c: kv.truncate(c, [0], [-1]), [Status.BAD_LENGTH]),
    ):
        new, result = operation(cache)
        assert statuses(getattr(result, "status", result)) == expected
        assert_same(before, leaf_bytes(new))

    # Rows 0 and 2 grow until one group is exhausted; the failing call leaves both groups as they were.
    failures = 0
    lengths = {0: 6, 2: 5}
    for _ in range(11):
        for seq_id in (0, 2):
            before, free = leaf_bytes(cache), (num_free(cache, 0), num_free(cache, 1))
            new, found = append_two(cache, [seq_id], [3])
            if found == [Status.OUT_OF_BLOCKS]:
                failures += 1
                assert_same(before, leaf_bytes(new))
                assert free[plenty] > 0
            else:
                assert found == [Status.OK]
                lengths[seq_id] += 3
                cache = poison(new)
            assert_invariants(cache)
        if failures:
            break
    assert failures
    assert np.asarray(cache.context_len).tolist() == [lengths[0], 0, lengths[2], 0]
    # With the one row gone the other proceeds, and in the end everything is free.
    cache, _ = kv.free(cache, [0])
    cache, found = append_two(cache, [2], [2])
    assert found == [Status.OK]
    cache, _ = kv.free(cache, [2])
    assert (num_free(cache, 0), num_free(cache, 1)) == (num_full_blocks, num_window_blocks)
    assert_invariants(cache)


@pytest.mark.slow
def test_failed_copy_in_one_group_leaves_both():
    """Both groups share a tail; only one has a block left for the copy."""
    for short, sizes in enumerate([(5, 40), (20, 9)]):
        cache = kv.init(two_groups(*sizes))
        cache, _ = kv.allocate(cache, [1], [5])
        cache, _ = kv.allocate(cache, [2], [12])  # all that is left of one group
        assert num_free(cache, short) == 0
        cache, found = append_two(cache, [1], [5])
        assert found == [Status.OK]
        cache, status = kv.fork(cache, [1, 1], [3, 0])
        assert statuses(status) == [Status.OK] * 2
        cache = poison(cache)
        before = leaf_bytes(cache)
        for seq_id in (3, 1, 0):
            new, found = append_two(cache, [seq_id], [1])
            assert found == [Status.OUT_OF_BLOCKS]
            assert_same(before, leaf_bytes(new))
        cache, _ = kv.free(cache, [3, 0])
        cache, found = append_two(cache, [1], [1])
        assert found == [Status.OK]
        assert_invariants(cache)


@pytest.mark.slow
def test_window_lost_leaves_both_groups():
    cache = kv.init(two_groups(20, 40))
    cache, _ = kv.allocate(cache, [3, 1], [17, 5])
    for num_new in ([6, 5], [6, 0], [5, 0]):
        cache, found = append_two(cache, [3, 1], num_new)
        assert found == [Status.OK] * 2
    cache = poison(cache)
    before = leaf_bytes(cache)
    for new_len in (14, 9, 7, 1, 0):
        new, status = kv.truncate(cache, [3], [new_len])
        assert statuses(status) == [Status.WINDOW_LOST], new_len
        assert_same(before, leaf_bytes(new))
    new, status = kv.truncate(cache, [3, 1], [14, 0])  # a row shorter than its window may lose everything
    assert statuses(status) == [Status.WINDOW_LOST, Status.OK]
    want, _ = kv.truncate(cache, [4, 1], [14, 0])
    assert_same(leaf_bytes(want), leaf_bytes(new))
    cache, status = kv.truncate(cache, [3], [15])
    assert statuses(status) == [Status.OK]
    assert_invariants(cache)
