"""A row whose logits are no numbers ends and says so; all others go on as without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.decoding.sampling import are_numbers
from tests.support.tiny_model import PREFILL_LEN, VOCAB, config, forward, make_params

PARAMS = make_params()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [4, 6, 2, 6]]
BAD = 13
"""No prompt has it."""


def spoiled(value):
    """Has `value` in one of the logits after `BAD`, or in all (-inf)."""
    after = np.zeros((VOCAB, VOCAB), np.float32)
    after[BAD, slice(None) if value == -np.inf else 5] = value
    return {**PARAMS, "after": jnp.asarray(after)}


NAN, INF, MUTE = spoiled(np.nan), spoiled(np.inf), spoiled(-np.inf)


def generations(params=PARAMS, prompts=PROMPTS, sizes=None, **options):
    options = {"max_new_tokens": 9, "prefill_len": PREFILL_LEN, **options}
    result = kv.generate(forward, params, prompts, config(**(sizes or {})), **options)
    assert kv.check_invariants(result.cache) == [] and not np.asarray(result.cache.is_active).any()
    for generation in result.generations:
        assert np.isfinite(generation.logprobs).all()
        assert len(generation.logprobs) == len(generation.tokens)
    return result.generations


def expected_of(plain):
    """What becomes of a continuation if nothing can be drawn behind `BAD`."""
    is_cut = BAD in plain.tokens[:-1]
    tokens = plain.tokens[: plain.tokens.index(BAD) + 1] if is_cut else plain.tokens
    return tokens, plain.logprobs[: len(tokens)], "nan_logits" if is_cut else plain.finish_reason


@pytest.mark.parametrize("params", [NAN, INF, MUTE])
def test_a_row_ends_where_its_logits_are_no_numbers_and_others_go_on(params):
    options = dict(num_samples=2, sampling=kv.decoding.SamplingParams(temperature=2.0, seed=4))
    expected = [expected_of(plain) for plain in generations(**options)]
    assert {reason for *_, reason in expected} == {"nan_logits", "length"}
    assert [(g.tokens, g.logprobs, g.finish_reason) for g in generations(params, **options)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("has_draft", [False, True])
def test_drafts_are_kept_up_to_the_last_logits_that_are_numbers(has_draft):
    options = dict(sampling=kv.decoding.SamplingParams(temperature=2.0, seed=4), max_new_tokens=20)
    draft = kv.Draft(forward, PARAMS, config()) if has_draft else None
    options["drafts"] = kv.decoding.Drafts(3, draft)
    plain, found = generations(**options), generations(NAN, **options)
    assert "nan_logits" in {g.finish_reason for g in found}
    if has_draft:  # whose own logits decide on nothing but drafts
        options["drafts"] = kv.decoding.Drafts(3, kv.Draft(forward, NAN, config()))
        assert {g.finish_reason for g in generations(**options)} == {"length"}
    for before, after in zip(plain, found, strict=True):
        tokens, _, reason = expected_of(before)
        assert (after.tokens, after.finish_reason) == (tokens, reason)


@pytest.mark.slow
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_prompt_whose_logits_are_no_numbers_has_no_first_token(enable_prefix_caching):
    sizes = dict(enable_prefix_caching=enable_prefix_caching)
    bad, streamed = [1, 2, 3, 4, 5, 6, 7, BAD], []
    options = dict(num_samples=2, sizes=sizes)
    three, two = (kv.decoding.SamplingParams(temperature=0.7, seed=seed) for seed in ([1, 2, 3], [1, 3]))
    watch = kv.decoding.Watch(lambda prompt_id, *new: streamed.append(prompt_id))
    found = generations(NAN, [PROMPTS[0], bad, PROMPTS[2]], **options, sampling=three, watch=watch)
    alone = generations(NAN, [PROMPTS[0], PROMPTS[2]], **options, sampling=two)
    assert [(g.tokens, g.finish_reason) for g in found[2:4]] == [([], "nan_logits")] * 2
    assert [(g.tokens, g.logprobs) for g in found[:2] + found[4:]] == [(g.tokens, g.logprobs) for g in alone]
    assert set(streamed) == {0, 2}


@pytest.mark.slow
def test_what_gave_no_numbers_is_not_published():
    sizes = config(enable_prefix_caching=True)
    prompts = [[1, 2, 3, 4, 5, 6, 7, BAD], list(range(8))]
    result = kv.generate(forward, NAN, prompts, sizes, max_new_tokens=2, prefill_len=PREFILL_LEN)
    found = kv.lookup(result.cache, np.array([[*prompt, 0] for prompt in prompts]), [9, 9])
    assert found.tolist() == [0, 8]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_weight_ends_every_row(value):
    found = generations({**PARAMS, "head": PARAMS["head"].at[3, 8].set(value)})
    # Times an activation below 0, the infinite weight is a mask.
    reasons = {g.finish_reason for g in found}
    assert reasons == {"nan_logits"} if np.isnan(value) else "nan_logits" in reasons


@pytest.mark.slow
def test_a_score_of_no_numbers_is_refused():
    score = functools.partial(kv.score, forward, NAN, [1, 2], prefill_len=3)
    few = config(num_blocks=7)
    assert np.isfinite(score([[3, 4, BAD]], few).logprobs[0]).all()
    with pytest.raises(FloatingPointError, match="logits after token 1 of continuation 1 hold NaN or"):
        score([[3, 4, 5], [6, BAD, 7], [8]], few)
    with pytest.raises(FloatingPointError, match="logits after the context hold NaN"):
        kv.score(forward, INF, [1, 2, BAD], [[3]], few, prefill_len=3)


def test_logits_are_numbers_wherever_what_spoils_them_stands():
    for width in (1, 7, 300):
        for value, expected in ((np.nan, False), (np.inf, False), (-np.inf, True), (0.5, True)):
            logits = np.zeros((width, width), np.float32)
            np.fill_diagonal(logits, value)
            expected = expected and (width > 1 or np.isfinite(value))
            assert jax.jit(are_numbers)(logits).tolist() == [expected] * width
