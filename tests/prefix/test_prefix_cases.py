"""The behavioural cases of the prefix cache, by letter, with their numbers.

Every call also checks the invariants and, slot by slot, that each row holds the tokens of its own text.
"""

import dataclasses

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from tests.support.helpers import assert_same, leaf_bytes, num_free, statuses, table
from tests.support.prefix_user import BALLAST, BLOCKS_OF_16, CONFIG, TENANT_A, TENANT_B, PrefixUser


def ref_counts(user, blocks):
    return np.asarray(user.cache.control.block_pools[0].ref_count)[blocks].tolist()


def ten_blocks():
    """Of 16 tokens."""
    user = PrefixUser(BLOCKS_OF_16)
    assert user.admit(4, user.new_text(15, BALLAST)) == 0
    assert num_free(user.cache) == 10
    return user


def two_blocks_left():
    """Of ten; the others are reserved by rows 2 and 3."""
    user = ten_blocks()
    for row in (2, 3):
        assert user.admit(row, user.new_text(10 + row, 64)) == 0
    assert int(kv.num_available_blocks(user.cache)) == 2
    return user


def test_case_o_the_full_blocks_of_a_prompt_are_published_and_its_tail_is_not():
    user = PrefixUser(BLOCKS_OF_16)
    shared = user.new_text(1, 48)
    first = shared + user.new_text(2, 7)
    assert user.admit(0, first) == 0
    user.fill(0)
    assert user.num_used() == 4
    assert user.lookup(first) == 0 and user.stats().num_blocks_published == 0
    user.commit(0)
    assert user.stats().num_blocks_published == 3

    second = shared + user.new_text(3, 5)
    assert user.admit(1, second) == 48
    assert user.num_used() == 5
    assert table(user.cache, 0)[:3] == table(user.cache, 1)[:3]
    assert ref_counts(user, table(user.cache, 0)) == [2, 2, 2, 1]
    user.fill(1)
    user.free(0, 1)
    assert user.num_used() == 0 and user.stats().num_blocks_cached == 3
    assert user.admit(2, shared + user.new_text(4, 9)) == 48


@pytest.mark.slow
def test_case_q_a_hit_is_never_evicted_underneath_itself():
    user = two_blocks_left()
    older, newer, other = (user.new_text(i, 16) for i in (1, 2, 3))
    for text in (older, newer):
        assert user.start(0, text) == 0
        user.free(0)
    assert user.stats().num_blocks_cached == 2
    assert user.admit(0, older + other) == 16
    assert user.lookup(newer + other) == 0 and user.lookup(older + other) == 16
    assert user.stats().num_evictions == 1
    user.fill(0)
    assert user.texts[0] == older + other


@pytest.mark.slow
def test_case_r_revived_hits_are_not_counted_as_room():
    user = ten_blocks()
    text = user.new_text(1, 144)
    assert user.start(0, text[:48]) == 0
    assert user.start(1, text[:96]) == 48
    user.free(1)
    assert user.start(2, user.new_text(2, 32)) == 0
    assert int(kv.num_available_blocks(user.cache)) == 5
    before = leaf_bytes(user.cache)
    assert user.lookup(text) == 96
    assert user.allocate({3: text}) == ([Status.OUT_OF_BLOCKS], [0])
    assert_same(before, user.cache)
    # One block less, and it fits exactly.
    assert user.allocate({3: text[:128]}) == ([Status.OK], [96])
    assert int(kv.num_available_blocks(user.cache)) == 0
    assert user.stats().num_evictions == 0


def test_case_s_a_block_taken_for_new_content_is_not_found_by_the_old():
    user = two_blocks_left()
    text = user.new_text(1, 32)
    user.start(0, text)
    user.free(0)
    longer = text[:31] + user.new_text(2, 1)
    assert user.lookup(text) == 16
    # The head of the chain stays while one block is enough: tails go first.
    user.admit(0, user.new_text(3, 16))
    assert user.lookup(text) == 16
    user.free(0)
    user.admit(0, user.new_text(3, 32))
    assert user.lookup(text) == user.lookup(longer) == 0
    user.free(0)  # Never written: the old tokens still stand in the blocks.
    assert user.lookup(text) == 0 and user.stats().num_blocks_published == 0
    assert user.start(0, text) == 0


def test_case_t_another_namespace_never_hits():
    user = PrefixUser(BLOCKS_OF_16)
    text = user.new_text(1, 55)
    assert user.start(0, text, TENANT_A) == 0
    assert user.admit(1, text, TENANT_B) == 0
    assert user.admit(2, text) == 0
    assert user.lookup(text, TENANT_A) == 48
    assert user.lookup(text, TENANT_B) == user.lookup(text) == 0
    assert user.admit(3, text, TENANT_A) == 48
    # Blocks that a row adds later belong to the namespace of its first.
    more = user.new_text(2, 9)
    assert user.append({0: more}) == {0: Status.OK}
    user.commit(0)
    assert user.lookup(text + more, TENANT_A) == 48  # 64 tokens: the last one is computed again
    assert user.lookup(text + more + [5], TENANT_A) == 64
    assert user.lookup(text + more + [5], TENANT_B) == user.lookup(text + more + [5]) == 0
    user.fill(1)
    user.commit(1)
    assert user.lookup(text, TENANT_B) == 48
    assert not set(table(user.cache, 0)) & set(table(user.cache, 1))


