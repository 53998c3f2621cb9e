"""Requests with passages on models of windows: each says what it says alone, and what `generate` says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.operations.reserve import needs, num_available, required_for
from tests.engine.exact_engine import RandomPace
from tests.engine.passages import (
    AGAIN,
    EDGES,
    PASSAGES,
    SHARE,
    WEIGHTS,
    ask,
    check_state,
    collect,
    counted,
    disturbing,
    expect,
    fitting,
    make_engine,
    text,
    windows_of,
)
from tests.support.rotary_model import ROTATE, first_of, forward
from tests.support.tiny_model import DIM, HEADS, VOCAB

FULL, MOST = kv.FullAttention(HEADS, DIM), 28


def window(size, **options: Any):
    return kv.SlidingWindow(HEADS, DIM, window=size, **options)


def in_one_call(params, tokens, cache, step, logits_at=None):
    """The model, called on prompts and next tokens at once."""
    logits, cache = forward(params, tokens, cache, step)
    return kv.decoding.for_logits(logits, logits_at), cache


# Layers, other sizes of the cache, and the engine's options. A window holds what 28 tokens read at once.
ENGINES: dict[str, tuple[list, dict, dict]] = {
    "nothing is taken back": ([FULL, window(7)], {}, {}),
    "in one call, drafts": (
        [FULL, window(7, max_rollback=2)],
        dict(num_blocks=30),
        dict(model=in_one_call, num_drafts=2, token_budget=20),
    ),
    "sinks and short blocks": (
        [FULL, window(7, max_rollback=1), window(3, num_sink_tokens=2, block_size=3, max_rollback=1)],
        dict(enable_prefix_caching=False),
        dict(model=in_one_call, weights="deep"),
    ),
    "windows alone": ([window(7, max_rollback=1)] * 2, dict(enable_prefix_caching=False), dict(share=1.0)),
}


def windows_engine(name):
    layers, sizes, options = ENGINES[name]
    return make_engine(dict(layers=layers, max_query_len=MOST) | sizes, **options)


def engine_of_two_rows():
    """An engine whose windows have the blocks of two rows, 7 each, and 3 more."""
    layers = [FULL, window(7, num_blocks=2 * 7 + 3)]
    sizes = dict(layers=layers, max_query_len=16, num_blocks=40, extras=[kv.chunks.Store(8, 12)])
    engine = make_engine(sizes, model=in_one_call)
    assert engine.config.groups[1].max_held_blocks == 7
    return engine


def expect_all(said, requests, engine, weights="first", share=SHARE, **_):
    for request in requests:
        ids = [i for i in range(request.num_samples) if (request.id, i) in said]
        spans, windows = fitting(request, engine.config), windows_of(engine.config)
        again = AGAIN if share == SHARE else first_of(share)
        expect(said, request, spans, again, sample_ids=ids, weights=weights, windows=windows)


def random_requests(rng, num, most_reach=MOST):
    """Texts before passages that leave windows, and passages of at most so many tokens from end to end."""
    for i in range(num):
        parts = [rng.integers(VOCAB, size=rng.choice([0, 3, 9, 17])).tolist()]
        for _ in range(int(rng.choice([0, 1, 2, 3]))):
            more = [PASSAGES[rng.integers(5)], rng.integers(VOCAB, size=rng.integers(0, 3)).tolist()]
            if sum(map(len, parts[1:] + more)) <= most_reach:
                parts += more
        parts.append(rng.integers(VOCAB, size=rng.integers(0, 3)).tolist())
        if not any(parts):
            parts.append([int(rng.integers(VOCAB))])
        most_new = min(16, 48 - sum(map(len, parts)))
        sampling = kv.decoding.SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])), seed=int(rng.integers(99))
        )
        samples = int(rng.choice([1, 1, 3]))
        yield ask(parts, int(rng.integers(1, most_new + 1)), i, sampling=sampling, num_samples=samples)


def test_passages_further_apart_than_windows_hold_at_once_are_refused():
    """By the engine as by `generate`, before anything is compiled."""
    engine = make_engine(dict(layers=[FULL, window(7)], max_query_len=10))
    message = r"has spans from 1 to 12 and layers\[1\] is SlidingWindow\(7\), .*max_query_len = 10 tokens"
    spans, prompt = [(9, 12), (1, 4)], [1] * 20
    with pytest.raises(ValueError, match="parts " + message):
        engine.push([kv.GenerationRequest(prompt, 3, inputs={"parts": spans})])
    made_of = kv.chunks.Prompts([prompt], [spans], kv.chunks.Reuse(rotate=ROTATE))
    with pytest.raises(ValueError, match=message):
        kv.generate(forward, WEIGHTS["first"], made_of, engine.config, max_new_tokens=1)


# With short blocks the pool has no room for all passages, and `generate` leaves out others than the engine.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "sinks and short blocks"])
def test_windows_see_passages_as_other_tokens(name):
    """Of passages and texts more than a window, computed in pieces; as with `generate`."""
    engine, (_, _, options) = windows_engine(name), ENGINES[name]
    requests = [ask(parts, 5, i) for i, parts in enumerate([*EDGES, [[3] * 9, *EDGES[0]]])]
    said = collect(engine, requests)
    expect_all(said, requests, engine, **options)
    before = counted(engine, "PREFILL_TOKENS")
    again = [ask(EDGES[0], 5, "again")]
    expect_all(collect(engine, again), again, engine, **options)
    spans = [list(request.parts) for request in requests]
    made_of = kv.chunks.Prompts(
        [np.asarray(request.prompt).tolist() for request in requests],
        spans,
        kv.chunks.Reuse(rotate=ROTATE, share=options.get("share", SHARE)),
    )
    weights = WEIGHTS[options.get("weights", "first")]
    result = kv.generate(forward, weights, made_of, engine.config, max_new_tokens=5, prefill_len=8)
    assert [said[i, 0][0] for i in range(len(requests))] == [g.tokens for g in result.generations]
    assert counted(engine, "PREFILL_TOKENS") - before <= len(requests[0].prompt)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ENGINES)
def test_random_mixes_say_what_each_says_alone(name, seed):
    """Preempted, cancelled, with samples, and through resets and releases; with passages and without."""
    rng = np.random.default_rng(seed)
    engine, (_, _, options) = windows_engine(name), ENGINES[name]
    engine._pace = RandomPace(8, rng, engine._device.shorten)
    requests = list(random_requests(rng, 30))

    said = collect(engine, requests, disturbing(engine, rng))
    expect_all(said, requests, engine, **options)
    assert counted(engine, "REUSED_TOKENS") > 0
    if name == "nothing is taken back":
        assert counted(engine, "PREEMPTIONS") > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_windows_with_blocks_for_two_rows_serve_all(seed):
    """Also after texts that left them, and with passages kept that the next row's parts take the place of."""
    engine = engine_of_two_rows()
    requests = list(random_requests(np.random.default_rng(seed), 16, most_reach=16))
    expect_all(collect(engine, requests, most_drains=200), requests, engine)


