"""Hybrids in the library's loops: tokens and scores are those of transformers, with hits and drafts too."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from models.decoder import cache_config, forward
from tests.models.driver import ATOL, expected, load

# Gated DeltaNet with experts, KDA with latents, Mamba-2 with layers that keep nothing, convolutions alone.
FAMILIES = "qwen3_next", "kimi_linear", "nemotron_h", "lfm2"
NUM_NEW = 12
STARTS = 27, 35, 43
"""Prompts are beginnings of a text whose tokens are the model's own choice from the first length on."""


def make_prompts(family):
    text = np.concatenate([expected(family)[name] for name in ("prompt", "greedy")]).tolist()
    return [text[:n] for n in STARTS], [text[n : n + NUM_NEW] for n in STARTS]


def make_config(family):
    sizes = dict(max_seqs=3, max_seq_len=64, max_query_len=32, num_blocks=32)
    return cache_config(load(family).config, max_rollback=3, enable_prefix_caching=True, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_chooses_the_tokens_of_transformers(family):
    """The second time from snapshots, then with drafts, all of which are right, and some."""
    decoder, config, (prompts, wanted) = load(family), make_config(family), make_prompts(family)
    cache, num_hits = None, []
    right = kv.decoding.Drafts(3, kv.Draft(forward, decoder, config))
    for drafts in (None, None, kv.decoding.Drafts(2), right):
        result = kv.generate(
            forward,
            decoder,
            prompts,
            config,
            max_new_tokens=NUM_NEW,
            prefill_len=32,
            cache=cache,
            drafts=drafts,
        )
        assert [[*each.tokens] for each in result.generations] == wanted
        cache = result.cache
        assert kv.check_invariants(cache) == []
        num_hits.append(int(kv.stats(cache).num_token_hits))
    of_prompts = sum((n - 1) // 16 * 16 for n in STARTS)
    assert (np.diff(num_hits) >= of_prompts).all(), num_hits


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers_and_of_beams(family):
    decoder, config, ([prompt, *_], _) = load(family), make_config(family), make_prompts(family)
    want, greedy = expected(family)["logits"], expected(family)["greedy"]
    want = jax.nn.log_softmax(want[len(prompt) - 1 : -1])[np.arange(len(greedy)), greedy]
    scored = kv.score(forward, decoder, prompt, [greedy[:5], greedy[:20]], config, prefill_len=32)
    for logprobs, num in zip(scored.logprobs, (5, 20), strict=True):
        np.testing.assert_allclose(logprobs, want[:num], atol=ATOL)
    [beams] = kv.beam_search(
        forward, decoder, [prompt], config, max_new_tokens=7, num_beams=3, prefill_len=32
    ).beams
    scored = kv.score(forward, decoder, prompt, [beam.tokens for beam in beams], config, prefill_len=32)
    for beam, logprobs in zip(beams, scored.logprobs, strict=True):
        np.testing.assert_allclose(beam.logprob, logprobs.sum(), atol=7 * ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_the_engine_chooses_the_tokens_of_transformers(family):
    """In pieces of odd lengths, with drafts of the text; the second time from snapshots."""
    prompts, wanted = make_prompts(family)
    engine = kv.Engine(forward, load(family), make_config(family), token_budget=25, num_drafts=2)
    for nth in range(2):
        said = collections.defaultdict(list)
        engine.push([kv.GenerationRequest(prompt, NUM_NEW, id=(nth, i)) for i, prompt in enumerate(prompts)])
        for event in engine:
            said[event.id] += event.tokens
        assert said == {(nth, i): tokens for i, tokens in enumerate(wanted)}
    assert kv.check_invariants(engine.state.cache) == []
    assert int(kv.stats(engine.state.cache).num_token_hits) >= sum(n // 16 * 16 for n in STARTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_tokens_are_the_same_with_a_host_tier(family):
    """Texts come back after the device has evicted them, with their states."""
    prompts, _ = make_prompts(family)
    texts = [[1 + i, *prompts[-1]] for i in range(5)]
    said, num_hits = {}, {}
    for name, extras in (("alone", []), ("host", [kv.tiers.Host(64)])):
        config = dataclasses.replace(make_config(family), num_blocks=12, extras=extras)
        engine = kv.Engine(forward, load(family), config, token_budget=25)
        said[name] = collections.defaultdict(list)
        for nth in range(3):
            for i, text in enumerate(texts):
                engine.push([kv.GenerationRequest(text, NUM_NEW, id=(nth, i))])
                for event in engine:
                    said[name][event.id] += event.tokens
        assert kv.check_invariants(engine.state.cache) == []
        num_hits[name] = int(kv.stats(engine.state.cache).num_token_hits)
    assert said["alone"] == said["host"] and len(said["host"]) == 15
    # Of each text 44 tokens are asked for again, of which two whole blocks can be hit.
    assert num_hits["host"] >= 10 * 32 > num_hits["alone"] + 32, num_hits


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_manager_finds_a_published_text(family):
    text, want = make_prompts(family)[0][-1], expected(family)["logits"]
    decoder, last = load(family), {}

    @functools.partial(jax.jit, donate_argnums=0)
    def step_fn(cache, batch):
        logits, cache = forward(decoder, batch.tokens, cache, batch.step)
        return cache, logits

    with kv.CacheManager(make_config(family), widths=[32]) as manager:
        for request_id in ("first", "second"):
            num_cached = manager.allocate_request(request_id, text)
            assert num_cached == (32 if request_id == "second" else 0)
            for start in range(num_cached, len(text), 16):
                batch = manager.append_tokens(request_id, text[start : start + 16])
                logits = np.asarray(manager.run(step_fn, batch))[0, : len(text[start : start + 16])]
                manager.commit_tokens(request_id)
                np.testing.assert_allclose(logits, want[start : start + 16][: len(logits)], atol=ATOL)
            last[request_id] = logits
    np.testing.assert_array_equal(last["first"], last["second"])  # the pieces are the same
