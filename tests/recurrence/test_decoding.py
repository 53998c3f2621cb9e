"""Loops over models with recurrent layers: the tokens are those that the states of the whole text give."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.hash_states import HashState, LastInputs, StatePerToken, expected

VOCAB, BLOCK = 5, 8
FULL = kv.FullAttention(1, 4)
KINDS = [kind(1, 1, max_rollback=4) for kind in (HashState, StatePerToken, LastInputs)]
SIZES = dict(block_size=BLOCK, max_seqs=4, max_seq_len=96, max_query_len=32, num_blocks=48)
AT_MULTIPLES = kv.CacheConfig(
    [kv.SlidingWindow(1, 4, window=6, max_rollback=4), *KINDS],
    **SIZES,
    enable_prefix_caching=True,
    snapshots=kv.Snapshots(every=BLOCK, at_junctions=False, at_prompt_end=False, at_end=False),
)


def forward(params, tokens, cache, step):
    """Logits that only the layers' own states decide; attention must see its keys, and adds nothing."""
    keys = jnp.ones((*tokens.shape, 1, 4))
    cache, attended = kv.attention(cache, 0, keys, keys, keys, step)
    outs = []
    for layer in range(1, cache.config.num_layers):
        cache, out = kv.recurrence(cache, layer, {"token": tokens.astype(jnp.uint32)}, step)
        outs.append(out)
    state, convolved = outs[0][..., 0], outs[0][..., 1]
    drawn = ((state >> 5) + convolved) % VOCAB
    logits = 4 * jax.nn.one_hot(drawn.astype(jnp.int32), VOCAB) + 0 * attended[..., :1, 0]
    for out, same in zip(outs[1:], (state, convolved), strict=False):
        logits += jnp.where(out == same[..., None], 0, jnp.nan)
    return logits, cache


def next_token(text):
    state, convolved = expected(text)[-1]
    with np.errstate(over="ignore"):
        return int(((state >> np.uint32(5)) + convolved) % VOCAB)


@functools.lru_cache
def answer(prompt, num_tokens):
    text = [*prompt]
    for _ in range(num_tokens):
        text.append(next_token(text))
    return text[len(prompt) :]


def make_prompts(seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.integers(VOCAB, size=29).tolist()
    tails = [rng.integers(VOCAB, size=n).tolist() for n in (5, 40, 11, 1, 19, 3)]
    return [tuple(shared + tail) for tail in tails] + [tuple(shared[:24]), tuple(shared[:3])]


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()


@pytest.mark.quick_cases("plain", "samples")
@pytest.mark.parametrize(
    "options", [{}, {"drafts": kv.decoding.Drafts(3)}, {"num_samples": 2}], ids=["plain", "drafts", "samples"]
)
def test_generate_draws_the_tokens_of_whole_texts(prompts, options):
    cache = None
    for nth in range(2):
        result = kv.generate(
            forward, (), prompts, AT_MULTIPLES, max_new_tokens=17, prefill_len=16, cache=cache, **options
        )
        cache = result.cache
        num_samples = options.get("num_samples", 1)
        wanted = [answer(prompt, 17) for prompt in prompts for _ in range(num_samples)]
        assert [[*generation.tokens] for generation in result.generations] == wanted, nth
        assert kv.check_invariants(cache) == []
    stats = kv.stats(cache)
    # The second time each prompt's states are there up to the last block before its last token.
    assert int(stats.num_token_hits) >= sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)


def test_each_call_of_a_prompt_keeps_the_states_at_every_multiple(prompts):
    """And the windows before them, which the row leaves in the next call."""
    run = functools.partial(kv.generate, forward, (), config=AT_MULTIPLES, max_new_tokens=2, prefill_len=16)
    text = prompts[1]
    cache, found = run([text]).cache, []
    for length in (60, 16, 29, 45):
        result = run([(*text[:length], VOCAB - 1 - text[length])], cache=cache)
        cache = result.cache
        found.append(result.num_cached_tokens)
    assert len(text) == 69 and found == [56, 16, 24, 40]


@pytest.mark.slow
def test_beams_follow_their_own_states(prompts):
    config = kv.CacheConfig([FULL, *KINDS], **SIZES, enable_prefix_caching=True)
    result = kv.beam_search(forward, (), [prompts[0]], config, max_new_tokens=9, num_beams=3)
    assert [*result.beams[0][0].tokens] == answer(prompts[0], 9)


@pytest.mark.slow
def test_scores_are_those_of_whole_texts(prompts):
    config = kv.CacheConfig([FULL, *KINDS], **SIZES, enable_prefix_caching=True)
    continuations = [answer(prompts[1], n) for n in (1, 6, 20)]
    scored = kv.score(forward, (), prompts[1], continuations, config, prefill_len=32)
    for logprobs in scored.logprobs:
        np.testing.assert_allclose(logprobs, 4 - np.log(np.exp(4) + VOCAB - 1), atol=1e-5)


@pytest.mark.quick_cases("drafts")
@pytest.mark.parametrize(
    ("num_kinds", "options"),
    [
        (1, dict()),
        (1, dict(num_drafts=3)),
        (3, dict(batch_invariant=True, num_drafts=3, token_budget=60)),  # more of prompts than of rows
    ],
    ids=["plain", "drafts", "all kinds"],
)
def test_the_engine_draws_the_tokens_of_whole_texts(prompts, num_kinds, options):
    config = kv.CacheConfig(
        [FULL, *KINDS[:num_kinds]], **(SIZES | {"num_blocks": 22}), enable_prefix_caching=True
    )
    engine = kv.Engine(forward, (), config, **dict(token_budget=24) | options, steps_per_dispatch=4)
    for nth in range(2):
        requests = [kv.GenerationRequest(prompt, 13, id=(nth, i)) for i, prompt in enumerate(prompts)]
        said = collections.defaultdict(list)
        engine.push(requests)
        for event in engine:
            said[event.id] += event.tokens
        assert said == {(nth, i): answer(prompt, 13) for i, prompt in enumerate(prompts)}
        assert kv.check_invariants(engine.state.cache) == []
    assert int(kv.stats(engine.state.cache).num_token_hits) > 100
    # A conversation goes on from the state at its last answer's end: two tokens after a full block.
    text = [*prompts[0], *answer(prompts[0], 9)]
    engine.push([kv.GenerationRequest(prompts[0], 9, id="turn")])
    assert [token for event in engine for token in event.tokens] == text[len(prompts[0]) :]
    engine.push([kv.GenerationRequest([*text, 0], 2, id="next")])
    [*events] = engine
    assert [token for event in events for token in event.tokens] == answer((*text, 0), 2)
    assert events[-1].num_cached_tokens == (len(text) - 1) // BLOCK * BLOCK
