"""Reuse, eviction and look-up of prompts of random tokens, against the oracle after every operation."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.prefix_script import (
    NAMESPACES,
    PROMPT_WIDTH,
    SCRIPT_CONFIG,
    PrefixDriver,
    lookup,
)
from tests.support.random_script import ROWS, WIDTH, Driver, padded


class FreshDriver(PrefixDriver):
    """Its tokens are no other row's."""

    new_tokens = Driver.new_tokens

    def start(self, lengths):
        """Rows of some lengths, {row: length}, all their full blocks published."""
        prompts = [self.new_tokens(PROMPT_WIDTH) for _ in lengths]
        nothing = [0] * len(lengths)
        self.apply("admit", [*lengths], [*lengths.values()], prompts, nothing, nothing)
        left = [lengths.get(row, 0) for row in range(ROWS)]
        while any(left):
            new = [min(n, WIDTH) for n in left]
            self.apply("extend", new)
            left = [n - m for n, m in zip(left, new, strict=True)]
        self.apply("commit", [*lengths], [2**31 - 1] * len(lengths))
        return [self.oracle.rows[row].tokens for row in lengths]


@pytest.mark.slow
def test_reuse_can_be_declined():
    driver = FreshDriver(SCRIPT_CONFIG)
    prompts = np.tile(driver.start({0: 9})[0], (3, 1))
    cache, admission = kv.allocate(
        driver.cache, [1, 2, 3], [9] * 3, tokens=prompts, reuse=[False, True, False]
    )
    assert admission.num_cached.tolist() == [0, 8, 0]
    assert int(kv.stats(cache).num_request_queries) == 2


@pytest.mark.slow
def test_a_block_that_several_rows_drop_is_released_with_the_last_of_them():
    driver = FreshDriver(SCRIPT_CONFIG)
    first, second, _ = map(list, driver.start({0: 4, 1: 4, 3: 2}))
    driver.apply("fork", [0], [2])
    driver.apply("reorder", [0, 1, 2], [3, 3, 3])  # block 0, that of row 1, block 0 again
    words = np.array(NAMESPACES[:1], np.uint32)
    for i, expected in enumerate(([4, 0], [0, 0])):
        driver.apply("evict", 1)
        assert int(kv.stats(driver.cache).num_evictions) == i + 1
        probes = [padded([[*text, 9]], PROMPT_WIDTH) for text in (first, second)]
        found = [lookup(driver.cache, tokens, np.array([5]), words).tolist() for tokens in probes]
        assert found == [[n] for n in expected]


@pytest.mark.slow
def test_lookup_finds_nothing_where_the_length_is_refused():
    """Fewer tokens than the prompt's length, or more of them than a row holds."""
    driver = FreshDriver(SCRIPT_CONFIG)
    prompt = np.array([[*driver.start({0: 9})[0], *range(1000, 1031)]])
    cache = driver.cache
    for width, length, expected in [
        (9, 9, 8),
        (9, 10, 0),
        (9, -1, 0),
        (9, -(2**31), 0),
        (40, 31, 8),
        (40, 32, 0),
        (40, 40, 0),
    ]:
        tokens = prompt[:, :width]
        assert kv.lookup(cache, tokens, [length]).tolist() == [expected], (width, length)
        assert kv.allocate(cache, [1], [length], tokens=tokens)[1].num_cached.tolist() == [expected]
