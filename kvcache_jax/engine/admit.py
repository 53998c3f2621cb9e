"""Admission of requests on the device, and the preemption that makes room for rows that run."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import (
    add_at,
    first_true,
    get_at,
    num_true,
    quotient,
    rank_true,
    set_at,
)
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.order import (
    first_of,
    is_parent_pending,
    metadata,
    num_cached_of,
    prompts_of,
    rows_in_order,
    waits,
)
from kvcache_jax.engine.policies import INPUT_WEIGHT, keys_of, policies
from kvcache_jax.engine.state import EngineState, Phase, count
from kvcache_jax.operations.allocate import Hits, Prompts, allocate_rows, find_hits, required_blocks
from kvcache_jax.operations.fork import fork_rows
from kvcache_jax.operations.free import free_rows
from kvcache_jax.operations.reserve import needs, num_available


class _Admitting(NamedTuple):
    """The carry of the loop over candidates; `is_passed` bool[R] are those that wait for another's blocks."""

    state: EngineState
    is_passed: jax.Array
    num_looks: jax.Array
    goes_on: jax.Array


def admit(state: EngineState, options: Options) -> EngineState:
    """Admits waiting requests, at most `options.most_admissions` looks."""
    looks_up = policies.find(options.policy).options["looks_up"]
    cached = num_cached_of(state) if looks_up else None
    pools, kept = state.cache.pools, state.cache.kept

    def look(loop: _Admitting) -> _Admitting:
        state = loop.state
        keys = keys_of(options.policy, metadata(state, options, cached))
        slot = first_of(keys, waits(state) & ~loop.is_passed)
        row = first_true(~state.cache.is_active)
        is_one = (slot < state.requests.num_slots) & (row < state.cache.max_seqs)
        prompts = prompts_of(state, slot[None])
        hits = find_hits(state.cache.control, prompts, state.cache.config)
        # A request that waits for another's blocks is passed; one that does not fit ends the admissions.
        is_waiting = is_one & _shares_what_is_computed(state, prompts, hits) & prompts.reuse[0]
        is_admitted = is_one & ~is_waiting & _fits(state, prompts, hits, options)
        admitted = jnp.where(is_admitted, slot, state.requests.num_slots)
        state = _start(state, admitted, row, prompts, hits, options)
        return _Admitting(
            state,
            loop.is_passed | (is_waiting & (jnp.arange(loop.is_passed.size, dtype=jnp.int32) == slot)),
            loop.num_looks + 1,
            is_admitted | is_waiting,
        )

    def goes_on(loop: _Admitting) -> jax.Array:
        return loop.goes_on & (loop.num_looks < options.most_admissions)

    # Without the pools, which nothing here reads.
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, pools=(), kept=None))
    start = _Admitting(state, jnp.zeros(state.phase.shape, bool), jnp.int32(0), waits(state).any())
    loop = lax.while_loop(goes_on, look, start)
    cache = dataclasses.replace(loop.state.cache, pools=pools, kept=kept)
    cache = cache.config.keeper.settle(cache)
    # Looks ran out, or requests were passed: in both cases a later step has to look again.
    return dataclasses.replace(loop.state, cache=cache, may_admit=loop.goes_on | loop.is_passed.any())


def _fits(state: EngineState, prompts: Prompts, hits: Hits, options: Options) -> jax.Array:
    """Tests whether there are blocks for one more request, bool[]."""
    cache = state.cache
    required = jnp.concatenate(required_blocks(cache.control, prompts, hits, cache.config))
    wanted = (state.num_to_compute > 0).astype(jnp.int32)
    growth = jnp.sum(needs(cache.control, wanted, cache.config).num_blocks, axis=1, dtype=jnp.int32)
    # The watermark does not bind while no row runs, or a large request would wait for ever.
    held_back = jnp.where(state.is_running.any(), jnp.array(options.num_reserved(cache), jnp.int32), 0)
    return (required + growth + held_back <= num_available(cache.control)).all()


