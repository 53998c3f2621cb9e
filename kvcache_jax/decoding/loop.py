"""The device side of decoding, for any model: one while loop, and the state that it carries.

Every step computes all rows of the cache, idle ones without new tokens.
"""

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import first_true
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.attention.attention_plan import each_alone
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.core.status import Status
from kvcache_jax.decoding.forward import Forward
from kvcache_jax.decoding.own_prompts import drop_unseen
from kvcache_jax.decoding.prompts import KEEP_ALL, Retention
from kvcache_jax.decoding.sampling import SamplingColumns, are_numbers, filtered_logprobs, row_keys, sample
from kvcache_jax.decoding.speculation import ngram_drafts, verify_drafts
from kvcache_jax.operations.extend import extend
from kvcache_jax.operations.stats import num_available_blocks, num_blocks_needed
from kvcache_jax.operations.truncate import truncate


class RowPhase(enum.IntEnum):
    """Activity of a row, or the reason why it ended."""

    RUNNING = 0
    """It decodes."""
    STOPPED = 1
    """Ended by a stop token."""
    LENGTH = 2
    """Ended at its `max_len`."""
    OUT_OF_BLOCKS = 3
    """Ended for want of a block."""
    NAN_LOGITS = 4
    """Ended at logits that no token can be drawn from."""
    IDLE = 5
    """It holds no request."""


@pytree_dataclass()
class DecodeState:
    """State that decoding carries from step to step."""

    cache: Cache
    draft_cache: Cache | None  # of the draft model; None without one
    # i32[max_seqs, width], each row's prompt and generated tokens; `width` is `max_seq_len`, but for rows
    # that drop tokens the length of the longest text.
    history: jax.Array
    prompt_len: jax.Array  # i32[max_seqs]
    length: jax.Array  # i32[max_seqs], tokens in `history`; the last one is not in the cache yet
    max_len: jax.Array  # i32[max_seqs], length at which the row ends
    logprobs: jax.Array  # f32[max_seqs, width], of each generated token, under the model's own distribution
    phase: jax.Array  # i32[max_seqs], each row's `RowPhase`
    sampling: SamplingColumns
    stop_tokens: jax.Array  # i32[any], ids that end a row; -1 for none
    num_steps: jax.Array  # i32[], model calls of the decode loop
    num_drafted: jax.Array  # i32[], draft tokens proposed
    num_accepted: jax.Array  # i32[], draft tokens that the model accepted


@dataclasses.dataclass(frozen=True)
class DraftSource:
    """Source of draft tokens (static)."""

    num_drafts: int  # per step
    forward: Forward | None = None  # of the draft model; None looks up n-grams in the row's text


class Proposals(NamedTuple):
    """Proposals for one step: tokens i32[n, D], how many i32[n], their log-probabilities or None."""

    tokens: jax.Array
    num_drafts: jax.Array
    logprobs: jax.Array | None


@functools.partial(jax.jit, donate_argnames="state")
def begin(
    state: DecodeState, logits: jax.Array, status: jax.Array, source: jax.Array, rows: jax.Array
) -> DecodeState:
    """Draws the first token of each row in `rows` bool[max_seqs] from its prompt's last logits.

    A prefill gave the `logits` f32[n, vocab] and `status` i32[n] of prompts; `source` i32[max_seqs] says
    which one is the row's. If its prefill failed, or nothing can be drawn from its logits, the row ends
    instead.
    """
    logits, status = logits[source], status[source]
    token, logprob = sample(logits, state.sampling, state.length)
    phase = jnp.where(rows, RowPhase.RUNNING, state.phase).astype(jnp.int32)
    state = _end_failed(dataclasses.replace(state, phase=phase), jnp.where(rows, status, Status.OK))
    starts, is_drawn = rows & (status == Status.OK), are_numbers(logits)
    state = _emit(state, token[:, None], logprob[:, None], jnp.where(starts & is_drawn, 1, 0))
    return _end_undrawn(state, starts & ~is_drawn)


@functools.partial(
    jax.jit, static_argnames=("forward", "draft_source", "retention", "may_share"), donate_argnames="state"
)
def decode(
    forward: Forward,
    params: Any,
    draft_params: Any,
    state: DecodeState,
    max_steps: jax.Array,
    *,
    draft_source: DraftSource | None,
    retention: Retention = KEEP_ALL,
    may_share: bool = True,
) -> DecodeState:
    """Decodes until a row has ended, so that its blocks can be assigned to others, or for `max_steps` steps.

    No step is made where one has already: with the first token, or for want of blocks in its prefill. Where
    no rows `may_share` blocks the program is smaller.
    """
    first_step = state.num_steps

    def goes_on(state: DecodeState) -> jax.Array:
        is_running, is_idle = state.phase == RowPhase.RUNNING, state.phase == RowPhase.IDLE
        none_ended = (is_running | is_idle).all()
        return is_running.any() & none_ended & (state.num_steps - first_step < max_steps)

    def body(state: DecodeState) -> DecodeState:
        if draft_source is None:
            return _decode_one(call, params, state, retention)
        return _decode_drafted(call, params, draft_params, state, draft_source)

    def call(params: Any, tokens: jax.Array, cache: Cache, step: Step) -> tuple[jax.Array, Cache]:
        return forward(params, tokens, cache, step if may_share else each_alone(step))

    return lax.while_loop(goes_on, body, state)


