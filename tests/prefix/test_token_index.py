"""Caches without a layer that keeps all tokens: prefixes are found by blocks of tokens alone."""

import dataclasses

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.hash_states import HashState

SIZES = dict(block_size=4, max_seqs=3, max_seq_len=48, num_blocks=20, enable_prefix_caching=True)
WINDOW = kv.SlidingWindow(1, 4, window=6, max_rollback=2)


def _started(cache, row, text):
    """Computes a prompt in pieces of 8 tokens and commits it; returns the cache and the tokens it found."""
    cache, admission = kv.allocate(cache, [row], [len(text)], tokens=text[None])
    assert admission.status[0] == kv.Status.OK
    for start in range(int(admission.num_cached[0]), len(text), 8):
        new = np.zeros((1, 8), np.int32)
        piece = text[start : start + 8]
        new[0, : len(piece)] = piece
        cache, step = kv.extend(cache, [len(piece)], max_new=8, seq_ids=[row], tokens=new)
        assert step.status[0] == kv.Status.OK
    cache, _ = kv.commit(cache, [row])
    return cache, int(admission.num_cached[0])


@pytest.mark.quick_cases("window")
@pytest.mark.parametrize(
    "layers", [[WINDOW], [HashState(1, 1)], [WINDOW, HashState(1, 1)]], ids=["window", "states", "both"]
)
def test_as_much_is_found_as_beside_a_layer_that_keeps_all_tokens(layers):
    rng, found = np.random.default_rng(0), []
    config = kv.CacheConfig(layers, **SIZES)
    both = dataclasses.replace(config, layers=[*layers, kv.FullAttention(1, 4)])
    caches, texts = [kv.init(each, storage=False) for each in (config, both)], rng.integers(2, size=(3, 40))
    for nth in range(24):
        text = texts[rng.integers(3)].astype(np.int32)
        text[int(rng.integers(40)) :] = 2 + nth  # leaves a text that is known
        started = [_started(cache, nth % 3, text) for cache in caches]
        caches = [kv.free(cache, [nth % 3])[0] for cache, _ in started]
        assert started[0][1] == started[1][1], nth
        found.append(started[0][1])
    assert kv.check_invariants(caches[0]) == [] and sum(found) > 20
    assert kv.memory_bytes(config) < kv.memory_bytes(both)
