"""`generate` and `score` with chunks, against a model without a cache that is given what chunks hold."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.chunks.chunk_selector import selectors
from tests.support import tiny_model
from tests.support.rotary_model import (
    DEEP,
    PARAMS,
    ROTATE,
    composed,
    dense,
    first_of,
    first_two,
    forward,
    greedy,
)
from tests.support.tiny_model import DIM, HEADS, VOCAB

NUM_NEW = 5
# One config, so that most tests share their programs: a prompt of 45 tokens leaves room for two long chunks.
PREFIXES = dict(enable_prefix_caching=True, num_blocks=40)
SIZES = dict(num_blocks=20, extras=[kv.chunks.Store(3, 12)])


def config(**sizes):
    return tiny_model.config(**{**SIZES, **sizes})


def check(result, prompts, spans, again, unchunked=()):
    """Each continuation is the reference's; nothing is left but chunks, which are whole."""
    for i, (prompt, chunks) in enumerate(zip(prompts, spans, strict=True)):
        tokens, scores = greedy(prompt, [span for span in chunks if span not in unchunked], again)
        assert result.generations[i].tokens == tokens, i
        np.testing.assert_allclose(result.generations[i].logprobs, scores, atol=1e-4)
    check_left(result.cache)


def check_left(cache):
    """Rows are idle, chunks hold their own blocks, and all are free once chunks are forgotten."""
    assert kv.check_invariants(cache) == []
    assert not np.asarray(cache.is_active).any()
    stored = np.flatnonzero(np.asarray(cache.control.extras["chunks"].length))
    emptied, status = kv.chunks.free(cache, stored) if len(stored) else (cache, np.zeros(0))
    assert not np.asarray(status).any() and int(kv.stats(emptied).num_blocks_used) == 0


def text(seed, length):
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


A, B, C = text(1, 11), text(2, 8), text(3, 5)


def prompt_of(*parts):
    """Joins texts and chunks; chunks are tuples. Returns the prompt and its spans."""
    prompt, spans = [], []
    for part in parts:
        if isinstance(part, tuple):
            spans.append((len(prompt), len(prompt) + len(part)))
        prompt += part
    return prompt, spans


a, b, c = tuple(A), tuple(B), tuple(C)
PROMPTS = [
    prompt_of([7, 2, 9], a, b, [5, 1, 4, 3], c, [8, 8]),  # texts in front, between and after
    prompt_of(b, a, [6]),  # the other way round, the first one exact
    prompt_of([7, 2, 9], a, b, [5, 1, 4, 3], c, [8, 8]),  # the same again
    prompt_of([1, 2, 3]),  # without chunks
    prompt_of([4], c, c, b),  # one twice, and no question after the last
    prompt_of(c),  # nothing but a chunk
]


def generate(prompts, spans, reuse=None, sizes=None, **options):
    reuse = reuse or kv.chunks.Reuse(rotate=ROTATE, share=0.25)
    options = {"max_new_tokens": NUM_NEW, "prefill_len": 8} | options
    size = config(**(sizes or {}))
    options.setdefault("cache", testing.poison(kv.init(size)))
    return kv.generate(forward, PARAMS, kv.chunks.Prompts(prompts, spans, reuse), size, **options)


@functools.cache
def all_at_once():
    return generate(*zip(*PROMPTS, strict=True))


def test_prompts_are_made_of_chunks_wherever_those_stand():
    """Six prompts on four rows and 20 blocks: some wait, and one chunk is forgotten and comes again."""
    prompts, spans = zip(*PROMPTS, strict=True)
    result = all_at_once()
    check(result, prompts, spans, first_of(0.25))
    # Three tokens of 11, two of 8 and of 5, but none of a first chunk, and always the last of a prompt.
    again = [3 + 2 + 2, 3, 3 + 2 + 2, 0, 2 + 2 + 2 + 1, 1]
    num_composed = sum(end - start for chunks in spans for start, end in chunks) - sum(again)
    assert result.num_reused_tokens == num_composed
    assert result.num_stored_tokens == len(A) + len(B) + len(C) + len(C)
    assert result.num_prompt_tokens == sum(map(len, prompts)) - num_composed + result.num_stored_tokens


