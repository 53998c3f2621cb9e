"""generate, score and beam_search against the same model without a cache."""

import dataclasses
import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.decoding import loop, prefill
from tests.support.dense_reference import dense_attention
from tests.support.helpers import ROOMY, compiled_programs, first_program
from tests.support.tiny_model import PREFILL_LEN, VOCAB, config, dense_logits, forward, make_params

PARAMS = make_params()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [4, 6, 2, 6], [15, 0, 15, 0, 15]]
LENGTH = 48
# Most tests have one config, to share their programs: short texts fit four rows, long ones run out of blocks.
# What must run out sooner has few blocks.
FEW = dict(num_blocks=7)
PROGRAMS = prefill._feed_pieces, loop.begin, loop.decode


@functools.cache
def dense_fn():
    return jax.jit(dense_logits)


@functools.partial(jax.jit, static_argnames="windows")
def window_logits(params, tokens, windows):
    """As `dense_logits`; each layer sees a window of its own, None sees all."""

    def attention(cache, layer, q, k, v, step):
        return cache, dense_attention(q[0], k[0], v[0], window=windows[layer])[0][None]

    step = types.SimpleNamespace(positions=jnp.arange(len(tokens), dtype=jnp.int32)[None])
    return forward(params, tokens[None], None, step, attention)[0][0]


def next_logits(tokens, params=PARAMS, windows=None):
    """Logits after `tokens`; padding after them changes nothing in a causal model."""
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    logits = window_logits(params, padded, windows) if windows else dense_fn()(params, padded)
    return np.asarray(logits)[len(tokens) - 1]


def logprobs_of(tokens, windows=None):
    logits = next_logits(tokens, windows=windows)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def greedy(prompt, num_new, windows=None):
    tokens, scores = list(prompt), []
    for _ in range(num_new):
        logprobs = logprobs_of(tokens, windows)
        tokens.append(int(logprobs.argmax()))
        scores.append(float(logprobs.max()))
    return tokens[len(prompt) :], scores


def generate(prompts=PROMPTS, sizes=None, **options):
    options = {"max_new_tokens": 9, "prefill_len": PREFILL_LEN, **options}
    return kv.generate(forward, PARAMS, prompts, config(**(sizes or {})), **options)


def check_idle(result):
    assert kv.check_invariants(result.cache) == []
    assert not np.asarray(result.cache.is_active).any()
    assert all(int(pool.num_free) == pool.num_blocks for pool in result.cache.control.block_pools)


def test_prompts_that_wait_compile_nothing():
    """Five more prompts on four rows, of other lengths, find what the first prompt of all has compiled.

    A number of samples that numpy counted is the same number.
    """
    for fn in PROGRAMS:
        fn.clear_cache()  # so that it is not other tests that have compiled what later prompts need
    generate([[1, 2, 3]], max_new_tokens=2, num_samples=2)
    assert [fn._cache_size() for fn in PROGRAMS] == [1] * len(PROGRAMS)
    with compiled_programs() as programs:
        generate(
            [[9], [8, 7, 6, 5, 4, 3, 2], [1] * 12, [2, 3], [5]],
            max_new_tokens=5,
            num_samples=np.int32(2),
            sampling=kv.decoding.SamplingParams(seed=3),
        )
    assert not programs


@pytest.mark.quick_cases("12")
@pytest.mark.parametrize("prefill_len", [PREFILL_LEN, 128])
def test_greedy_equals_the_model_without_a_cache(prefill_len):
    """Five prompts on four rows: one waits."""
    result = generate(prefill_len=prefill_len)
    for i, prompt in enumerate(PROMPTS):
        tokens, scores = greedy(prompt, 9)
        got = result.generations[i]
        assert (got.prompt_id, got.sample_id, got.finish_reason) == (i, 0, "length")
        assert got.tokens == tokens
        np.testing.assert_allclose(got.logprobs, scores, atol=1e-4)
    check_idle(result)


