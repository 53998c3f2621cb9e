"""The engine's one program: takes in the host's news, makes up to `k` steps, and reports.

The report is one array of i32, so that the host reads once per dispatch: a header (`Report`), the counters,
the slot that runs in each row, what the cache had of each request, then the outbox.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, num_true, set_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.blocks.block_pool import num_used
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.engine.invariant import take_invariant_step
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.requests import RequestArrays
from kvcache_jax.engine.schedule import finish
from kvcache_jax.engine.state import (
    NO_TOKEN,
    EngineCounter,
    EngineState,
    Finish,
    Phase,
    count,
    note_in_outbox,
)
from kvcache_jax.engine.step import STEPS, Model, take_step

_MOST_READ = 16
"""Numbers of a request's column up to which the whole column is read for a few new ones."""
_NEWS = EngineCounter.FINISHED, EngineCounter.FIRST_TOKENS


class Report(enum.IntEnum):
    """Index into the header of a report; the counters follow it."""

    OUTBOX_LEN = 0
    """Entries of the outbox."""
    RUNNING = 1
    """Rows with a request."""
    WAITING = 2
    """Requests without a row."""
    BLOCKS_USED = 3
    """Referenced blocks, all groups."""
    BLOCKS_CACHED = 4
    """Published blocks without owner."""
    BLOCKS_FREE = 5
    """The others."""


HEADER_LEN = len(Report) + len(EngineCounter)

_MOST_SERVICE = 2**29


@pytree_dataclass()
class Inbox:
    """News from the host, handed over with a dispatch; arrays of fixed sizes, in numpy."""

    slots: jax.Array  # i32[N], where new requests go; `num_slots` for none
    # The N new ones; `tokens` are i32[M], `namespace` u32[R, 4] of all slots, which new weights change.
    requests: RequestArrays
    places: jax.Array  # i32[M], where each token goes in the table's buffer; its length for none
    ended: jax.Array  # i32[E], slots of requests that end; `num_slots` for none
    ended_uid: jax.Array  # i32[E], which request it is
    reason: jax.Array  # i32[E], `Finish`
    num_generated: jax.Array  # i32[N], tokens of new requests after their prompts, known after a failure
    has_new_weights: jax.Array  # bool[], rows that run were computed under other ones


def run_dispatch(
    model: Model, params: Any, state: EngineState, inbox: Inbox, length: jax.Array, options: Options
) -> tuple[EngineState, jax.Array]:
    """Takes in the inbox and makes steps, as many as `length` i32[3] has at least and at most.

    The last of `length` is the time in ticks. It makes fewer than most once there are news, and than least
    without work or room in the outbox. The report is i32[HEADER_LEN + max_seqs + R + outbox].
    """
    state, before = dataclasses.replace(state, outbox_len=jnp.zeros_like(state.outbox_len)), state.counters
    control = state.cache.config.hooks.tick(state.cache.control, length[2])
    state = _take_in(model, params, state.with_control(control), inbox)
    most = options.most_entries(state.cache.max_seqs)

    def goes_on(loop: tuple[EngineState, jax.Array]) -> jax.Array:
        state, num_steps = loop
        has_room = state.outbox_len + most <= state.outbox.shape[0]
        has_news = [state.counters[event] != before[event] for event in _NEWS]
        most_steps = jnp.where(has_news[0] | has_news[1], length[0], length[1])
        return (num_steps < most_steps) & state.has_work & has_room

    def step(loop: tuple[EngineState, jax.Array]) -> tuple[EngineState, jax.Array]:
        state, num_steps = loop
        take = take_invariant_step if options.batch_invariant else take_step
        return take(model, params, state, options), num_steps + 1

    def has_ended(loop: tuple[EngineState, jax.Array]) -> jax.Array:
        return loop[0].is_ended.any()

    def steps(loop: tuple[EngineState, jax.Array]) -> tuple[EngineState, jax.Array]:
        """Frees the rows that ended, and makes steps until others end: the program has one place for it."""
        loop = finish(loop[0]), loop[1]
        with jax.named_scope(STEPS):
            return lax.while_loop(lambda loop: goes_on(loop) & ~has_ended(loop), step, loop)

    loop = state, jnp.zeros_like(length[0])
    state, _ = lax.while_loop(lambda loop: goes_on(loop) | has_ended(loop), steps, loop)
    return state, _report(state)


def _report(state: EngineState) -> jax.Array:
    pools = state.cache.control.block_pools
    cached = sum((p.cached.num_cached for p in pools if p.cached is not None), start=jnp.int32(0))
    is_waiting = (state.phase == Phase.WAITING) | (state.phase == Phase.PREEMPTED)
    figures = {
        Report.OUTBOX_LEN: state.outbox_len,
        Report.RUNNING: num_true(state.is_running),
        Report.WAITING: num_true(is_waiting),
        Report.BLOCKS_USED: sum((num_used(p) for p in pools), start=jnp.int32(0)),
        Report.BLOCKS_CACHED: cached,
        Report.BLOCKS_FREE: sum((p.num_free for p in pools), start=jnp.int32(0)),
    }
    header = jnp.stack([figures[name].astype(jnp.int32) for name in Report])
    counters = lax.bitcast_convert_type(state.counters, jnp.int32)
    columns = state.row_request, state.num_cached, state.outbox.reshape(-1)
    return jnp.concatenate([header, counters, *columns])


