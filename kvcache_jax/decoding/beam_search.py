"""Beam search: rows of one cache, reordered every step, so that beams share all they have in common."""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.arrays.number_checks import finite_number, static_count
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status, raise_for_status
from kvcache_jax.decoding import arguments
from kvcache_jax.decoding.forward import Forward, prepared
from kvcache_jax.decoding.host import Snapshot, Stopwatch, snapshot_of
from kvcache_jax.decoding.options import UNWATCHED, Watch, require_option, steps_between_check_ins
from kvcache_jax.decoding.prefill import prefill
from kvcache_jax.decoding.sampling import without_nan
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.extend import extend
from kvcache_jax.operations.fork import fork
from kvcache_jax.operations.reorder import reorder

_NEVER = -1e30
# Of the divisor of a score: log-probabilities from 1e-17 to 1e9 stay normal float32 and above `_NEVER`.
_MOST_DECIMALS = 20


@dataclasses.dataclass
class Beam:
    """One hypothesis.

    Attributes:
      tokens: New tokens; the stop token, if one ended it, is the last.
      logprobs: Log-probability of each. A search needs numbers to rank by: a NaN among the logits counts as
        -inf here, and +inf as the largest number (`generate` ends such a row, `score` raises).
      logprob: Sum of `logprobs`.
      score: `logprob / len(tokens) ** length_penalty`, by which hypotheses are ranked.
      finish_reason: "stop", "length" or "out_of_blocks"; "running" before the search has ended.
    """

    tokens: list[int]
    logprobs: list[float]
    logprob: float
    score: float
    finish_reason: str


@dataclasses.dataclass
class BeamResult:
    """Result of `beam_search`.

    Attributes:
      beams: Per prompt, its hypotheses, best first. A search that ran out of blocks has those so far.
      finish_reasons: Per prompt, why its search ended: "stop" (no running beam could win any more), "length"
        or "out_of_blocks", where others may have been better than those that it had finished.
      cache: The cache at the end: row `prompt_id * num_beams + i` still holds the prompt's i-th running
        beam, so that `kv.stats` and `kv.block_map` tell which blocks beams share. A row lacks its beam's last
        token, except some rows of a search that ran out of blocks: see `cache.context_len`.
      num_steps: Calls of the model in the search.
      prefill_seconds: Host clock around prefills, forks and first tokens included; compilation too.
      decode_seconds: Host clock around the search, likewise; callbacks do not count.
      timeline: One entry per check-in of the host; its `running` is {row: (prompt_id, i)}.
    """

    beams: list[list[Beam]]
    finish_reasons: list[str]
    cache: Cache
    num_steps: int
    prefill_seconds: float
    decode_seconds: float
    timeline: list[Snapshot]


class _Search(NamedTuple):
    """State of the loop: `p` prompts with `b` beams each, up to `t` new tokens.

    A beam's row is `prompt * b + beam`. Finished hypotheses are kept sorted, best first.
    """

    cache: Cache
    tokens: jax.Array  # i32[p, b, t], of the running beams
    logprobs: jax.Array  # f32[p, b, t], of the tokens
    logprob: jax.Array  # f32[p, b], sums; the best first
    done_tokens: jax.Array  # i32[p, b, t]
    done_logprobs: jax.Array  # f32[p, b, t]
    done_logprob: jax.Array  # f32[p, b]
    done_score: jax.Array  # f32[p, b], _NEVER where there is none
    done_len: jax.Array  # i32[p, b]
    num_new: jax.Array  # i32[p], tokens of the running beams
    is_over: jax.Array  # bool[p], no running beam can still win
    is_failed: jax.Array  # bool[p], out of blocks
    num_steps: jax.Array  # i32[], calls of the model

    @property
    def is_searching(self) -> jax.Array:
        """bool[p]."""
        return ~self.is_over & ~self.is_failed & (self.num_new < self.tokens.shape[-1])


