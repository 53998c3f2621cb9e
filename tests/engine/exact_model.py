"""A model in exact arithmetic, the same tokens decoded without cache or engine, and random requests.

Its numbers are integers, small enough for float32 to be exact in any order: a token's value depends on the
token and its place, attention without a query is the mean of values, and logits are a hash of their sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from kvcache_jax.decoding.sampling import SamplingColumns, sample
from kvcache_jax.engine.requests import sample_seed
from kvcache_jax.engine.state import Phase

VOCAB, DIM, PRIME = 24, 8, 97
NAN_TOKEN = VOCAB - 1
"""Its logits are NaN at each fourth place."""
WINDOW = 5


def values_of(tokens, positions):
    """Integers below 61, f32[..., DIM]."""
    d = jnp.arange(1, DIM + 1, dtype=jnp.int32)
    d = d.reshape(*[1] * jnp.ndim(tokens), DIM)
    mixed = (tokens[..., None] + 3) * (7 * d + 5) + (positions[..., None] + 1) * (d * d + 2)
    return (mixed % 61).astype(jnp.float32)


def _logits(sums, tokens, positions, counts):
    """Of f32[..., 2, DIM], sums of integers, and the last tokens: f32[..., VOCAB], integers over 8.

    A model that `counts` says the next number, modulo 7, and so the same again and again.
    """
    weights = jnp.arange(2 * DIM, dtype=jnp.int32) * 13 + 1
    weights = weights.reshape(*[1] * (sums.ndim - 2), 2 * DIM)
    mixed = jnp.sum(sums.astype(jnp.int32).reshape(*sums.shape[:-2], -1) % PRIME * weights, axis=-1) % PRIME
    ids = jnp.arange(VOCAB, dtype=jnp.int32).reshape(*[1] * mixed.ndim, VOCAB)
    logits = ((mixed[..., None] * (ids * 5 + 3) + ids * ids) % PRIME).astype(jnp.float32) / 8
    is_next = ids == (tokens[..., None] + 1) % 7
    logits = jnp.where(counts, jnp.where(is_next, jnp.float32(20), logits), logits)
    is_nan = (tokens == NAN_TOKEN) & (positions % 4 == 3)
    return jnp.where(is_nan[..., None], jnp.nan, logits)


def forward(params, tokens, cache, step, logits_at=None):
    """The model on a cache of one layer, or of two, of which the second has a window."""
    values = values_of(tokens + params["shift"], step.positions)[..., None, :]
    values = jnp.repeat(values, cache.pools[0].k.shape[1], axis=-2)  # all heads are the same
    nothing = jnp.zeros_like(values)
    length = (step.positions + 1).astype(jnp.float32)[..., None]
    sums = []
    for layer in range(cache.config.num_layers):
        cache, out = kv.attention(cache, layer, nothing, nothing, values, step)
        seen = length if layer == 0 else jnp.minimum(length, WINDOW)
        sums.append(jnp.round(out[..., 0, :] * seen))
    sums = jnp.stack([sums[0], sums[-1]], axis=-2)
    logits = _logits(sums, tokens, step.positions, params["counts"])
    return kv.decoding.for_logits(logits, logits_at), cache


def forward_of_halves(params, tokens, cache, step, logits_at=None):
    """The exact model, whose one layer has as many heads; each device's heads attend, and are the same."""
    num_heads = cache.pools[0].k.shape[1]
    assert num_heads == 2 // 2, "a device sees its own heads"
    logits, cache = forward(params, tokens, cache, step, logits_at)
    # What only the second device has: half of the logits.
    mine = jax.lax.axis_index("heads") == jnp.arange(logits.shape[-1])[None, None] % 2
    return jax.lax.psum(jnp.where(mine, logits, 0), "heads"), cache


def make_params(shift=0, counts=False):
    return {"shift": np.int32(shift), "counts": np.bool_(counts)}


def ban_zero(logits, state):
    """A hook: token 0 is never drawn."""
    return logits.at[:, 0].set(-jnp.inf)


def config(num_layers=1, **sizes):
    layers = [kv.FullAttention(1, DIM), kv.SlidingWindow(1, DIM, window=WINDOW, max_rollback=4)][:num_layers]
    options = {"num_blocks": 24, "block_size": 4, "max_seqs": 4, "max_seq_len": 48} | sizes
    return kv.CacheConfig(layers, **{"enable_prefix_caching": True} | options)


@functools.partial(jax.jit, static_argnames=("num_layers", "bans_zero"))
def _next_token(tokens, length, model, params, num_layers, bans_zero=False):
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    values = values_of(tokens + model["shift"], place)
    is_seen = place < length
    is_near = is_seen & (place >= length - WINDOW)
    masks = [is_seen, is_near if num_layers == 2 else is_seen]
    sums = jnp.stack([jnp.sum(jnp.where(mask[:, None], values, 0), axis=0) for mask in masks])
    logits = _logits(sums, tokens[length - 1], length - 1, model["counts"])[None]
    if bans_zero:
        logits = logits.at[:, 0].set(-jnp.inf)
    return *sample(logits, params, length[None]), logits


