"""An engine whose requests have passages, and what each says alone, by a model without a cache."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax.engine.state import Phase
from kvcache_jax.layers.span import ceil_div
from tests.engine.exact_model import columns_of, draw, note
from tests.support import tiny_model
from tests.support.rotary_model import DEEP, PARAMS, ROTATE, composed, dense, first_of, forward
from tests.support.tiny_model import VOCAB

SHARE = 0.25
AGAIN = first_of(SHARE)
WEIGHTS = {"first": PARAMS, "other": tiny_model.make_params(seed=9), "deep": DEEP}
LIMITS = kv.engine.Limits(max_requests=12, max_tokens=12 * 49)


def text(seed, length):
    return tuple(np.random.default_rng(seed).integers(VOCAB, size=length).tolist())


PASSAGES = [text(seed, length) for seed, length in ((1, 11), (2, 8), (3, 5), (4, 12), (5, 1))]


def config(layers=(), **sizes: Any):
    store = kv.chunks.Store(3, 12)
    sizes = dict[str, Any](num_blocks=20, enable_prefix_caching=True, extras=[store]) | sizes
    found = tiny_model.config(**sizes)
    return dataclasses.replace(found, layers=layers) if layers else found


def make_engine(sizes=None, selector="first", share=SHARE, weights="first", **options: Any):
    reuse = kv.chunks.Reuse(rotate=ROTATE, share=share, selector=selector)
    options = dict[str, Any](token_budget=12, steps_per_dispatch=8, limits=LIMITS) | options
    inputs = kv.engine.Inputs(parts=kv.chunks.Parts(reuse=reuse, max_parts=4))
    model = options.pop("model", forward)
    return kv.Engine(model, WEIGHTS[weights], config(**sizes or {}), inputs=inputs, **options)


def windows_of(config):
    """Each layer's window and sinks; None for all tokens."""
    spans = [kind.span for kind in config.layers]
    return tuple(None if span.keeps_all else (span.window, span.num_sink_tokens) for span in spans)


def ask(parts, max_new, request_id, **options):
    """A request of texts, lists, and passages, tuples."""
    prompt, spans = [], []
    for part in parts:
        if isinstance(part, tuple):
            spans.append((len(prompt), len(prompt) + len(part)))
        prompt += part
    return kv.GenerationRequest(
        prompt, max_new, id=request_id, inputs={"parts": spans} if spans else {}, **options
    )


@functools.cache
def alone(prompt, spans, max_new, sampling, sample_id, again, weights, windows):
    """What a request says without cache, engine or company, and the log-probabilities."""
    params = WEIGHTS[weights]
    given, is_given = composed(list(prompt), spans, again(spans), params, windows)
    columns = columns_of(sampling, sample_id)
    said, scores = list(prompt), []
    for _ in range(max_new):
        num_more = len(said) - len(prompt)
        wide = [tuple(np.pad(x, [(0, num_more), (0, 0), (0, 0)]) for x in layer) for layer in given]
        logits = dense(said, wide, np.pad(is_given, (0, num_more)), params, windows=windows)[0][-1]
        token, logprob = draw(np.float32(logits[None]), columns, np.int32([len(said)]))
        said.append(int(token[0]))
        scores.append(float(logprob[0]))
    return said[len(prompt) :], scores


def expect(said, request, spans=None, again=AGAIN, sample_ids=None, weights="first", windows=None):
    """Every sample says what it says alone; one that was cancelled says a beginning of it."""
    spans = request.parts if spans is None else spans
    for i in range(request.num_samples) if sample_ids is None else sample_ids:
        prompt = tuple(np.asarray(request.prompt).tolist())
        how = request.max_new_tokens, request.sampling, i, again, weights, windows
        tokens, scores = alone(prompt, tuple(map(tuple, spans)), *how)
        found, logprobs, why = said[request.id, i]
        assert why == "cancelled" or (why == "length" and len(found) == len(tokens)), (request.id, i, why)
        assert found == tokens[: len(found)], (request.id, i)
        np.testing.assert_allclose(logprobs, scores[: len(found)], atol=2e-4)


def check_state(state):
    """Rows and requests are each other's, what is kept for a row is there, and no block is lost."""
    state = jax.device_get(state)
    assert kv.check_invariants(state.cache) == []
    rows, is_running = state.row_request, state.row_request < state.requests.num_slots
    assert sorted(rows[is_running]) == np.flatnonzero(state.phase == Phase.RUNNING).tolist()
    assert (is_running == state.cache.is_active).all() and not state.is_ended.any()
    num_alone = int((is_running & (state.parts.alone[:, 1] > state.parts.alone[:, 0])).sum())
    assert num_alone <= 1, "one part is computed at a time"
    held = state.parts.ids[is_running]
    assert (state.cache.control.extras["chunks"].length[held[held >= 0]] > 0).all()


def check_left(engine):
    """Nothing is left but passages and what is cached."""
    cache = engine.state.cache
    assert kv.check_invariants(cache) == [] and not np.asarray(cache.is_active).any()
    stored = np.flatnonzero(np.asarray(cache.control.extras["chunks"].length))
    emptied, _ = kv.chunks.free(cache, stored) if len(stored) else (cache, None)
    assert int(kv.stats(emptied).num_blocks_used) == 0


def collect(engine, requests, on_drain=lambda: None, most_drains=400):
    waiting, said = list(requests), {}
    for _ in range(most_drains):
        if not waiting and not engine.num_unfinished:
            break
        waiting = waiting[engine.push(waiting) :]
        engine.drain(max_steps=6)
        check_state(engine.state)
        on_drain()
        note(said, engine.take_events())
    assert not waiting and not engine.num_unfinished, "it takes for ever"
    note(said, engine)
    check_left(engine)
    return said


a, b, c, d, e = PASSAGES
EDGES = [
    [[7, 2, 9], a, b, [5, 1, 4, 3], c, [8, 8]],  # texts in front, between and after
    [b, a, [6]],  # the other way round, the first one exact
    [[1, 2, 3]],  # without
    [[4], c, c, b],  # one twice, and no question after the last
    [c],  # nothing but a passage
    [[3] * 9, e, [5]],  # one of a token
]


def counted(engine, name):
    return engine.figures().counts[kv.engine.Counter[name]]


def fitting(request, config):
    """The passages that have room beside the row of a request, in order.

    One at the end of the prompt is left out where a window cannot take the last token back.
    """
    [store], parts = config.extras, list(request.parts)
    if any(kind.span.rollback_limit == 0 for kind in config.layers):
        parts = [span for span in parts if span[1] < len(request.prompt)]
    num_tokens, names, found = request.num_tokens - 1, set(), []
    num_left = [
        group.num_blocks - min(ceil_div(num_tokens, group.block_size), group.max_held_blocks) - 1
        for group in config.groups
    ]
    for start, end in parts:
        name = tuple(np.asarray(request.prompt)[start:end].tolist())
        if name not in names:
            left = [
                num - ceil_div(len(name), group.block_size)
                for num, group in zip(num_left, config.groups, strict=True)
            ]
            if min(left) < 0 or len(names) == store.num_chunks:
                continue
            num_left = left
            names.add(name)
        found.append((start, end))
    return tuple(found)


def disturbing(engine, rng):
    """Returns a function that now and then resets the engine, gives its memory back, or cancels a request."""

    def disturb():
        kind = rng.integers(12)
        if kind == 0:
            engine.reset()
        elif kind == 1:
            engine.release(keep=bool(rng.integers(2)))
            engine.restore()
        elif kind < 4:
            engine.cancel(int(rng.integers(30)))

    return disturb
