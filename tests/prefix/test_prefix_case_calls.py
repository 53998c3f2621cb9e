"""The behavioural cases of the prefix cache in which the rows of one call share or compete for blocks."""

import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from tests.support.helpers import num_free, table
from tests.support.prefix_user import BALLAST, BLOCKS_OF_16, PrefixUser


def pool_of(num_blocks):
    """Rows 3 and 4 hold the others."""
    user = PrefixUser(BLOCKS_OF_16)
    others = (user.new_text(14, 160 - 16 * num_blocks), user.new_text(15, BALLAST))
    assert [user.admit(3 + i, text) for i, text in enumerate(others)] == [0, 0]
    assert num_free(user.cache) == num_blocks
    return user


def cached_text(user, num_blocks, start=1):
    """A text of full blocks that are published and that no row holds."""
    text = user.new_text(start, num_blocks * 16)
    assert user.start(0, text) == 0
    user.free(0)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("is_hitter_first", [True, False])
def test_case_gg_hits_that_nobody_holds_are_needed_like_new_blocks(is_hitter_first):
    user = pool_of(4)
    other, text = cached_text(user, 1, start=9), cached_text(user, 3)
    assert user.stats().num_blocks_cached == 4 and user.stats().num_blocks_free == 0
    entries = [(0, user.new_text(5, 48)), (1, text + user.new_text(2, 16))]
    if is_hitter_first:
        entries.reverse()
    assert user.allocate(dict(entries)) == (
        [Status.OK, Status.OUT_OF_BLOCKS],
        [48 if is_hitter_first else 0, 0],
    )
    # With the hits held, the fourth block made room; otherwise three of the cached ones did.
    assert user.stats().num_evictions == (1 if is_hitter_first else 3)
    assert user.stats().num_blocks_cached == (0 if is_hitter_first else 1)
    assert user.lookup([*other, 1]) == 0
    assert user.lookup([*text, 1]) == (48 if is_hitter_first else 16)


@pytest.mark.slow
def test_case_hh_two_equal_prompts_revive_their_hits_once():
    user = pool_of(5)
    text = cached_text(user, 3)
    assert user.stats().num_blocks_cached == 3 and user.stats().num_blocks_free == 2
    prompt = text + user.new_text(2, 16)
    assert user.allocate({0: prompt, 1: prompt}) == ([Status.OK] * 2, [48, 48])
    assert table(user.cache, 0)[:3] == table(user.cache, 1)[:3] and num_free(user.cache) == 0
    assert user.stats().num_evictions == 0
    # The new blocks of equal prompts of one call are not shared, before they are published.
    assert table(user.cache, 0)[3] != table(user.cache, 1)[3]
    # One block less, and the second one does not get its own.
    user = pool_of(4)
    text = cached_text(user, 3)
    assert user.allocate({1: prompt, 0: prompt}) == ([Status.OK, Status.OUT_OF_BLOCKS], [48, 0])
    # Also where a third one is short of blocks.
    user = pool_of(5)
    text = cached_text(user, 3)
    found = user.allocate({1: prompt, 0: prompt, 2: user.new_text(3, 16)})
    assert found == ([Status.OK, Status.OK, Status.OUT_OF_BLOCKS], [48, 48, 0])


def test_case_ii_the_queue_after_two_rows_that_share_blocks():
    user = PrefixUser(BLOCKS_OF_16)
    shared = user.new_text(1, 32)
    texts = [shared + user.new_text(2 + row, 16) for row in range(2)]
    assert [user.start(row, text) for row, text in enumerate(texts)] == [0, 32]
    assert user.num_used() == 4 and user.stats().num_blocks_published == 4
    user.free(0, 1)
    found = []
    for _ in range(4):
        user.cache, num_evicted = kv.evict(user.cache, 1)
        assert int(num_evicted) == 1
        user.check()
        found.append([user.lookup([*text, 1]) for text in texts])
    assert found == [
        [32, 48],
        [32, 32],
        [16, 16],
        [0, 0],
    ]  # tail of 0, tail of 1, shared second, shared first


def test_blocks_that_a_row_drops_are_queued_last_first():
    """One row is cut, another takes the place of an empty one."""
    user = PrefixUser(BLOCKS_OF_16)
    cut, replaced = user.new_text(1, 48), user.new_text(2, 48)
    assert [user.start(row, text) for row, text in enumerate((cut, replaced))] == [0, 0]
    assert user.admit(2, []) == 0
    user.truncate(0, 16)
    user.cache, status = kv.reorder(user.cache, [1], [2])
    assert status.tolist() == [Status.OK]
    user.texts[1] = []
    user.check()
    found = []
    for _ in range(5):
        user.cache, num_evicted = kv.evict(user.cache, 1)
        assert int(num_evicted) == 1
        user.check()
        found.append([user.lookup([*text, 1]) for text in (cut, replaced)])
    assert found == [[32, 48], [16, 48], [16, 32], [16, 16], [16, 0]]


def test_two_rows_that_adopt_a_cached_block_revive_it_once():
    user = PrefixUser(BLOCKS_OF_16)
    text = cached_text(user, 2)
    assert user.allocate({1: text, 2: text}, reuse=False) == ([Status.OK] * 2, [0, 0])
    user.fill(1, 2)
    user.commit(1, 2)
    assert table(user.cache, 1) == table(user.cache, 2)
    assert user.stats().num_adoptions == 4 and user.stats().num_blocks_cached == 0


def test_forks_that_are_committed_together_adopt_a_block_once():
    """Both hold the private block in the same column, and a third row that is not named does too."""
    user = PrefixUser(BLOCKS_OF_16)
    text = user.new_text(1, 32)
    assert user.start(0, text) == 0
    assert user.admit(1, text, reuse=False) == 0
    user.fill(1)
    user.fork(1, 2)
    user.fork(1, 3)
    user.commit(1, 2)
    assert [table(user.cache, row) for row in (1, 2, 3)] == [table(user.cache, 0)] * 3
    assert user.num_used() == 2 and user.stats().num_adoptions == 2
