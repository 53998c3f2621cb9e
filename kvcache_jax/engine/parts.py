"""Prompts that are put together from parts, within the engine's program; see `PartRows` and `PromptParts`."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, first_true, get_at, num_true, run_if, set_at
from kvcache_jax.core.state import Cache
from kvcache_jax.decoding.prompt_parts import NO_PART
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.order import rows_in_order
from kvcache_jax.engine.state import EngineState, Phase, count
from kvcache_jax.operations.free import free_rows
from kvcache_jax.operations.reserve import needs, num_available, required_for
from kvcache_jax.operations.truncate import truncate_rows


class Wanted(NamedTuple):
    """Parts that requests i32[n] need before they are put together."""

    ids: jax.Array  # i32[n, P], their parts that are kept; `NO_PART` for none
    alone: jax.Array  # i32[n, 2], the first part that is not; equal ones for none

    @property
    def alone_len(self) -> jax.Array:
        """i32[n], its tokens; 0 for none."""
        return self.alone[:, 1] - self.alone[:, 0]


def wanted_parts(state: EngineState, slots: jax.Array, options: Options) -> Wanted | None:
    """Looks for the parts of requests `slots` i32[n]; None where no request has any."""
    if state.requests.parts is None:
        return None
    spans, num = get_at(state.requests.parts, slots, 0), slots.shape[0]
    length = spans[..., 1] - spans[..., 0]
    max_parts = length.shape[1]
    owner = jnp.repeat(slots, max_parts)
    tokens = _tokens_of(state, owner, spans[..., 0].reshape(-1), length.reshape(-1), options)
    namespace = get_at(state.requests.namespace, owner, 0)
    ids = options.parts.find(state.cache.control, tokens, length.reshape(-1), namespace)
    ids = jnp.where(length > 0, ids.reshape(num, max_parts), NO_PART)
    if options.parts.keeps_ends:
        return Wanted(ids, jnp.zeros((num, 2), jnp.int32))
    missing = first_true((length > 0) & (ids == NO_PART))
    return Wanted(ids, get_at(spans, (jnp.arange(num, dtype=jnp.int32), missing), 0))


def parts_behind(state: EngineState, slots: jax.Array, ids: jax.Array, num_cached: jax.Array) -> jax.Array:
    """Leaves out the parts i32[n, P] of requests i32[n] that begin within the tokens that are cached."""
    assert state.requests.parts is not None
    starts = get_at(state.requests.parts, slots, 0)[..., 0]
    return jnp.where(starts >= num_cached[:, None], ids, NO_PART)


def _tokens_of(
    state: EngineState, slots: jax.Array, first: jax.Array, length: jax.Array, options: Options
) -> jax.Array:
    """Reads parts of requests i32[n] as they are named, i32[n, max_len]."""
    places = jnp.arange(options.parts.max_len(state.cache.config), dtype=jnp.int32)[None]
    start = get_at(state.requests.start, slots, 0) + first
    return jnp.where(places < length[:, None], get_at(state.requests.tokens, start[:, None] + places), 0)


def make_room_for(state: EngineState, num_blocks: jax.Array, ids: jax.Array, options: Options) -> EngineState:
    """Gives up kept parts for `num_blocks` i32[groups], but none of `ids` or that a row is to be given."""
    if state.parts is None:
        return state
    kept = jnp.concatenate([ids.reshape(-1), state.parts.ids.reshape(-1)])
    return dataclasses.replace(state, cache=options.parts.give_up(state.cache, num_blocks, kept))


def make_room_for_next(state: EngineState, options: Options) -> EngineState:
    """Gives up kept parts where rows lack blocks for their next tokens: a row is worth more than they are."""
    control, config = state.cache.control, state.cache.config
    lack = needs(control, (state.num_to_compute > 0).astype(jnp.int32), config).of_all_rows
    num_blocks = jnp.where((lack > num_available(control)).any(), lack, 0)
    return make_room_for(state, num_blocks, jnp.zeros(0, jnp.int32), options)


def forget_failed(state: EngineState, is_good: jax.Array) -> EngineState:
    """Takes parts for ordinary text whose rows computed their last token, not `is_good` bool[max_seqs]."""
    requests = state.requests
    if state.parts is None or requests.parts is None:
        return state
    is_bad = state.is_alone & (state.num_to_compute == 0) & ~is_good
    slots = jnp.where(is_bad, state.row_request, requests.num_slots)
    spans = get_at(requests.parts, slots, 0)
    spans = jnp.where((spans == state.parts.alone[:, None]).all(axis=-1, keepdims=True), 0, spans)
    return dataclasses.replace(
        state, requests=dataclasses.replace(requests, parts=set_at(requests.parts, slots, spans))
    )


def keep_computed(state: EngineState, options: Options) -> EngineState:
    """Keeps the part that a row has computed alone, and frees the row: its request waits again."""
    if state.parts is None:
        return state
    is_done = state.is_alone & (state.num_to_compute == 0)

    def keep(state: EngineState) -> EngineState:
        assert state.parts is not None
        row = first_true(is_done)[None]
        slot, span = state.row_request[row], state.parts.alone[row]
        # What failed is no part any more, and what was computed under other weights has no name.
        is_part = (get_at(state.requests.parts, slot, 0) == span[:, None]).all(axis=-1).any(axis=1)  # type: ignore
        length = jnp.where(is_part & state.may_publish[row], span[:, 1] - span[:, 0], 0)
        tokens = _tokens_of(state, slot, span[:, 0], length, options)
        cache = options.parts.keep(state.cache, row, tokens, length, state.parts.ids.reshape(-1))
        return _leave(dataclasses.replace(state, cache=cache), row)

    return run_if(is_done.any(), keep, state)


def keep_ends(
    state: EngineState, slots: jax.Array, is_end: jax.Array, options: Options
) -> tuple[EngineState, jax.Array]:
    """Keeps what requests `slots` i32[max_seqs], R for none, leave in their rows where they just ended.

    Returns the state, and i32[max_seqs], the rows' first tokens that are published.
    """
    context_len, requests = state.cache.context_len, state.requests
    if not options.parts.keeps_ends or state.parts is None or requests.keeps_end is None:
        return state, context_len
    keeps = get_at(requests.keeps_end, slots, False)
    prompt_len = get_at(requests.prompt_len, slots, 0)
    published = jnp.where(keeps, jnp.minimum(prompt_len, context_len), context_len)
    # What was computed under other weights has no name.
    is_left = keeps & is_end & state.may_publish
    kept = state.parts.ids.reshape(-1)

    def keep(loop: tuple[Cache, jax.Array, jax.Array]) -> tuple[Cache, jax.Array, jax.Array]:
        cache, is_left, published = loop
        row = first_true(is_left)[None]
        slot = slots[row]
        tokens, length = state.tokens_of(slot), get_at(state.length, slot) - 1
        cache, num = options.parts.keep_end(cache, row, tokens, prompt_len[row], length, kept)
        return cache, is_left.at[row].set(False), published.at[row].set(num)

    loop = state.cache, is_left, published
    cache, _, published = lax.while_loop(lambda loop: loop[1].any(), keep, loop)
    return dataclasses.replace(state, cache=cache), published


def _leave(state: EngineState, rows: jax.Array) -> EngineState:
    """Frees running rows i32[n], whose requests wait again; `max_seqs` is skipped."""
    assert state.parts is not None
    slots = get_at(state.row_request, rows, state.requests.num_slots)
    has_run = (get_at(state.num_preemptions, slots, 0) > 0) | (get_at(state.num_generated, slots, 0) > 0)
    control, _ = free_rows(state.cache.control, rows, config=state.cache.config)
    row_request = set_at(state.row_request, rows, state.requests.num_slots)
    return state.with_control(
        control,
        phase=set_at(state.phase, slots, jnp.where(has_run, Phase.PREEMPTED, Phase.WAITING)),
        row_request=row_request,
        parts=state.parts.where(row_request < state.requests.num_slots),
        may_admit=state.may_admit | (rows < state.cache.max_seqs).any(),
    )


def put_parts(state: EngineState, options: Options) -> EngineState:
    """Puts its parts into the best row that has the tokens before the first one.

    Where blocks are short for it the worst row goes, until there are enough: at last it is alone, or itself
    the worst. So the best one has its parts in the end.
    """
    if state.parts is None:
        return state
    is_ready = state.is_running & (state.cache.context_len == state.first_part)

    def put(state: EngineState) -> EngineState:
        assert state.requests.parts is not None and state.parts is not None
        order, max_seqs = rows_in_order(state, options), state.cache.max_seqs
        row = order[first_true(is_ready[order])][None]
        worst = order[num_true(state.is_running) - 1][None]
        slot, ids, first = state.row_request[row], state.parts.ids[row], state.cache.context_len[row]
        spans = state.requests.parts[slot]
        places = jnp.arange(state.cache.config.max_seq_len, dtype=jnp.int32)
        span = spans[0][..., None]
        is_part = (places[None] >= span[:, 0]) & (places[None] < span[:, 1]) & (ids[0][:, None] != NO_PART)
        num_new = state.num_wanted[row]
        lack = required_for(state.cache.control, row, num_new, state.cache.config)
        state = make_room_for(state, lack, ids, options)
        assert state.parts is not None
        cache, is_put, is_again = options.parts.put(
            state.cache, row, ids, spans[..., 0], state.tokens_of(slot)
        )
        # The prompt's last token is computed for its logits, as a next one; but in its place where generated
        # tokens follow, whose blocks are reserved.
        last = first + num_new
        end = jnp.minimum(last, state.row_length[row] - 1)
        is_here = (places >= first) & (places < end[0])
        is_last = places == get_at(state.requests.prompt_len, slot, 0) - 1
        is_again = is_here & (is_again | is_last | ~is_part.any(axis=0))
        control, _ = truncate_rows(
            cache.control, jnp.where(is_put & (end < last), row, max_seqs), end, config=cache.config
        )
        done = jnp.where(is_put, row, max_seqs)
        parts = dataclasses.replace(
            state.parts,
            ids=set_at(state.parts.ids, done, jnp.full_like(ids, NO_PART)),
            is_again=set_at(state.parts.is_again, done, is_again[None]),
        )
        gone = jnp.where(is_put, max_seqs, worst)
        is_counted = ~get_at(state.is_alone, gone, True)
        preempted = jnp.where(is_counted, get_at(state.row_request, gone, 0), state.requests.num_slots)
        state = dataclasses.replace(
            state,
            cache=dataclasses.replace(cache, control=control),
            parts=parts,
            num_preemptions=add_at(state.num_preemptions, preempted, 1),
        )
        reused_tokens = jnp.where(is_put, num_true(is_here & ~is_again), 0)
        return _leave(count(state, reused_tokens=reused_tokens, preemptions=~is_put[None]), gone)

    return run_if(is_ready.any(), put, state)