def test_a_prompt_is_its_own_whatever_stands_beside_and_was_before():
    prompts, spans = zip(*PROMPTS, strict=True)
    together, cache = all_at_once(), None
    for i in (4, 0, 1):
        options = {} if cache is None else {"cache": testing.poison(cache)}
        alone = generate([prompts[i]], [spans[i]], **options)
        cache = alone.cache
        got, want = alone.generations[0], together.generations[i]
        assert got.tokens == want.tokens
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert alone.num_stored_tokens == 0 and alone.num_prompt_tokens == 3 + 1  # all was there


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"selector": "all", "share": 0.0}, {"sizes": PREFIXES}, {"drafts": kv.decoding.Drafts(3)}]
)
def test_computed_again_as_a_whole_prompts_are_exact(options):
    """The same as without chunks, up to rounding, wherever all is computed again."""
    prompts, spans = zip(*PROMPTS, strict=True)
    options = dict(options)
    sizes = options.pop("sizes", {})
    reuse = kv.chunks.Reuse(
        rotate=ROTATE, selector=options.pop("selector", "first"), share=options.pop("share", 1.0)
    )
    result = generate(prompts, spans, reuse, sizes, num_samples=2, **options)
    plain = kv.generate(
        forward,
        PARAMS,
        prompts,
        config(**sizes),
        max_new_tokens=NUM_NEW,
        num_samples=2,
        prefill_len=8,
        **options,
    )
    for got, want in zip(result.generations, plain.generations, strict=True):
        assert got.tokens == want.tokens
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    check_left(result.cache)


@pytest.mark.slow
def test_scores_are_those_of_a_context_made_of_chunks():
    """Of contexts with a question, without one, and without chunks, in a cache that knows them."""
    continuations = [[1, 2, 3], [4], [], [5, 6]]
    cache = all_at_once().cache
    for i, num_composed in (0, 24 - 7), (4, 18 - 7), (3, 0):
        context, spans = PROMPTS[i]
        result = kv.score(
            forward,
            PARAMS,
            kv.chunks.Prompts([context], [spans], kv.chunks.Reuse(rotate=ROTATE, share=0.25)),
            continuations,
            config(),
            cache=testing.poison(cache),
            prefill_len=8,
        )
        cache = result.cache
        for found, continuation in zip(result.logprobs, continuations, strict=True):
            given, is_given = composed(context, spans, first_of(0.25)(spans))
            wide = [tuple(np.pad(x, [(0, len(continuation)), (0, 0), (0, 0)]) for x in kv) for kv in given]
            logits = dense(context + continuation, wide, np.pad(is_given, (0, len(continuation))))[0]
            logits = logits[len(context) - 1 : -1]
            want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            np.testing.assert_allclose(found, want[np.arange(len(continuation)), continuation], atol=1e-4)
        assert result.num_reused_tokens == num_composed and result.num_cached_tokens == 0
        check_left(cache)


@pytest.mark.slow
def test_chunks_without_room_are_computed_as_other_text():
    """Beside prompts of 12, 10 and 8 blocks, answers included; chunks need 3, 2 and 2."""
    for (prompt, spans), kept in (
        (prompt_of([7, 2, 9], a, b, [5, 1, 4, 3] * 3, c, [8, 8]), []),
        (PROMPTS[0], [1]),
        (prompt_of([7], a, b, c, [8]), [0]),
    ):
        unchunked = [span for i, span in enumerate(spans) if i not in kept]
        result = generate([prompt] * 2, [spans] * 2, sizes=dict(num_blocks=12))
        assert [g.finish_reason for g in result.generations] == ["length"] * 2
        check(result, [prompt] * 2, [spans] * 2, first_of(0.25), unchunked)


@pytest.mark.slow
def test_a_store_of_one_place_is_enough():
    """Two chunks of a prompt are not held together; of prompts that take turns each comes anew."""
    prompts, spans = zip(*PROMPTS, strict=True)
    result = generate(prompts, spans, sizes=dict(extras=[kv.chunks.Store(1, 12)]))
    for i, (chunks, prompt) in enumerate(zip(spans, prompts, strict=True)):
        first = [span for span in chunks if prompt[slice(*span)] == prompt[slice(*chunks[0])]]
        tokens, scores = greedy(prompt, first, first_of(0.25))
        assert result.generations[i].tokens == tokens
        np.testing.assert_allclose(result.generations[i].logprobs, scores, atol=1e-4)
    check_left(result.cache)


