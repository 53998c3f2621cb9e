"""generate, score and beam_search with prefix caching: less is computed, and nothing else changes."""

import functools

import jax
import numpy as np
import pytest
from test_beam_search import slow_beam_search
from test_generate import LENGTH, PARAMS, PROMPTS, check_scores, greedy

import kvcache_jax as kv
from tests.support.tiny_model import PREFILL_LEN, config, dense_logits, forward

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
DRAFT = kv.Draft(forward, PARAMS, config())
FAMILY = [[*SHARED, 8], [*SHARED, 9], [*SHARED, 8], [2, 2], SHARED[:6]]


def cached_config(**sizes):
    return config(**{"enable_prefix_caching": True, **sizes})


def exact_logprobs_of(tokens):
    """`logprobs_of`, of a model in float64: two in float32 may round further apart than each is from it."""
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), PARAMS)
        logits = np.asarray(exact_fn()(params, padded))[len(tokens) - 1]
    assert logits.dtype == np.float64
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@functools.cache
def exact_fn():
    return jax.jit(dense_logits)


def generate(prompts, sizes=None, **options):
    options = {"max_new_tokens": 7, "prefill_len": PREFILL_LEN, **options}
    return kv.generate(forward, PARAMS, prompts, cached_config(**(sizes or {})), **options)


def score_of(params, context, continuations, **options):
    return kv.score(
        forward, params, context, continuations, cached_config(), prefill_len=PREFILL_LEN, **options
    )


def check_greedy(result, prompts, num_new=7):
    for prompt, generation in zip(prompts, result.generations, strict=True):
        tokens, scores = greedy(prompt, num_new)
        assert generation.tokens == tokens
        np.testing.assert_allclose(generation.logprobs, scores, atol=1e-4)
    assert kv.check_invariants(result.cache) == []
    assert not np.asarray(result.cache.is_active).any()
    assert int(kv.stats(result.cache).num_blocks_used) == 0


@pytest.mark.slow
def test_prompts_of_one_call_share_what_they_have_in_common():
    """Two full blocks of 4 are common to three prompts, one to the fourth; each is computed once."""
    result = generate(FAMILY)
    check_greedy(result, FAMILY)
    assert result.num_cached_tokens == 8 + 8 + 4
    assert result.num_prompt_tokens == sum(map(len, FAMILY)) - 20
    assert generate(PROMPTS).num_cached_tokens == 0


@pytest.mark.slow
def test_a_later_call_finds_prompts_and_answers_of_an_earlier_one():
    first = generate(FAMILY[:1])
    turn = FAMILY[0] + first.generations[0].tokens + [1, 2, 3]
    again = generate([turn], cache=first.cache)
    check_greedy(again, [turn])
    # 12 tokens and 6 of the 7 new ones were computed by the first call: 4 full blocks.
    assert again.num_cached_tokens == 16
    other = generate([turn], cache=again.cache, drafts=kv.decoding.Drafts(3, DRAFT))
    check_greedy(other, [turn])
    assert other.num_cached_tokens == 20


def test_prompts_share_within_a_namespace():
    tenants = np.stack([kv.namespace(tenant=name) for name in "abaab"])
    result = generate(FAMILY, namespace=tenants)
    check_greedy(result, FAMILY)
    assert result.num_cached_tokens == 8 + 4
    longer = [FAMILY[0], [*FAMILY[1], 7]]
    later = generate(longer, namespace=tenants[1], cache=result.cache)
    check_greedy(later, longer)
    assert later.num_cached_tokens == 8 + 12
    stranger = generate(FAMILY[:2], namespace=kv.namespace(tenant="c"), cache=later.cache)
    check_greedy(stranger, FAMILY[:2])
    assert stranger.num_cached_tokens == 8  # of the other's, computed in this call
    with pytest.raises(ValueError, match=r"namespace is uint32\(3, 4\), expected uint32 \(4,\) or \(2, 4\)"):
        generate(FAMILY[:2], namespace=tenants[:3], cache=stranger.cache)


@pytest.mark.slow
def test_other_weights_find_nothing_in_another_namespace():
    others = jax.tree.map(lambda x: -x, PARAMS)
    weights = kv.namespace(weights="negative")

    def decode(**options):
        options = {"max_new_tokens": 7, "prefill_len": PREFILL_LEN, **options}
        return kv.generate(forward, others, FAMILY[:1], cached_config(), **options)

    known = generate(FAMILY[:1]).cache
    found, expected = decode(cache=known, namespace=weights), decode()
    assert found.num_cached_tokens == 0
    assert [each.tokens for each in found.generations] == [each.tokens for each in expected.generations]

    def score(**options):
        return score_of(others, SHARED, [[1, 2]], **options)

    scores, expected = score(cache=found.cache, namespace=weights), score()
    assert (scores.num_cached_tokens, expected.num_cached_tokens) == (8, 0)
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow
def test_samples_and_a_pool_that_must_evict():
    options = dict(num_samples=2, sampling=kv.decoding.SamplingParams(temperature=1.1, seed=3))
    free = generate(FAMILY, dict(enable_prefix_caching=False), **options)
    # A pool that others have filled: 10 of its 24 blocks each.
    filled = generate([[token] * 40 for token in range(3)], max_new_tokens=1)
    assert int(kv.stats(filled.cache).num_evictions) == 6
    tight = generate(FAMILY, cache=filled.cache, **options)
    assert [g.tokens for g in tight.generations] == [g.tokens for g in free.generations]
    assert tight.num_cached_tokens >= 12
    assert kv.check_invariants(tight.cache) == []
    assert int(kv.stats(tight.cache).num_evictions) > 6