@jax.jit
def blocks_of_windows(state, row):
    """Counts blocks of windows that a row's passages and all rows' next tokens lack, and those available."""
    control, config = state.cache.control, state.cache.config
    lack = required_for(control, row[None], state.num_wanted[row][None], config)
    wanted = (state.num_to_compute > 0).astype(jnp.int32)
    return lack[1], needs(control, wanted, config).num_blocks[1].sum(), num_available(control)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kept_goes", [False, True], ids=["a row goes", "a kept passage goes"])
def test_the_best_row_has_the_blocks_of_its_passages(kept_goes):
    """The first request's text of 28 tokens lets go of 5 of its 7 blocks, and its passages need 4.

    Meanwhile the last request was admitted to the blocks that were left. Where a passage is kept that no row
    is given it goes; else the last row does.
    """
    engine = engine_of_two_rows()
    for passage in PASSAGES[1:2] + PASSAGES[4:] * kept_goes:
        collect(engine, [ask([[1], passage, [2]], 1, len(passage))])
    texts = [list(text(50 + i, length)) for i, length in enumerate((28, 13, 5, 12 if kept_goes else 16))]
    requests = [ask([texts[0], PASSAGES[1], PASSAGES[1], [3]], 3, 0)]
    requests += [ask([words], 14, i) for i, words in enumerate(texts[1:], 1)]
    assert engine.push(requests) == 4
    state, is_ready = engine.state, np.zeros(4, bool)
    while not is_ready.any():
        assert engine.num_unfinished
        engine.drain(max_steps=1)
        state = engine.state
        is_ready = np.array(state.cache.context_len == state.first_part)
    rows, uids = np.array(state.row_request), np.array(state.requests.uid)
    order = rows[np.argsort(uids[rows])]
    assert np.asarray(state.is_running).all() and rows[is_ready] == order[0]
    # No row lacks a block for its next token, so `preempt` frees none.
    lack, wanted, available = map(int, blocks_of_windows(state, np.flatnonzero(is_ready)[0]))
    assert (lack, wanted, available) == (4, 0, 3)
    before = np.array(state.counters)
    assert np.sum(state.cache.control.extras["chunks"].length > 0) == 1 + kept_goes
    assert before[kv.engine.Counter.PREEMPTIONS] == 0
    engine.drain(max_steps=1)
    state = engine.state
    check_state(state)
    gone = [] if kept_goes else [order[-1]]
    assert np.flatnonzero(state.num_preemptions).tolist() == gone
    assert set(rows) - set(np.asarray(state.row_request).tolist()) == set(gone)
    events = np.asarray(state.counters) - before
    assert events[kv.engine.Counter.STEPS] == 1 and events[kv.engine.Counter.PREEMPTIONS] == len(gone)
    assert len(PASSAGES[4]) not in np.asarray(state.cache.control.extras["chunks"].length)
    expect_all(collect(engine, []), requests, engine)
