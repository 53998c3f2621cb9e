"""Calls that all processes of a mesh make, and one process alone, with the same results."""

import kvcache_jax as kv
from tests.engine.exact_model import DIM


def generated(forward, params, config):
    """Tokens drawn for three prompts, two samples each, with a prefix in common."""
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [9] * 11]
    sampling = kv.decoding.SamplingParams(temperature=1.0, seed=3)
    result = kv.generate(forward, params, prompts, config, max_new_tokens=9, num_samples=2, sampling=sampling)
    return [each.tokens for each in result.generations]


def scored(forward, params, config):
    """Log-probabilities of more continuations than there are rows."""
    result = kv.score(forward, params, [1, 2, 3, 4, 5], [[i, 4, 2 * i] for i in range(6)], config)
    return [values.tolist() for values in result.logprobs]


def searched(forward, params, config):
    """The best continuations of two prompts."""
    result = kv.beam_search(forward, params, [[1, 2, 3], [4, 5]], config, max_new_tokens=5, num_beams=2)
    return [[each.tokens for each in beams] for beams in result.beams]


CALLS = {"generated": generated, "scored": scored, "searched": searched}
CALLED = kv.CacheConfig(
    [kv.FullAttention(2, DIM)],
    num_blocks=14,
    block_size=4,
    max_seqs=4,
    max_seq_len=32,
    enable_prefix_caching=True,
)
