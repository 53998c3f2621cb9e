"""Two exclusive tiers with demotion are one LRU: on a trace of conversations, request by request."""

import dataclasses

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from tests.experiments.trace_maker import lru_hits, make_requests
from tests.tiers.lru_trace import NUM_REQUESTS, serve_all, trace

CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 1)], block_size=1, max_seqs=1, max_seq_len=10, enable_prefix_caching=True
)


def hits_of(ids, num_ids, num_more, num_blocks, num_on_host=None):
    extras = [] if num_on_host is None else [kv.tiers.Host(num_on_host)]
    # One block more for the token that does not count.
    config = dataclasses.replace(CONFIG, num_blocks=num_blocks + num_more, extras=extras)
    cache, hits, status = serve_all(kv.init(config, storage=False), ids, num_ids, num_more)
    kv.raise_for_status(status[None], "serve_all")
    assert kv.check_invariants(cache) == []
    return np.asarray(hits), cache


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [9, 20])
def test_hits_equal_those_of_one_lru_of_five_times_the_size(num_blocks):
    """Where each id can be hit, and where a prompt's last is computed again, and may be on the host."""
    for seed in (0, 1):
        ids, num_ids = trace(seed)
        for num_more in (1, 0):
            two, cache = hits_of(ids, num_ids, num_more, num_blocks, 4 * num_blocks)
            one, _ = hits_of(ids, num_ids, num_more, 5 * num_blocks)
            alone, _ = hits_of(ids, num_ids, num_more, num_blocks)
            assert two.tolist() == one.tolist()
            assert (two != alone).sum() > 25
            stats = jax.device_get(kv.tiers.host_stats(cache))
            assert min(stats.num_promoted, stats.num_evicted) > 50 and stats.num_cached == 4 * num_blocks
            if num_more:
                assert two.tolist() == lru_hits(make_requests(seed, NUM_REQUESTS), 5 * num_blocks)[0]
