"""beam_search against a search on lists, with the same model without a cache."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import PARAMS, PROMPTS, greedy, logprobs_of, next_logits

import kvcache_jax as kv
from tests.support.tiny_model import PREFILL_LEN, VOCAB, config, forward


def beam_search(prompts, params=PARAMS, sizes=None, **options):
    """Two beams and ten tokens, so that most tests share their programs."""
    options = {"max_new_tokens": 10, "num_beams": 2, "prefill_len": PREFILL_LEN, **options}
    return kv.beam_search(forward, params, prompts, config(**(sizes or {})), **options)


def slow_beam_search(prompt, num_beams, max_new, stops, length_penalty):
    """The same search on lists; returns (tokens, logprob) best first."""
    beams, done = [([], 0.0)], []

    def rank(hypothesis):
        return hypothesis[1] / len(hypothesis[0]) ** length_penalty

    for _ in range(max_new):
        options = [
            (tokens + [token], total + float(logprob))
            for tokens, total in beams
            for token, logprob in enumerate(logprobs_of([*prompt, *tokens]))
        ]
        options.sort(key=lambda option: -option[1])
        done += [option for option in options[:num_beams] if option[0][-1] in stops]
        done = sorted(done, key=rank, reverse=True)[:num_beams]
        beams = [option for option in options if option[0][-1] not in stops][:num_beams]
        longest = max_new if length_penalty > 0 else len(beams[0][0])
        if len(done) == num_beams and rank(done[-1]) >= beams[0][1] / longest**length_penalty:
            beams = []
            break
    return sorted(done + beams, key=rank, reverse=True)[:num_beams]


@pytest.mark.quick_cases("2-stops0-1.0")
@pytest.mark.parametrize(
    ("num_beams", "stops", "penalty"), [(2, [], 1.0), (2, [3, 8], 0.0), (1, [], 1.0), (2, [9, 15], 2.0)]
)
def test_beam_search_equals_a_search_on_lists(num_beams, stops, penalty):
    prompts = [PROMPTS[0], PROMPTS[3]]
    found = beam_search(prompts, num_beams=num_beams, stop_tokens=stops, length_penalty=penalty)
    assert kv.check_invariants(found.cache) == []
    for prompt, beams in zip(prompts, found.beams, strict=True):
        expected = slow_beam_search(prompt, num_beams, 10, stops, penalty)
        assert [beam.tokens for beam in beams] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(
            [beam.logprob for beam in beams], [total for _, total in expected], atol=1e-3
        )
        for beam in beams:
            assert beam.finish_reason == ("stop" if beam.tokens[-1] in stops else "length")
            expected = [
                logprobs_of([*prompt, *beam.tokens[:i]])[token] for i, token in enumerate(beam.tokens)
            ]
            np.testing.assert_allclose(beam.logprobs, expected, atol=1e-4)
    if not stops:
        assert found.finish_reasons == ["length", "length"]
    if num_beams == 1:
        assert found.beams[0][0].tokens == greedy(prompts[0], 10)[0]


@pytest.mark.slow
def test_beams_are_looked_at_while_they_are_searched():
    seen = []
    options = dict(stop_tokens=[3, 8], length_penalty=0.0)
    plain = beam_search(PROMPTS[:2], **options)
    found = beam_search(
        PROMPTS[:2],
        **options,
        watch=kv.decoding.Watch(on_check_in=lambda *check_in: seen.append(check_in), check_in_every=3),
    )
    assert found.beams == plain.beams == seen[-1][1]
    assert found.num_steps == plain.num_steps == found.timeline[-1].num_steps == 7
    assert [check_in.num_steps for check_in in plain.timeline] == [0, 7]
    assert [check_in.num_steps for check_in, _ in seen] == [0, 3, 6, 7]
    assert [dataclasses.replace(check_in, block_tables=[]) for check_in, _ in seen] == found.timeline
    first, beams = seen[0]
    # The prompts' 2 + 1 blocks of 4, each held by both beams.
    assert (first.num_blocks_used, first.num_refs, first.num_active_seqs) == (3, 6, 4)
    assert first.running == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert {len(beam.tokens) for hypotheses in beams for beam in hypotheses} == {1}
    assert "running" in {beam.finish_reason for hypotheses in beams for beam in hypotheses}
    figures = kv.stats(found.cache)
    assert int(figures.num_active_seqs) == 4 and int(figures.num_forks) >= 2
    assert int(figures.num_refs) > int(figures.num_blocks_used)


@pytest.mark.slow
def test_enough_beams_find_the_best_of_all():
    sizes = dict(max_seqs=VOCAB, num_blocks=80)
    (beams,) = beam_search([PROMPTS[3]], sizes=sizes, max_new_tokens=2, num_beams=VOCAB).beams
    first = logprobs_of(PROMPTS[3])
    totals = np.stack([first[a] + logprobs_of([*PROMPTS[3], a]) for a in range(VOCAB)])
    best = np.unravel_index(totals.argmax(), totals.shape)
    assert beams[0].tokens == [int(token) for token in best]
    np.testing.assert_allclose(beams[0].logprob, totals.max(), atol=1e-4)


def test_beam_search_without_blocks_returns_what_it_had():
    """Two prompts fill 20 of 24 blocks, and every beam wants one of its own."""
    prompts = [(PROMPTS[0] * 6)[:39], (PROMPTS[2] * 4)[:39]]
    found = beam_search(prompts)
    assert "out_of_blocks" in {beam.finish_reason for beams in found.beams for beam in beams}
    assert "out_of_blocks" in found.finish_reasons
    for prompt, beams in zip(prompts, found.beams, strict=True):
        expected = slow_beam_search(prompt, 2, len(beams[0].tokens), [], 1.0)
        assert [beam.tokens for beam in beams] == [tokens for tokens, _ in expected]


def gambles(params, tokens, cache, step):
    """Up to position 4 half a chance of 0, then hardly any, and from 10 on nearly certainty."""
    x = jnp.ones((*tokens.shape, 1, 8))
    cache, _ = kv.attention(cache, 0, x, x, x, step)
    early, middle, late = jnp.array([[0.5, 0.3, 0.2], [0.001, 0.998, 0.001], [0.998, 0.001, 0.001]])
    at = step.positions[..., None]
    return jnp.log(jnp.where(at < 5, early, jnp.where(at < 10, middle, late))), cache


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "why"), [(5, "out_of_blocks"), (32, "stop")])
def test_a_beam_search_says_that_it_ran_out_of_blocks(num_blocks, why):
    """Also where all hypotheses that it returns are finished ones: with more blocks others would have won."""
    layers = [kv.FullAttention(1, 8)]
    sizes = kv.CacheConfig(layers, num_blocks=num_blocks, block_size=2, max_seqs=2, max_seq_len=16)
    found = kv.beam_search(gambles, None, [[1, 1]], sizes, max_new_tokens=12, num_beams=2, stop_tokens=[0])
    assert found.finish_reasons == [why]
    assert [beam.finish_reason for beam in found.beams[0]] == ["stop", "stop"]
    assert (found.beams[0][0].tokens == [0]) == (why == "out_of_blocks")


def test_beams_go_around_logits_that_are_no_number():
    params = {**PARAMS, "head": PARAMS["head"].at[:, 8].set(np.nan)}
    found = beam_search([PROMPTS[0], PROMPTS[3]], params)
    for prompt, beams in zip([PROMPTS[0], PROMPTS[3]], found.beams, strict=True):
        assert len(beams) == 2
        for beam in beams:
            known = list(prompt)
            for token, logprob in zip(beam.tokens, beam.logprobs, strict=True):
                logits = np.delete(next_logits(known), 8)
                assert token != 8
                expected = next_logits(known)[token] - np.log(np.exp(logits).sum())
                np.testing.assert_allclose(logprob, expected, atol=1e-4)
                known.append(token)
    params["embedding"] = PARAMS["embedding"].at[PROMPTS[3][-1]].set(np.nan)
    with pytest.raises(FloatingPointError, match="prompt 1 has no hypothesis: all its logits are NaN"):
        beam_search([PROMPTS[0], PROMPTS[3]], params)


def test_logits_without_a_number_have_no_beams():
    mute = {**PARAMS, "after": jnp.full((VOCAB, VOCAB), -jnp.inf)}
    with pytest.raises(
        FloatingPointError, match="prompt 0 has no hypothesis: all its logits are NaN or -inf"
    ):
        beam_search([[1], [2]], mute)


@pytest.mark.slow
def test_one_token_has_the_same_score_under_any_penalty():
    found = beam_search([PROMPTS[0], PROMPTS[3]], max_new_tokens=1, length_penalty=400)
    for beams in found.beams:
        assert [beam.score for beam in beams] == [beam.logprob for beam in beams]
