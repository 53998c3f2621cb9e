"""Turns whose reasoning the history drops, against a model without a cache that is given what is kept."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.chunks.answers import answers_namespace
from tests.engine.exact_model import note
from tests.support import tiny_model
from tests.support.rotary_model import PARAMS, ROTATE, dense
from tests.support.rotary_model import forward as unmarked
from tests.support.tiny_model import DIM, HEADS, VOCAB

MARK, EVERY, BLOCK = VOCAB - 1, 7, 4
SHARE, MOST, LEAST = 0.25, 5, 2
LIMITS = kv.engine.Limits(max_requests=12, max_tokens=12 * 49)
OTHER = tiny_model.make_params(seed=9)


def marked(logits, positions, library):
    """Ends reasoning after every seventh position, and nowhere else."""
    is_mark = library.arange(VOCAB) == MARK
    ends = (positions % EVERY == EVERY - 1)[..., None]
    return library.where(ends == is_mark.reshape(*[1] * positions.ndim, VOCAB), logits, -1e9)


def forward(params, tokens, cache, step):
    logits, cache = unmarked(params, tokens, cache, step)
    return marked(logits, step.positions, jnp), cache


def make_engine(share=SHARE, num_blocks=60, after=(MARK,), **options: Any):
    """An engine that keeps three answers; engines of the same options share a program."""
    reuse = kv.chunks.Reuse(rotate=ROTATE, share=share)
    answers = kv.chunks.AnswerParts(reuse=reuse, max_parts=6, after=after, least_len=LEAST)
    store = kv.chunks.Store(3, MOST)
    config = tiny_model.config(num_blocks=num_blocks, enable_prefix_caching=True, extras=[store])
    options = dict[str, Any](token_budget=12, steps_per_dispatch=8, limits=LIMITS) | options
    return kv.Engine(forward, PARAMS, config, inputs=kv.engine.Inputs(parts=answers), **options)


def ask(prompt, max_new, spans, request_id=None):
    inputs = {} if spans is None else {"parts": spans}
    return kv.GenerationRequest(prompt, max_new, id=request_id, inputs=inputs)


def finish(engine, most_drains=60):
    """What requests say to their end, within so many dispatches."""
    said = {}
    for _ in range(most_drains):
        if engine.num_unfinished:
            engine.drain()
            note(said, engine.take_events())
    assert not engine.num_unfinished, "it takes for ever"
    return said


def answer(engine, prompt, max_new, spans):
    assert engine.push([ask(prompt, max_new, spans, "it")]) == 1
    said = finish(engine)
    tokens, logprobs, why = said["it", 0]
    assert why == "length" and kv.check_invariants(engine.state.cache) == []
    return tokens, logprobs


def say(prompt, max_new, given=None, is_given=None, params=PARAMS):
    """What the dense model says; of each layer keys before rotation, and values."""
    text, scores = list(prompt), []
    given = given or [tuple(np.zeros((len(prompt), HEADS, DIM)) for _ in "kv") for _ in params["layers"]]
    is_given = np.zeros(len(prompt), bool) if is_given is None else is_given
    found = []
    for _ in range(max_new):
        more = len(text) - len(prompt)
        wide = [tuple(np.pad(x, [(0, more), (0, 0), (0, 0)]) for x in layer) for layer in given]
        logits, found = dense(text, wide, np.pad(is_given, (0, more)), params)
        last = marked(logits, np.arange(len(text)), np)[-1]
        scores.append(last.max() - last.max() - np.log(np.exp(last - last.max()).sum()))
        text.append(int(last.argmax()))
    return text[len(prompt) :], scores, [layer[:2] for layer in found]


@functools.cache
def exactly(prompt, max_new, is_other=False):
    return say(prompt, max_new, params=OTHER if is_other else PARAMS)[0]


def answer_of(tokens):
    """The tokens after the last mark; none without one."""
    return tokens[len(tokens) - tokens[::-1].index(MARK) :] if MARK in tokens else []


class Talk:
    """A conversation as the dense model has it: what each place of the last text holds, and each answer."""

    def __init__(self, share=SHARE, keeps=True):
        self.share, self.keeps = share, keeps
        self.history, self.spans, self.answers = [], [], []
        self.text, self.held = [], [tuple(np.zeros((0, HEADS, DIM)) for _ in "kv") for _ in PARAMS["layers"]]
        self.num_reused = 0

    def prompt(self, new):
        return self.history + list(new)

    def turn(self, prompt, max_new):
        """Says what the turn says, and what has to be computed of its prompt."""
        same = [a == b for a, b in zip(prompt, self.text, strict=False)]
        num_same = same.index(False) if False in same else len(same)
        hit = min(num_same, len(prompt) - 1) // BLOCK * BLOCK
        given = [tuple(np.zeros((len(prompt), HEADS, DIM)) for _ in "kv") for _ in PARAMS["layers"]]
        is_given = np.zeros(len(prompt), bool)
        is_given[:hit] = True
        for layer, held in zip(given, self.held, strict=True):
            for x, old in zip(layer, held, strict=True):
                x[:hit] = old[:hit]
        for start, kept in self.answers if self.keeps else ():
            length = len(kept[0][0])
            if start < hit or length < LEAST:
                continue
            for layer, of_answer in zip(given, kept, strict=True):
                for x, old in zip(layer, of_answer, strict=True):
                    x[start : start + length] = old
            first = start + math.ceil(round(self.share * length, 9))
            is_given[first : start + length] = True
        is_given[-1] = False
        self.num_reused = int(is_given[hit:].sum())
        tokens, scores, self.held = say(prompt, max_new, given, is_given)
        self.text = prompt + tokens[:-1]
        found = answer_of(tokens)
        first = len(self.text) + 1 - len(found)
        most = slice(first, min(first + MOST, len(self.text)))
        if found:
            self.spans.append((len(prompt), len(prompt) + len(found)))
            self.answers.append((len(prompt), [tuple(x[most] for x in layer) for layer in self.held]))
        self.history = prompt + (found or tokens)
        return tokens, scores


def text(seed, length):
    return np.random.default_rng(seed).integers(VOCAB - 1, size=length).tolist()


TURNS = [(text(1, 5), 9), (text(2, 4), 12), (text(3, 1), 11), (text(4, 6), 4)]


def generated(state, prompt, max_new, spans):
    """A turn by `generate`, on the cache of the turn before."""
    answers = kv.chunks.Answers(
        [prompt], [spans], kv.chunks.Reuse(rotate=ROTATE, share=SHARE), after=[MARK], least_len=LEAST
    )
    store = kv.chunks.Store(8, MOST)
    config = tiny_model.config(num_blocks=60, enable_prefix_caching=True, extras=[store])
    result = kv.generate(
        forward, PARAMS, answers, config, max_new_tokens=max_new, cache=state["cache"], prefill_len=12
    )
    assert kv.check_invariants(result.cache) == []
    state["cache"], state["reused"] = result.cache, result.num_reused_tokens
    return result.generations[0].tokens, result.generations[0].logprobs


def check_cached(cache, prompt, tokens):
    """Such requests find the prompt, and what was said if the history keeps it all; others find nothing."""
    length = len(prompt) if MARK in tokens[:-1] else len(prompt) + len(tokens) - 1
    said, own = np.array([prompt + tokens]), np.zeros(4, np.uint32)
    found = [int(kv.lookup(cache, said, [said.size], name)[0]) for name in (own, answers_namespace(own))]
    assert found == [0, length // BLOCK * BLOCK]


@pytest.mark.quick_cases("engine")
@pytest.mark.parametrize("by", ["engine", "generate"])
def test_answers_stay_as_reasoning_goes(by):
    """Each turn is what the dense model says, given what answers hold, and the prefix the turn before."""
    engine, state, talk, most = make_engine(), {"cache": None, "reused": 0}, Talk(), 0
    for new, max_new in TURNS:
        prompt, spans = talk.prompt(new), list(talk.spans)
        before = engine.figures().counts[kv.engine.Counter.REUSED_TOKENS]
        if by == "engine":
            tokens, logprobs = answer(engine, prompt, max_new, spans)
            num_reused = engine.figures().counts[kv.engine.Counter.REUSED_TOKENS] - before
        else:
            tokens, logprobs = generated(state, prompt, max_new, spans)
            num_reused = state["reused"]
        expected, scores = talk.turn(prompt, max_new)
        assert tokens == expected
        np.testing.assert_allclose(logprobs, scores, atol=2e-4)
        assert num_reused == talk.num_reused
        most = max(most, num_reused)
        check_cached(engine.state.cache if by == "engine" else state["cache"], prompt, tokens)
    assert most >= 3


def chunk_lens(engine):
    return sorted(np.asarray(engine.state.cache.control.extras["chunks"].length).tolist())[::-1]


def test_what_hangs_on_answers_is_found_by_such_requests_alone():
    """A request that names no parts is exact, whatever others hold; so is a turn whose answer went."""
    engine, talk = make_engine(), Talk()
    for new, max_new in TURNS[:2]:
        prompt, spans = talk.prompt(new), list(talk.spans)
        assert answer(engine, prompt, max_new, spans)[0] == talk.turn(prompt, max_new)[0]
    assert chunk_lens(engine) == [MOST, MOST - 1, 0]
    prompt, spans = talk.prompt(TURNS[2][0]), list(talk.spans)
    cache, length = engine.state.cache, [len(prompt)]
    own = engine.namespace_of()
    assert kv.lookup(cache, np.array([prompt]), length, own).tolist() == [0]
    assert kv.lookup(cache, np.array([prompt]), length, answers_namespace(own)).tolist()[0] >= BLOCK
    exact = say(prompt, 9)[1]
    np.testing.assert_allclose(answer(engine, prompt, 9, None)[1], exact, atol=2e-4)
    # Answers of other conversations take the places of older ones, though one of these was used.
    assert all(answer_of(answer(engine, text(seed, 6), 8, [])[0]) for seed in (9, 10, 11))
    for start, end in spans:
        length = min(end - 1 - start, MOST)
        name = np.zeros((1, MOST), np.int32)
        name[0, :length] = prompt[start : start + length]
        assert kv.chunks.find(engine.state.cache, name, [length], answers_namespace(own)).tolist() == [3]
    talk.keeps = False
    scores = talk.turn(prompt, 9)[1]
    np.testing.assert_allclose(answer(engine, prompt, 9, spans)[1], scores, atol=2e-4)
    assert np.abs(np.array(scores) - exact).max() > 2e-4, "what was published after composed answers is used"


@pytest.mark.quick_cases("weights", "no mark", "cancelled")
@pytest.mark.parametrize("why", ["weights", "no mark", "half a mark", "cancelled"])
def test_no_answer_is_kept_that_is_none(why):
    """Computed in part under other weights, without reasoning before it, or not said to its end."""
    engine = make_engine(after=(MARK, MARK) if why == "half a mark" else (MARK,))
    prompt, max_new = (text(1, EVERY + 1), EVERY - 1) if why == "no mark" else (text(1, 5), 14)
    assert engine.push([ask(prompt, max_new, [], "it")]) == 1
    engine.drain(max_steps=2)
    if why == "weights":
        engine.set_params(OTHER, kv.namespace(weights="other"))
    engine.drain(max_steps=7)
    if why == "cancelled":
        engine.drain(max_steps=1)  # the report of the dispatch before
        assert engine.cancel("it")
    said = finish(engine)
    assert (MARK in said["it", 0][0][: -LEAST - (why != "cancelled")]) == (why != "no mark")
    assert chunk_lens(engine) == [0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_turns_are_exact_where_all_is_computed_again(seed):
    """Conversations side by side in a small pool: preempted, cancelled, with samples, through resets."""
    rng = np.random.default_rng(seed)
    engine, names = make_engine(share=1.0, num_blocks=18), iter(range(99))
    talks, asked, said, wanted = {}, {}, {}, 24
    for _ in range(500):
        while wanted and len(asked) < 6:
            talk = int(rng.choice(list(talks))) if talks and rng.random() < 0.7 else next(names)
            history, spans = talks.pop(talk, ([], []))
            prompt = history + text(int(rng.integers(99)), int(rng.integers(1, 7)))
            max_new = int(rng.integers(1, 15))
            if len(prompt) + max_new > 48:
                continue
            request = ask(prompt, max_new, spans if rng.random() < 0.8 or spans else None, (talk, wanted))
            request = request if rng.random() < 0.8 else dataclasses.replace(request, num_samples=2)
            assert engine.push([request]) == 1
            asked[request.id], wanted = (request, spans), wanted - 1
        if not asked:
            break
        engine.drain(max_steps=int(rng.integers(1, 8)))
        assert kv.check_invariants(engine.state.cache) == []
        if rng.random() < 0.04:
            engine.reset()
        if rng.random() < 0.06:
            engine.cancel(list(asked)[0])
        note(said, engine.take_events())
        for name, (request, spans) in list(asked.items()):
            ends = [said.get((name, i), ([], [], None)) for i in range(request.num_samples)]
            if not all(why for *_, why in ends):
                continue
            del asked[name]
            prompt = tuple(np.asarray(request.prompt).tolist())
            for tokens, _, why in ends:
                assert why in ("length", "cancelled")
                assert tokens == exactly(prompt, request.max_new_tokens)[: len(tokens)]
            if (found := answer_of(ends[0][0])) and ends[0][2] == "length":
                span = len(prompt), len(prompt) + len(found)
                talks[name[0]] = [*prompt, *found], [*spans, span][-6:]
    assert not asked and finish(engine) == {}, "all were told to their ends"
    cache = engine.state.cache
    left = np.flatnonzero(np.asarray(cache.control.extras["chunks"].length))
    emptied, _ = kv.chunks.free(cache, left) if len(left) else (cache, None)
    assert int(kv.stats(emptied).num_blocks_used) == 0
    if not seed:
        counts = engine.figures().counts
        assert counts[kv.engine.Counter.PREEMPTIONS] and counts[kv.engine.Counter.CACHED_TOKENS]


def test_of_named_answers_is_looked_up_what_is_kept_of_them():
    """Not the last token, which no row held, nothing past the longest chunk, and no short ones."""
    store = kv.chunks.Store(8, MOST)
    answers = kv.chunks.AnswerParts(reuse=kv.chunks.Reuse(rotate=ROTATE), after=[MARK], least_len=LEAST)
    named = [(14, 14 + MOST + 3), (0, 1), (2, 2 + LEAST), (6, 7 + LEAST)]
    found = answers.spans(np.arange(30), named, 40, tiny_model.config(num_blocks=60, extras=[store]))
    assert found == [(6, 6 + LEAST), (14, 14 + MOST)]


def refuse(match, kind: type[Exception] = ValueError):
    return pytest.raises(kind, match=match)


def test_what_keeps_no_answers_is_refused_by_name():
    reuse = kv.chunks.Reuse(rotate=ROTATE)
    with refuse("after is empty, expected the tokens between reasoning and answer"):
        kv.chunks.AnswerParts(reuse=reuse, after=[])
    with refuse("least_len is 0, expected 1 <= least_len"):
        kv.chunks.Answers([[1]], [[]], reuse, after=[3], least_len=0)
    window = kv.CacheConfig([kv.SlidingWindow(1, 4, window=8)], extras=[kv.chunks.Store(3, 12)])
    turn = kv.chunks.Answers([[1]], [[]], reuse, after=[3])
    with refuse(r"generate got answers and layers\[0\] is SlidingWindow.*, expected layers that keep all"):
        kv.generate(forward, PARAMS, turn, window, max_new_tokens=2)
    full = tiny_model.config(extras=[kv.chunks.Store(3, 12)])
    with refuse("score got kv.chunks.Answers, expected kv.chunks.Prompts, or `generate`"):
        kv.score(forward, PARAMS, turn, [[1]], full)
    with refuse(r"parts has the span \(3, 9\), expected 0 <= start < end <= 5"):
        make_engine().push([ask([1] * 5, 3, [(3, 9)])])
