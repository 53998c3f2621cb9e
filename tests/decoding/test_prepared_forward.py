"""Parameters that a model prepares once before a loop of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import PARAMS, PROMPTS, greedy, logprobs_of

import kvcache_jax as kv
from tests.support import tiny_model
from tests.support.tiny_model import PREFILL_LEN, config

prepared = []
"""Parameters as the model got them, in each test."""


def take_apart(params):
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))
    prepared.append(params)
    return {**params, "layers": [*params["layers"]]}


FORWARD = kv.decoding.PreparedForward(tiny_model.forward, take_apart)


def stack_of(params):
    return {**params, "layers": jnp.stack(params["layers"])}


@pytest.fixture(autouse=True)
def empty_list():
    prepared.clear()


def test_generate_prepares_a_model_and_its_draft_once():
    params, sizes, draft_params = stack_of(PARAMS), config(), stack_of(tiny_model.make_params(seed=7))
    result = kv.generate(
        FORWARD,
        params,
        PROMPTS,
        sizes,
        max_new_tokens=9,
        prefill_len=PREFILL_LEN,
        drafts=kv.decoding.Drafts(2, kv.Draft(FORWARD, draft_params, sizes)),
        watch=kv.decoding.Watch(check_in_every=2, on_tokens=lambda *_: None),
    )
    for generation, prompt in zip(result.generations, PROMPTS, strict=True):
        assert generation.tokens == greedy(prompt, 9)[0]
    assert result.num_steps > 2 and [*map(id, prepared)] == [id(params), id(draft_params)]


def test_what_is_prepared_must_be_arrays():
    model = kv.decoding.PreparedForward(tiny_model.forward, lambda params: {**params, "more": b"text"})
    found = ""
    try:
        kv.generate(model, PARAMS, PROMPTS, config(), max_new_tokens=1)
    except TypeError as error:
        found = str(error)
    assert found.startswith("params['more'] is b'text', expected arrays alone: ")


@pytest.mark.slow
def test_score_prepares_once():
    scores = kv.score(FORWARD, stack_of(PARAMS), [3, 1], [[2, 7], [8]], config(), prefill_len=PREFILL_LEN)
    want = [[logprobs_of([3, 1])[2], logprobs_of([3, 1, 2])[7]], [logprobs_of([3, 1])[8]]]
    for got, wanted in zip(scores.logprobs, want, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert len(prepared) == 1


@pytest.mark.slow
def test_beam_search_prepares_once():
    options = dict(max_new_tokens=10, num_beams=1, prefill_len=PREFILL_LEN)
    found = kv.beam_search(FORWARD, stack_of(PARAMS), PROMPTS[:1], config(), **options)
    assert found.beams[0][0].tokens == greedy(PROMPTS[0], 10)[0] and len(prepared) == 1


@pytest.mark.slow
def test_the_engine_prepares_its_first_parameters_and_later_ones():
    def texts_of(engine):
        engine.push([kv.GenerationRequest(prompt, 6, id=i) for i, prompt in enumerate(PROMPTS)])
        texts = [[] for _ in PROMPTS]
        for event in engine:
            texts[event.id] += event.tokens
        return texts

    others = tiny_model.make_params(seed=7)
    engine = kv.Engine(FORWARD, stack_of(others), config(enable_prefix_caching=True), steps_per_dispatch=3)
    before = texts_of(engine)
    engine.set_params(stack_of(PARAMS))
    after = texts_of(engine)
    assert after == [greedy(prompt, 6)[0] for prompt in PROMPTS] != before and len(prepared) == 2


def test_equal_ones_are_one_to_jit_and_fresh_ones_are_warned_of():
    def of_fresh_function():
        return kv.decoding.PreparedForward(lambda *args: tiny_model.forward(*args), dict)

    same = kv.decoding.PreparedForward(tiny_model.forward, take_apart)
    assert same == FORWARD and hash(same) == hash(FORWARD)
    with pytest.warns(UserWarning, match="compiled anew for each: define the function once"):
        for _ in range(3):
            kv.score(of_fresh_function(), PARAMS, [3], [], config(), prefill_len=PREFILL_LEN)


def test_a_loop_of_ones_own_prepares_too():
    assert len(kv.decoding.prepared(FORWARD, stack_of(PARAMS))["layers"]) == tiny_model.LAYERS
    assert kv.decoding.prepared(tiny_model.forward, PARAMS) is PARAMS
