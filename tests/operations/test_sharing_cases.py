"""The behavioural cases of serving engines' own test suites in which rows share blocks, by letter.

Each restates one case with its numbers. Contents are compared, not only counts: see `helpers.TokenDriver`.
"""

import itertools
import math

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from tests.support.helpers import (
    TokenDriver,
    num_copies,
    num_free,
    num_used,
    table,
)
from tests.support.letter_cases import CONFIG, NUM_BLOCKS, start_with


def test_case_i_fork_takes_no_block():
    driver = TokenDriver(CONFIG)
    driver.start(4, 48)
    assert num_used(driver.cache) == 3
    assert driver.fork([4], [9]) == [Status.OK]
    assert num_used(driver.cache) == 3
    assert table(driver.cache, 4) == table(driver.cache, 9)
    assert int(kv.stats(driver.cache).num_refs) == 6 and int(kv.stats(driver.cache).num_blocks_shared) == 3
    driver.check()
    free = num_free(driver.cache)
    driver.free(4)
    assert num_free(driver.cache) == free
    driver.check()
    driver.free(9)
    assert num_free(driver.cache) == NUM_BLOCKS
    driver.check()


def test_case_i_reserved_blocks_stay_with_the_source():
    driver = TokenDriver(CONFIG)
    assert driver.allocate({4: 90}) == {4: Status.OK}  # 6 blocks reserved, 2 of them filled
    assert driver.append({4: 20}) == {4: Status.OK}
    assert driver.fork([4], [9]) == [Status.OK]
    assert num_used(driver.cache) == 6
    assert len(table(driver.cache, 4)) == 6 and table(driver.cache, 9) == table(driver.cache, 4)[:2]
    assert driver.append({9: 14, 4: 13}) == {9: Status.OK, 4: Status.OK}
    driver.check()
    driver.free(4)
    assert num_used(driver.cache) == 3
    driver.check()


@pytest.mark.parametrize("is_fork_first", [True, False])
def test_case_j_copy_on_write_counts(is_fork_first):
    driver = TokenDriver(CONFIG)
    for n, k in itertools.product((5, 15, 16, 17, 32, 33), (1, 11, 16, 28)):
        driver.start(2, n)
        driver.fork([2], [6])
        driver.check()
        first, second = (6, 2) if is_fork_first else (2, 6)
        copies, used = num_copies(driver.cache), num_used(driver.cache)
        taken = math.ceil((n + k) / 16) - n // 16
        assert np.asarray(kv.num_blocks_needed(driver.cache, [k], [first])).tolist() == [taken]
        with driver.unchanged(second):
            assert driver.append({first: k}) == {first: Status.OK}
        assert num_used(driver.cache) - used == taken
        assert num_copies(driver.cache) - copies == (1 if n % 16 else 0)
        assert table(driver.cache, first)[: n // 16] == table(driver.cache, second)[: n // 16]
        driver.check()

        # The last remaining owner of the tail writes in place.
        copies, used, tail = num_copies(driver.cache), num_used(driver.cache), table(driver.cache, second)
        with driver.unchanged(first):
            assert driver.append({second: k}) == {second: Status.OK}
        assert num_used(driver.cache) - used == math.ceil((n + k) / 16) - math.ceil(n / 16)
        assert num_copies(driver.cache) == copies
        assert table(driver.cache, second)[: len(tail)] == tail
        driver.check()
        driver.free(2, 6)
        assert num_free(driver.cache) == NUM_BLOCKS


def test_case_k_three_branches_of_one_row():
    driver = TokenDriver(CONFIG)
    driver.start(1, 20)
    driver.fork([1, 1], [5, 3])
    copies = num_copies(driver.cache)
    assert set(driver.append({1: 1, 3: 1, 5: 1}).values()) == {Status.OK}
    tables = [table(driver.cache, seq_id) for seq_id in (1, 3, 5)]
    assert len({blocks[0] for blocks in tables}) == 1 and len({blocks[1] for blocks in tables}) == 3
    assert num_used(driver.cache) == 4
    assert num_copies(driver.cache) == copies + 2  # three writers, three owners: the last writes in place
    assert int(kv.stats(driver.cache).num_blocks_shared) == 1
    assert len({tuple(driver.texts[seq_id]) for seq_id in (1, 3, 5)}) == 3
    driver.check()
    # One branch after another, and longer ones.
    for seq_id, count in ((5, 3), (1, 12), (3, 13)):
        assert driver.append({seq_id: count}) == {seq_id: Status.OK}
        driver.check()


def test_case_m_reorder_with_duplicates():
    driver = TokenDriver(CONFIG)
    for seq_id, length in ((0, 19), (1, 35), (2, 37), (3, 50)):
        driver.start(seq_id, length)
    driver.check()
    tables = {seq_id: table(driver.cache, seq_id) for seq_id in range(4)}
    assert num_used(driver.cache) == 2 + 3 + 3 + 4
    assert driver.reorder([0, 1, 2, 3], [2, 2, 0, 2]) == [Status.OK] * 4
    assert [table(driver.cache, seq_id) for seq_id in range(4)] == [tables[parent] for parent in (2, 2, 0, 2)]
    assert num_used(driver.cache) == 2 + 3  # what only rows 1 and 3 owned came back
    driver.check()
    assert set(driver.append({0: 2, 1: 2, 2: 2, 3: 2}).values()) == {Status.OK}
    assert num_used(driver.cache) == 2 + 2 + 3  # three branches of 37 tokens: two full blocks, three tails
    driver.check()
    # A swap keeps everything, and the identity changes no row.
    used = num_used(driver.cache)
    assert driver.reorder([3, 2], [2, 3]) == [Status.OK] * 2
    assert num_used(driver.cache) == used
    driver.check()
    rows = [table(driver.cache, seq_id) for seq_id in range(4)]
    assert driver.reorder([0, 1, 2, 3], [0, 1, 2, 3]) == [Status.OK] * 4
    assert [table(driver.cache, seq_id) for seq_id in range(4)] == rows and num_used(driver.cache) == used
    driver.check()
    driver.free(0, 1, 2, 3)
    assert num_free(driver.cache) == NUM_BLOCKS


@pytest.mark.parametrize("num_owners", [3, 4])
def test_case_ee_three_writers_and_one_spare_block(num_owners):
    driver = start_with(3)
    driver.start(1, 20)
    branches = [4, 2, 0][: num_owners - 1]
    assert driver.fork([1] * len(branches), branches) == [Status.OK] * len(branches)
    assert num_free(driver.cache) == 1
    driver.check()
    with driver.unchanged(2, 4):
        found = driver.append({1: 1, 2: 1, 4: 1})
    # With three owners, row 2 still owns the tail after it failed, so row 4 may not write in place either.
    assert found == {1: Status.OK, 2: Status.OUT_OF_BLOCKS, 4: Status.OUT_OF_BLOCKS}
    assert num_free(driver.cache) == 0
    driver.check()
    driver.free(*(seq_id for seq_id in branches if seq_id != 4))
    copies = num_copies(driver.cache)
    assert driver.append({4: 1}) == {4: Status.OK}  # now the one owner
    assert num_copies(driver.cache) == copies
    driver.check()
