"""Long random scripts with prefix caching, against the oracle after every operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.prefix_script import PrefixDriver, prefix_config, random_prefix_operation

STEPS = 7_000


def test_a_short_random_script():
    """What `make mutants` runs."""
    rng, driver = np.random.default_rng(3), PrefixDriver(prefix_config(num_blocks=17))
    for _ in range(900):
        driver.apply(*random_prefix_operation(rng, driver))
    assert min(driver.num_hits, driver.oracle.num_evictions, driver.oracle.num_adoptions) > 10


def test_reuse_can_be_declined():
    prompts = np.tile(np.arange(9), (3, 1))
    cache, _ = kv.allocate(kv.init(prefix_config(num_blocks=17)), [0], [9], tokens=prompts[:1])
    cache, _ = kv.extend(cache, [9], max_new=9, seq_ids=[0], tokens=prompts[:1])
    cache, _ = kv.commit(cache, [0])
    cache, admission = kv.allocate(cache, [1, 2, 3], [9] * 3, tokens=prompts, reuse=[False, True, False])
    assert admission.num_cached.tolist() == [0, 8, 0]
    assert int(kv.stats(cache).num_request_queries) == 2


def test_lookup_finds_nothing_where_the_length_is_refused():
    """Fewer tokens than the prompt's length, or more of them than a row holds."""
    prompt = np.arange(40)[None]
    cache, _ = kv.allocate(kv.init(prefix_config(num_blocks=17)), [0], [9], tokens=prompt[:, :9])
    cache, _ = kv.extend(cache, [9], max_new=9, seq_ids=[0], tokens=prompt[:, :9])
    cache, _ = kv.commit(cache, [0])
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


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_script(seed):
    rng, driver = np.random.default_rng(seed), PrefixDriver(prefix_config(num_blocks=17))
    for _ in range(STEPS):
        driver.apply(*random_prefix_operation(rng, driver))
    assert driver.num_hits > 150, driver.num_hits
    assert driver.oracle.num_evictions > 100, driver.oracle.num_evictions
    assert driver.oracle.num_adoptions > 100, driver.oracle.num_adoptions
    assert driver.oracle.num_copies > 100
    num_refused = sum(n for (_, status), n in driver.statuses.items() if status == "OUT_OF_BLOCKS")
    assert num_refused > 5, driver.statuses


def test_a_random_script_without_kernels(monkeypatch):
    """What accelerators run, and versions of jax that were not tested: scatters, not one kernel."""
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    jax.clear_caches()
    try:
        driver, rng = PrefixDriver(prefix_config()), np.random.default_rng(0)
        for _ in range(300):
            driver.apply(*random_prefix_operation(rng, driver))
        cache, ids = kv.init(prefix_config(), storage=False), jnp.zeros(1, jnp.int32)
        assert "xla_cpu_small_call" not in jax.jit(kv.free).lower(cache, ids).as_text()
    finally:
        jax.clear_caches()
