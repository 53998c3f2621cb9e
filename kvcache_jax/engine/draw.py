"""From logits to the next tokens of requests, which end or go on with them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, first_true, get_at, set_at
from kvcache_jax.core.backends import computed_once
from kvcache_jax.core.state import Step
from kvcache_jax.decoding.sampling import SamplingColumns, are_numbers, sample
from kvcache_jax.decoding.speculation import ngram_drafts, verify_drafts
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.policies import OUTPUT_WEIGHT
from kvcache_jax.engine.state import NO_TOKEN, OF_PROMPT, EngineState, Finish, Phase, count, note_in_outbox
from kvcache_jax.operations.truncate import truncate_rows


class Computed(NamedTuple):
    """The next tokens that a step computed, and the model's logits after them."""

    num_tokens: jax.Array  # i32[max_seqs]; -1 where nothing was computed yet
    logits: jax.Array  # [max_seqs, width, vocab], floats
    tokens: jax.Array | None = None  # i32[max_seqs, width], where there are drafts among them


class Drawn(NamedTuple):
    """The tokens drawn for each row in one step."""

    tokens: jax.Array  # i32[max_seqs, width]
    logprobs: jax.Array  # f32[max_seqs, width]
    num_tokens: jax.Array  # i32[max_seqs], how many of them count
    # i32[max_seqs], why nothing can be drawn from the logits after them: `Finish.NAN_LOGITS` or
    # `Finish.NO_TOKEN`; `Finish.NOT_YET` elsewhere.
    failure: jax.Array
    # The most probable tokens i32[max_seqs, width, K] and their log-probabilities; None for K = 0.
    tops: tuple[jax.Array, jax.Array] | None


def row_sampling(state: EngineState) -> SamplingColumns:
    """Gathers how the rows' requests draw; rows without one are greedy."""
    sampling, slots = state.requests.sampling, state.row_request
    return SamplingColumns(
        temperature=get_at(sampling.temperature, slots, 0),
        top_k=get_at(sampling.top_k, slots, 0),
        top_p=get_at(sampling.top_p, slots, 1),
        min_p=get_at(sampling.min_p, slots, 0),
        seed=get_at(sampling.seed, slots, 0),
    )