@pytest.mark.slow
def test_chunks_of_least_use_are_forgotten_first():
    """Of four chunks in three places, as prompts used them."""
    names = [tuple(text(i, 5)) for i in range(4)]
    prompts, spans = zip(*(prompt_of([4], names[i], [2]) for i in (0, 1, 2, 0, 3, 0, 2, 3)), strict=True)
    result = generate(prompts, spans)
    check(result, prompts, spans, first_of(0.25))
    assert result.num_stored_tokens == 4 * 5
    assert generate(prompts[1:2], spans[1:2], cache=result.cache).num_stored_tokens == 5


@pytest.mark.slow
def test_chunks_that_are_stored_give_way_to_prompts_without_any():
    """Three chunks hold 9 blocks of 20; two samples of a prompt need 14, a context and a continuation 12."""
    filled = prompt_of(*(tuple(text(i, 12)) for i in (4, 5, 6)), [1, 2])
    cache = generate(*zip(filled, strict=True), max_new_tokens=1).cache
    assert int(kv.stats(cache).num_blocks_used) == 9
    prompt = text(9, 42)
    options = dict(max_new_tokens=6, prefill_len=8)
    result = kv.generate(
        forward, PARAMS, [prompt], config(), cache=testing.poison(cache), num_samples=2, **options
    )
    assert [g.tokens for g in result.generations] == [greedy(prompt, [], first_of(0), 6)[0]] * 2
    assert 0 < int(kv.stats(result.cache).num_blocks_used) < 9
    check_left(result.cache)
    own = [text(i, 20) for i in range(4)]
    try:
        scored = kv.score(
            forward, PARAMS, prompt[:27], own, config(), cache=testing.poison(cache), prefill_len=8
        )
    except kv.StatusError as error:
        raise AssertionError("chunks hold what a continuation needs") from error
    assert not np.isnan(scored.logprobs).any()
    check_left(scored.cache)


@pytest.mark.slow
def test_chunks_are_found_within_their_namespace():
    prompt, spans = prompt_of([4], c, [2])
    tenants = np.stack([kv.namespace(tenant=name) for name in "aba"])
    result = generate([prompt] * 3, [spans] * 3, namespace=tenants)
    check(result, [prompt] * 3, [spans] * 3, first_of(0.25))
    assert result.num_stored_tokens == 2 * len(C)


@pytest.mark.slow
def test_the_text_in_front_of_chunks_is_shared_as_a_prefix():
    """Prompts publish and find no more than that; a chunk that begins a text is found as one."""
    prompts, spans = zip(
        prompt_of([3] * 9, a, [1, 2]),
        prompt_of([3] * 9, a, [1, 2]),
        prompt_of(a, [6, 5]),
        (A + [6, 5], []),
        (A + [6, 5, 1], []),
        strict=True,
    )
    result = generate(prompts, spans, sizes=PREFIXES)
    check(result, prompts, spans, first_of(0.25))
    assert result.num_cached_tokens == 8 + 12  # of the second prompt, and the last
    again = generate(prompts, spans, sizes=PREFIXES, cache=testing.poison(result.cache))
    check(again, prompts, spans, first_of(0.25))
    assert again.num_cached_tokens == 8 + 8 + 12 + 12
    emptied, _ = kv.chunks.free(again.cache, [0, 1, 2])
    anew = generate(prompts[:1], spans[:1], sizes=PREFIXES, cache=emptied)
    assert anew.num_stored_tokens == len(A) - 8  # the others were a prompt's


@pytest.mark.slow
def test_a_selector_of_ones_own_and_one_that_draws():
    prompts, spans = zip(*PROMPTS[:2], strict=True)
    name = "last tokens of a test"
    if name not in selectors.names:
        kv.chunks.selector(name)(
            lambda chunks: (chunks.place_in_chunk - chunks.chunk_len).astype(jnp.float32)
        )

    def last(spans):
        return [
            place for start, end in spans for place in range(end - math.ceil((end - start) / 2), end) if start
        ]

    own = generate(prompts, spans, kv.chunks.Reuse(rotate=ROTATE, selector=name, share=0.5))
    check(own, prompts, spans, last)
    drawn = [
        generate(prompts, spans, kv.chunks.Reuse(rotate=ROTATE, selector="random", share=0.5, seed=seed))
        for seed in (1, 1, 2**32 - 1)
    ]
    scores = [[g.logprobs for g in result.generations] for result in drawn]
    assert scores[0] == scores[1] != scores[2]
    assert {result.num_reused_tokens for result in drawn} == {own.num_reused_tokens}


