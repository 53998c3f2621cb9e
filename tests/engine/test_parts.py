"""Requests with passages, against a model without a cache that is given what passages computed alone hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvcache_jax as kv
from tests.engine.exact_engine import RandomPace
from tests.engine.exact_model import note
from tests.engine.passages import (
    AGAIN,
    EDGES,
    PASSAGES,
    SHARE,
    WEIGHTS,
    ask,
    check_state,
    collect,
    config,
    counted,
    disturbing,
    expect,
    fitting,
    make_engine,
    text,
)
from tests.support.rotary_model import PARAMS, ROTATE, first_of, forward
from tests.support.tiny_model import VOCAB

a, b, c, d, e = PASSAGES


def test_requests_are_made_of_passages_wherever_those_stand():
    """Six on four rows: tokens that come from passages are not computed but for the share, and each once."""
    engine = make_engine()
    requests = [ask(parts, 5, i) for i, parts in enumerate(EDGES)]
    said = collect(engine, requests)
    for request in requests:
        expect(said, request)
    kept = np.asarray(engine.state.cache.control.extras["chunks"].length)
    assert (kept > 0).sum() == 3
    before = counted(engine, "PREFILL_TOKENS"), counted(engine, "REUSED_TOKENS")
    assert before[1] == (24 - 7) + (19 - 3) + (18 - 7) + (5 - 1) + 0  # see `test_generate_chunks`
    last = [ask(EDGES[5], 5, "again")]
    expect(collect(engine, last), last[0])
    assert counted(engine, "PREFILL_TOKENS") - before[0] <= 9 + 1  # the text before, in part cached, and `e`


def test_what_was_computed_as_other_text_is_no_passage():
    """The same tokens with and without passages, in turns: blocks of one are not the other's."""
    engine, text_of = make_engine(), [[7, 2, 9, 1, 4], a, [5, 1]]
    for i in range(4):
        request = ask(text_of if i % 2 else [list(part) for part in text_of], 5, i)
        expect(collect(engine, [request]), request)
        assert bool(request.parts) == bool(i % 2)
    assert counted(engine, "CACHED_TOKENS") >= 4 + 16 + 4  # the text before passages, and the other text
    # The row that computed the passage alone published nothing: no prompt began with it.
    assert kv.lookup(engine.state.cache, np.array([a]), [len(a)]).tolist() == [0]


def test_kept_passages_give_way_to_rows():
    """They hold 9 of 20 blocks; a prompt needs 12, or a row comes to need them."""
    engine = make_engine()
    for prompt_len, max_new in (46, 2), (30, 18):
        kept = [ask([[1], text(seed, 12), [2]], 1, seed) for seed in (20, 21, 22)]
        collect(engine, kept)
        assert (np.asarray(engine.state.cache.control.extras["chunks"].length) == 12).all()
        request = ask([list(text(prompt_len, prompt_len))], max_new, "long")
        expect(collect(engine, [request], most_drains=60), request)


def random_requests(rng, num):
    for i in range(num):
        parts = [rng.integers(VOCAB, size=rng.integers(0, 5)).tolist()]
        for _ in range(int(rng.choice([0, 1, 2, 3]))):
            parts += [PASSAGES[rng.integers(5)], rng.integers(VOCAB, size=rng.integers(0, 3)).tolist()]
        length = sum(map(len, parts))
        while length > 28:
            length -= len(parts.pop())
        if not length:
            parts.append([int(rng.integers(VOCAB))])
        sampling = kv.decoding.SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])), seed=int(rng.integers(99))
        )
        yield ask(
            parts, int(rng.integers(1, 20)), i, sampling=sampling, num_samples=int(rng.choice([1, 1, 3]))
        )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_random_mixes_say_what_each_says_alone(seed):
    """Preempted, cancelled, with samples, and through resets and releases; with passages and without."""
    rng = np.random.default_rng(seed)
    engine = make_engine()
    engine._pace = RandomPace(8, rng, engine._device.shorten)
    requests = list(random_requests(rng, 30))

    said = collect(engine, requests, disturbing(engine, rng))
    for request in requests:
        ids = [i for i in range(request.num_samples) if (request.id, i) in said]
        expect(said, request, fitting(request, engine.config), sample_ids=ids)
    assert counted(engine, "REUSED_TOKENS") > 0
    if not seed:
        assert counted(engine, "PREEMPTIONS") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "again"),
    [
        (dict(num_drafts=2, token_budget=24), AGAIN),
        (dict(sizes=dict(enable_prefix_caching=False, num_blocks=15)), AGAIN),
        (
            dict(sizes=dict(extras=[kv.chunks.Store(1, 12)], num_blocks=13), policy="priority"),
            first_of(SHARE),
        ),
        (dict(sizes=dict(partial_hits=True), policy="fair"), AGAIN),
        (dict(share=1.0), first_of(1.0)),
        (dict(selector="none"), lambda spans: []),
    ],
    ids=["drafts", "no prefixes", "one place", "partial hits", "exact", "none again"],
)
def test_every_kind_of_engine_puts_prompts_together(options, again):
    """Also where a pool has too few blocks for all passages of a prompt, or a store too few places."""
    engine = make_engine(**options)
    requests = list(random_requests(np.random.default_rng(7), 12))
    said = collect(engine, requests)
    for request in requests:
        expect(said, request, fitting(request, engine.config), again)


@pytest.mark.slow
def test_a_mesh_of_rows_puts_prompts_together():
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    engine, said = make_engine(placement=kv.engine.Placement(mesh, row_axis="rows")), {}
    requests = [ask(parts, 5, i) for i, parts in enumerate(EDGES)]
    assert engine.push(requests) == 6
    note(said, engine)
    for request in requests:
        expect(said, request)


