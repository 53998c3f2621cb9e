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


WIDTH = 6
LIMIT = 16
"""Of states in both tiers of a `TwoRows`."""


class TwoRows:
    """Two rows with a state at the end of each, without storage: 8 states on the device and 8 on the host."""

    def __init__(self):
        layers = [FULL, HashState(1, 1, num_blocks=LIMIT // 2)]
        sizes = dict(num_blocks=60, block_size=1, max_seqs=2, max_seq_len=WIDTH, enable_prefix_caching=True)
        options = dict(snapshots=kv.Snapshots(at_prompt_end=False), extras=[kv.tiers.Host(60)])
        self.cache = kv.init(kv.CacheConfig(layers, **sizes, **options), storage=False)

    def admit(self, row, prompt):
        tokens = np.pad(prompt, (0, WIDTH - len(prompt)))[None]
        self.cache, admission = kv.allocate(self.cache, [row], [len(prompt)], tokens=tokens)
        return int(admission.num_cached[0]), int(admission.junction[0])

    def append(self, row, new):
        tokens, num_new = np.zeros((2, WIDTH), np.int32), np.zeros(2, np.int32)
        tokens[row, : len(new)], num_new[row] = new, len(new)
        self.cache, step = kv.extend(self.cache, num_new, max_new=WIDTH, tokens=tokens)
        assert step.status[row] == kv.Status.OK

    def end(self, row, is_end=True):
        self.cache, _ = kv.free(kv.commit(self.cache, [row], is_end=is_end)[0], [row])
        assert kv.check_invariants(self.cache) == []

    def serve(self, texts, is_end=True):
        for text in texts:
            num_cached, _ = self.admit(0, text)
            self.append(0, text[num_cached:])
            self.end(0, is_end)

    def has_states(self, texts):
        """Whether a prompt that continues each text starts from its end."""
        tokens = np.array([[*text, *[0] * (WIDTH - len(text))] for text in texts])
        lengths = np.array([len(text) for text in texts])
        return (np.asarray(kv.lookup(self.cache, tokens, lengths + 1)) == lengths).tolist()

    def num_on_host(self):
        [g] = self.cache.config.snapshot_groups
        return int(self.cache.control.extras["host"].control.block_pools[g].cached.num_cached)


TEXTS = [[10 + i, 50 + i, 90 + i] for i in range(20)]


def test_states_that_went_with_their_prefix_leave_the_device_less():
    """The host has more than its share of them then, and both tiers no more than one larger pool."""
    rows = TwoRows()
    rows.serve(TEXTS[:12])
    cache, _ = kv.tiers.demote_to_utilization(rows.cache, 0.0)
    rows.cache = cache.config.keeper.settle(cache)
    assert rows.num_on_host() == 12
    rows.serve(TEXTS[12:])
    assert rows.has_states(TEXTS) == [False] * (20 - LIMIT) + [True] * LIMIT


def test_a_state_on_the_host_is_asked_for():
    """By a row that computes what another one answered meanwhile: it stays when both tiers are full."""
    rows, text = TwoRows(), [1, 2, 3]
    rows.serve([[*text, 4]], is_end=False)  # keys alone
    assert rows.admit(1, [*text, 4]) == (0, 3)
    rows.admit(0, text[:1])
    rows.append(0, text[:1])
    rows.append(0, text[1:])
    rows.end(0)
    rows.serve(TEXTS[:10])
    assert rows.num_on_host() == 3 and rows.has_states([text]) == [True]
    rows.append(1, [*text, 4])
    rows.end(1)
    rows.serve(TEXTS[10:])
    # Two states are of the text, which is asked for, and of what continues it.
    assert rows.has_states([text, *TEXTS]) == [True] + [False] * (22 - LIMIT) + [True] * (LIMIT - 2)


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
