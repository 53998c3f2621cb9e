"""What starts from a snapshot is equal, to the last bit, to what is computed from the beginning."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv

VOCAB, WIDTH, HEADS, DIM = 17, 16, 2, 8
RECURRENT = kv.GatedDeltaNet(num_kv_heads=HEADS, head_dim=DIM, key_dim=DIM, max_rollback=2)
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


def generated(config, cache, prompts, **options):
    """Returns the cache, the log-probabilities of what was drawn, and the tokens that were found."""
    result = kv.generate(
        forward, make_params(), prompts, config, max_new_tokens=4, prefill_len=48, cache=cache, **options
    )
    return result.cache, [each.logprobs for each in result.generations], result.num_cached_tokens


def scored(config, cache, prompts):
    """The same of two continuations of the last prompt."""
    result = kv.score(
        forward, make_params(), prompts[-1], [TEXT[:5], TEXT[-9:]], config, prefill_len=48, cache=cache
    )
    return result.cache, [each.tolist() for each in result.logprobs], result.num_cached_tokens


FULL, WINDOW = kv.FullAttention(HEADS, DIM), kv.SlidingWindow(HEADS, DIM, window=20)
LOOPS = [
    pytest.param(generated, FULL, id="full"),
    pytest.param(generated, WINDOW, id="window", marks=pytest.mark.slow),
    # That drafts take the tokens of whole texts too, test_decoding.py shows.
    pytest.param(
        functools.partial(generated, drafts=kv.decoding.Drafts(2)), FULL, id="drafts", marks=pytest.mark.slow
    ),
    pytest.param(scored, FULL, id="score", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("loop", "layer"), LOOPS)
def test_loops_draw_and_score_by_the_same_logprobs_whatever_was_hit(loop, layer):
    """In pieces that the lengths of hits are no multiples of."""
    run = functools.partial(loop, make_config(layer))
    want = [run(None, [TEXT[:n]])[1] for n in WHOLE]
    for length in (20, 40, 60):
        cache = None
        for prompt in leave_at(length):
            cache, _, _ = run(cache, [prompt])
        for n, logprobs in zip(WHOLE, want, strict=True):
            cache, got, num_cached = run(cache, [TEXT[:n]])
            assert num_cached == (length // 16 * 16 if n == WHOLE[0] else 64)
            assert got == logprobs, (length, n)


@pytest.mark.slow
def test_beams_of_equal_prompts_are_equal_whatever_was_hit():
    """Each goes on from forks of its own, from blocks that were adopted or computed."""
    found = []
    for is_caching in (True, False):
        config = dataclasses.replace(make_config(FULL), max_seqs=4, enable_prefix_caching=is_caching)
        options = dict(max_new_tokens=6, num_beams=2, prefill_len=48)
        result = kv.beam_search(forward, make_params(), [TEXT[:70]] * 2, config, **options)
        found += [[(beam.tokens, beam.logprobs) for beam in beams] for beams in result.beams]
    assert found[0][0] != found[0][1] and found == [found[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("layer", [FULL, WINDOW], ids=["full", "window"])
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
