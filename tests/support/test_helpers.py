"""The other tests lean on these helpers: what they fill, and what they notice."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core.state import row_fields
from tests.support.helpers import TokenDriver, changed_leaves, row_state

CONFIG = kv.CacheConfig([kv.FullAttention(2, 3)] * 2, num_blocks=12, block_size=4, max_seqs=3, max_seq_len=30)


@pytest.fixture(scope="module")
def driver():
    driver = TokenDriver(CONFIG)
    driver.start(2, 21)
    driver.check()
    return driver


def test_a_row_s_state_has_all_that_the_control_holds_per_row(driver):
    control = driver.cache.control
    arrays = {f.name: getattr(control, f.name) for f in dataclasses.fields(control)}
    per_row = [
        name for name, array in arrays.items() if getattr(array, "shape", ())[:1] == (CONFIG.max_seqs,)
    ]
    assert sorted(row_fields(control)) == sorted(per_row)
    assert row_state(driver.cache, 2).keys() == {*per_row, "block_table[0]"}


def test_one_changed_bit_is_noticed(driver):
    pool = driver.cache.pools[0]
    bits = np.array(pool.v).view(np.int32)
    bits[-1, -1, -1, -1] ^= 1
    changed = dataclasses.replace(pool, arrays=pool.arrays | {"v": jnp.asarray(bits.view(np.float32))})
    cache = dataclasses.replace(driver.cache, pools=(changed,))
    assert len(changed_leaves(driver.cache, cache)) == 1


@pytest.mark.quick_cases("1-v")
@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_wrong_token_fails_the_token_test(half, layer):
    driver = TokenDriver(CONFIG)
    driver.start(1, 9)
    pool = driver.cache.pools[0]
    array = np.array(getattr(pool, half)).reshape(2, 12, 2, 4, 3)
    blocks = np.asarray(driver.cache.control.block_pools[0].block_table)[1]
    array[layer, blocks[1], 1, 2] = array[layer, blocks[1], 1, 3]  # position 6 reads as position 7
    changed = dataclasses.replace(pool, arrays=pool.arrays | {half: jnp.asarray(array.reshape(24, 2, 4, 3))})
    driver.cache = dataclasses.replace(driver.cache, pools=(changed,))
    with pytest.raises(AssertionError, match=f"row 1, layer {layer}"):
        driver.check()
