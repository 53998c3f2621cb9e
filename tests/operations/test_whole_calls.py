"""All rows of a call act on the state before it: every operation x rows that repeat, name no row or chain.

What an entry must not do is shown by a call in which it is skipped: that must leave the same bits.
"""

import numpy as np
import pytest

from kvcache_jax import Status
from tests.support import row_calls
from tests.support.helpers import assert_invariants, assert_same, leaf_bytes, num_free, row_state
from tests.support.row_calls import CALLS, FAILURES, NUM_ROWS, PARTNERS, make_crowded

SKIPPED = (NUM_ROWS, 0)
GROWS = ("extend", "extend_packed", "append")
HAS_TWO_IDS = ("fork", "reorder")
IDLE, FULL, LONG = 6, 3, 4  # rows of the crowded state

# What would succeed for the row of a failure, were it alone: (operation, row): argument.
RETRIES = {
    **{(operation, row): 1 for operation in GROWS for row in (LONG, FULL)},
    ("allocate", IDLE): 1,
    ("fork", IDLE): 0,
    ("reorder", FULL): 0,
    ("truncate", LONG): 3,
    ("truncate", FULL): 3,
}


@pytest.fixture(scope="module")
def crowded():
    return make_crowded()


def call(crowded, operation, *entries):
    """The cache after a call of pairs (row, argument), and the statuses of these."""
    cache, found = row_calls.call(operation, crowded.cache, *zip(*entries, strict=True))
    assert_invariants(cache)
    return cache, found


def assert_does_what(crowded, operation, entries, which, expected):
    """The statuses are as expected, and the entries `which` alone changed anything."""
    cache, found = call(crowded, operation, *entries)
    assert found == expected, (operation, entries, found)
    others_skipped = [entry if i in which else SKIPPED for i, entry in enumerate(entries)]
    assert_same(leaf_bytes(call(crowded, operation, *others_skipped)[0]), leaf_bytes(cache))


@pytest.mark.parametrize("operation", CALLS)
def test_the_first_entry_that_names_a_row_wins(crowded, operation):
    (first, argument), other = PARTNERS[operation]
    entries = (first, argument), (first, argument), other, (first, 1)
    expected = [Status.OK, Status.DUPLICATE_SEQ_ID, Status.OK, Status.DUPLICATE_SEQ_ID]
    assert_does_what(crowded, operation, entries, [0, 2], expected)


@pytest.mark.parametrize("operation", CALLS)
def test_a_failed_entry_names_its_row_too(crowded, operation):
    """Later entries for the row fail, also those that would succeed; the other rows go on."""
    num_tried = 0
    for name, row, argument, failure in FAILURES:
        if name != operation or failure in (Status.BAD_SEQ_ID, Status.SKIPPED):
            continue
        num_tried += 1
        retry = row, RETRIES.get((operation, row), argument)
        other = next(entry for entry in PARTNERS[operation] if entry[0] != row)
        expected = [failure, Status.DUPLICATE_SEQ_ID, Status.OK, Status.DUPLICATE_SEQ_ID]
        assert_does_what(crowded, operation, [(row, argument), retry, other, retry], [2], expected)
    assert num_tried, operation
    for (name, row), argument in RETRIES.items():
        if name == operation and (name, row) not in [(n, FULL) for n in GROWS]:
            assert call(crowded, operation, (row, argument))[1] == [Status.OK], (operation, row)


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize(("bad_id", "failure"), [(NUM_ROWS, Status.SKIPPED), (-1, Status.BAD_SEQ_ID)])
def test_entries_that_name_nobody_repeat_nobody(crowded, operation, bad_id, failure):
    """Skipped ids and those out of range may repeat; a bad second id takes the first one's word back."""
    row, argument = PARTNERS[operation][0]
    entries = [(bad_id, argument), (row, argument), (bad_id, argument), (NUM_ROWS + 1, argument)]
    expected = [failure, Status.OK, failure, Status.BAD_SEQ_ID]
    assert_does_what(crowded, operation, entries, [1], expected)
    if operation in HAS_TWO_IDS:
        entries = [(row, bad_id), (row, argument), (row, bad_id), (row, argument)]
        expected = [failure, Status.OK, failure, Status.DUPLICATE_SEQ_ID]
        assert_does_what(crowded, operation, entries, [1], expected)


