"""Windows beside recurrent layers: what they keep published reaches as far as the states do."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.hash_states import HashState
from tests.support.state_script import StateScript, admit, padded_step, start, with_window

SMALL = dict(kinds=[HashState], num_blocks=20, num_blocks_of_keys=200)
"""The pool of the window is small, so that others' windows want its blocks."""


@pytest.mark.parametrize("sinks", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_hit_at_a_junction_finds_the_window_that_rows_left_long_ago(sinks):
    cache, shared, found = kv.init(with_window(sinks=sinks, **SMALL)), [1] * 29, []
    for tail in (0, 2, 1, 0):
        cache, admission = start(cache, shared + [tail] * 30)
        found.append((int(admission.num_cached[0]), int(admission.junction[0])))
        assert kv.check_invariants(cache) == []
        cache, _ = kv.free(cache, [0])
    assert found == [(0, 0), (0, 24), (24, 0), (56, 0)]


def test_windows_before_states_that_others_want_are_evicted_last():
    cache = kv.init(with_window(**SMALL))
    rng = np.random.default_rng(1)
    shared = rng.integers(3, size=29).tolist()
    for tail in (0, 1):
        cache, _ = start(cache, shared + [tail] * 9)
        cache, _ = kv.free(cache, [0])
    for _ in range(12):
        cache, _ = start(cache, rng.integers(3, size=30).tolist())
        cache, _ = kv.free(cache, [0])
    _, admission = admit(cache, shared + [2] * 21)
    assert admission.num_cached[0] == 24


def test_what_stays_for_a_state_leaves_once_it_is_published():
    cache, prompt = kv.init(with_window(**SMALL)), np.random.default_rng(0).integers(3, size=90).tolist()
    window = next(g for g, group in enumerate(cache.config.groups) if group.window)
    held = []
    for commits in (False, True):
        cache, _ = start(cache, prompt[:25], commits=False)  # its last state is after 24 tokens
        for num in (20, 20, 20, 5):
            if commits and num == 5:  # the row went on far beyond
                cache, _ = kv.commit(cache, [0])
            new = np.full((6, 20), 1, np.int32)
            cache, _, _ = padded_step(cache, np.array([num, 0, 0, 0, 0, 0], np.int32), new)
        pool = cache.control.block_pools[window]
        held.append(np.flatnonzero(pool.block_table[0] < pool.num_blocks).tolist())
        cache, _ = kv.free(cache, [0])
    assert held == [[1, 2, 9, 10, 11], [9, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rollback, options",
    [
        (3, dict(window=12, sinks=3)),
        (11, dict(window=20, num_blocks_of_keys=60)),
        (0, dict(window=6, num_blocks=30, snapshots=kv.Snapshots(every=16))),
    ],
)
def test_no_row_beside_a_window_is_given_a_wrong_state(rollback, options):
    script = StateScript(rollback, with_window(rollback, **options))
    script.run(600)
    assert script.count["tokens computed"] > 1000 and script.count["tokens cached"] > 200
