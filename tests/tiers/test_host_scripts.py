"""Random scripts with a host tier: whatever moves between tiers, rows read what was computed for them."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.tiers.host_script import HostScript, host_config

FULL = kv.FullAttention(1, 5)
WINDOW = kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=30)
CASES = {
    "one group": dict(layers=[FULL] * 2),
    "windows": dict(),
    "larger blocks": dict(layers=[FULL, kv.FullAttention(2, 5, block_size=8, num_blocks=10), WINDOW]),
    "lfu": dict(layers=[FULL], eviction_policy=kv.policies.InBatches("lfu", 3)),
    "partial hits": dict(layers=[FULL, kv.FullAttention(2, 5)], partial_hits=True),
    "used once": dict(layers=[FULL] * 2, extras=[kv.tiers.Host(24, store_after=1)]),
    "few on the host": dict(layers=[FULL, kv.FullAttention(2, 5)], extras=[kv.tiers.Host(3)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_random_script(case):
    """1,000 calls each, 7,000 in all, and whatever they do every row reads its own tokens."""
    script = HostScript(sorted(CASES).index(case), host_config(**CASES[case]))
    for _ in range(1000):
        script.step()
    script.check("the end")
    stats = kv.tiers.host_stats(script.cache)
    found = script.counts["hits"], *script.num_promoted.values()
    found = *found, script.num_overwritten, int(stats.num_demoted)
    assert found[0] > 60 and sum(found[1:3]) > 13 and found[3] > 6 and found[4] > 33, found


@pytest.mark.slow  # in `make test`: as a part of the script of test_store_scripts.py
def test_a_short_script():
    script = HostScript(11, host_config(layers=[FULL] * 2))
    for _ in range(300):
        script.step()
    script.check("the end")
    assert sum(script.num_promoted.values()) > 5 and np.isfinite(script.counts["hits"])