@pytest.mark.slow
def test_drafts_are_never_published():
    result = generate(FAMILY, drafts=kv.decoding.Drafts(3, DRAFT))
    check_greedy(result, FAMILY)
    for generation, prompt in zip(result.generations, FAMILY, strict=True):
        text = np.zeros((1, LENGTH), np.int32)
        num_tokens = len(prompt) + 7
        text[0, :num_tokens] = [*prompt, *generation.tokens]
        num_known = num_tokens - 1
        assert int(kv.lookup(result.cache, text, [num_tokens + 1])[0]) == num_known // 4 * 4


@pytest.mark.slow
def test_score_and_beams():
    continuations = [[1, 2], [7, 7, 7, 7], []]
    first = score_of(PARAMS, SHARED, continuations)
    longer = [*SHARED, 4]
    again = score_of(PARAMS, longer, continuations, cache=first.cache)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 8)
    for context, scores in ((SHARED, first.logprobs), (longer, again.logprobs)):
        for tokens, got in zip(continuations, scores, strict=True):
            want = [exact_logprobs_of([*context, *tokens[:i]])[token] for i, token in enumerate(tokens)]
            np.testing.assert_allclose(got, want, atol=1e-5)
    assert kv.check_invariants(again.cache) == []

    options = dict(max_new_tokens=4, prefill_len=PREFILL_LEN)
    found = kv.beam_search(forward, PARAMS, FAMILY[:1], cached_config(), **options)
    expected = slow_beam_search(FAMILY[0], 4, 4, [], 1.0)
    assert [beam.tokens for beam in found.beams[0]] == [tokens for tokens, _ in expected]


@pytest.mark.slow
def test_score_feeds_every_token_once():
    """Whatever of the context's last block is filled, and with groups whose blocks end elsewhere."""
    fed = []

    def counting(params, tokens, cache, step):
        jax.debug.callback(lambda num: fed.append(int(num)), step.query_len.sum())
        return forward(params, tokens, cache, step)

    layers = [kv.FullAttention(2, 4, block_size=3), kv.FullAttention(2, 4)]
    sizes = kv.CacheConfig(
        layers, num_blocks=64, block_size=4, max_seqs=4, max_seq_len=48, enable_prefix_caching=True
    )
    continuations = [[1], [2, 3], [4], [5, 6, 7], [8, 9], [1]]
    for num_tokens, num_known in ((11, 0), (12, 12), (13, 12)):
        fed.clear()
        context = [7, 2, 5] * 4 + [6]
        first = kv.score(counting, PARAMS, context[:num_tokens], continuations, sizes, prefill_len=8)
        jax.effects_barrier()
        assert sum(fed) == num_tokens + 1 + 2 + 1
        assert int(kv.stats(first.cache).num_forks) == 3  # a single token needs no row
        check_scores(continuations, first.logprobs, context[:num_tokens])
        question = np.array([[*context[:num_tokens], 9, 9]], np.int32)
        assert kv.lookup(first.cache, question, [num_tokens + 2]).tolist() == [num_known]


def test_a_cache_that_cannot_be_gone_on_with():
    result = generate(FAMILY[:1])
    other = cached_config(num_blocks=63)
    with pytest.raises(ValueError, match="config"):
        kv.generate(forward, PARAMS, FAMILY[:1], other, max_new_tokens=7, cache=result.cache)
    cache, _ = kv.allocate(result.cache, [1], [3], tokens=np.ones((1, LENGTH), np.int32))
    with pytest.raises(ValueError, match="1 active row"):
        generate(FAMILY[:1], cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [24, 6], ids=["roomy", "tight"])
def test_prompts_begin_inside_blocks(num_blocks):
    """Twelve tokens and seven: with six blocks of four the copies are short for several rows at a time."""
    sizes = dict(partial_hits=True, num_blocks=num_blocks)
    first = generate(FAMILY[:1], sizes)
    prompts = [FAMILY[0][:10] + [7, 7], FAMILY[0][:7] + [8], FAMILY[0][:10] + [7, 6], FAMILY[0]]
    again = generate(prompts, sizes, cache=first.cache)
    for i, generation in enumerate(again.generations):
        tokens, _ = greedy(prompts[i], 7)
        assert generation.tokens == tokens, i
    assert kv.check_invariants(again.cache) == []
    if num_blocks == 24:
        assert again.num_cached_tokens == 10 + 7 + 10 + 11


@pytest.mark.slow
def test_a_prompt_waits_for_the_copy_that_another_still_makes():
    """Of six blocks one prompt shares two, one of them in part; another would fill the other four."""
    sizes = dict(partial_hits=True, num_blocks=6)
    first = generate(FAMILY[:1], sizes)
    prompts = [[*FAMILY[0][:7], 8], [2, 7] * 8]
    again = generate(prompts, sizes, cache=first.cache, max_new_tokens=1)
    assert again.num_cached_tokens == 7
    check_greedy(again, prompts, num_new=1)
