"""States of recurrent layers in a host tier: found there as one larger cache would find them, and right."""

import dataclasses

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.hash_states import HashState, LastInputs
from tests.support.state_script import (
    admit,
    config_of_states,
    expected_of_layers,
    padded_step,
    start,
    with_window,
)
from tests.tiers.hosted_state_script import HostedStateScript
from tests.tiers.lru_trace import serve_all, trace

FULL = kv.FullAttention(1, 1)
WINDOW = kv.SlidingWindow(1, 1, window=4, num_blocks=16)
LAYERS = {
    "points": ([FULL, HashState(1, 1, num_blocks=7)], {}),
    "points at multiples": ([FULL, HashState(1, 1, num_blocks=11)], {"every": 2}),
    "the last inputs": ([FULL, LastInputs(1, 1, num_blocks=16)], {}),
    "windows beside": ([FULL, HashState(1, 1, num_blocks=6), WINDOW], {}),
    "states alone": ([HashState(1, 1, num_blocks=8)], {"at_end": False}),
}
"""Their pools have room for few states."""


def test_the_host_has_room_for_the_states_that_go_with_their_prefix():
    """And none for entries, which no prefix needs."""
    config = config_of_states(0, [HashState], num_blocks=12, extras=[kv.tiers.Host(24)])
    arrays, [g] = config.keeper.arrays(config), config.snapshot_groups
    num_states = config.groups[g].num_blocks
    assert {len(kept) for kept in arrays} == {2, 0} and arrays[0]["k"].shape[0] == 24 + 12
    assert arrays[g]["state"].shape == (3 * num_states, 1, 8, 128)  # a whole tile
    control = kv.init(config, storage=False).control
    assert config.keeper.num_free(control, g, config) == 3 * num_states
    moments = [control.block_pools[group_id].cached.released_at for group_id in (0, g)]
    assert moments[0] is None and moments[1] is not None and moments[1].shape == (num_states,)


@pytest.mark.slow
def test_a_state_comes_back_from_the_host():
    cache = kv.init(config_of_states(0, [HashState], num_blocks=12, extras=[kv.tiers.Host(24)]))
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, size=41).tolist() for _ in range(3)]
    for text in texts:  # the device has room for two
        cache, _ = start(cache, text)
        cache, _ = kv.free(cache, [0])
    cache, admission = admit(cache, texts[0])
    assert (int(admission.num_cached[0]), int(admission.num_promoted[0])) == (40, 32)
    new = np.zeros((6, 20), np.int32)
    new[0, 0] = texts[0][40]
    cache, _, out = padded_step(cache, np.array([1, 0, 0, 0, 0, 0], np.int32), new)
    assert (np.asarray(out)[0, 0] == expected_of_layers(texts[0])[40, :2]).all()
    assert kv.check_invariants(cache) == []


def hits_of(layers, ids, num_ids, num_blocks, num_times=1, **options):
    """Hits of each prompt, in a cache of which all pools are `num_times` as large."""

    def larger(layer):
        return dataclasses.replace(layer, num_blocks=layer.num_blocks and layer.num_blocks * num_times)

    config = kv.CacheConfig(
        [larger(layer) for layer in layers],
        num_blocks=num_blocks * num_times,
        block_size=1,
        max_seqs=1,
        max_seq_len=10,
        enable_prefix_caching=True,
        **options,
    )
    cache, hits, status = serve_all(kv.init(config, storage=False), ids, num_ids, 0)
    kv.raise_for_status(status[None], "serve_all")
    assert kv.check_invariants(cache) == []
    return np.asarray(hits)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYERS)
def test_hits_equal_those_of_one_cache_of_five_times_the_size(case):
    """Request by request, on traces of conversations, where the device is a fifth and the host the rest."""
    layers, chosen = LAYERS[case]
    snapshots = kv.Snapshots(**chosen)
    for seed, num_blocks in ((0, 10), (1, 22)):
        ids, num_ids = trace(seed)
        sizes = dict(ids=ids, num_ids=num_ids, num_blocks=num_blocks, snapshots=snapshots)
        two = hits_of(layers, **sizes, extras=[kv.tiers.Host(4 * num_blocks)])
        one, alone = hits_of(layers, **sizes, num_times=5), hits_of(layers, **sizes)
        assert two.tolist() == one.tolist()
        assert (two != alone).sum() > 20, (two != alone).sum()


FEW = dict(max_bytes=600)
SCRIPTS = {
    "many kinds": config_of_states(3, num_blocks=28),
    "few states": config_of_states(0, num_blocks=30, snapshots=kv.Snapshots(**FEW)),
    "tokens saved": config_of_states(
        2, num_blocks=24, snapshots=kv.Snapshots(every=16, eviction="tokens saved", **FEW)
    ),
    "windows beside": with_window(3, window=12, sinks=3, num_blocks_of_keys=30),
    "lfu": config_of_states(0, eviction_policy="lfu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SCRIPTS)
def test_no_row_is_given_a_wrong_state(case):
    config = dataclasses.replace(SCRIPTS[case], extras=[kv.tiers.Host(60)])
    script = HostedStateScript(sorted(SCRIPTS).index(case), config)
    script.run(800)
    assert script.count["tokens computed"] > 1000 and script.count["tokens cached"] > 200
    assert script.num_restored > 5 and script.num_alone > 1, (script.num_restored, script.num_alone)