def _shares_what_is_computed(state: EngineState, prompts: Prompts, hits: Hits) -> jax.Array:
    """Tests whether a running row computes a block of the one prompt that is not published yet, bool[]."""
    cache, config = state.cache, state.cache.config
    if cache.control.prefix_index is None:
        return jnp.bool_(False)
    length = state.row_length
    prompt_len = get_at(state.requests.prompt_len, state.row_request, 0)
    is_computing = state.is_running & state.may_publish
    is_computing &= cache.context_len < jnp.maximum(prompt_len, length - 1)
    is_computing &= (cache.control.namespace == prompts.namespace).all(axis=1)

    def shares() -> jax.Array:
        tokens, mine = state.row_tokens, prompts.tokens
        assert mine is not None
        num_common = first_true(tokens != mine)
        # A row computes the last token of its prompt itself: a block that ends with it is no reason to wait.
        num_common = jnp.minimum(num_common, jnp.minimum(length, prompts.num_tokens - 1))
        block_size = config.groups[config.indexed_group].block_size
        num_blocks = jnp.where(is_computing, quotient(jnp.maximum(num_common, 0), block_size), 0)
        return (num_blocks > quotient(hits.num_tokens, block_size)).any()

    return lax.cond(is_computing.any(), shares, lambda: jnp.bool_(False))


def _start(
    state: EngineState, slot: jax.Array, row: jax.Array, prompts: Prompts, hits: Hits, options: Options
) -> EngineState:
    """Starts request `slot` i32[] in `row` i32[]; the slot R is none."""
    requests, max_seqs = state.requests, state.cache.max_seqs
    row = jnp.where(slot < requests.num_slots, row, max_seqs)
    control, admission = allocate_rows(
        state.cache.control, row[None], prompts, hits, config=state.cache.config
    )
    is_first = get_at(state.num_preemptions, slot, 1) == 0
    client = jnp.where(is_first, get_at(requests.client, slot, 0), state.service.shape[0])
    # Earlier requests that still wait were bypassed; policies bound how often that may happen.
    is_passed = waits(state) & (requests.uid < get_at(requests.uid, slot, -1))
    state = state.with_control(
        control,
        phase=set_at(state.phase, slot, Phase.RUNNING),
        row_request=set_at(state.row_request, row, slot),
        may_publish=set_at(state.may_publish, row, True),
        num_bypassed=state.num_bypassed + is_passed.astype(jnp.int32),
        # A request that comes back finds its own blocks, which says nothing of its prompt.
        num_cached=set_at(
            state.num_cached, jnp.where(is_first, slot, requests.num_slots), admission.num_cached[0]
        ),
        service=add_at(state.service, client, INPUT_WEIGHT * get_at(requests.prompt_len, slot, 0)),
    )
    return count(state, admissions=(row < max_seqs)[None], cached_tokens=admission.num_cached[0])


def fork_samples(state: EngineState) -> EngineState:
    """Forks rows whose prompt lacks its last token for the other samples of the prompt, as far as rows go.

    Each computes the last token itself, and so has logits of its own. Samples that get no row wait like
    requests of their own, and find the prompt in the cache.
    """
    requests, cache = state.requests, state.cache
    max_seqs, num_slots = cache.max_seqs, requests.num_slots
    rows = jnp.arange(max_seqs, dtype=jnp.int32)
    is_ready = (state.num_to_compute == 1) & (get_at(state.num_generated, state.row_request, 1) == 0)
    ready_row = set_at(
        jnp.full(num_slots, max_seqs, jnp.int32), jnp.where(is_ready, state.row_request, num_slots), rows
    )
    source = get_at(ready_row, requests.parent, max_seqs)
    is_sample = (state.phase == Phase.WAITING) & is_parent_pending(state) & (source < max_seqs)
    wanted = (state.num_to_compute > 0).astype(jnp.int32)
    growth = jnp.sum(needs(cache.control, wanted, cache.config).num_blocks, axis=1, dtype=jnp.int32)
    most = jnp.min(num_available(cache.control) - growth)  # each soon wants a block
    nth_sample, _ = rank_true(is_sample)
    nth_row, num_rows = rank_true(~cache.is_active)
    is_sample &= (nth_sample < num_rows) & (nth_sample < most)
    row_of_rank = set_at(jnp.full_like(rows, max_seqs), jnp.where(cache.is_active, max_seqs, nth_row), rows)
    row = jnp.where(is_sample, get_at(row_of_rank, nth_sample, max_seqs), max_seqs)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    # Entries by row: a fork has one source and one destination.
    src = set_at(jnp.full_like(rows, max_seqs), row, source)
    dst = jnp.where(src < max_seqs, rows, max_seqs)
    control, _ = fork_rows(cache.control, src, dst, config=cache.config)
    state = state.with_control(
        control,
        phase=jnp.where(is_sample, Phase.RUNNING, state.phase).astype(jnp.int32),
        row_request=set_at(state.row_request, row, slots),
        may_publish=set_at(state.may_publish, row, get_at(state.may_publish, source)),
    )
    return count(state, forks=num_true(is_sample))