@pytest.mark.slow
def test_samples_fork_from_one_prefill_and_depend_on_nothing_else():
    options = dict(num_samples=3, sampling=kv.decoding.SamplingParams(temperature=1.3, top_k=9, seed=5))
    alone = generate([PROMPTS[2]], **options)
    beside = generate([PROMPTS[2], PROMPTS[0]], **options)
    samples = [g.tokens for g in alone.generations]
    assert len({tuple(tokens) for tokens in samples}) == 3
    assert [g.tokens for g in beside.generations[:3]] == samples
    options["sampling"] = dataclasses.replace(options["sampling"], seed=6)
    assert [g.tokens for g in generate([PROMPTS[2]], **options).generations] != samples
    figures = kv.stats(alone.cache)
    assert (int(figures.num_allocations), int(figures.num_forks)) == (1, 2)
    # 11 tokens in blocks of 4: the tail is copied for all but the last writer.
    assert int(figures.num_copies) == 2
    for generation in alone.generations:
        prefix = list(PROMPTS[2])
        for token, logprob in zip(generation.tokens, generation.logprobs, strict=True):
            logprobs = logprobs_of(prefix)
            assert (logprobs > logprobs[token]).sum() < 9
            np.testing.assert_allclose(logprob, logprobs[token], atol=1e-4)
            prefix.append(token)
    check_idle(beside)


@pytest.mark.slow
def test_a_prompt_with_a_seed_of_its_own_may_stand_anywhere():
    def samples(prompts, seed):
        result = generate(
            prompts, num_samples=2, sampling=kv.decoding.SamplingParams(temperature=1.3, seed=seed)
        )
        return [generation.tokens for generation in result.generations]

    expected = samples([PROMPTS[2]], 9)
    beside = samples([PROMPTS[0], PROMPTS[2], PROMPTS[2]], np.array([7, 9, 8]))
    assert beside[2:4] == expected and beside[4:] != expected
    assert samples([PROMPTS[0], PROMPTS[2]], 9)[2:] != expected


@pytest.mark.slow
def test_the_timeline_tells_what_rows_held_and_when_they_ended():
    """Three prompts of two samples on four rows: the third waits until the first has ended."""
    check_ins = []
    options = dict(num_samples=2, sampling=kv.decoding.SamplingParams(temperature=1.0), max_new_tokens=9)
    options["watch"] = kv.decoding.Watch(on_check_in=check_ins.append, check_in_every=4)
    result = generate([PROMPTS[2], PROMPTS[1], PROMPTS[4]], **options)
    assert [dataclasses.replace(check_in, block_tables=[]) for check_in in check_ins] == result.timeline
    assert result.num_prompt_tokens == 11 + 1 + 5
    first, last = check_ins[0], check_ins[-1]
    # After the first prefill: 3 + 1 blocks, each held by two rows.
    assert (first.num_steps, first.num_blocks_used, first.num_refs, first.num_active_seqs) == (0, 4, 8, 4)
    assert first.running == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)} and first.ended == []
    np.testing.assert_array_equal(first.block_tables[0][0, :3], first.block_tables[0][1, :3])
    assert (first.block_tables[0] < ROOMY["num_blocks"]).sum() == 8
    assert set(last.running.values()) == {(2, 0), (2, 1)}
    ended = [generation for check_in in check_ins for generation in check_in.ended]
    assert len(ended) == 6 and sorted(ended, key=lambda g: (g.prompt_id, g.sample_id)) == result.generations
    for check_in in check_ins:
        assert {(g.prompt_id, g.sample_id) for g in check_in.ended} <= set(check_in.running.values())
    assert [check_in.num_steps for check_in in check_ins] == [0, 4, 8, 8, 12, 16]
    seconds = [check_in.seconds for check_in in check_ins]
    assert seconds == sorted(seconds)
    assert 0 < result.prefill_seconds + result.decode_seconds and min(seconds) > 0
    assert result.prefill_seconds > 0 and result.decode_seconds > 0


def test_stop_tokens_end_a_row_and_free_it_for_the_next():
    plain = {i: greedy(prompt, 9)[0] for i, prompt in enumerate(PROMPTS)}
    # A token that some of the rows draw and some do not.
    stops = [next(t for t in range(VOCAB) if 0 < sum(t in tokens for tokens in plain.values()) < len(plain))]
    result = generate(stop_tokens=stops)
    for i, generation in enumerate(result.generations):
        hits = [k for k, token in enumerate(plain[i]) if token in stops]
        expected = plain[i][: hits[0] + 1] if hits else plain[i]
        assert generation.tokens == expected
        assert generation.finish_reason == ("stop" if hits else "length")
    assert {g.finish_reason for g in result.generations} == {"stop", "length"}
    check_idle(result)