@pytest.mark.parametrize("operation", GROWS)
def test_entries_without_tokens_name_nobody(crowded, operation):
    """An entry with fewer than none names its row."""
    entries = [(LONG, 0), (LONG, 2), (LONG, 0), (LONG, 1)]
    expected = [Status.OK, Status.OK, Status.OK, Status.DUPLICATE_SEQ_ID]
    assert_does_what(crowded, operation, entries, [1], expected)
    entries = [(IDLE, 0), (LONG, -1), (LONG, 2), (IDLE, 1)]
    expected = [Status.OK, Status.BAD_LENGTH, Status.DUPLICATE_SEQ_ID, Status.SEQ_NOT_ACTIVE]
    assert_does_what(crowded, operation, entries, [], expected)


def test_an_allocation_of_no_tokens_names_its_row(crowded):
    entries = [(IDLE, 0), (IDLE, 1)]
    assert_does_what(crowded, "allocate", entries, [0], [Status.OK, Status.DUPLICATE_SEQ_ID])


def test_entries_do_not_see_what_the_call_starts(crowded):
    """Entries are (new row, source)."""
    ok, idle = Status.OK, Status.SEQ_NOT_ACTIVE
    chain = [(6, 0), (7, 6), (1, 7), (5, 1)]
    assert_does_what(crowded, "fork", chain, [0], [ok, idle, idle, idle])
    backwards = [(1, 7), (7, 6), (6, 0), (5, 0)]
    assert_does_what(crowded, "fork", backwards, [2, 3], [idle, idle, ok, ok])
    assert_does_what(crowded, "fork", [(6, 6), (6, 0)], [], [idle, Status.DUPLICATE_SEQ_ID])


def test_entries_do_not_see_what_the_call_changes(crowded):
    """Parents are taken as they were: a cycle of three rows, and one that is a parent of itself."""
    rows = 0, FULL, LONG
    before = crowded.cache
    cache, found = call(crowded, "reorder", (0, FULL), (FULL, LONG), (LONG, 0), (2, 2))
    assert found == [Status.OK] * 4
    tables = [np.asarray(c.control.block_pools[0].block_table) for c in (before, cache)]
    for row, parent in zip(rows, (FULL, LONG, 0), strict=True):
        np.testing.assert_array_equal(tables[1][row], tables[0][parent])
    assert row_state(before, 2) == row_state(cache, 2)
    assert num_free(before) == num_free(cache)


def test_a_call_of_all_failures_leaves_the_state(crowded):
    """The first named wins nothing, the others are refused, and no bit moves."""
    before = leaf_bytes(crowded.cache)
    for operation in CALLS:
        failures = [(row, argument) for name, row, argument, _ in FAILURES if name == operation]
        for i in range(0, len(failures), 4):
            cache, found = call(crowded, operation, *failures[i : i + 4])
            assert Status.OK not in found
            assert_same(before, leaf_bytes(cache))


@pytest.mark.parametrize("operation", GROWS)
def test_all_rows_grow_where_there_are_blocks_for_all(crowded, operation):
    """A new block, a copy, and the last owner writes in place: two of three blocks."""
    cache, found = call(crowded, operation, (LONG, 4), (0, 1), (2, 1))
    assert found == [Status.OK] * 3
    assert num_free(cache) == 1


def test_a_row_that_asks_for_less_gets_what_a_larger_one_left(crowded):
    """Three free blocks, in the order of the entries: 2, 2, 1."""
    entries = [(7, 8), (1, 8), (5, 3), (IDLE, 1)]
    expected = [Status.OK, Status.OUT_OF_BLOCKS, Status.OK, Status.OUT_OF_BLOCKS]
    assert_does_what(crowded, "allocate", entries, [0, 2], expected)
    # Three blocks, a copy, and the last owner writes in place.
    entries = [(LONG, 12), (0, 1), (2, 1), (IDLE, 0)]
    cache, found = call(crowded, "extend", *entries)
    assert found == [Status.OK, Status.OUT_OF_BLOCKS, Status.OUT_OF_BLOCKS, Status.OK]
    assert num_free(cache) == 0
    assert row_state(cache, 0) == row_state(crowded.cache, 0)
    assert row_state(cache, 2) == row_state(crowded.cache, 2)