def beam_search(
    forward: Forward,
    params: Any,
    prompts: Sequence[Sequence[int]],
    config: CacheConfig,
    *,
    max_new_tokens: int,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    stop_tokens: Sequence[int] = (),
    prefill_len: int = 128,
    watch: Watch = UNWATCHED,
) -> BeamResult:
    """Finds the `num_beams` best continuations of each prompt.

    A search ends when its beams cannot beat the finished hypotheses any more, or at `max_new_tokens`.

    Args:
      forward: As in `generate`.
      params: Passed on to `forward`.
      prompts: Token ids, each prompt at least one; `len(prompts) * num_beams` rows are needed.
      config: The cache's.
      max_new_tokens: Per hypothesis.
      num_beams: Hypotheses kept per prompt.
      length_penalty: Exponent of the length by which sums are divided; 0 ranks by the sum. The power of
        `max_new_tokens` is to be between 1e-20 and 1e20.
      stop_tokens: Ids that finish a hypothesis.
      prefill_len: As in `generate`.
      watch: A callback while the search runs, `kv.decoding.Watch(on_check_in=...)`: it is called with each
        entry of the timeline, and its block tables, and the hypotheses so far.

    Returns:
      A `BeamResult`.

    Raises:
      ValueError, TypeError: bad sizes, ids that are none, a call within `jit`, a `forward` without a hash.
      StatusError: the prompts do not fit.
      FloatingPointError: the model's logits are NaN or -inf for all beams of a prompt.
    """
    arguments.check_model("beam_search", forward, config, params)
    prompt_tokens = arguments.prompt_tokens(prompts)
    if not prompt_tokens:
        raise ValueError("prompts is empty, expected at least one prompt")
    max_new_tokens = static_count("max_new_tokens", max_new_tokens)
    num_beams = static_count("num_beams", num_beams)
    prefill_len = arguments.usable_prefill_len(prefill_len, config)
    require_option("watch", watch, Watch)
    if watch.on_tokens is not None:
        raise ValueError(
            "watch has on_tokens, expected on_check_in alone: which tokens a search finds is known at its end"
        )
    check_in_every = steps_between_check_ins(watch)
    longest = max(map(len, prompt_tokens))
    num_rows = len(prompt_tokens) * num_beams
    if num_rows > config.max_seqs:
        raise ValueError(
            f"{len(prompt_tokens)} prompts x {num_beams} beams, expected at most max_seqs = {config.max_seqs}"
        )
    if longest + max_new_tokens > config.max_seq_len + 1:
        raise ValueError(
            f"a prompt of {longest} and {max_new_tokens} new tokens, "
            f"expected at most max_seq_len + 1 = {config.max_seq_len + 1} together"
        )
    length_penalty = _usable_length_penalty(length_penalty, max_new_tokens)
    prefilling, searching, start = Stopwatch(), Stopwatch(), time.perf_counter()
    running = {row: divmod(row, num_beams) for row in range(num_rows)}
    timeline = []

    def check_in(state: _Search) -> tuple[_Search, list[list[Beam]]]:
        found = jax.device_get(state._replace(cache=None))
        beams = [_hypotheses(found, prompt_id, length_penalty) for prompt_id in range(len(prompt_tokens))]
        if [] in beams:
            raise FloatingPointError(
                f"prompt {beams.index([])} has no hypothesis: all its logits are NaN or -inf"
            )
        seconds = time.perf_counter() - start
        snapshot = snapshot_of(state.cache, found.num_steps, seconds, running)
        timeline.append(dataclasses.replace(snapshot, block_tables=[]))
        if watch.on_check_in:
            watch.on_check_in(snapshot, beams)
        return found, beams

    stops, penalty = arguments.stop_ids(stop_tokens), np.float32(length_penalty)
    params = prepared(forward, params)
    arguments.committed_shardings(params=params)
    cache, logits = prefilling(_prefill, forward, params, init(config), prompt_tokens, num_beams, prefill_len)
    state = prefilling(
        _begin, cache, logits, stops, penalty, num_beams=num_beams, max_new_tokens=max_new_tokens
    )
    found, beams = check_in(state)
    while found.is_searching.any():
        state = searching(_search, forward, params, state, stops, penalty, np.int32(check_in_every))
        found, beams = check_in(state)
    return BeamResult(
        beams=beams,
        finish_reasons=[
            "out_of_blocks" if is_failed else "stop" if is_over else "length"
            for is_failed, is_over in zip(found.is_failed, found.is_over, strict=True)
        ],
        cache=state.cache,
        num_steps=int(found.num_steps),
        prefill_seconds=prefilling.seconds,
        decode_seconds=searching.seconds,
        timeline=timeline,
    )


def _usable_length_penalty(value: Any, max_new_tokens: int) -> float:
    """Checks the exponent of lengths: up to `max_new_tokens` its powers leave scores finite in float32."""
    penalty = finite_number("length_penalty", value)
    decimals = math.log10(max_new_tokens)
    if abs(penalty) * decimals > _MOST_DECIMALS:
        raise ValueError(
            f"length_penalty is {penalty}, expected at most {_MOST_DECIMALS / decimals:.3g} above or below 0 "
            f"for max_new_tokens = {max_new_tokens}: scores are float32, divided by lengths to its power"
        )
    return penalty