def columns_of(sampling, sample_id=0):
    """How one row draws, as data: numbers of all requests are drawn by one program."""
    return SamplingColumns(
        temperature=np.float32([sampling.temperature]),  # type: ignore
        top_k=np.int32([sampling.top_k]),  # type: ignore
        top_p=np.float32([sampling.top_p]),  # type: ignore
        min_p=np.float32([sampling.min_p]),  # type: ignore
        seed=np.uint32([sample_seed(sampling.seed, sample_id)]),  # type: ignore
    )


draw = jax.jit(sample)


def decode_alone(request, num_layers=1, sample_id=0, bans_zero=False, **model):
    """What a request says without cache, engine or company: tokens, log-probabilities, why it ends."""
    prompt = np.asarray(request.prompt)
    tokens = np.zeros(64, np.int32)
    tokens[: len(prompt)] = prompt
    params = columns_of(request.sampling, sample_id)
    said, logprobs = [], []
    for length in range(len(prompt), len(prompt) + request.max_new_tokens):
        token, logprob, logits = _next_token(
            tokens, np.int32(length), make_params(**model), params, num_layers, bans_zero
        )
        if np.isnan(logits).any():
            return said, logprobs, "nan_logits"
        tokens[length] = int(token[0])
        said.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        if said[-1] in request.stop_tokens:
            return said, logprobs, "stop"
    return said, logprobs, "length"


def random_request(rng, request_id=None, longest=44, **options):
    """A prompt that begins like others, of any length, and anything else that one may ask for."""
    most = int(rng.integers(2, longest))
    prompt_len = int(rng.integers(1, most))
    begin = np.random.default_rng(int(rng.integers(3))).integers(0, VOCAB, longest)
    num_own = int(rng.integers(0, 6))
    prompt = begin[:prompt_len].copy()
    prompt[max(prompt_len - num_own, 0) :] = rng.integers(0, VOCAB, min(num_own, prompt_len))
    choices = {
        "sampling": kv.decoding.SamplingParams(
            temperature=float(rng.choice([0.0, 0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 0, 5])),
            top_p=float(rng.choice([1.0, 1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(1000)),
        ),
        "stop_tokens": rng.integers(0, VOCAB, rng.integers(3)).tolist(),
        "priority": int(rng.integers(-2, 3)),
        "client": int(rng.integers(3)),
        "num_samples": int(rng.choice([1, 1, 1, 2, 4])),
    }
    return kv.GenerationRequest(
        prompt.tolist(), max(most - prompt_len, 1), id=request_id, **choices | options
    )


def collect(engine, requests, on_drain=None):
    """Pushes requests as there is room and collects what comes: {(id, sample): (tokens, logprobs, reason)}.

    The state is checked at every drain.
    """
    waiting, said = list(requests), {}
    while waiting or engine.num_unfinished:
        waiting = waiting[engine.push(waiting) :]
        engine.drain()
        check_state(engine.state)
        if on_drain is not None:
            on_drain()
        note(said, engine.take_events())
    note(said, engine)
    check_idle(engine)
    return said


def note(said, events):
    """Adds events to what was said."""
    for event in events:
        tokens, logprobs, reason = said.setdefault((event.id, event.sample_id), ([], [], None))
        assert reason is None, "nothing comes behind the end"
        tokens += event.tokens
        logprobs += event.logprobs
        said[event.id, event.sample_id] = (tokens, logprobs, event.finish_reason)


def check_state(state):
    """What the engine promises between two dispatches (see kvcache_jax/engine/state.py)."""
    state = jax.device_get(state)
    assert kv.check_invariants(state.cache) == []
    num_slots, rows = state.requests.num_slots, state.row_request
    running = rows[rows < num_slots]
    assert len(set(running.tolist())) == len(running)
    assert sorted(running) == np.flatnonzero(state.phase == Phase.RUNNING).tolist()
    assert ((rows < num_slots) == state.cache.is_active).all() and not state.is_ended.any()
    length = state.requests.prompt_len + state.num_generated
    assert (state.cache.context_len[rows < num_slots] < length[running]).all()
    live = np.flatnonzero((state.phase >= Phase.WAITING) & (state.phase <= Phase.PREEMPTED))
    size = state.requests.prompt_len + state.requests.max_new
    runs = sorted((state.requests.start[slot], size[slot]) for slot in live)
    assert all(start + num <= behind for (start, num), (behind, _) in zip(runs, runs[1:], strict=False))
    assert (state.num_generated[live] < state.requests.max_new[live]).all()


def check_idle(engine):
    """All blocks are free or cached, and the cache is in order."""
    cache = engine.state.cache
    assert kv.check_invariants(cache) == []
    stats = jax.device_get(kv.stats(cache))
    assert stats.num_blocks_used == 0 and stats.num_active_seqs == 0
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