def detokenize(tokens):
    return "".join(f"<{token}>" for token in tokens)


def test_stop_strings_cut_at_the_token_that_completes_them():
    plain, _ = greedy(PROMPTS[0], 9)
    stop = f"{plain[4]}><{plain[5]}"
    streamed = []
    result = generate(
        stop_strings=kv.decoding.StopStrings([stop], detokenize),
        watch=kv.decoding.Watch(
            on_tokens=lambda prompt_id, sample_id, tokens: streamed.append((prompt_id, sample_id, tokens)),
            check_in_every=4,
        ),
    )
    assert stop in detokenize(plain[:6]) and stop not in detokenize(plain[:5])
    assert result.generations[0].tokens == plain[:6]
    assert result.generations[0].finish_reason == "stop"
    for generation in result.generations:
        pieces = [tokens for prompt_id, _, tokens in streamed if prompt_id == generation.prompt_id]
        assert sum(pieces, []) == generation.tokens
    assert len(streamed) > len(PROMPTS)
    check_idle(result)


def test_max_seq_len_ends_a_row():
    result = generate([PROMPTS[2]], max_new_tokens=60)
    assert result.generations[0].finish_reason == "length"
    assert result.generations[0].tokens == greedy(PROMPTS[2], LENGTH - len(PROMPTS[2]))[0]


