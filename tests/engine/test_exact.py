"""Whatever else is in the batch, at any length of dispatches, across resets: each request's own tokens."""

from typing import Any

import numpy as np
import pytest

import kvcache_jax as kv
from tests.engine.exact_engine import LIMITS, RandomPace
from tests.engine.exact_model import collect, config, decode_alone, forward, make_params, random_request

# A pool that one long request fills, so that rows are preempted and come back; short and long pieces, blocks
# and no index; a window beside; hits inside blocks. Sizes of the cache, then those of the engine.
ENGINES: dict[str, tuple[dict, dict]] = {
    "tiny pool": (dict(num_blocks=11), dict(token_budget=12)),
    "short blocks, no index": (
        dict(num_blocks=24, block_size=2, max_seqs=3, enable_prefix_caching=False),
        dict(token_budget=5, schedule=kv.engine.Schedule(watermark=0.1)),
    ),
    "window and drafts": (
        dict(num_layers=2, num_blocks=14, max_query_len=8),
        dict(token_budget=4 * 4 + 12, num_drafts=3, policy="fair", steps_per_dispatch=3),
    ),
    "long blocks, partial hits": (
        dict(num_blocks=7, block_size=8, partial_hits=True),
        dict(token_budget=40, policy="priority"),
    ),
    "batch invariant": (
        dict(num_layers=2, num_blocks=14, max_query_len=8),
        dict(token_budget=4 * 3 + 40, num_drafts=2, batch_invariant=True),
    ),
}


def make_engine(name):
    sizes, options = ENGINES[name]
    shared: dict[str, Any] = {"limits": LIMITS, "steps_per_dispatch": 8}
    return kv.Engine(
        forward,
        make_params(),
        config(**sizes),
        **shared | options,
    )


def check_mixes(engine, seeds, num_requests=9):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        requests = [random_request(rng, i) for i in range(num_requests)]
        engine._pace = RandomPace(engine._steps, rng, engine._device.shorten)
        said = collect(engine, requests, lambda rng=rng: engine.reset() if rng.random() < 0.04 else None)
        assert len(said) == sum(request.num_samples for request in requests)
        samples = [(request, i) for request in requests for i in range(request.num_samples)]
        for request, i in samples:
            tokens, logprobs, reason = decode_alone(request, engine.config.num_layers, sample_id=i)
            found = said[request.id, i]
            assert (found[0], found[2]) == (tokens, reason), (seed, request, i)
            np.testing.assert_allclose(found[1], logprobs, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_random_mixes(name):
    """Of all engines 200 mixes."""
    engine = make_engine(name)
    check_mixes(engine, range(40))
    counts = engine.figures().counts
    assert counts[kv.engine.Counter.PREEMPTIONS] > 0 and counts[kv.engine.Counter.FORKS] > 0
    has_index = engine.config.enable_prefix_caching
    assert (counts[kv.engine.Counter.CACHED_TOKENS] > 0) == has_index
    assert counts[kv.engine.Counter.GENERATED_TOKENS] > counts[kv.engine.Counter.STEPS]
