"""The behavioural cases of serving engines' own test suites, by letter (those without prefix caching).

Each restates one case with its numbers. Contents are compared, not only counts: see `helpers.TokenDriver`.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from tests.support import helpers
from tests.support.helpers import (
    TokenDriver,
    append,
    assert_same,
    leaf_bytes,
    num_free,
    num_used,
    statuses,
    table,
    tiny_config,
    token_vectors,
)
from tests.support.letter_cases import CONFIG, HOARDERS, MAX_LEN, MAX_SEQS, NUM_BLOCKS, start_with


def test_case_a_sizes_from_a_memory_budget():
    hundred_bytes = kv.FullAttention(num_kv_heads=1, head_dim=25)  # 2 * 25 * 2 bytes a token
    for budget, num_blocks in ((16_000, 10), (17_599, 10), (17_600, 11)):
        config = kv.CacheConfig([hundred_bytes], memory_budget=budget, block_size=16, dtype=jnp.float16)
        assert config.groups[0].num_blocks == num_blocks
        assert config.groups[0].block_bytes == 1_600
        assert kv.memory_bytes(config) == num_blocks * 1_600
    # A block spans all layers of its group: the same budget holds fewer blocks of a deeper model.
    deep = kv.CacheConfig([hundred_bytes] * 3, memory_budget=16_000, block_size=16, dtype=jnp.float16)
    assert deep.groups[0].num_blocks == 3 and kv.memory_bytes(deep) == 3 * 4_800

    wide = kv.FullAttention(num_kv_heads=32, head_dim=128)
    for dtype, block_bytes in ((jnp.float16, 262_144), (jnp.bfloat16, 262_144), (jnp.float32, 524_288)):
        config = kv.CacheConfig(layers=[wide], num_blocks=7, block_size=16, dtype=dtype)
        assert config.groups[0].block_bytes == block_bytes
        assert kv.memory_bytes(config) == 7 * block_bytes
    cache = kv.init(CONFIG)
    arrays = [half for pool in cache.pools for half in (pool.k, pool.v)]
    num_bytes = sum(array.nbytes for array in arrays)
    assert kv.memory_bytes(CONFIG) == num_bytes == NUM_BLOCKS * CONFIG.groups[0].block_bytes


def test_case_b_blocks_used_by_lengths():
    driver = TokenDriver(CONFIG)
    driver.start(4, 48)
    assert num_used(driver.cache) == 3 and len(table(driver.cache, 4)) == 3
    driver.start(7, 8)
    assert num_used(driver.cache) == 3 + 1
    assert driver.append({7: 4})[7] == Status.OK
    assert num_used(driver.cache) == 3 + 1
    assert driver.append({7: 8})[7] == Status.OK
    assert num_used(driver.cache) == 3 + 2
    driver.check()
    assert driver.free(7, 4) == [Status.OK] * 2
    assert num_free(driver.cache) == NUM_BLOCKS
    driver.check()
    for length, num_rows in itertools.product((1, 16, 129), (1, 2, 10)):
        rows = {seq_id: length for seq_id in range(num_rows)}
        assert set(driver.allocate(rows).values()) == {Status.OK}
        assert num_used(driver.cache) == num_rows * math.ceil(length / 16)  # reserved by the admission
        assert set(driver.append(rows).values()) == {Status.OK}
        assert num_used(driver.cache) == num_rows * math.ceil(length / 16)  # and not one more when filled
        assert int(kv.stats(driver.cache).num_refs) == num_rows * math.ceil(length / 16)
        driver.check()
        driver.free(*rows)
        assert num_free(driver.cache) == NUM_BLOCKS


def test_case_f_release_leaves_others_alone():
    driver = TokenDriver(CONFIG)
    for seq_id, length in ((2, 33), (7, 16), (0, 50), (11, 1)):
        driver.start(seq_id, length)
    driver.check()
    with driver.unchanged(2, 0, 11):
        assert driver.free(7) == [Status.OK]
    driver.check()
    driver.free(0, 2, 11)
    assert num_free(driver.cache) == NUM_BLOCKS
    for cycle in range(7):
        rows = [(cycle * 5 + i) % 12 for i in range(4)]
        for i, seq_id in enumerate(rows):
            driver.start(seq_id, 7 + 13 * i + cycle)
        assert set(driver.append({seq_id: 9 for seq_id in rows}).values()) == {Status.OK}
        driver.check()
        assert driver.free(*rows) == [Status.OK] * 4
        assert num_free(driver.cache) == NUM_BLOCKS
    stats = kv.stats(driver.cache)
    assert int(stats.num_blocks_free) == NUM_BLOCKS and int(stats.num_refs) == int(stats.num_active_seqs) == 0
    driver.check()


def test_case_g_padding_and_idle_rows_write_nowhere():
    driver, active = start_with(0), 4
    holder = next(seq_id for seq_id in HOARDERS if 0 in table(driver.cache, seq_id))
    assert driver.append({holder: MAX_LEN}) == {holder: Status.OK}
    driver.free(*[seq_id for seq_id in HOARDERS if seq_id != holder])
    driver.start(active, 0)
    driver.check()
    before = [(np.array(pool.k), np.array(pool.v)) for pool in driver.cache.pools]

    idle, padding = Status.SEQ_NOT_ACTIVE, Status.SKIPPED
    seq_ids = np.array([5, MAX_SEQS, active, MAX_SEQS, holder, 1], np.int32)
    num_new = np.array([1, 1, 1, 1, 0, 1], np.int32)
    expected = [idle, padding, Status.OK, padding, Status.OK, idle]
    driver.texts[active] = driver.new_tokens(100)
    with driver.unchanged(holder):
        for position, token in enumerate(driver.texts[active]):
            keys = np.full((2, 6, 1, 2, 3), np.nan, np.float32)
            values = keys.copy()
            for layer in range(2):
                keys[layer, 2], values[layer, 2] = token_vectors(CONFIG, layer, [token], position)
            driver.cache, step = append(driver.cache, keys, values, num_new, seq_ids=seq_ids)
            assert statuses(step.status) == expected
    is_written = np.zeros((NUM_BLOCKS, 16), bool)
    is_written[table(driver.cache, active)] = True
    for pool, halves in zip(driver.cache.pools, before, strict=True):
        for array, old in zip((pool.k, pool.v), halves, strict=True):
            new, old = (np.asarray(x).reshape(2, NUM_BLOCKS, 2, 16, 3) for x in (array, old))
            is_changed = (new.view(np.int32) != old.view(np.int32)).any(axis=(0, 2, 4))
            assert not is_changed[0].any() and not (is_changed & ~is_written).any()
    driver.check()


@pytest.mark.quick_cases("244")
@pytest.mark.parametrize("max_seq_len", [MAX_LEN, 48])
def test_case_h_row_at_max_seq_len(max_seq_len):
    """In a block that is cut short, and in a whole one."""
    driver = TokenDriver(CONFIG if max_seq_len == MAX_LEN else tiny_config(**helpers.ROOMY))
    driver.start(1, max_seq_len - 1)
    driver.start(0, 5)
    driver.check()
    before = leaf_bytes(driver.cache)
    assert driver.append({1: 2}) == {1: Status.TOO_LONG}
    assert_same(before, leaf_bytes(driver.cache))
    assert driver.append({1: 1, 0: 2}) == {1: Status.OK, 0: Status.OK}
    driver.check()
    before = leaf_bytes(driver.cache)
    for count in (1, 2, 16):
        assert driver.append({1: count}) == {1: Status.TOO_LONG}
        assert_same(before, leaf_bytes(driver.cache))
    assert driver.append({1: 1, 0: 3}) == {1: Status.TOO_LONG, 0: Status.OK}
    driver.check()
    assert driver.truncate([1], [max_seq_len - 1]) == [Status.OK]
    assert driver.append({1: 1}) == {1: Status.OK}
    driver.check()
    driver.free(1)
    assert driver.allocate({1: max_seq_len + 1}) == {1: Status.TOO_LONG}
    driver.check()