def _decode_one(forward: Forward, params: Any, state: DecodeState, retention: Retention) -> DecodeState:
    """Decodes one token for every running row."""
    tokens = _last_token(state)[:, None]
    cache, is_running = state.cache, state.phase == RowPhase.RUNNING
    num_new = is_running.astype(jnp.int32)
    rows = jnp.arange(cache.max_seqs, dtype=jnp.int32)
    cache = drop_unseen(retention, cache, jnp.where(is_running, rows, cache.max_seqs))
    cache, step = extend(cache, num_new, max_new=1, tokens=tokens)
    logits, cache = forward(params, tokens, cache, step)
    logits = logits[:, 0].astype(jnp.float32)
    token, logprob = sample(logits, state.sampling, state.length)
    is_drawn = are_numbers(logits)
    state = _end_failed(dataclasses.replace(state, cache=cache, num_steps=state.num_steps + 1), step.status)
    state = _emit(state, token[:, None], logprob[:, None], jnp.where(is_drawn, step.query_len, 0))
    return _end_undrawn(state, (step.query_len > 0) & ~is_drawn)


def _decode_drafted(
    forward: Forward, params: Any, draft_params: Any, state: DecodeState, draft_source: DraftSource
) -> DecodeState:
    """Calls the model once on the last token and its drafts; keeps the accepted ones and one more.

    References:
      Fast Inference from Transformers via Speculative Decoding (Leviathan et al.; arXiv:2211.17192).
      Prompt Lookup Decoding (Saxena, 2023) for drafts from the row's own history.
    """
    running = state.phase == RowPhase.RUNNING
    state, drafts = _draft(draft_params, state, draft_source)
    count = jnp.maximum(jnp.minimum(drafts.num_drafts, state.max_len - state.length - 1), 0)
    count = jnp.where(running & _have_room(state.cache, running, count), count, 0)

    tokens = jnp.concatenate([_last_token(state)[:, None], drafts.tokens], axis=1)
    before = state.cache.context_len
    num_new = jnp.where(running, 1 + count, 0)
    cache, step = extend(state.cache, num_new, max_new=1 + draft_source.num_drafts, tokens=tokens)
    logits, cache = forward(params, tokens, cache, step)
    logits = logits.astype(jnp.float32)

    emitted, logprobs, num_accepted, num_drawn = verify_drafts(
        logits, state.sampling, state.length, drafts.tokens, count, drafts.logprobs
    )
    # The cache holds the last token and the accepted drafts; the newly drawn token is fed next time.
    grew, num_rows = step.query_len > 0, logits.shape[0]
    ids = jnp.arange(num_rows, dtype=jnp.int32)
    rows = jnp.where(grew, ids, num_rows)
    cache, _ = truncate(cache, rows, before + 1 + num_accepted)
    draft_cache = state.draft_cache
    if draft_cache is not None:
        draft_len = jnp.minimum(draft_cache.context_len, before + 1 + num_accepted)
        draft_cache, _ = truncate(draft_cache, jnp.where(draft_cache.is_active, ids, num_rows), draft_len)
    state = dataclasses.replace(
        state,
        cache=cache,
        draft_cache=draft_cache,
        num_steps=state.num_steps + 1,
        num_drafted=state.num_drafted + jnp.sum(jnp.where(grew, count, 0), dtype=jnp.int32),
        num_accepted=state.num_accepted + jnp.sum(jnp.where(grew, num_accepted, 0), dtype=jnp.int32),
    )
    # Up to the first place that nothing can be drawn at, as without drafts.
    num_emitted = jnp.where(grew, jnp.minimum(1 + num_accepted, num_drawn), 0)
    state = _emit(_end_failed(state, step.status), emitted, logprobs, num_emitted)
    return _end_undrawn(state, grew & (num_drawn < 1 + num_accepted))


