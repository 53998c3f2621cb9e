"""An engine of the exact model, whose program several files of tests share, and what is asked of it."""

from typing import Any

import kvcache_jax as kv
from kvcache_jax.engine.pace import Length, Pace
from tests.engine.exact_model import config, decode_alone, forward, make_params

LIMITS = kv.engine.Limits(max_requests=7, max_tokens=7 * 49)
SIZES: dict[str, Any] = {"token_budget": 12, "steps_per_dispatch": 8, "limits": LIMITS}


def make_engine(params=None, **options: Any):
    """An engine with 11 blocks of 4 tokens, which one request may fill."""
    return kv.Engine(forward, params or make_params(), config(num_blocks=11), **SIZES | options)


def ask(prompt, max_new, request_id=None, **options):
    return kv.GenerationRequest(prompt, max_new, id=request_id, **options)


def expect(said, requests, **options):
    """Every sample says what it says alone."""
    for request in requests:
        for i in range(request.num_samples):
            tokens, _, reason = decode_alone(request, sample_id=i, **options)
            found, _, why = said[request.id, i]
            assert (found, why) == (tokens, reason), (request, i)


class RandomPace(Pace):
    """Dispatches of any lengths, ended early by any news, one or two of them under way."""

    def __init__(self, most_steps, rng):
        super().__init__(most_steps)
        self.most_steps, self.rng = most_steps, rng

    def choose(self, now, has_free_row):
        most = int(self.rng.integers(1, self.most_steps + 1))
        return Length(int(self.rng.integers(1, most + 1)), most), int(self.rng.integers(1, 3))