def _prefill(
    forward: Forward,
    params: Any,
    cache: Cache,
    prompts: Sequence[np.ndarray],
    num_beams: int,
    prefill_len: int,
) -> tuple[Cache, jax.Array]:
    """Fills an empty cache: every beam holds its prompt. Also the prompts' last logits f32[p, vocab]."""
    max_seqs, max_seq_len = cache.max_seqs, cache.config.max_seq_len
    firsts = np.arange(len(prompts), dtype=np.int32) * num_beams
    lengths, tokens = np.zeros(max_seqs, np.int32), np.zeros((max_seqs, max_seq_len), np.int32)
    for row, prompt in zip(firsts, prompts, strict=True):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    cache, admission = allocate(cache, firsts, lengths[firsts], tokens=tokens[firsts])
    raise_for_status(admission.status, "allocating the prompts")
    cache, fed = prefill(forward, params, cache, tokens, lengths, prefill_len=prefill_len)
    raise_for_status(fed.status, "prefilling the prompts")
    if num_beams > 1:
        others = np.setdiff1d(np.arange(len(prompts) * num_beams), firsts)
        cache, _ = fork(cache, others // num_beams * num_beams, others)
    return cache, fed.logits[firsts]


def _hypotheses(found: _Search, prompt_id: int, length_penalty: float) -> list[Beam]:
    """Lists finished hypotheses and running beams together, best first; `found` is in numpy."""
    beams = []
    _, num_beams, max_new_tokens = found.tokens.shape
    num_new = int(found.num_new[prompt_id])
    why = "length" if num_new == max_new_tokens else "running"
    why = "out_of_blocks" if found.is_failed[prompt_id] else why

    def add(tokens: Any, logprobs: Any, logprob: Any, length: int, why: str) -> None:
        score = float(logprob) / length**length_penalty
        beams.append(Beam(tokens[:length].tolist(), logprobs[:length].tolist(), float(logprob), score, why))

    for i in range(num_beams):
        at = prompt_id, i
        if found.done_score[at] > _NEVER / 2:
            length = int(found.done_len[at])
            add(found.done_tokens[at], found.done_logprobs[at], found.done_logprob[at], length, "stop")
        if found.logprob[at] > _NEVER / 2 and not found.is_over[prompt_id]:
            add(found.tokens[at], found.logprobs[at], found.logprob[at], num_new, why)
    return sorted(beams, key=lambda beam: -beam.score)[:num_beams]


@functools.partial(jax.jit, static_argnames=("num_beams", "max_new_tokens"), donate_argnames="cache")
def _begin(
    cache: Cache,
    logits: jax.Array,
    stop_tokens: jax.Array,
    length_penalty: jax.Array,
    *,
    num_beams: int,
    max_new_tokens: int,
) -> _Search:
    """Starts the search from the prompts' last logits `f32[p, vocab]`, which give the first tokens."""
    num_prompts, vocab = logits.shape
    shape = (num_prompts, num_beams)
    state = _Search(
        cache=cache,
        tokens=jnp.zeros((*shape, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((*shape, max_new_tokens), jnp.float32),
        logprob=jnp.full(shape, _NEVER, jnp.float32).at[:, 0].set(0),
        done_tokens=jnp.zeros((*shape, max_new_tokens), jnp.int32),
        done_logprobs=jnp.zeros((*shape, max_new_tokens), jnp.float32),
        done_logprob=jnp.zeros(shape, jnp.float32),
        done_score=jnp.full(shape, _NEVER, jnp.float32),
        done_len=jnp.zeros(shape, jnp.int32),
        num_new=jnp.zeros(num_prompts, jnp.int32),
        is_over=jnp.zeros(num_prompts, bool),
        is_failed=jnp.zeros(num_prompts, bool),
        num_steps=jnp.int32(0),
    )
    wide = jnp.broadcast_to(logits[:, None], (*shape, vocab))
    mask = jnp.ones(num_prompts, bool)
    return _expand(state, wide, mask, stop_tokens=stop_tokens, length_penalty=length_penalty)[0]


@functools.partial(jax.jit, static_argnames="forward", donate_argnames="state")
def _search(
    forward: Forward,
    params: Any,
    state: _Search,
    stop_tokens: jax.Array,
    length_penalty: jax.Array,
    max_steps: jax.Array,
) -> _Search:
    """Searches to the end, or for `max_steps` steps."""
    shape = num_prompts, num_beams = state.tokens.shape[:2]
    first_step = state.num_steps

    def step_fn(state: _Search) -> _Search:
        searching = state.is_searching
        max_seqs = state.cache.max_seqs
        last = jnp.take_along_axis(state.tokens, jnp.maximum(state.num_new - 1, 0)[:, None, None], axis=2)
        unused = max_seqs - num_prompts * num_beams
        tokens = jnp.pad(last.reshape(-1), (0, unused))[:, None]
        num_fed = jnp.pad(jnp.repeat(searching, num_beams).astype(jnp.int32), (0, unused))
        cache, step = extend(state.cache, num_fed, max_new=1, tokens=tokens)
        logits, cache = forward(params, tokens, cache, step)
        status = step.status[: num_prompts * num_beams].reshape(shape)
        failed = searching & (status != Status.OK).any(axis=1)
        searching &= ~failed
        logits = logits[: num_prompts * num_beams, 0].astype(jnp.float32).reshape(*shape, -1)
        state = state._replace(cache=cache, is_failed=state.is_failed | failed, num_steps=state.num_steps + 1)
        state, parents = _expand(
            state, logits, searching, stop_tokens=stop_tokens, length_penalty=length_penalty
        )
        rows = jnp.arange(num_prompts * num_beams, dtype=jnp.int32).reshape(shape)
        moved = jnp.where(searching[:, None], rows, max_seqs)
        sources = rows[:, :1] + parents
        cache, _ = reorder(state.cache, moved.reshape(-1), sources.reshape(-1))
        return state._replace(cache=cache)

    def goes_on(state: _Search) -> jax.Array:
        return state.is_searching.any() & (state.num_steps - first_step < max_steps)

    return lax.while_loop(goes_on, step_fn, state)


def _expand(
    state: _Search, logits: jax.Array, mask: jax.Array, *, stop_tokens: jax.Array, length_penalty: jax.Array
) -> tuple[_Search, jax.Array]:
    """Extends the beams of the masked prompts by one token; returns also their parents, i32[p, b]."""
    num_prompts, num_beams, vocab = logits.shape
    max_new_tokens = state.tokens.shape[-1]
    scores = jax.nn.log_softmax(without_nan(logits), axis=-1)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # all -inf: the beam ends
    totals = state.logprob[..., None] + scores
    # Enough that num_beams candidates go on even if every stop token is among the best of every beam.
    num_candidates = min(num_beams * (1 + stop_tokens.shape[0]), num_beams * vocab)
    best, index = lax.top_k(totals.reshape(num_prompts, -1), num_candidates)
    parent, token = index // vocab, index % vocab
    is_stop = (token[..., None] == stop_tokens[None, None]).any(axis=-1)
    at = jnp.broadcast_to(state.num_new[:, None, None], (num_prompts, num_candidates, 1))
    is_new = jnp.arange(max_new_tokens, dtype=jnp.int32)[None, None] == at

    def grow(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(is_new, new[..., None], jnp.take_along_axis(old, parent[..., None], axis=1))

    tokens = grow(state.tokens, token)
    logprobs = grow(state.logprobs, jnp.take_along_axis(scores.reshape(num_prompts, -1), index, axis=1))
    num_new = state.num_new + 1
    scale = num_new.astype(jnp.float32) ** length_penalty

    rank = jnp.arange(num_candidates, dtype=jnp.int32)[None]
    finishes = is_stop & (rank < num_beams) & (best > _NEVER / 2)
    ranks = jnp.where(finishes, best / scale[:, None], _NEVER)
    done_score, kept = lax.top_k(jnp.concatenate([state.done_score, ranks], axis=1), num_beams)

    def keep(old: jax.Array, new: jax.Array) -> jax.Array:
        both = jnp.concatenate([old, new], axis=1)
        return jnp.take_along_axis(both, kept.reshape(*kept.shape, *(1,) * (both.ndim - 2)), axis=1)

    logprob, goes_on = lax.top_k(jnp.where(is_stop, 2 * _NEVER, best), num_beams)
    # The best that a running beam can still reach: sums only fall, so dividing by most helps most.
    last = jnp.where(length_penalty > 0, jnp.float32(max_new_tokens), num_new.astype(jnp.float32))
    reachable = logprob[:, 0] / last**length_penalty
    new_state = state._replace(
        tokens=jnp.take_along_axis(tokens, goes_on[..., None], axis=1),
        logprobs=jnp.take_along_axis(logprobs, goes_on[..., None], axis=1),
        logprob=logprob,
        done_tokens=keep(state.done_tokens, tokens),
        done_logprobs=keep(state.done_logprobs, logprobs),
        done_logprob=keep(state.done_logprob, best),
        done_score=done_score,
        done_len=keep(state.done_len, jnp.broadcast_to(num_new[:, None], best.shape)),
        num_new=num_new,
        is_over=done_score[:, -1] >= reachable,
    )

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    fields = [name for name in _Search._fields if name not in ("cache", "is_failed", "num_steps")]
    chosen = {name: choose(getattr(new_state, name), getattr(state, name)) for name in fields}
    return state._replace(**chosen), jnp.take_along_axis(parent, goes_on, axis=1)
