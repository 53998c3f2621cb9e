"""What starts from a snapshot is equal, to the last bit, to what is computed from the beginning."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv

VOCAB, WIDTH, HEADS, DIM = 17, 16, 2, 8
RECURRENT = kv.GatedDeltaNet(num_kv_heads=HEADS, head_dim=DIM, key_dim=DIM)
TEXT = np.random.default_rng(0).integers(VOCAB, size=100).tolist()
WHOLE = 70, 97
"""Prompts, beginnings of the text; others leave it earlier and keep their states there."""


@functools.cache
def make_params():
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape, scale=0.3):
        return scale * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal(VOCAB, WIDTH, scale=1),
        "qkv": normal(WIDTH, 3 * HEADS * DIM),
        "after": [normal(HEADS * DIM, WIDTH) for _ in range(2)],
        "x": normal(WIDTH, RECURRENT.num_channels),
        "g": normal(WIDTH, HEADS),
        "beta": normal(WIDTH, HEADS),
        "conv": normal(RECURRENT.kernel, RECURRENT.num_channels, scale=1),
        "head": normal(WIDTH, VOCAB, scale=1),
    }


def forward(params, tokens, cache, step):
    """A layer of states that decay slowly, and one of keys that attends to what it says."""
    x = params["embedding"][tokens]
    g, beta = -0.05 * jax.nn.softplus(x @ params["g"]), jax.nn.sigmoid(x @ params["beta"])
    new = {"x": x @ params["x"], "g": g, "beta": beta}
    cache, out = kv.recurrence(cache, 0, new, step, weights={"conv": params["conv"]})
    x += 4 * out.reshape(*tokens.shape, -1) @ params["after"][0]
    q, k, v = jnp.split((x @ params["qkv"]).reshape(*tokens.shape, 3 * HEADS, DIM), 3, axis=-2)
    cache, out = kv.attention(cache, 1, q, k, v, step)
    x += out.reshape(*tokens.shape, -1) @ params["after"][1]
    return x @ params["head"], cache


def make_config(layer):
    sizes = dict(block_size=16, max_seqs=2, max_seq_len=112, max_query_len=96, num_blocks=40)
    return kv.CacheConfig([RECURRENT, layer], **sizes, enable_prefix_caching=True)


def leave_at(length):
    """Two prompts that begin alike: the second keeps the state where it parts from the first."""
    return [[*TEXT[:length], *tail] for tail in ([VOCAB - 1] * 3, [VOCAB - 2] * 7)]


LAYERS = [
    pytest.param(kv.FullAttention(HEADS, DIM), id="full"),
    pytest.param(kv.SlidingWindow(HEADS, DIM, window=20), id="window", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layer", LAYERS)
def test_generate_draws_by_the_same_logprobs_whatever_was_hit(layer):
    """In pieces that the lengths of hits are no multiples of."""

    def run(cache, prompts):
        result = kv.generate(
            forward, make_params(), prompts, make_config(layer), max_new_tokens=4, prefill_len=48, cache=cache
        )
        return result.cache, [each.logprobs for each in result.generations], result.num_cached_tokens

    _, want, _ = run(None, [TEXT[:n] for n in WHOLE])
    for length in (20, 40, 60):
        cache = None
        for prompt in leave_at(length):
            cache, _, _ = run(cache, [prompt])
        for n, logprobs in zip(WHOLE, want, strict=True):
            cache, got, num_cached = run(cache, [TEXT[:n]])
            assert num_cached == (length // 16 * 16 if n == WHOLE[0] else 64)
            assert got == [logprobs], (length, n)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_the_engine_draws_by_the_same_logprobs_whatever_was_hit(layer):
    """Alone or beside others, whose prompts take pieces of the same steps."""
    engine = kv.Engine(forward, make_params(), make_config(layer), token_budget=26)

    def run(prompts):
        said = collections.defaultdict(list)
        for i, prompt in enumerate(prompts):
            engine.push([kv.GenerationRequest(prompt, 4, id=i)])
        for event in engine:
            said[event.id] += event.logprobs
        return [said[i] for i in range(len(prompts))], int(kv.stats(engine.state.cache).num_token_hits)

    want, hits = run([TEXT[:n] for n in WHOLE])
    for length in (20, 40, 60):
        engine.reset()
        for prompt in leave_at(length):
            _, hits = run([prompt])
        got, more = run([TEXT[:n] for n in WHOLE])
        assert got == want, length
        assert more - hits >= length // 16 * 16