def _have_room(cache: Cache, running: jax.Array, num_drafts: jax.Array) -> jax.Array:
    """Selects the first rows whose drafts fit, bool[max_seqs]. Drafts never cost a row its next token."""
    least = running.astype(jnp.int32)
    have_room = running
    for group in range(len(cache.config.groups)):
        needed = num_blocks_needed(cache, least, group=group)
        more = num_blocks_needed(cache, jnp.where(running, 1 + num_drafts, 0), group=group) - needed
        num_left = num_available_blocks(cache, group=group) - jnp.sum(needed, dtype=jnp.int32)
        have_room &= (more == 0) | (jnp.cumsum(more, dtype=jnp.int32) <= num_left)
    return have_room


def _draft(draft_params: Any, state: DecodeState, draft_source: DraftSource) -> tuple[DecodeState, Proposals]:
    """Proposes the tokens that follow each row's history."""
    if draft_source.forward is None:
        tokens, count = ngram_drafts(state.history, state.length, draft_source.num_drafts)
        return state, Proposals(tokens, count, None)
    forward, cache = draft_source.forward, state.draft_cache
    assert cache is not None
    is_drafting = (
        (state.phase == RowPhase.RUNNING) & cache.is_active & (cache.context_len == state.length - 1)
    )

    def propose(carry, i):
        cache, token, is_drafting = carry
        cache, step = extend(cache, is_drafting.astype(jnp.int32), max_new=1, tokens=token[:, None])
        logits, cache = forward(draft_params, token[:, None], cache, step)
        logits = logits[:, 0].astype(jnp.float32)
        logprobs = filtered_logprobs(logits, state.sampling)
        # A stream of its own: the target's accept test must not share the draft's randomness.
        keys = jax.vmap(jax.random.fold_in)(
            row_keys(state.sampling, state.length + i), jnp.full_like(token, 1)
        )
        token = jax.vmap(jax.random.categorical)(keys, logprobs).astype(jnp.int32)
        is_drafting &= step.query_len > 0
        return (cache, token, is_drafting), (token, logprobs, is_drafting)

    # One step more than drafts: it feeds the last draft, so that both caches have as many tokens.
    steps = jnp.arange(draft_source.num_drafts + 1, dtype=jnp.int32)
    (cache, _, _), (tokens, logprobs, proposed) = lax.scan(
        propose, (cache, _last_token(state), is_drafting), steps
    )
    num_proposed = jnp.sum(proposed[:-1], axis=0, dtype=jnp.int32)
    drafts = Proposals(tokens[:-1].T, num_proposed, jnp.moveaxis(logprobs[:-1], 0, 1))
    return dataclasses.replace(state, draft_cache=cache), drafts


def _last_token(state: DecodeState) -> jax.Array:
    return jnp.take_along_axis(state.history, jnp.maximum(state.length - 1, 0)[:, None], axis=1)[:, 0]


def _end_failed(state: DecodeState, status: jax.Array) -> DecodeState:
    """Ends running rows that `extend` could not grow."""
    failed = (state.phase == RowPhase.RUNNING) & (status != Status.OK)
    why = jnp.where(status == Status.TOO_LONG, RowPhase.LENGTH, RowPhase.OUT_OF_BLOCKS)
    return dataclasses.replace(state, phase=jnp.where(failed, why, state.phase).astype(jnp.int32))


def _end_undrawn(state: DecodeState, rows: jax.Array) -> DecodeState:
    """Ends the given rows that are still running, with NAN_LOGITS."""
    ends = rows & (state.phase == RowPhase.RUNNING)
    return dataclasses.replace(
        state, phase=jnp.where(ends, RowPhase.NAN_LOGITS, state.phase).astype(jnp.int32)
    )


def _emit(state: DecodeState, tokens: jax.Array, logprobs: jax.Array, num_tokens: jax.Array) -> DecodeState:
    """Appends `num_tokens i32[n]` of `tokens [n, T]` to the rows, up to a stop token or `max_len`."""
    order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    num_tokens = jnp.minimum(num_tokens, state.max_len - state.length)
    is_stop = (tokens[..., None] == state.stop_tokens[None, None]).any(axis=-1) & (
        order < num_tokens[:, None]
    )
    stops = is_stop.any(axis=1)
    num_tokens = jnp.where(stops, first_true(is_stop) + 1, num_tokens)
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    nowhere = state.history.shape[1]
    at = jnp.where(order < num_tokens[:, None], state.length[:, None] + order, nowhere)
    length = state.length + jnp.maximum(num_tokens, 0)
    ends = jnp.where(length >= state.max_len, RowPhase.LENGTH, RowPhase.RUNNING)
    ends = jnp.where(stops, RowPhase.STOPPED, ends)
    grows = num_tokens > 0
    return dataclasses.replace(
        state,
        history=state.history.at[rows, at].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[rows, at].set(logprobs, mode="drop"),
        length=length,
        phase=jnp.where(grows & (state.phase == RowPhase.RUNNING), ends, state.phase).astype(jnp.int32),
    )