def scores_by(selector, prompt, spans):
    """What the second layer says of each token, from texts computed as a whole."""
    given, _ = composed(prompt, spans, [], DEEP)
    k, v, shares = dense(prompt, params=DEEP)[1][1]
    if selector == "attention":
        starts = [max([start for start, _ in spans if start <= place], default=0) for place in range(len(k))]
        return np.array([shares[:, place, :start].sum() for place, start in enumerate(starts)])
    old, new = (given[1][0], k) if selector == "key deviation" else (given[1][1], v)
    return ((new - old) ** 2).sum(axis=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["attention", "key deviation", "value deviation"])
def test_selectors_see_what_first_layers_compute(selector):
    """What they compute is right for all tokens, and stays; the third layer has it for those chosen."""
    reuse = kv.chunks.Reuse(rotate=ROTATE, selector=selector, share=0.3, observe=first_two, observed_layer=1)
    size = kv.CacheConfig(
        [kv.FullAttention(HEADS, DIM)] * 3, **SIZES, block_size=4, max_seqs=4, max_seq_len=48
    )
    prompts, spans = zip(*(PROMPTS[i] for i in (0, 1, 4)), strict=True)
    result = kv.generate(
        forward,
        DEEP,
        kv.chunks.Prompts(prompts, spans, reuse),
        size,
        max_new_tokens=NUM_NEW,
        prefill_len=8,
        cache=testing.poison(kv.init(size)),
    )
    for generation, prompt, chunks in zip(result.generations, prompts, spans, strict=True):
        scores = scores_by(selector, prompt, chunks)

        def best(spans, scores=scores):
            return [
                start + place
                for start, end in spans
                for place in np.argsort(-scores[start:end])[: math.ceil(round(0.3 * (end - start), 9))]
                if start
            ]

        tokens, wanted = greedy(prompt, chunks, best, params=DEEP, first_given=2)
        assert generation.tokens == tokens
        np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-4)
    check_left(result.cache)


WINDOW = kv.SlidingWindow(HEADS, DIM, window=7)


@pytest.mark.slow
@pytest.mark.parametrize("max_rollback", [0, 1])
def test_windows_see_chunks_as_other_tokens(max_rollback):
    """Of a chunk and of a prompt more than a window; without rollback a prompt's last chunk is plain text."""
    window = dataclasses.replace(WINDOW, max_rollback=max_rollback)
    size = dataclasses.replace(config(), layers=[kv.FullAttention(HEADS, DIM), window], num_blocks=30)
    prompts, spans = zip(*PROMPTS, strict=True)
    result = kv.generate(
        forward,
        PARAMS,
        kv.chunks.Prompts(prompts, spans, kv.chunks.Reuse(rotate=[ROTATE, ROTATE], share=0.25)),
        size,
        max_new_tokens=NUM_NEW,
        prefill_len=8,
        cache=testing.poison(kv.init(size)),
    )
    for generation, prompt, chunks in zip(result.generations, prompts, spans, strict=True):
        composed = [span for span in chunks if max_rollback or span[1] < len(prompt)]
        tokens, scores = greedy(prompt, composed, first_of(0.25), windows=[None, (7, 0)])
        assert generation.tokens == tokens
        np.testing.assert_allclose(generation.logprobs, scores, atol=1e-4)
    check_left(result.cache)


@pytest.mark.slow
def test_a_chunk_whose_logits_are_no_numbers_is_not_stored():
    """Its token of NaN ends the prompt, and a prompt without it goes on."""
    params = PARAMS | {"embedding": PARAMS["embedding"].at[0].set(jnp.nan)}
    prompts, spans = zip(prompt_of([1], (5, 0, 3), [2]), prompt_of([1], (5, 4, 3), [2]), strict=True)
    made_of = kv.chunks.Prompts(prompts, spans, kv.chunks.Reuse(rotate=ROTATE))
    result = kv.generate(forward, params, made_of, config(), max_new_tokens=1, prefill_len=8)
    assert [g.finish_reason for g in result.generations] == ["nan_logits", "length"]
    assert np.asarray(result.cache.control.extras["chunks"].length).tolist() == [3, 0, 0]
    assert result.num_reused_tokens == 2
    check_left(result.cache)