def preempt(state: EngineState, options: Options) -> tuple[EngineState, jax.Array]:
    """Frees rows until those that stay have a block for their next token; touches no pool.

    Masks the rows that go on without one, bool[max_seqs].
    """
    cache = state.cache
    wanted = (state.num_to_compute > 0).astype(jnp.int32)
    is_short = jnp.sum(needs(cache.control, wanted, cache.config).num_blocks, axis=1) > num_available(
        cache.control
    )
    order, max_seqs = rows_in_order(state, options), cache.max_seqs
    ranks = jnp.arange(max_seqs, dtype=jnp.int32)

    def settle(loop):
        control, wanted, is_stalled, granted, rank = loop
        row = order[rank]
        need = needs(control, wanted, cache.config).num_blocks[:, row]
        available = num_available(control) - granted
        fits = (wanted[row] == 0) | (need <= available).all()
        is_worse = set_at(jnp.zeros(max_seqs, bool), jnp.where(ranks > rank, order, max_seqs), True)
        is_worse &= control.is_active & state.is_running
        goes = ~fits & _is_enough(control, cache.config, is_worse, wanted, row, available)
        worst = jnp.max(jnp.where(get_at(is_worse, order), ranks, 0))
        victim = jnp.where(goes, order[worst], max_seqs)
        control, _ = free_rows(control, victim[None], config=cache.config)
        granted += jnp.where(fits, need, 0)
        is_stalled = set_at(is_stalled, jnp.where(fits | goes, max_seqs, row), True)
        return control, set_at(wanted, victim, 0), is_stalled, granted, rank + jnp.where(goes, 0, 1)

    rank = jnp.where(is_short.any(), 0, max_seqs).astype(jnp.int32)
    loop = cache.control, wanted, jnp.zeros(max_seqs, bool), jnp.zeros(len(cache.config.groups), jnp.int32)
    control, _, is_stalled, _, _ = lax.while_loop(lambda loop: loop[4] < max_seqs, settle, (*loop, rank))

    is_victim = state.is_running & ~control.is_active
    slots = jnp.where(is_victim, state.row_request, state.requests.num_slots)
    state = state.with_control(
        control,
        phase=set_at(state.phase, slots, Phase.PREEMPTED),
        num_preemptions=add_at(state.num_preemptions, slots, 1),
        row_request=jnp.where(is_victim, state.requests.num_slots, state.row_request),
        may_admit=state.may_admit | is_victim.any(),
    )
    return count(state, preemptions=is_victim, stalls=is_stalled), is_stalled


def _is_enough(
    control: Control,
    config: CacheConfig,
    is_worse: jax.Array,
    wanted: jax.Array,
    row: jax.Array,
    available: jax.Array,
) -> jax.Array:
    """Tests whether `row` would have its blocks without all worse rows, bool[]."""
    owners, num_freed = [], []
    for pool in control.block_pools:
        held = jnp.where(is_worse[:, None], pool.block_table, pool.num_blocks)
        owners.append(add_at(pool.ref_count, held, -1))
        num_freed.append(jnp.sum((owners[-1] == 0) & (pool.ref_count > 0), dtype=jnp.int32))
    need = needs(control, wanted, config, tuple(owners)).num_blocks[:, row]
    return is_worse.any() & (need <= available + jnp.stack(num_freed)).all()
