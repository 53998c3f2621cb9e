"""Random scripts with a store that lies: whatever it returns, rows read what was computed for them."""

import pytest

import kvcache_jax as kv
from tests.support.state_script import MAX_SEQS, StateScript, config_of_states
from tests.tiers.host_script import host_config
from tests.tiers.lying_store import LyingStore
from tests.tiers.store_script import StoreScript

FULL = kv.FullAttention(1, 5)
CASES = {
    "one group": dict(layers=[FULL] * 2),
    "windows": dict(),
    "hardly a host": dict(extras=[kv.tiers.Host(1)]),
    "lfu": dict(layers=[FULL], eviction_policy="lfu"),
    "partial hits": dict(layers=[FULL, kv.FullAttention(2, 5)], partial_hits=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_random_script_with_a_lying_store(case):
    """2,000 operations each, 10,000 in all."""
    script = StoreScript(sorted(CASES).index(case), host_config(**CASES[case]))
    for _ in range(2000):
        script.step()
    script.check("the end")
    assert sum(map(bool, script.store.counts.values())) > 8, script.store.counts
    assert script.loaded > 50 and len(script.reasons) > 6, script.reasons


def test_a_short_script_with_a_lying_store():
    script = StoreScript(12, host_config(layers=[FULL] * 2), LyingStore(0, rate=0.1))
    for _ in range(400):
        script.step()
    script.check("the end")
    assert script.loaded > 5 and len(script.reasons) > 3, script.reasons


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one group", "windows", "hardly a host"])
def test_restarts_cost_no_hit(case):
    """All that texts find on both tiers and in every group, whatever happened before."""
    script = StoreScript(sorted(CASES).index(case), host_config(**CASES[case]), kv.tiers.MemoryStore())
    found = 0
    for _ in range(10):
        for _ in range(40):
            script.step()
        found += script.restart()
        script.check("a restart")
    assert found > 100, found


@pytest.mark.slow
@pytest.mark.parametrize("extras", [[], [kv.tiers.Host(60)]])
def test_states_of_recurrent_layers(extras):
    """Points and the blocks before them, by rows whose outputs are compared with uncached ones."""
    script, store = StateScript(5, config_of_states(extras=extras)), LyingStore(1, rate=0.1)
    num_loaded = 0
    for _ in range(12):
        script.run(40)
        report = kv.tiers.save(script.cache, store, weights="w")
        script.cache, _ = kv.free(script.cache, [*script.rows, *[MAX_SEQS] * (MAX_SEQS - len(script.rows))])
        script.rows.clear()
        script.pending.clear()
        before = script.count["tokens cached"]
        script.cache, report = kv.tiers.load(store, kv.init(script.config), weights="w")
        num_loaded += report.num_loaded
    script.run(40)
    assert num_loaded > 50 and script.count["tokens cached"] > before
