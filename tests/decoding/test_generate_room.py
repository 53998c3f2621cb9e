"""generate in tight pools: no row that fits alone ends for want of blocks, and none depends on the others."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import greedy

import kvcache_jax as kv
from kvcache_jax.decoding.sampling import sample, sampling_columns
from kvcache_jax.layers.span import ceil_div
from tests.support import tiny_model
from tests.support.dense_reference import dense_attention
from tests.support.tiny_model import DIM, HEADS, forward, make_params

PARAMS, BLOCK_SIZE, MAX_LEN = make_params(), 4, 40
FULL = kv.FullAttention(HEADS, DIM)
WINDOW = kv.SlidingWindow(HEADS, DIM, window=5)
LIMITS = dict(block_size=BLOCK_SIZE, max_seq_len=MAX_LEN, max_query_len=4)

TIGHT = {
    "full": kv.CacheConfig([FULL] * 2, num_blocks=8, max_seqs=4, **LIMITS),
    "prefixes": kv.CacheConfig(
        [FULL] * 2, num_blocks=9, max_seqs=4, enable_prefix_caching=True, partial_hits=True, **LIMITS
    ),
    "windows": kv.CacheConfig([WINDOW] * 2, num_blocks=9, max_seqs=4, **LIMITS),
    "mixed prefixes": kv.CacheConfig(
        [FULL, WINDOW], num_blocks=10, max_seqs=3, enable_prefix_caching=True, **LIMITS
    ),
}


def generate(config, prompts, **options):
    return kv.generate(forward, PARAMS, prompts, config, **dict(sampling=drawn(), prefill_len=8) | options)


def drawn(seed=0):
    return kv.decoding.SamplingParams(temperature=1.0, seed=seed)


@functools.partial(jax.jit, static_argnames="windows")
def draw(texts, length, seeds, windows):
    """Draws what follows the first `length` tokens of each text, i32[n, MAX_LEN], without a cache."""

    def attention(cache, layer, q, k, v, step):
        attend = functools.partial(dense_attention, window=windows[layer])
        return cache, jax.vmap(attend)(q, k, v)[0]

    places = jnp.broadcast_to(jnp.arange(MAX_LEN, dtype=jnp.int32), texts.shape)
    logits, _ = forward(PARAMS, texts, None, types.SimpleNamespace(positions=places), attention)
    columns = sampling_columns(len(seeds), temperature=1.0, seed=seeds)
    return sample(logits[:, length - 1], columns, jnp.broadcast_to(length, seeds.shape))


def alone(config, prompts, seeds, num_new):
    """Tokens and log-probabilities of five samples of each prompt, by a model without a cache."""
    windows, found = tuple(getattr(kind, "window", None) for kind in config.layers), []
    for prompt, seed in zip(prompts, seeds, strict=True):
        texts, scores, start = np.zeros((5, MAX_LEN), np.int32), np.zeros((5, num_new)), len(prompt)
        texts[:, :start] = prompt
        rows = np.uint32([np.random.SeedSequence([seed, 0, i]).generate_state(1)[0] for i in range(5)])
        for i in range(num_new):
            texts[:, start + i], scores[:, i] = draw(texts, np.int32(start + i), rows, windows)
        found.append([*zip(texts[:, start : start + num_new].tolist(), scores, strict=True)])
    return found


def check_equal(generations, expected, num_new):
    """Compares samples with those from `alone`, which go on."""
    for i, (got, (tokens, logprobs)) in enumerate(
        zip(generations, expected[: len(generations)], strict=True)
    ):
        assert (got.sample_id, got.tokens) == (i, tokens[:num_new])
        assert (got.finish_reason, len(got.tokens)) == ("length", num_new)
        np.testing.assert_allclose(got.logprobs, logprobs[:num_new], atol=1e-4)


def check_idle(result):
    assert kv.check_invariants(result.cache) == []
    assert int(kv.stats(result.cache).num_blocks_used) == 0


def fits_alone(config, prompt_len, num_new):
    num_columns = ceil_div(min(prompt_len + num_new, MAX_LEN) - 1, BLOCK_SIZE)
    return all(min(num_columns, group.max_held_blocks) <= group.num_blocks for group in config.groups)


@pytest.mark.quick_cases("prefixes")
@pytest.mark.parametrize("kind", TIGHT)
def test_every_answer_is_the_one_that_it_has_alone(kind):
    """Random requests: 1-4 prompts that may begin alike, 1-5 samples of each in 3 or 4 rows."""
    config, cache, rng, num_turns = TIGHT[kind], None, np.random.default_rng(8), 0
    requests = []
    for _ in range(6):
        num_samples, num_new = int(rng.integers(1, 6)), int(rng.integers(1, 14))
        base, prompts = rng.integers(0, 16, 24), []
        for length in rng.integers(1, 24, rng.integers(1, 5)):
            if fits_alone(config, length, num_new):
                own = rng.integers(0, length + 1)
                prompts.append([*base[:own].tolist(), *rng.integers(0, 16, length - own).tolist()])
        requests.append((prompts, rng.integers(0, 1000, len(prompts)).tolist(), num_samples, num_new))
    every = [sum((request[i] for request in requests), []) for i in range(2)]
    expected = alone(config, *every, num_new=13)
    for prompts, seeds, num_samples, num_new in requests:
        options = dict(max_new_tokens=num_new, num_samples=num_samples)
        result = generate(config, prompts, sampling=drawn(seeds), cache=cache, **options)
        check_idle(result)
        for i in range(len(prompts)):
            got = result.generations[i * num_samples : (i + 1) * num_samples]
            check_equal(got, expected.pop(0), num_new)
        num_turns += result.num_prompt_tokens + result.num_cached_tokens > sum(map(len, prompts))
        cache = result.cache if config.enable_prefix_caching else None
    assert num_turns > 2  # prompts were started again for samples that had no room


@pytest.mark.quick_cases("7-prompt0-9-4-1")
@pytest.mark.parametrize(
    ("num_blocks", "prompt", "num_new", "num_samples", "num_together"),
    [
        (7, [3, 1, 4, 1, 5] * 4, 9, 4, 1),  # 5 full blocks, and 2 more for each
        (7, [3] * 5, 5, 4, 3),  # one full block, the other copied by all but the last, and one more each
        (2, [3], 7, 2, 1),
        (2, [3], 4, 2, 2),  # one block each
        (2, [3], 1, 6, 4),  # nothing is stored after the prompt
    ],
)
def test_as_many_samples_start_as_fit_side_by_side(num_blocks, prompt, num_new, num_samples, num_together):
    config = tiny_model.config(num_blocks=num_blocks)
    options = dict(num_samples=num_samples, prefill_len=tiny_model.PREFILL_LEN)
    result = generate(config, [prompt], max_new_tokens=num_new, **options)
    assert [len(generation.tokens) for generation in result.generations] == [num_new] * num_samples
    assert {generation.finish_reason for generation in result.generations} == {"length"}
    running = [len(check_in.running) for check_in in result.timeline]
    assert running[0] == max(running) == num_together
    num_starts = -(-num_samples // num_together)
    assert result.num_prompt_tokens == num_starts * len(prompt)
    check_idle(result)


def test_a_row_without_blocks_ends_with_its_tokens_intact():
    """Of 7 blocks a row of 7 tokens that grows by 36 would need 11: each of three samples gets all, alone."""
    prompt, options = [3, 1, 4, 1, 5, 9, 2], dict(max_new_tokens=36, prefill_len=tiny_model.PREFILL_LEN)
    greedily = kv.decoding.SamplingParams()
    result = generate(tiny_model.config(num_blocks=7), [prompt], num_samples=3, sampling=greedily, **options)
    expected, _ = greedy(prompt, 4 * 7 + 1 - len(prompt))  # the last token drawn is not stored any more
    for generation in result.generations:
        assert generation.finish_reason == "out_of_blocks" and generation.tokens == expected
    assert max(len(check_in.running) for check_in in result.timeline) == 1
    check_idle(result)


@pytest.mark.slow
def test_samples_share_a_window_only_until_it_has_passed():
    """A row holds at most 4 blocks; rows that go on to 36 tokens share none of them in the end."""
    config = kv.CacheConfig([WINDOW] * 2, num_blocks=9, max_seqs=4, **LIMITS)
    assert config.groups[0].max_held_blocks == 4
    prompt = [3, 1, 4, 1, 5] * 3
    result = generate(config, [prompt], sampling=drawn([7]), max_new_tokens=22, num_samples=3)
    check_equal(result.generations, alone(config, [prompt], [7], 22)[0], 22)
    assert len(result.timeline[0].running) == 2
    # Where samples end before, they share: 4 blocks, one more each, and all but one a copy.
    short = generate(config, [prompt], max_new_tokens=4, num_samples=4)
    assert len(short.timeline[0].running) == 3
