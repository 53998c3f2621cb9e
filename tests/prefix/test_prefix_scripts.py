"""Long random scripts with prefix caching, against the oracle after every operation."""

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.operations import commit
from kvcache_jax.prefix import eviction
from tests.support.prefix_script import (
    NAMESPACES,
    PROMPT_WIDTH,
    SCRIPT_CONFIG,
    WIDTH,
    PrefixDriver,
    lookup,
    random_prefix_operation,
)
from tests.support.random_script import ROWS, Driver, padded

# So often per 1,000 operations, at least, did rows of one call meet.
EVENTS = {
    "several lack blocks": 20,
    "one gets blocks and another none": 30,
    "a later one gets blocks": 10,
    "a copy where blocks are short": 2,
    "several copies": 4,
    "a repeated row": 40,
    "a repeated row that failed": 10,
    "entries that hit the same blocks": 4,
    "a chain of forks": 4,
}


@pytest.mark.slow
def test_a_short_random_script():
    """What `make mutants` runs."""
    rng, driver = np.random.default_rng(3), PrefixDriver(SCRIPT_CONFIG)
    for _ in range(900):
        driver.apply(*random_prefix_operation(rng, driver))
    assert min(driver.num_hits, driver.oracle.num_evictions, driver.oracle.num_adoptions) > 10


class FreshDriver(PrefixDriver):
    """Its tokens are nobody else's."""

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


@pytest.mark.slow
def test_a_long_random_script():
    num_steps = 4_000
    rng, driver = np.random.default_rng(0), PrefixDriver(SCRIPT_CONFIG)
    for _ in range(num_steps):
        driver.apply(*random_prefix_operation(rng, driver))
    assert driver.num_hits > num_steps // 40, driver.num_hits
    for count in ("num_evictions", "num_adoptions", "num_copies"):
        assert getattr(driver.oracle, count) > num_steps // 70, (count, getattr(driver.oracle, count))
    for event, per_thousand in EVENTS.items():
        assert driver.events[event] >= per_thousand * num_steps // 1000, (event, driver.events)


@pytest.mark.slow
def test_a_random_script_in_small_batches(monkeypatch):
    """Blocks are published, and evicted, in several batches; chains end in one before the last."""
    monkeypatch.setattr(commit, "_BATCH_ON_CPUS", 3)
    monkeypatch.setattr(eviction, "_ENTRIES_ON_CPUS", 3)
    jax.clear_caches()
    try:
        driver, rng = PrefixDriver(SCRIPT_CONFIG), np.random.default_rng(5)
        for _ in range(700):
            driver.apply(*random_prefix_operation(rng, driver))
        assert min(driver.num_hits, driver.oracle.num_evictions, driver.oracle.num_adoptions) > 10
    finally:
        jax.clear_caches()
