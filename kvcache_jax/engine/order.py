"""Requests in the order of a policy."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, first_true, get_at, set_at
from kvcache_jax.core.backends import by_platform
from kvcache_jax.decoding.prompts import NOT_LOOKED_UP
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.policies import INPUT_WEIGHT, RequestMetadata, keys_of, policies
from kvcache_jax.engine.state import EngineState, Phase
from kvcache_jax.operations.allocate import Hits, Prompts, find_hits

_MOST_LOOKED_UP = 16
"""Waiting requests that a policy knows the cached prefix of; the others keep the order of arrival."""
_LAST = jnp.iinfo(jnp.int32).max


def metadata(state: EngineState, options: Options, num_cached: jax.Array | None = None) -> RequestMetadata:
    """Collects the metadata that policies see; `num_cached` is i32[R]."""
    requests = state.requests
    return RequestMetadata(
        uid=requests.uid,
        # Not since the start: steps are counted modulo 2**32, and differences stay right.
        arrival_step=requests.arrival_step - state.step,
        priority=requests.priority,
        num_tokens=state.length,
        num_cached=jnp.zeros_like(requests.uid) if num_cached is None else num_cached,
        num_preemptions=state.num_preemptions,
        num_bypassed=state.num_bypassed,
        service=get_at(state.service, requests.client, 0),
        ageing_steps=options.schedule.ageing_steps,
        max_bypasses=options.schedule.max_bypasses,
    )


def first_of(keys: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
    """Finds the masked request with the lowest keys, i32[]; R for none."""
    for key in keys:
        mask &= key == jnp.min(jnp.where(mask, key, _LAST))
    return first_true(mask)


def next_waiting(state: EngineState, options: Options, num: int) -> jax.Array:
    """Finds the requests to admit next, i32[num] slots, each as if those before it had been; R for none."""
    num_cached = num_cached_of(state) if policies.find(options.policy).options["looks_up"] else None

    def choose(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
        is_left, num_bypassed, service = carry
        now = dataclasses.replace(state, num_bypassed=num_bypassed, service=service)
        slot = first_of(keys_of(options.policy, metadata(now, options, num_cached)), is_left)
        is_left &= jnp.arange(is_left.size, dtype=jnp.int32) != slot
        now = charged(now, slot[None], is_left)
        return (is_left, now.num_bypassed, now.service), slot

    carry, unroll = (waits(state), state.num_bypassed, state.service), by_platform(cpu=1, accelerator=num)
    return lax.scan(choose, carry, length=num, unroll=unroll)[1]


def charged(state: EngineState, slots: jax.Array, is_waiting: jax.Array) -> EngineState:
    """Charges the clients of requests `slots` i32[n] for their prompts, and those bool[R] that still wait.

    Policies bound how often later requests may go before one.
    """
    requests = state.requests
    is_first = get_at(state.num_preemptions, slots, 1) == 0
    client = jnp.where(is_first, get_at(requests.client, slots, 0), state.service.shape[0])
    is_bypassed = is_waiting[None] & (requests.uid[None] < get_at(requests.uid, slots, -1)[:, None])
    return dataclasses.replace(
        state,
        num_bypassed=state.num_bypassed + jnp.sum(is_bypassed, axis=0, dtype=jnp.int32),
        service=add_at(state.service, client, INPUT_WEIGHT * get_at(requests.prompt_len, slots, 0)),
    )


def rows_in_order(state: EngineState, options: Options) -> jax.Array:
    """Sorts the rows, i32[max_seqs]: the best running one first, those without a request last."""
    keys = keys_of(options.policy, metadata(state, options), of_rows=True)
    rows = jnp.arange(state.row_request.shape[0], dtype=jnp.int32)
    columns = [get_at(key, state.row_request, 0) for key in keys]
    *_, order = lax.sort((~state.is_running, *columns, rows), num_keys=1 + len(columns), is_stable=True)
    return order


def prompts_of(state: EngineState, slots: jax.Array, alone_len: jax.Array | None = None) -> Prompts:
    """Reads the tokens of requests `slots` i32[n] as prompts: generated ones belong to them.

    Where `alone_len` i32[n] is not 0 the prompt is a part of so many tokens, which is not looked up.
    """
    requests = state.requests
    num_tokens, reuse = get_at(state.length, slots, 0), ~get_at(state.wants_prompt, slots, False)
    if alone_len is not None:
        num_tokens, reuse = jnp.where(alone_len > 0, alone_len, num_tokens), reuse & (alone_len == 0)
    tokens = items = None
    if state.cache.control.prefix_index is not None:
        tokens = _looked_up(state, slots, jnp.arange(state.cache.config.max_seq_len, dtype=jnp.int32))
        items = None if requests.items is None else get_at(requests.items, slots, 0)
    return Prompts(
        num_tokens=num_tokens,
        namespace=get_at(requests.namespace, slots, 0),
        priority=get_at(requests.priority, slots, 0),
        tokens=tokens,
        reuse=reuse,
        items=items,
    )


def _looked_up(state: EngineState, slots: jax.Array, places: jax.Array) -> jax.Array:
    """Reads tokens of requests i32[n] at `places` i32[m] as a lookup of prefixes sees them."""
    tokens = state.tokens_of(slots, places)
    if state.requests.parts is None:
        return tokens
    return jnp.where(places[None] < state.prefix_len(slots)[:, None], tokens, NOT_LOOKED_UP)


def look_up(state: EngineState, slots: jax.Array, alone_len: jax.Array | None = None) -> tuple[Prompts, Hits]:
    """Looks requests `slots` i32[n] up."""
    prompts, cache = prompts_of(state, slots, alone_len), state.cache

    def read(first: jax.Array, num: int) -> jax.Array:
        return _looked_up(state, slots, first + jnp.arange(num, dtype=jnp.int32))

    return prompts, find_hits(cache.control, prompts, cache.config, read)


def waits(state: EngineState) -> jax.Array:
    """Masks the requests that could be admitted, bool[R]: none that will be forked from its parent."""
    requests = state.requests
    is_waiting = (state.phase == Phase.WAITING) | (state.phase == Phase.PREEMPTED)
    return is_waiting & ~(is_parent_pending(state) & (state.phase == Phase.WAITING)) & (requests.uid >= 0)


def is_parent_pending(state: EngineState) -> jax.Array:
    """Masks the requests that have a parent whose prompt is still to be computed, bool[R]."""
    requests, parent = state.requests, state.requests.parent
    phase = get_at(state.phase, parent, Phase.EMPTY)
    is_it = get_at(requests.uid, parent, -1) == requests.parent_uid
    is_early = get_at(state.num_generated, parent, 1) == 0
    return is_it & is_early & ((phase == Phase.WAITING) | (phase == Phase.RUNNING))


def num_cached_of(state: EngineState) -> jax.Array:
    """Looks up the first waiting requests: i32[R], tokens that the cache has of them, 0 of the others."""
    num_cached = jnp.zeros_like(state.phase)
    if state.cache.control.prefix_index is None:
        return num_cached
    age = jnp.where(waits(state), -state.requests.uid, -_LAST)
    _, slots = lax.top_k(age, min(_MOST_LOOKED_UP, age.shape[0]))
    slots = jnp.where(get_at(age, slots) > -_LAST, slots, age.shape[0]).astype(jnp.int32)
    _, found = look_up(state, slots)
    return set_at(num_cached, slots, found.num_tokens)