def _take_in(model: Model, params: Any, state: EngineState, inbox: Inbox) -> EngineState:
    """Ends requests that the host ended, changes the weights, and enters new requests."""
    state = _end(state, inbox)
    state = dataclasses.replace(state, may_publish=state.may_publish & ~inbox.has_new_weights)
    state = _enter(count(state, updates=inbox.has_new_weights[None]), inbox)
    return model.advanced_again(params, state, inbox.slots, inbox.num_generated)


def _end(state: EngineState, inbox: Inbox) -> EngineState:
    """Ends requests that the host cancels; their rows are freed before the next step."""
    requests = state.requests
    phase = get_at(state.phase, inbox.ended, Phase.EMPTY)
    is_it = (get_at(requests.uid, inbox.ended, -1) == inbox.ended_uid) & (inbox.ended_uid >= 0)
    is_it &= (phase >= Phase.WAITING) & (phase <= Phase.PREEMPTED)
    slots = jnp.where(is_it, inbox.ended, requests.num_slots)
    is_ended = set_at(jnp.zeros(state.phase.shape, bool), slots, True)
    ends = get_at(is_ended, state.row_request, False)
    nothing = jnp.zeros_like(slots)
    state = note_in_outbox(state, is_it, slots, nothing + NO_TOKEN, nothing.astype(jnp.float32), inbox.reason)
    state = dataclasses.replace(
        state,
        phase=jnp.where(is_ended, Phase.DONE, state.phase).astype(jnp.int32),
        row_request=jnp.where(ends, requests.num_slots, state.row_request),
        is_ended=state.is_ended | ends,
    )
    return count(state, finished=is_it)


def _enter(state: EngineState, inbox: Inbox) -> EngineState:
    """Enters new requests into the table; those that can never run are refused at once."""
    slots, old, new = inbox.slots, state.requests, inbox.requests
    is_new = slots < old.num_slots
    service = _lifted(state)
    # One scatter for all narrow columns: each slot reads its entry, or stays. Wide ones are not read whole.
    order = jnp.arange(slots.size, dtype=jnp.int32)
    entry = set_at(jnp.full(old.num_slots, slots.size, jnp.int32), slots, order)

    def entered(x: jax.Array, values: jax.Array) -> jax.Array:
        if x.size > _MOST_READ * old.num_slots:
            return set_at(x, slots, values)
        is_it = lax.broadcast_in_dim(entry < slots.size, x.shape, (0,))
        return jnp.where(is_it, get_at(values, entry).astype(x.dtype), x)

    of_slots = (requests.of_slots() for requests in (old, new))
    requests = dataclasses.replace(
        old,
        **jax.tree.map(entered, *of_slots),
        tokens=set_at(old.tokens, inbox.places, new.tokens),
        namespace=new.namespace,
        arrival_step=jnp.where(entry < slots.size, state.step, old.arrival_step),
    )
    is_refused = is_new & is_beyond(state.cache, new.prompt_len + new.max_new - 1)
    is_back = inbox.num_generated > 0
    phase = jnp.where(is_back, Phase.PREEMPTED, Phase.WAITING)
    phase = jnp.where(is_refused, Phase.DONE, phase).astype(jnp.int32)
    zeros = jnp.zeros_like(slots)
    state = dataclasses.replace(
        state,
        requests=requests,
        phase=entered(state.phase, phase),
        num_generated=entered(state.num_generated, inbox.num_generated),
        num_preemptions=entered(state.num_preemptions, zeros),
        num_bypassed=entered(state.num_bypassed, zeros),
        num_cached=entered(state.num_cached, zeros - 1),
        may_admit=state.may_admit | is_new.any(),
        service=service,
    )
    state = note_in_outbox(
        state,
        is_refused,
        slots,
        zeros + NO_TOKEN,
        zeros.astype(jnp.float32),
        zeros + Finish.REFUSED,
    )
    return count(state, finished=is_refused, refused=is_refused)


def is_beyond(cache: Any, num_tokens: jax.Array) -> jax.Array:
    """Masks the requests that could never run, bool[n], by the most tokens i32[n] that they ever store."""
    config: CacheConfig = cache.config
    is_too_long = num_tokens > config.max_seq_len
    for pool, group in zip(cache.control.block_pools, config.groups, strict=True):
        num_blocks = (num_tokens + group.block_size - 1) // group.block_size
        is_too_long |= jnp.minimum(num_blocks, group.max_held_blocks) > pool.num_blocks
    return is_too_long


def _lifted(state: EngineState) -> jax.Array:
    """Counts service from the least of the active clients: idle ones gain nothing by waiting."""
    is_active = (state.phase >= Phase.WAITING) & (state.phase <= Phase.PREEMPTED)
    num_clients = state.service.shape[0]
    clients = jnp.where(is_active, state.requests.client, num_clients)
    is_client_active = set_at(jnp.zeros(num_clients, bool), clients, True)
    least = jnp.min(jnp.where(is_client_active, state.service, jnp.iinfo(jnp.int32).max))
    service = jnp.where(is_active.any(), jnp.maximum(state.service - least, 0), state.service)
    # One who asks alone is given any number of tokens.
    return jnp.minimum(service, _MOST_SERVICE)


def outbox_len(options: Options, max_seqs: int, steps: int, num_entering: int, num_ended: int) -> int:
    """Counts the entries that `steps` steps and a full inbox may need."""
    return steps * options.most_entries(max_seqs) + num_entering + num_ended
