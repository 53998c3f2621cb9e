"""An engine of the exact model, whose program several files of tests share, and what is asked of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from kvcache_jax.engine.pace import Length, Pace
from tests.engine.exact_model import VOCAB, config, decode_alone, forward, make_params, note

LIMITS = kv.engine.Limits(max_requests=7, max_tokens=7 * 49)
SIZES: dict[str, Any] = {"token_budget": 12, "steps_per_dispatch": 8, "limits": LIMITS}

BANS_ALL = 5
TABLE = np.vstack(
    [np.random.default_rng(0).integers(0, 5, (5, VOCAB)), *(np.full((1, VOCAB), n) for n in (5, 5, 6, 7))]
)
"""The next state of an automaton. Each of 5 states bans the tokens that are equal to it, modulo 5; the sixth
bans all, and those after it count down to it."""


def make_engine(params=None, **options: Any):
    """An engine with 11 blocks of 4 tokens, which one request may fill."""
    return kv.Engine(forward, params or make_params(), config(num_blocks=11), **SIZES | options)


def shifted(params, tokens, cache, step, inputs=None):
    """The exact model, to which each request says its own shift."""
    shift = inputs["shift"][:, None] if inputs is not None else 0
    return forward({**params, "shift": params["shift"] + shift}, tokens, cache, step)


def process(logits, state, inputs, params):
    """Bans by the automaton's state, and adds the request's bias."""
    place = inputs["automaton"][:, None]
    is_banned = (jnp.arange(VOCAB)[None] % 5 == place) | (place == BANS_ALL)
    return jnp.where(is_banned & inputs["bans"][:, None], -jnp.inf, logits) + inputs["bias"]


def advance(inputs, tokens, params):
    return {"automaton": params["table"][inputs["automaton"], tokens]}


def make_engine_with_inputs(**options: Any):
    """An engine with priorities, inputs and all log-probabilities: one program for tests of any of them."""
    inputs = {
        "shift": jnp.int32,
        "automaton": jnp.int32,
        "bans": bool,
        "bias": jax.ShapeDtypeStruct((VOCAB,), jnp.float32),
    }
    params = {**make_params(), "table": jnp.array(TABLE, jnp.int32)}
    limits = dataclasses.replace(LIMITS, prompt_logprobs=True)
    order = dict(policy="priority", schedule=kv.engine.Schedule(ageing_steps=2**28))
    sizes: dict[str, Any] = SIZES | order | dict(token_budget=20, limits=limits) | options
    return kv.Engine(
        shifted,
        params,
        config(num_blocks=11),
        process_logits=process,
        inputs=kv.engine.Inputs(inputs, advance),
        num_top_logprobs=3,
        **sizes,
    )


def ask(prompt, max_new, request_id=None, **options):
    return kv.GenerationRequest(prompt, max_new, id=request_id, **options)


def expect(said, requests, **options):
    """Every sample says what it says alone."""
    for request in requests:
        for i in range(request.num_samples):
            tokens, _, reason = decode_alone(request, sample_id=i, **options)
            found, _, why = said[request.id, i]
            assert (found, why) == (tokens, reason), (request, i)


def serve(engine, requests):
    """What all say; they are pushed as there is room."""
    said, left = {}, list(requests)
    while left or engine.num_unfinished:
        left = left[engine.push(left) :]
        engine.drain()
        note(said, engine.take_events())
    note(said, engine)
    return said


def num_cached(engine, requests):
    """Serves requests, each of which says what it says alone; the tokens that were found cached."""
    before = engine.figures().counts[kv.engine.Counter.CACHED_TOKENS]
    expect(serve(engine, requests), requests)
    return engine.figures().counts[kv.engine.Counter.CACHED_TOKENS] - before


def linked(store, timeout=60.0, **options):
    return kv.tiers.AttachedStore(store, weights="w", timeout=timeout, **options)


class RandomPace(Pace):
    """Dispatches of any lengths, ended early by any news, one or two of them under way."""

    def __init__(self, most_steps, rng, shorten=None):
        super().__init__(most_steps, shorten)
        self.most_steps, self.rng = most_steps, rng

    def choose(self, now, has_free_row):
        most = int(self.rng.integers(1, self.most_steps + 1))
        return Length(int(self.rng.integers(1, most + 1)), most), int(self.rng.integers(1, 3))