def test_case_t_a_fork_inherits_the_namespace():
    user = PrefixUser(BLOCKS_OF_16)
    text = user.new_text(1, 20)
    user.start(0, text, TENANT_A)
    user.fork(0, 1)
    more = user.new_text(2, 13)
    user.append({1: more})
    user.commit(1)
    assert user.lookup(text + more, TENANT_A) == 32
    assert user.lookup(text + more) == 0


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 3, 4, 7, 16])
def test_case_u_keys_built_in_pieces_equal_keys_built_at_once(piece):
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 43)
    user.admit(0, text)
    for end in range(piece, len(text) + piece, piece):
        user.append({0: text[:end][len(user.texts[0]) :]})
        if piece < 16:
            user.commit(0)
    user.commit(0)
    assert user.stats().num_blocks_published == 10
    assert user.lookup(text) == 40
    # Built at once without looking: every one of its blocks turns out to be the same.
    user.admit(1, text, reuse=False)
    user.fill(1)
    user.commit(1)
    assert user.stats().num_adoptions == 10 and user.stats().num_blocks_published == 10
    assert table(user.cache, 0)[:10] == table(user.cache, 1)[:10]


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_case_v_of_two_equal_computations_one_copy_remains(together):
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 14)
    assert user.allocate({2: text, 0: text}) == ([Status.OK] * 2, [0, 0])
    user.fill(0, 2)
    assert user.num_used() == 8
    if together:
        user.commit(2, 0)
    else:
        user.commit(2)
        assert user.num_used() == 8
        user.commit(0)
    assert user.num_used() == 5 and num_free(user.cache) == 19
    assert table(user.cache, 0)[:3] == table(user.cache, 2)[:3]
    assert user.stats().num_adoptions == 3
    user.free(0, 2)
    assert user.stats().num_blocks_cached == 3 and user.num_used() == 0


def test_case_y_reset_keeps_the_blocks_of_active_rows():
    user = PrefixUser(BLOCKS_OF_16)
    text, other = user.new_text(1, 55), user.new_text(2, 40)
    user.start(0, text)
    user.start(1, other)
    user.free(1)
    user.fork(0, 2)
    held = table(user.cache, 0)
    user.cache, num_dropped = kv.reset_prefix_cache(user.cache)
    user.check()
    assert int(num_dropped) == 5
    assert table(user.cache, 0) == table(user.cache, 2) == held
    assert user.lookup(text) == user.lookup(other) == 0
    assert user.num_used() == 4 and user.stats().num_blocks_free == 20
    user.commit(0)  # What is still there can be published again.
    assert user.lookup(text) == 48
    user.free(0, 2)
    user.cache, num_dropped = kv.reset_prefix_cache(user.cache)
    assert int(num_dropped) == 3 and user.stats().num_blocks_free == 24
    user.check()
    assert int(kv.reset_prefix_cache(user.cache)[1]) == 0


@pytest.mark.slow
def test_case_z_without_prefix_caching_the_same_blocks_are_counted():
    on, off = PrefixUser(CONFIG), PrefixUser(dataclasses.replace(CONFIG, enable_prefix_caching=False))
    assert off.cache.control.prefix_index is None and off.cache.control.block_pools[0].cached is None
    text = on.new_text(1, 21)
    for user in (on, off):
        assert user.admit(0, text, reuse=False) == 0
        user.fill(0)
        assert user.admit(1, text, reuse=False) == 0
        user.fill(1)
        assert user.lookup(text) == 0
        user.fork(0, 2)
        user.append({2: [1, 2, 3], 0: [4]})
        assert user.allocate({3: user.new_text(2, 33)}) == ([Status.OK], [0])
    for field in dataclasses.fields(kv.state.Stats):
        if field.name.startswith(("num_request", "num_block_", "num_token")):
            assert getattr(off.stats(), field.name) == 0
        else:
            assert getattr(on.stats(), field.name) == getattr(off.stats(), field.name), field.name
    assert statuses(kv.free(off.cache, [0])[1]) == [Status.OK]
    assert int(kv.evict(off.cache, 5)[1]) == 0 and int(kv.reset_prefix_cache(off.cache)[1]) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_case_dd_a_published_block_is_copied_before_it_is_written(shared):
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 12)
    user.start(0, text)
    if shared:
        user.fork(0, 1)
    original = table(user.cache, 0)
    user.truncate(0, 6)
    assert user.append({0: [9, 9]}) == {0: Status.OK}
    assert user.stats().num_copies == 1
    assert table(user.cache, 0)[0] == original[0] and table(user.cache, 0)[1] != original[1]
    assert user.lookup([*text, 1]) == 12
    assert user.admit(2, [*text, 1]) == 12  # Checks the tokens of the original, slot by slot.
    assert table(user.cache, 2)[:3] == original
    user.commit(0)
    assert user.lookup([*text[:6], 9, 9, 1]) == 8


def test_drafts_that_are_taken_back_are_never_found():
    user = PrefixUser(CONFIG)
    text, drafts = user.new_text(1, 7), [3, 3, 3, 3, 3]
    user.admit(0, text)
    user.fill(0)
    user.append({0: drafts})
    user.commit(0, final_len=[7])
    assert user.lookup([*text, *drafts, 1]) == 4
    user.truncate(0, 9)
    user.commit(0)
    assert user.lookup([*text, *drafts, 1]) == 8
    user.append({0: [4, 4, 4]})
    user.commit(0)
    assert user.lookup([*text, *drafts, 1]) == 8
    assert user.lookup([*text, 3, 3, 4, 4, 4, 1]) == 12
