"""Beam search: rows of one cache, reordered every step, so that beams share all they have in common."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.cache import allocate, extend, fork, init, reorder
from kvcache_jax.config import CacheConfig
from kvcache_jax.decode_loop import Forward, prefill
from kvcache_jax.state import Cache
from kvcache_jax.status import Status, raise_for_status

_NEVER = -1e30


@dataclasses.dataclass
class Beam:
    """One hypothesis.

    Attributes:
      tokens: New tokens; the stop token, if one ended it, is the last.
      logprob: Sum of the tokens' log-probabilities.
      score: `logprob / len(tokens) ** length_penalty`, by which hypotheses are ranked.
      finish_reason: "stop", "length" or "out_of_blocks".
    """

    tokens: list[int]
    logprob: float
    score: float
    finish_reason: str


class _Search(NamedTuple):
    """State of the loop: `p` prompts with `b` beams each, up to `t` new tokens.

    A beam's row is `prompt * b + beam`. Finished hypotheses are kept sorted, best first.
    """

    cache: Cache
    tokens: jax.Array  # i32[p, b, t], of the running beams
    logprob: jax.Array  # f32[p, b], sums; the best first
    done_tokens: jax.Array  # i32[p, b, t]
    done_logprob: jax.Array  # f32[p, b]
    done_score: jax.Array  # f32[p, b], _NEVER where there is none
    done_len: jax.Array  # i32[p, b]
    num_new: jax.Array  # i32[p], tokens of the running beams
    is_over: jax.Array  # bool[p], no running beam can still win
    is_failed: jax.Array  # bool[p], out of blocks


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
    chunk_len: int = 128,
) -> list[list[Beam]]:
    """The `num_beams` best continuations of each prompt, found by beam search.

    A search ends when its beams cannot beat the finished hypotheses any more, or at `max_new_tokens`.

    Args:
      forward: As in `generate`.
      params: Passed on to `forward`.
      prompts: Token ids, each prompt at least one; `len(prompts) * num_beams` rows are needed.
      config: Of the cache.
      max_new_tokens: Per hypothesis.
      num_beams: Hypotheses kept per prompt.
      length_penalty: Exponent of the length by which sums are divided; 0 ranks by the sum.
      stop_tokens: Ids that finish a hypothesis.
      chunk_len: Most prompt tokens of a row in one call of the model.

    Returns:
      Per prompt, its hypotheses, best first. A search that runs out of blocks returns what it had.

    Raises:
      ValueError: bad sizes. StatusError: the prompts do not fit.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"prompts have lengths {lengths}, expected at least one of at least one token")
    if max_new_tokens < 1 or num_beams < 1:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, num_beams {num_beams}, expected at least 1 each"
        )
    num_rows = len(prompts) * num_beams
    if num_rows > config.max_seqs:
        raise ValueError(
            f"{len(prompts)} prompts x {num_beams} beams, expected at most max_seqs = {config.max_seqs}"
        )
    if max(lengths) + max_new_tokens > config.max_seq_len + 1:
        raise ValueError(
            f"a prompt of {max(lengths)} and {max_new_tokens} new tokens, "
            f"expected at most max_seq_len + 1 = {config.max_seq_len + 1} together"
        )
    history = np.zeros((config.max_seqs, config.max_seq_len), np.int32)
    prompt_len = np.zeros(config.max_seqs, np.int32)
    firsts = np.arange(len(prompts)) * num_beams
    for first, prompt in zip(firsts, prompts, strict=True):
        history[first, : len(prompt)], prompt_len[first] = prompt, len(prompt)
    cache, admission = allocate(init(config), firsts, lengths)
    raise_for_status(admission.status, "allocating the prompts")
    chunk_len = min(chunk_len, config.query_len_limit)
    cache, logits, failed = prefill(forward, params, cache, history, prompt_len, chunk_len=chunk_len)
    raise_for_status(jnp.where(failed, Status.OUT_OF_BLOCKS, Status.OK), "prefilling the prompts")
    if num_beams > 1:
        others = np.setdiff1d(np.arange(num_rows), firsts)
        cache, _ = fork(cache, others // num_beams * num_beams, others)

    found = _search(
        forward,
        params,
        cache,
        logits[firsts],
        jnp.array(list(stop_tokens) or [-1], jnp.int32),
        jnp.float32(length_penalty),
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
    )
    return [_hypotheses(found, prompt_id, length_penalty) for prompt_id in range(len(prompts))]


def _hypotheses(found: _Search, prompt_id: int, length_penalty: float) -> list[Beam]:
    """Finished hypotheses and running beams together, best first."""
    beams = []
    num_new, failed = int(found.num_new[prompt_id]), bool(found.is_failed[prompt_id])
    for i in range(found.tokens.shape[1]):
        if float(found.done_score[prompt_id, i]) > _NEVER / 2:
            length = int(found.done_len[prompt_id, i])
            tokens = np.asarray(found.done_tokens[prompt_id, i, :length]).tolist()
            total = float(found.done_logprob[prompt_id, i])
            beams.append(Beam(tokens, total, total / length**length_penalty, "stop"))
        total = float(found.logprob[prompt_id, i])
        if total > _NEVER / 2 and not bool(found.is_over[prompt_id]):
            tokens = np.asarray(found.tokens[prompt_id, i, :num_new]).tolist()
            why = "out_of_blocks" if failed else "length"
            beams.append(Beam(tokens, total, total / num_new**length_penalty, why))
    return sorted(beams, key=lambda beam: -beam.score)[: found.tokens.shape[1]]


@functools.partial(
    jax.jit, static_argnames=("forward", "num_beams", "max_new_tokens"), donate_argnames="cache"
)
def _search(
    forward: Forward,
    params: Any,
    cache: Cache,
    logits: jax.Array,
    stop_tokens: jax.Array,
    length_penalty: jax.Array,
    *,
    num_beams: int,
    max_new_tokens: int,
) -> _Search:
    """Searches from the prompts' last logits `f32[p, vocab]`."""
    num_prompts, vocab = logits.shape
    shape = (num_prompts, num_beams)
    state = _Search(
        cache=cache,
        tokens=jnp.zeros((*shape, max_new_tokens), jnp.int32),
        logprob=jnp.full(shape, _NEVER, jnp.float32).at[:, 0].set(0),
        done_tokens=jnp.zeros((*shape, max_new_tokens), jnp.int32),
        done_logprob=jnp.zeros(shape, jnp.float32),
        done_score=jnp.full(shape, _NEVER, jnp.float32),
        done_len=jnp.zeros(shape, jnp.int32),
        num_new=jnp.zeros(num_prompts, jnp.int32),
        is_over=jnp.zeros(num_prompts, bool),
        is_failed=jnp.zeros(num_prompts, bool),
    )
    expand = functools.partial(_expand, stop_tokens=stop_tokens, length_penalty=length_penalty)
    wide = jnp.broadcast_to(logits[:, None], (*shape, vocab))
    state, _ = expand(state, wide, jnp.ones(num_prompts, bool))

    def is_searching(state: _Search) -> jax.Array:
        return ~state.is_over & ~state.is_failed & (state.num_new < max_new_tokens)

    def step_fn(state: _Search) -> _Search:
        searching = is_searching(state)
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
        logits = logits[: num_prompts * num_beams, 0].astype(jnp.float32).reshape(*shape, vocab)
        state = state._replace(cache=cache, is_failed=state.is_failed | failed)
        state, parents = expand(state, logits, searching)
        rows = jnp.arange(num_prompts * num_beams, dtype=jnp.int32).reshape(shape)
        moved = jnp.where(searching[:, None], rows, max_seqs)
        sources = rows[:, :1] + parents
        cache, _ = reorder(state.cache, moved.reshape(-1), sources.reshape(-1))
        return state._replace(cache=cache)

    return lax.while_loop(lambda state: is_searching(state).any(), step_fn, state)


def _expand(
    state: _Search, logits: jax.Array, mask: jax.Array, *, stop_tokens: jax.Array, length_penalty: jax.Array
) -> tuple[_Search, jax.Array]:
    """Extends the beams of the masked prompts by one token; returns also their parents, i32[p, b]."""
    num_prompts, num_beams, vocab = logits.shape
    max_new_tokens = state.tokens.shape[-1]
    totals = state.logprob[..., None] + jax.nn.log_softmax(logits, axis=-1)
    # Enough that num_beams candidates go on even if every stop token is among the best of every beam.
    num_candidates = min(num_beams * (1 + stop_tokens.shape[0]), num_beams * vocab)
    best, index = lax.top_k(totals.reshape(num_prompts, -1), num_candidates)
    parent, token = index // vocab, index % vocab
    is_stop = (token[..., None] == stop_tokens).any(axis=-1)
    at = jnp.broadcast_to(state.num_new[:, None, None], (num_prompts, num_candidates, 1))
    tokens = jnp.take_along_axis(state.tokens, parent[..., None], axis=1)
    tokens = jnp.where(jnp.arange(max_new_tokens, dtype=jnp.int32) == at, token[..., None], tokens)
    num_new = state.num_new + 1
    scale = num_new.astype(jnp.float32) ** length_penalty

    rank = jnp.arange(num_candidates, dtype=jnp.int32)
    finishes = is_stop & (rank < num_beams) & (best > _NEVER / 2)
    scores = jnp.where(finishes, best / scale[:, None], _NEVER)
    done_score, kept = lax.top_k(jnp.concatenate([state.done_score, scores], axis=1), num_beams)

    def keep(old: jax.Array, new: jax.Array) -> jax.Array:
        both = jnp.concatenate([old, new], axis=1)
        return jnp.take_along_axis(both, kept.reshape(*kept.shape, *(1,) * (both.ndim - 2)), axis=1)

    logprob, goes_on = lax.top_k(jnp.where(is_stop, 2 * _NEVER, best), num_beams)
    # The best that a running beam can still reach: sums only fall, so dividing by most helps most.
    last = jnp.where(length_penalty > 0, jnp.float32(max_new_tokens), num_new.astype(jnp.float32))
    reachable = logprob[:, 0] / last**length_penalty
    new_state = state._replace(
        tokens=jnp.take_along_axis(tokens, goes_on[..., None], axis=1),
        logprob=logprob,
        done_tokens=keep(state.done_tokens, tokens),
        done_logprob=keep(state.done_logprob, best),
        done_score=done_score,
        done_len=keep(state.done_len, jnp.broadcast_to(num_new[:, None], best.shape)),
        num_new=num_new,
        is_over=done_score[:, -1] >= reachable,
    )

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    fields = [name for name in _Search._fields if name not in ("cache", "is_failed")]
    chosen = {name: choose(getattr(new_state, name), getattr(state, name)) for name in fields}
    return state._replace(**chosen), jnp.take_along_axis(parent, goes_on, axis=1)