@pytest.mark.quick_cases("ngram-tight")
@pytest.mark.parametrize("num_new", [12, 26], ids=["roomy", "tight"])
@pytest.mark.parametrize("kind", ["ngram", "weak draft", "itself"])
def test_speculative_greedy_decoding_gives_the_same_tokens(kind, num_new):
    draft = None
    if kind != "ngram":
        params = PARAMS if kind == "itself" else make_params(seed=1)
        draft = kv.Draft(forward, params, config())
    # Tight: four samples of one prompt would need 1 + 4 * 7 of 24 blocks, and three take nearly all.
    prompts = [PROMPTS[4], PROMPTS[0], PROMPTS[3], PROMPTS[1]] if num_new == 12 else [PROMPTS[4]]
    options = dict(max_new_tokens=num_new, num_samples=4 // len(prompts))
    result = generate(prompts, drafts=kv.decoding.Drafts(3, draft), **options)
    for generation in result.generations:
        expected, scores = greedy(prompts[generation.prompt_id], num_new)
        assert (generation.tokens, generation.finish_reason) == (expected, "length")
        np.testing.assert_allclose(generation.logprobs, scores, atol=1e-4)
    assert 0 <= result.num_accepted <= result.num_drafted
    if kind == "itself":
        assert result.num_accepted == result.num_drafted
    if num_new == 12:
        assert result.num_drafted > 0
    if kind == "itself" and num_new == 12:
        assert result.num_steps == 3  # 11 tokens after the first, four a step
    check_idle(result)


@pytest.mark.quick_cases("tight")
@pytest.mark.parametrize("num_new", [12, 26], ids=["roomy", "tight"])
def test_drafts_from_the_text_change_no_drawn_token(num_new):
    """Nor does a short pool, that leaves no room for drafts."""
    options = dict(sampling=kv.decoding.SamplingParams(temperature=0.5, seed=3), max_new_tokens=num_new)
    if num_new == 26:
        options |= dict(prompts=PROMPTS[:1], num_samples=4)
    plain, drafted = generate(**options), generate(drafts=kv.decoding.Drafts(3), **options)
    for generation, expected in zip(drafted.generations, plain.generations, strict=True):
        assert generation.tokens == expected.tokens and len(expected.tokens) == num_new
    assert drafted.num_drafted > drafted.num_accepted > 0


@pytest.mark.slow
def test_one_row_without_room_does_not_keep_others_from_drafting():
    """One block is left: the first of three rows drafts into it, and the last row into its own last block."""
    lengths, running = np.array([23, 23, 23, 18], np.int32), np.ones(4, bool)
    cache, _ = kv.allocate(kv.init(config()), np.arange(4), lengths)
    cache, _ = kv.extend(cache, lengths, max_new=23)
    assert int(kv.num_available_blocks(cache)) == 1
    have_room = jax.jit(loop._have_room)(cache, running, np.ones(4, np.int32))
    assert have_room.tolist() == [True, False, False, True]


@pytest.mark.slow
def test_drafts_cost_no_row_a_token():
    """The pool ends before the row: 28 tokens are stored, and one more is drawn."""
    result = generate(PROMPTS[4:], FEW, drafts=kv.decoding.Drafts(3), max_new_tokens=32)
    (generation,) = result.generations
    assert generation.finish_reason == "out_of_blocks" and result.num_drafted > 0
    assert generation.tokens == greedy(PROMPTS[4], 28 + 1 - len(PROMPTS[4]))[0]


@pytest.mark.slow
def test_speculative_sampling_accepts_everything_from_the_model_itself():
    draft = kv.Draft(forward, PARAMS, config())
    result = generate(
        drafts=kv.decoding.Drafts(3, draft),
        sampling=kv.decoding.SamplingParams(temperature=0.9, top_p=0.95),
        max_new_tokens=12,
    )
    assert result.num_accepted >= 0.98 * result.num_drafted > 0
    assert all(len(g.tokens) == 12 for g in result.generations)
    weak = kv.Draft(forward, make_params(seed=1), config())
    result = generate(
        drafts=kv.decoding.Drafts(3, weak),
        sampling=kv.decoding.SamplingParams(temperature=0.9),
        max_new_tokens=12,
    )
    assert 0 < result.num_accepted < 0.9 * result.num_drafted


@pytest.mark.slow
def test_each_sample_of_a_prompt_has_a_draft_that_knows_it():
    draft = kv.Draft(forward, PARAMS, config())
    prompts = [PROMPTS[0], PROMPTS[3]]
    result = generate(prompts, num_samples=2, drafts=kv.decoding.Drafts(3, draft), max_new_tokens=12)
    assert [g.tokens for g in result.generations] == [
        greedy(prompt, 12)[0] for prompt in prompts for _ in "ab"
    ]
    assert result.num_drafted == result.num_accepted == 4 * 8  # 11 tokens after the first: 3, 3 and 2 drafts


@pytest.mark.slow
def test_speculative_decoding_rolls_windows_back():
    window = kv.SlidingWindow(2, 4, window=6, max_rollback=3, block_size=2)
    layers = [window, kv.FullAttention(2, 4)]
    cfg = kv.CacheConfig(layers, num_blocks=64, block_size=4, max_seqs=4, max_seq_len=48, max_query_len=16)
    drafted = kv.generate(forward, PARAMS, PROMPTS[:4], cfg, max_new_tokens=12, drafts=kv.decoding.Drafts(3))
    expected = [greedy(prompt, 12, windows=(6, None))[0] for prompt in PROMPTS[:4]]
    assert [g.tokens for g in drafted.generations] == expected
    assert expected != [greedy(prompt, 12)[0] for prompt in PROMPTS[:4]]
    assert 0 < drafted.num_accepted < drafted.num_drafted
    short = kv.CacheConfig([kv.SlidingWindow(2, 4, window=6)] * 2, num_blocks=64, max_seqs=4, max_seq_len=48)
    with pytest.raises(ValueError, match=r"max_rollback = 0, expected max_rollback=3 there"):
        kv.generate(forward, PARAMS, PROMPTS, short, max_new_tokens=2, drafts=kv.decoding.Drafts(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ngram", "draft", "score", "beams"])
def test_no_program_copies_a_pool(kind, monkeypatch):
    """Neither the model's nor a draft's, whose pools are as large."""
    names = ["decoding.prefill._feed_pieces", "decoding.loop.begin", "decoding.loop.decode"]
    if kind in ("score", "beams"):
        names = names[:1] if kind == "score" else ["decoding.beam_search._search"]
    texts = [first_program(monkeypatch, name) for name in names]
    if kind == "score":
        cache = kv.score(forward, PARAMS, PROMPTS[2], [[1, 2, 3], [7, 7]], config(**FEW), prefill_len=3).cache
    elif kind == "beams":
        options = dict(max_new_tokens=10, num_beams=2, prefill_len=PREFILL_LEN)
        cache = kv.beam_search(forward, PARAMS, PROMPTS[:2], config(), **options).cache
    else:
        draft = kv.Draft(forward, PARAMS, config()) if kind == "draft" else None
        cache = generate(drafts=None if kind == "plain" else kv.decoding.Drafts(3, draft)).cache
    shape = ",".join(map(str, cache.pools[0].k.shape))
    for [text] in texts:
        assert f"[{shape}]" in text and not re.findall(rf"\[{shape}\]\S* copy\(", text)


@pytest.mark.slow
def test_a_row_that_ends_with_its_first_token_makes_room_before_any_step():
    """At once: another row could run out of the blocks that it holds, and a prompt waits for its row."""
    stop = greedy(PROMPTS[3], 1)[0][0]
    pairs = ([token, other] for token in range(VOCAB) for other in range(VOCAB))
    going_on = (pair for pair in pairs if stop not in greedy(pair, 9)[0])
    others = list(itertools.islice(going_on, 3))
    full = [1] * (LENGTH - 1)  # as long as a row may be with one token more
    check_ins = []
    prompts = [*others[:2], PROMPTS[3], full, others[2]]
    result = generate(prompts, stop_tokens=[stop], watch=kv.decoding.Watch(on_check_in=check_ins.append))
    _, first, second = check_ins[:3]  # after the prefill, then as rows end, then with the fifth prompt
    assert (first.num_steps, [(g.prompt_id, g.finish_reason) for g in first.ended]) == (
        0,
        [(2, "stop"), (3, "length")],
    )
    assert {prompt_id for prompt_id, _ in second.running.values()} == {0, 1, 4}
    assert [len(g.tokens) for g in result.generations] == [9, 9, 1, 1, 9]
    check_idle(result)


def check_scores(continuations, got, context, windows=None):
    for tokens, scores in zip(continuations, got, strict=True):
        prefix, expected = list(context), []
        for token in tokens:
            expected.append(logprobs_of(prefix, windows)[token])
            prefix.append(token)
        assert scores.shape == (len(tokens),)
        np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_score_equals_the_model_without_a_cache():
    context = PROMPTS[2]

    def score(context, continuations):
        return kv.score(forward, PARAMS, context, continuations, config(**FEW), prefill_len=3)

    short = [[1, 2, 3], [7], [], [15] * 9, [2, 2], [3, 1, 4, 1, 5]]
    # No three of these fit at a time, and the first two not even as a fork, which copies the block that the
    # context ends in: all seven blocks are for the one continuation.
    long = [[1, 2, 3] * 6, [7] * 17, [2, 2, 5, 1] * 3, [15] * 10]
    for continuations in (short, long):
        check_scores(continuations, score(context, continuations).logprobs, context)
    best, _ = greedy(context, 4)
    nearly = [best[0], (best[1] + 1) % VOCAB, 2]
    found = score(context, [best, nearly, nearly[1:], []]).is_greedy
    second = int(logprobs_of([*context, *nearly[:2]]).argmax()) == 2
    assert [flags.tolist() for flags in found[:2]] == [[True] * 4, [True, False, second]]
    assert found[2][0] == (nearly[1] == best[0]) and len(found[3]) == 0
    (alone,) = score([5], [[6, 7]]).logprobs
    check_scores([[6, 7]], [alone], [5])
    result = score([5], [[6, VOCAB], [VOCAB]])
    beyond, first = result.logprobs
    assert beyond[0] == alone[0] and np.isnan(beyond[1]) and np.isnan(first).tolist() == [True]
    assert not result.is_greedy[0][1] and not result.is_greedy[1][0]
    with pytest.raises(ValueError, match="context has 0 tokens, expected at least 1"):
        kv.score(forward, PARAMS, [], [[1]], config())
    with pytest.raises(ValueError, match="prefill_len is 0, expected at least 1"):
        kv.score(forward, PARAMS, [5], [[1]], config(), prefill_len=0)


@pytest.mark.slow
def test_a_continuation_that_fits_alone_is_scored():
    """Also where no fork of it fits beside the context, of which its window holds the end."""
    window = kv.SlidingWindow(2, 4, window=6, block_size=2, num_blocks=6)
    limits = dict(num_blocks=8, block_size=4, max_seqs=3, max_seq_len=48, max_query_len=3)
    sizes = kv.CacheConfig([window, kv.FullAttention(2, 4)], **limits, enable_prefix_caching=True)
    assert sizes.groups[0].max_held_blocks == 6

    def score(continuations, cache=None):
        return kv.score(forward, PARAMS, PROMPTS[2], continuations, sizes, cache=cache)

    # The context holds four blocks of the window: forks fit that need two more together, no long one does.
    # The longest one needs all of the eight other blocks.
    continuations, cache = [[3] * 22, [1, 2] * 2, [5, 7, 9] * 5, [8, 6], [4, 2]], None
    found = []
    for order in (1, -1):
        result = score(continuations[::order], cache)
        found.append(result.logprobs[::order])
        check_scores(continuations, found[-1], PROMPTS[2], windows=(6, None))
        cache = result.cache
        assert kv.check_invariants(cache) == [] and not np.asarray(cache.is_active).any()
        assert int(kv.stats(cache).num_blocks_used) == 0
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    with pytest.raises(kv.StatusError, match="OUT_OF_BLOCKS"):
        score([[3] * 23])


@pytest.mark.slow
def test_the_model_is_traced_twice_whatever_the_prompts():
    """By the prefill and by the decode step; a draft model likewise."""
    traces = []

    def named(name):
        def model(*args):
            traces.append(name)
            return forward(*args)

        return model

    target, lengths = named("target"), [1, 5, 12, 23, 40]
    draft = kv.Draft(named("draft"), PARAMS, config(block_size=8))
    prompts = [[(3 * i + n) % VOCAB for i in range(n)] for n in lengths]
    options = dict(max_new_tokens=4, prefill_len=PREFILL_LEN)
    for asked in (prompts, prompts[3:4], prompts[1:3], [*prompts, *prompts[:2]]):
        drafted = kv.generate(target, PARAMS, asked, config(), drafts=kv.decoding.Drafts(2, draft), **options)
        assert [g.tokens for g in drafted.generations] == [greedy(prompt, 4)[0] for prompt in asked]
    assert sorted(traces) == ["draft"] * 2 + ["target"] * 2


@pytest.mark.slow
def test_a_prompt_waits_until_all_that_it_may_store_fits():
    """Of 7 blocks a row of 15 tokens needs 4, and the last prompt more than there are: it gets all, alone."""
    prompts = [[3, 1, 4, 1], [6, 2, 8, 5], PROMPTS[2] + PROMPTS[2][:9]]
    result = generate(prompts, FEW, max_new_tokens=12)
    assert [len(g.tokens) for g in result.generations] == [12, 12, 9]
    assert [g.finish_reason for g in result.generations] == ["length", "length", "out_of_blocks"]
    for prompt, generation in zip(prompts, result.generations, strict=True):
        assert generation.tokens == greedy(prompt, len(generation.tokens))[0]
    assert max(len(check_in.running) for check_in in result.timeline) == 1
    # Two samples share a full block, 1 + 2 * 3, and copy one that is not full, twice 2 * 2.
    shared = generate(
        prompts[:2],
        FEW,
        max_new_tokens=12,
        num_samples=2,
        sampling=kv.decoding.SamplingParams(temperature=0.7),
    )
    assert int(kv.stats(shared.cache).peak_used) == 7
    options = dict(max_new_tokens=6, num_samples=2, sampling=kv.decoding.SamplingParams(temperature=0.7))
    copied = generate([prompt[:3] for prompt in prompts[:2]], FEW, **options)
    assert {g.finish_reason for g in [*shared.generations, *copied.generations]} == {"length"}
    # Prompts that need 3 and 4 get theirs at once.
    both = generate([prompts[0], prompts[1] * 2], FEW, max_new_tokens=9)
    assert len(both.timeline[0].running) == 2 and [len(g.tokens) for g in both.generations] == [9, 9]
    check_idle(both)