def test_other_weights_have_passages_of_their_own():
    """One that was computed under both is kept under none, even if the first ones come back."""
    names = [kv.namespace(weights=name) for name in ("first", "other")]
    engine, said = make_engine(namespace=names[0]), {}
    request = ask([[7, 2, 9], d, [5, 1]], 5, "back")
    assert engine.push([request]) == 1
    for params, name in (WEIGHTS["other"], names[1]), (PARAMS, names[0]):
        engine.drain(max_steps=1)
        check_state(engine.state)
        engine.set_params(params, name)
    note(said, engine)
    expect(said, request)
    engine.set_params(WEIGHTS["other"], names[1])
    late = ask([[7, 2, 9], d, [5, 1]], 5, "late")
    expect(collect(engine, [late]), late, weights="other")
    assert (np.asarray(engine.state.cache.control.extras["chunks"].length) == 12).sum() == 2


def test_a_row_forgets_what_it_was_to_compute_of_a_cancelled_request():
    """The next request in its place computes its own tokens alone, here the two that are not cached."""
    engine = make_engine()
    again = [list(text(7, 30))]
    collect(engine, [ask([c], 1, "warm"), ask(again, 1, "before")])
    assert engine.push([ask([c, list(text(6, 16)), c], 5, "gone")]) == 1
    engine.drain(max_steps=1)
    state = jax.device_get(engine.state)
    assert state.parts.is_again[0].any(), "it is not done"
    before = int(state.counters[kv.engine.Counter.PREFILL_TOKENS])
    assert engine.cancel("gone")
    request = ask(again, 5, "after")
    expect(collect(engine, [request]), request)
    assert counted(engine, "PREFILL_TOKENS") == before + 30 - 28 - 1


def not_a_number(params, tokens, cache, step):
    """The model, whose logits after a passage computed alone are no numbers."""
    logits, cache = forward(params, tokens, cache, step)
    is_bad = (tokens == b[-1]) & (step.positions == len(b) - 1)
    return jnp.where(is_bad[..., None], jnp.nan, logits), cache


@pytest.mark.slow
def test_a_passage_without_numbers_is_other_text():
    engine = make_engine(model=not_a_number)
    request = ask([[7, 2], a, b, [5, 1, 4]], 5, "a")
    said = collect(engine, [request])
    expect(said, request, tuple(map(tuple, request.parts))[:1])


def refuse(match, kind: type[Exception] = ValueError):
    return pytest.raises(kind, match=match)


def test_what_cannot_be_put_together_is_refused_by_name():
    reuse = kv.chunks.Reuse(rotate=ROTATE)
    with refuse(r"reuse is 0.2, expected kv\.chunks\.Reuse", TypeError):
        kv.chunks.Parts(reuse=0.2)  # type: ignore
    with refuse("max_parts is 0, expected at least 1"):
        kv.chunks.Parts(reuse=reuse, max_parts=0)
    observed = kv.chunks.Reuse(rotate=ROTATE, selector="key deviation", observe=lambda *_: _)
    with refuse("selector 'key deviation', which looks at the model's first layers, expected one that"):
        kv.chunks.Parts(reuse=observed)
    with refuse("parts is 3, expected a value such as", TypeError):
        kv.engine.Inputs(parts=3)  # type: ignore
    with refuse("kinds has 'parts', expected another name"):
        kv.engine.Inputs({"parts": jnp.int32}, parts=kv.chunks.Parts(reuse=reuse))
    with refuse(r"Engine got a cache without a store .* expected one built with"):
        make_engine(dict(extras=[]))
    with refuse("batch_invariant is True and requests may have parts, expected one of them"):
        make_engine(batch_invariant=True)
    window = config([kv.SlidingWindow(1, 4, window=8)], enable_prefix_caching=False)
    answers = kv.chunks.AnswerParts(reuse=reuse, after=[1])
    with refuse(r"have answers and layers\[0\] is SlidingWindow.*, expected layers that keep all tokens"):
        kv.Engine(forward, PARAMS, window, inputs=kv.engine.Inputs(parts=answers))


def test_parts_that_are_none_are_refused_by_name():
    engine, prompt = make_engine(), [1] * 20
    plain = kv.Engine(forward, PARAMS, config())
    one, both = [(0, 2)], "and items or prompt_logprobs, expected one of them"
    options: dict[str, Any]
    for asked, parts, options, match in (
        (engine, 3, {}, "parts is 3, expected a list of spans"),
        (engine, [(2, 1)], {}, r"parts has the span \(2, 1\), expected 0 <= start < end <= 20"),
        (engine, [(19, 21)], {}, r"parts has the span \(19, 21\), expected 0 <= start < end <= 20"),
        (
            engine,
            [(0, 2), (1, 3)],
            {},
            r"the spans \(0, 2\) and \(1, 3\), expected spans that do not overlap",
        ),
        (engine, [(0, 13)], {}, r"the span \(0, 13\) of 13 tokens, expected at most max_chunk_len = 12"),
        (engine, [(i, i + 1) for i in range(5)], {}, "5 parts, expected at most max_parts = 4 of the Engine"),
        (engine, one, dict(prompt_logprobs=True), both),
        (engine, one, dict(items=[(0, 2)]), both),
        (plain, one, {}, "a request has the input 'parts', expected one of"),
    ):
        request = kv.GenerationRequest(prompt, 3, inputs={"parts": parts}, **options)
        with refuse(match, TypeError if parts == 3 else ValueError):
            asked.push([request])
        assert not asked.num_unfinished