def next_tokens(state: EngineState, wanted: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """Picks the tokens that rows compute next, i32[max_seqs, width]: known ones, and drafts after the last.

    Rows take part where `wanted` bool[max_seqs]. Counts the tokens of each row too, i32[max_seqs].
    """
    place = jnp.arange(options.width, dtype=jnp.int32)[None]
    tokens = get_at(state.requests.tokens, (state.row_start + state.cache.context_len)[:, None] + place)
    num_known = jnp.minimum(state.num_to_compute, options.width)
    if options.num_drafts == 0:
        return jnp.where(wanted[:, None], tokens, 0), jnp.where(wanted, num_known, 0)
    # Drafts follow only a row's last known token: before it there is nothing to guess.
    is_last = state.is_at_last
    drafts, num_drafts = ngram_drafts(state.row_tokens, state.row_length, options.num_drafts)
    num_left = get_at(state.requests.max_new - state.num_generated, state.row_request, 0)
    # One token is drawn after the accepted drafts, and with it they must not pass `max_new`.
    num_drafts = jnp.where(is_last, jnp.clip(num_left - 1, 0, num_drafts), 0)
    drafted = jnp.concatenate([tokens[:, :1], drafts], axis=1)
    tokens = jnp.where(is_last[:, None], drafted, tokens)
    num_new = jnp.where(wanted, num_known + num_drafts, 0)
    return jnp.where(place < num_new[:, None], tokens, 0), num_new


def draw(state: EngineState, computed: Computed, options: Options) -> tuple[EngineState, Drawn]:
    """Draws the next token of rows that computed all they know; takes back drafts that were not accepted."""
    logits = computed.logits
    # A row draws only when all its known tokens are computed: earlier parts of a prompt draw nothing.
    is_there = (computed.num_tokens > 0) & (state.cache.context_len >= state.row_length)
    is_there &= state.is_running & ~state.is_alone
    num_silent = jnp.sum(jnp.where(is_there, 0, computed.num_tokens), dtype=jnp.int32)
    state = count(state, prefill_tokens=num_silent)
    if options.num_drafts == 0:
        token, logprob = sample(logits[:, 0], row_sampling(state), state.row_length)
        is_drawn = are_numbers(logits[:, 0])
        num_tokens = jnp.where(is_there & is_drawn, 1, 0)
        # A part of a prompt whose logits are no numbers fails with its last one.
        failure = jnp.where(is_there & ~is_drawn, _failure_of(logits[:, 0]), Finish.NOT_YET)
        drawn = token[:, None], logprob[:, None], num_tokens, failure
        return state, Drawn(*drawn, _tops(logits, options))
    return _draw_after_drafts(state, computed, is_there, options)


def _draw_after_drafts(
    state: EngineState, computed: Computed, is_there: jax.Array, options: Options
) -> tuple[EngineState, Drawn]:
    """Accepts drafts as far as they are the tokens that would have been drawn."""
    num_tokens, logits, tokens = computed
    assert tokens is not None
    max_seqs, width, _ = logits.shape
    order = jnp.arange(width, dtype=jnp.int32)
    # A row computes at least one known token before its drafts: the first logits that are drawn from.
    num_drafts = jnp.where(is_there, state.cache.context_len - state.row_length, 0)
    last_known = jnp.maximum(num_tokens - num_drafts - 1, 0)
    place = jnp.minimum(last_known[:, None] + order[None], width - 1)
    logits = jnp.take_along_axis(logits, place[..., None], axis=1)
    drafts = jnp.take_along_axis(tokens, jnp.minimum(place + 1, width - 1), axis=1)[:, :-1]
    emitted, logprobs, num_accepted, num_drawn = verify_drafts(
        logits, row_sampling(state), state.row_length, drafts, num_drafts
    )
    # Nothing counts after the first logits that are no numbers: the row emits the tokens before, and fails.
    num_tokens = jnp.where(is_there, jnp.minimum(1 + num_accepted, num_drawn), 0)
    # Rejected drafts leave the cache again, so that it never holds a token that the request does not have.
    rows = jnp.where(num_accepted < num_drafts, jnp.arange(max_seqs, dtype=jnp.int32), max_seqs)
    control, _ = truncate_rows(
        state.cache.control, rows, state.row_length + num_accepted, config=state.cache.config
    )
    state = count(
        state.with_control(control),
        drafted=jnp.sum(num_drafts, dtype=jnp.int32),
        accepted=jnp.sum(jnp.where(is_there, num_accepted, 0), dtype=jnp.int32),
    )
    first_failed = jnp.minimum(num_drawn, width - 1)[:, None]
    why = jnp.take_along_axis(_failure_of(logits), first_failed, axis=1)[:, 0]
    failure = jnp.where(is_there & (num_drawn < 1 + num_accepted), why, Finish.NOT_YET)
    return state, Drawn(emitted, logprobs, num_tokens, failure, _tops(logits, options))


def _failure_of(logits: jax.Array) -> jax.Array:
    """Computes why nothing can be drawn from logits f32[..., vocab] that are no numbers, i32[...]."""
    return jnp.where((logits == -jnp.inf).all(axis=-1), Finish.NO_TOKEN, Finish.NAN_LOGITS).astype(jnp.int32)


def _tops(logits: jax.Array, options: Options) -> tuple[jax.Array, jax.Array] | None:
    if options.num_top_logprobs == 0:
        return None
    if (vocab := logits.shape[-1]) < options.num_top_logprobs:
        raise ValueError(
            f"num_top_logprobs is {options.num_top_logprobs} and forward's logits are for {vocab} tokens, "
            f"expected at most {vocab}: make the Engine with fewer"
        )
    logprobs, tokens = lax.top_k(jax.nn.log_softmax(logits, axis=-1), options.num_top_logprobs)
    return tokens, logprobs


def note_prompts(state: EngineState, step: Step, logits: jax.Array) -> EngineState:
    """Reports log-probabilities of prompts, from the logits [n, T, vocab] of a padded step of `n` rows."""
    slots = get_at(state.row_request, step.seq_ids, state.requests.num_slots)[:, None]
    order = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    place = step.held[:, None] + order + 1  # of the token that logits are of
    mask = (order < step.query_len[:, None]) & get_at(state.wants_prompt, slots, False)
    mask &= place < get_at(state.requests.prompt_len, slots, 0)
    tokens = get_at(state.requests.tokens, get_at(state.requests.start, slots, 0) + place)
    logits = logits.astype(jnp.float32)
    known = jnp.where(tokens < 0, logits.shape[-1], tokens)  # a negative index is no token's
    chosen = jnp.take_along_axis(logits, jnp.where(mask, known, 0)[..., None], axis=-1, mode="fill")[..., 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    slots, kind = jnp.broadcast_to(slots, mask.shape), jnp.full_like(place, OF_PROMPT)
    mask, slots, place, logprobs, kind = (x.reshape(-1) for x in (mask, slots, place, logprobs, kind))
    return note_in_outbox(state, mask, slots, place, logprobs, kind)


def write_down(state: EngineState, drawn: Drawn, options: Options) -> EngineState:
    """Adds the drawn tokens to their requests, up to the one that ends them, and tells the host."""
    requests, slots = state.requests, state.row_request
    order = jnp.arange(drawn.tokens.shape[1], dtype=jnp.int32)[None]
    num_left = get_at(requests.max_new - state.num_generated, slots, 0)
    # No token past `max_new` is reported, and none past it can stop the request.
    num_tokens = jnp.minimum(drawn.num_tokens, num_left)
    is_stop = (drawn.tokens[..., None] == get_at(requests.stop, slots, -1)[:, None]).any(axis=-1)
    is_stop &= order < num_tokens[:, None]
    stops = is_stop.any(axis=1)
    num_tokens = jnp.where(stops, first_true(is_stop) + 1, num_tokens)

    # A stop token is the reason before the length, and both before logits that could not be drawn from.
    finish = jnp.where((num_tokens > 0) & (num_tokens == num_left), Finish.LENGTH, Finish.NOT_YET)
    finish = jnp.where(finish == Finish.NOT_YET, drawn.failure, finish)
    finish = jnp.where(stops, Finish.STOP, finish).astype(jnp.int32)
    num_tokens, finish = computed_once((num_tokens, finish))
    is_undrawn = (finish == Finish.NAN_LOGITS) | (finish == Finish.NO_TOKEN)
    has_ended = finish != Finish.NOT_YET
    is_first = (num_tokens > 0) & (get_at(state.num_generated, slots, 1) == 0)

    is_new = order < num_tokens[:, None]
    start = get_at(requests.start, slots, 0) + state.row_length
    place = jnp.where(is_new, start[:, None] + order, requests.tokens.shape[0])
    tokens = set_at(requests.tokens, place, drawn.tokens)
    # A failed draw is reported in an entry of its own, without a token.
    is_last = order == (num_tokens + is_undrawn.astype(jnp.int32) - 1)[:, None]
    state = note_in_outbox(
        state,
        (order < (num_tokens + is_undrawn.astype(jnp.int32))[:, None]).reshape(-1),
        jnp.broadcast_to(slots[:, None], is_new.shape).reshape(-1),
        jnp.where(is_new, drawn.tokens, NO_TOKEN).reshape(-1),
        jnp.where(is_new, drawn.logprobs, 0).reshape(-1),
        jnp.where(is_last, finish[:, None], 0).reshape(-1),
        None if drawn.tops is None else tuple(x.reshape(-1, x.shape[-1]) for x in drawn.tops),  # type: ignore
    )
    ended = jnp.where(has_ended, slots, requests.num_slots)
    weight = OUTPUT_WEIGHT * num_tokens
    client = jnp.where(num_tokens > 0, get_at(requests.client, slots, 0), state.service.shape[0])
    state = dataclasses.replace(
        state,
        requests=dataclasses.replace(requests, tokens=tokens),
        phase=set_at(state.phase, ended, Phase.DONE),
        num_generated=add_at(state.num_generated, slots, num_tokens),
        row_request=jnp.where(has_ended, requests.num_slots, slots),
        is_ended=state.is_ended | has_ended,
        service=add_at(state.service, client, weight),
    )
    num_generated = jnp.sum(num_tokens, dtype=jnp.int32)
    return count(state, generated_tokens=num_generated, finished=has_ended, first_tokens=is_first)