REUSE = kv.chunks.Reuse(rotate=ROTATE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reuse": "first"}, "reuse is 'first', expected kv.chunks.Reuse"),
        ({"spans": [[]]}, "spans has 1 lists of spans, expected 2, one per prompt"),
        ({"spans": 3}, "spans is 3, expected a list of spans of each prompt"),
        ({"spans": [[], 5]}, r"spans\[1\] is 5, expected a list of spans"),
        ({"spans": [[], [5]]}, r"spans\[1\] is 5, expected a list of spans"),
        ({"spans": [[(1, 2, 3)], []]}, r"spans\[0\] has the span \(1, 2, 3\), expected a pair"),
        ({"spans": [[(1, 2.5)], []]}, r"spans\[0\] is 2.5, expected an integer"),
        ({"spans": [[(2, 2)], []]}, r"the span \(2, 2\), expected 0 <= start < end <= 20, the prompt's"),
        ({"spans": [[(-1, 2)], []]}, r"the span \(-1, 2\), expected 0 <= start"),
        ({"spans": [[], [(2, 7)]]}, r"spans\[1\] has the span \(2, 7\), expected .* <= 6"),
        ({"spans": [[(2, 15)], []]}, r"\(2, 15\) of 13 tokens, expected at most max_chunk_len = 12"),
        ({"spans": [[(5, 9), (2, 6)], []]}, r"\(2, 6\) and \(5, 9\), expected spans that do not overlap"),
        ({"sizes": {"extras": []}}, "without a store of chunks"),
        (
            {
                "retention": kv.compression.Streaming(window=4),
                "sizes": {"extras": [kv.compression.Dropping(), kv.chunks.Store(3, 12)]},
            },
            "generate got chunks and a retention that drops tokens, expected one",
        ),
        ({"prompts": [[1] * 20, [1] * 47], "sizes": {"num_blocks": 11}}, "needs 12 blocks, expected at most"),
    ],
)
def test_what_are_no_chunks_of_prompts_is_refused(options, message):
    options = dict(options)
    sizes = options.pop("sizes", {})
    prompts = options.pop("prompts", [[1] * 20, [2] * 6])
    made_of = kv.chunks.Prompts(prompts, options.pop("spans", [[(1, 3)], []]), options.pop("reuse", REUSE))
    with pytest.raises((ValueError, TypeError), match=message):
        kv.generate(forward, PARAMS, made_of, config(**sizes), max_new_tokens=1, **options)


def test_spans_beyond_what_windows_hold_at_once_are_refused():
    sizes = dict(layers=[kv.FullAttention(HEADS, DIM), WINDOW], max_query_len=10)
    message = r"spans\[0\] has spans from 1 to 12 and layers\[1\] is SlidingWindow\(7\), .*max_query_len = 10"
    with pytest.raises(ValueError, match=message):
        kv.generate(
            forward,
            PARAMS,
            kv.chunks.Prompts([[1] * 20], [[(1, 4), (9, 12)]], REUSE),
            dataclasses.replace(config(), **sizes),
            max_new_tokens=1,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotate": 3}, "rotate is 3, expected a function of keys and distances, None, or a list of"),
        ({"rotate": [None, 3]}, "rotate is .None, 3., expected a function"),
        ({"share": 1.5}, "share is 1.5, expected 0 to 1"),
        ({"share": -0.1}, "share is -0.1, expected 0 to 1"),
        ({"share": "all"}, "share is 'all', expected a finite number"),
        ({"seed": 2**32}, "seed is 4294967296, expected 0 <= seed <= "),
        ({"selector": "best"}, "selector is 'best', expected one of 'attention', "),
        ({"selector": "key deviation"}, "'key deviation', which needs k_deviation, expected observe="),
        ({"observe": 3}, "observe is 3, expected a function as a model's, or None"),
        ({"observed_layer": -1}, "observed_layer is -1, expected at least 0"),
    ],
)
def test_options_of_chunk_reuse_are_checked(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kv.chunks.Reuse(**{"rotate": ROTATE} | options)


def test_a_context_without_what_it_needs_is_refused():
    with pytest.raises(ValueError, match="context has 2 prompts, expected one"):
        kv.score(forward, PARAMS, kv.chunks.Prompts([[1], [2]], [[], []], REUSE), [[3]], config())
    with pytest.raises(ValueError, match=r"spans\[0\] has the span \(1, 3\), expected .* <= 2"):
        kv.score(forward, PARAMS, kv.chunks.Prompts([[1, 2]], [[(1, 3)]], REUSE), [[3]], config())
