"""Admission of requests on the device, and the preemption that makes room for rows that run."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import (
    add_at,
    get_at,
    num_true,
    quotient,
    rank_true,
    set_at,
)
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.backends import by_platform, computed_once, run_if_due
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.extras import Turn
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.order import (
    charged,
    is_parent_pending,
    look_up,
    next_waiting,
    rows_in_order,
    waits,
)
from kvcache_jax.engine.parts import Wanted, make_room_for, parts_behind, wanted_parts
from kvcache_jax.engine.state import EngineState, Phase, count
from kvcache_jax.operations.allocate import Hits, Prompts, allocate_rows, required_blocks
from kvcache_jax.operations.fork import fork_rows
from kvcache_jax.operations.free import free_rows
from kvcache_jax.operations.reserve import needs, num_available

_COMPARED_ON_CPUS, _COMPARED_ON_ACCELERATORS = 64, 512
"""Tokens of each prompt that are compared at once."""


def admit(state: EngineState, options: Options) -> EngineState:
    """Admits the first waiting requests of the policy's order, as far as there are rows and blocks.

    All are looked up before any is admitted. One that lacks a block which a row is to compute is passed, and
    waits for it; the first for which there are no blocks ends the admissions.
    """
    cache, num_slots = state.cache, state.requests.num_slots
    slots = next_waiting(state, options, min(options.most_admissions, cache.max_seqs, num_slots))
    parts = wanted_parts(state, slots, options)
    is_alone = is_gone = jnp.zeros(slots.shape, bool)
    if parts is not None:
        is_alone = parts.alone_len > 0
    prompts, hits = look_up(state, slots, None if parts is None else parts.alone_len)
    is_computed = _is_computed(state, slots, prompts, hits, is_alone)
    required = jnp.stack(required_blocks(cache.control, prompts, hits, cache.config))
    required = jnp.where(is_alone, 2 * required, required)  # the row's, and those that are kept
    growth = needs(cache.control, state.num_wanted, cache.config).of_all_rows
    num_reserved = jnp.array(options.num_reserved(cache), jnp.int32)
    num_idle, is_running = num_true(~cache.is_active), state.is_running.any()
    if parts is not None:  # the first request is worth more than parts that no row is given
        lack = required[:, 0] + growth + jnp.where(is_running, num_reserved, 0)
        lack = jnp.where((slots[0] < num_slots) & (num_idle > 0), lack, 0)
        state = make_room_for(state, lack, parts.ids[0], options)
        cache = state.cache
        still = wanted_parts(state, slots, options)
        assert still is not None
        is_gone = (parts.ids != still.ids).any(axis=1)
    available = num_available(cache.control) - growth

    def decide(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
        goes_on, is_admitted, available = carry
        goes_on &= (slots[i] < num_slots) & (num_true(is_admitted) < num_idle)
        is_owner = jnp.append(jnp.ones(cache.max_seqs, bool), is_admitted)
        passes = (is_computed[:, i] & is_owner).any()
        passes |= is_alone[i] & (state.is_alone.any() | (is_alone & is_admitted).any()) | is_gone[i]
        num_blocks = required[:, i] - _num_revived(cache.control, hits, i, is_admitted)
        # The watermark does not bind while no row runs, or a large request would wait for ever.
        held_back = jnp.where(is_running | is_admitted.any(), num_reserved, 0)
        fits = (num_blocks + held_back <= available).all()
        is_passed = goes_on & passes
        goes_on &= passes | fits
        is_it = goes_on & ~passes
        is_admitted |= is_it & (order == i)
        return (goes_on, is_admitted, available - jnp.where(is_it, num_blocks, 0)), is_passed

    order = jnp.arange(slots.size, dtype=jnp.int32)
    carry = jnp.bool_(True), jnp.zeros(slots.shape, bool), available
    # A loop is compiled sooner; on a GPU it would be launches for each request.
    unroll = by_platform(cpu=1, accelerator=slots.size)
    (goes_on, is_admitted, _), is_passed = lax.scan(decide, carry, order, unroll=unroll)
    state = _start(state, jnp.where(is_admitted, slots, num_slots), prompts, hits, parts)
    cache = state.cache.config.keeper.settle(state.cache)
    # There may be more to admit, or some were passed: in both cases a later step has to look again.
    return dataclasses.replace(state, cache=cache, may_admit=goes_on | is_passed.any())


def _is_computed(
    state: EngineState, slots: jax.Array, prompts: Prompts, hits: Hits, is_alone: jax.Array | bool = False
) -> jax.Array:
    """Tests which owners are to compute and publish a block that a candidate lacks: bool[max_seqs + n, n].

    Candidates that are `is_alone` bool[n] publish nothing.

    Owners are the rows, and then the candidates themselves, each for those after it.
    """
    cache, num = state.cache, slots.shape[0]
    if cache.control.prefix_index is None:
        return jnp.zeros((cache.max_seqs + num, num), bool)
    nothing = state.requests.num_slots
    owners = jnp.where(state.may_publish & ~state.is_alone, state.row_request, nothing)
    owners = jnp.append(owners, jnp.where(is_alone, nothing, slots))
    length, num_known = get_at(state.length, owners, 0), jnp.append(cache.context_len, hits.num_tokens)
    num_published = jnp.maximum(get_at(state.requests.prompt_len, owners, 0), length - 1)
    length = jnp.minimum(length, state.prefix_len(owners))
    is_computing = num_known < jnp.minimum(num_published, state.prefix_len(owners))
    order = jnp.arange(num, dtype=jnp.int32)
    is_before = (order[:, None] < order[None]) & (num_true(~cache.is_active) > 1)
    is_before = jnp.concatenate([jnp.ones((cache.max_seqs, num), bool), is_before])
    namespace = jnp.concatenate([cache.control.namespace, prompts.namespace])
    may_share = (namespace[:, None] == prompts.namespace[None]).all(axis=-1)
    may_share &= is_before & is_computing[:, None]
    may_share &= (prompts.reuse & (slots < state.requests.num_slots))[None]

    block_size = cache.config.groups[cache.config.indexed_group].block_size
    num_needed = (quotient(hits.num_tokens, block_size) + 1) * block_size
    # A row computes the last token of its prompt itself: a block that ends with it is no reason to wait.
    num_own = jnp.minimum(prompts.num_tokens - 1, state.prefix_len(slots))
    num_own = jnp.minimum(length[:, None], num_own[None])

    num_at_once = by_platform(cpu=_COMPARED_ON_CPUS, accelerator=_COMPARED_ON_ACCELERATORS)

    def compare(loop: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        is_equal, first = loop
        places = first + jnp.arange(num_at_once, dtype=jnp.int32)
        # Read once: fused into the comparison, each token would be read for every pair.
        tokens = lax.optimization_barrier(state.tokens_of(owners, places))
        differs = tokens[:, None] != tokens[None, cache.max_seqs :]
        differs &= (places[None] < num_needed[:, None])[None]
        return is_equal & ~differs.any(axis=-1), first + num_at_once

    def goes_on(loop: tuple[jax.Array, jax.Array]) -> jax.Array:
        is_equal, first = loop
        return (is_equal & (first < num_needed)[None]).any()

    may_share &= num_needed[None] <= num_own
    return lax.while_loop(goes_on, compare, (may_share, jnp.int32(0)))[0]


def _num_revived(control: Control, hits: Hits, i: jax.Array, is_admitted: jax.Array) -> jax.Array:
    """Counts the hits of candidate `i` that no row holds, but an admitted candidate will, per group."""
    return jnp.stack(
        [
            num_true(
                block_pool.has_no_owner(pool.ref_count, ids[i])
                & (is_admitted[:, None] & (ids == ids[i][None])).any(axis=0)
            )
            for pool, ids in zip(control.block_pools, hits.block_ids, strict=True)
        ]
    )


def _start(
    state: EngineState, slots: jax.Array, prompts: Prompts, hits: Hits, parts: Wanted | None
) -> EngineState:
    """Starts requests `slots` i32[n], for which there are rows and blocks; the slot R is none."""
    cache, is_admitted = state.cache, slots < state.requests.num_slots
    rows = jnp.where(is_admitted, get_at(idle_rows(cache), rank_true(is_admitted)[0]), cache.max_seqs)
    control, admission = allocate_rows(cache.control, rows, prompts, hits, config=cache.config)
    rows_parts, served = state.parts, slots
    if parts is not None and rows_parts is not None:
        ids = parts_behind(state, slots, parts.ids, admission.num_cached)
        rows_parts = rows_parts.set(rows, parts.alone, ids)
        served = jnp.where(parts.alone_len > 0, state.requests.num_slots, slots)
    turn = Turn(*(get_at(column, served, 0) for column in state.requests.turn))
    control = cache.config.hooks.begin(control, rows, turn)
    # A request that comes back finds its own blocks, which says nothing of its prompt.
    told = jnp.where(get_at(state.num_preemptions, served, 1) == 0, served, state.requests.num_slots)
    state = state.with_control(
        control,
        phase=set_at(state.phase, slots, Phase.RUNNING),
        row_request=set_at(state.row_request, rows, slots),
        may_publish=set_at(state.may_publish, rows, True),
        num_cached=set_at(state.num_cached, told, admission.num_cached),
        parts=rows_parts,
    )
    num_cached = jnp.sum(admission.num_cached, dtype=jnp.int32)
    return count(charged(state, served, waits(state)), admissions=is_admitted, cached_tokens=num_cached)


def idle_rows(cache: Cache) -> jax.Array:
    """Lists the rows without a sequence, i32[max_seqs], the first one first; `max_seqs` past their number."""
    nth, _ = rank_true(~cache.is_active)
    rows = jnp.arange(cache.max_seqs, dtype=jnp.int32)
    return set_at(jnp.full_like(rows, rows.size), jnp.where(cache.is_active, rows.size, nth), rows)


def fork_samples(state: EngineState) -> EngineState:
    """Forks rows whose prompt lacks its last token for the other samples of the prompt, as far as rows go.

    Each computes the last token itself, and so has logits of its own. Samples that get no row wait like
    requests of their own, and find the prompt in the cache.
    """
    is_waiting = is_parent_pending(state) & (state.phase == Phase.WAITING)
    return run_if_due(is_waiting.any(), _fork_samples, state)


def _fork_samples(state: EngineState) -> EngineState:
    requests, cache = state.requests, state.cache
    max_seqs, num_slots = cache.max_seqs, requests.num_slots
    rows = jnp.arange(max_seqs, dtype=jnp.int32)
    is_ready = state.is_at_last & (get_at(state.num_generated, state.row_request, 1) == 0)
    ready_row = set_at(
        jnp.full(num_slots, max_seqs, jnp.int32), jnp.where(is_ready, state.row_request, num_slots), rows
    )
    source = get_at(ready_row, requests.parent, max_seqs)
    is_sample = (state.phase == Phase.WAITING) & is_parent_pending(state) & (source < max_seqs)
    growth = needs(cache.control, state.num_wanted, cache.config).of_all_rows
    most = jnp.min(num_available(cache.control) - growth)  # each soon wants a block
    nth_sample, _ = rank_true(is_sample)
    is_sample &= (nth_sample < num_true(~cache.is_active)) & (nth_sample < most)
    row = jnp.where(is_sample, get_at(idle_rows(cache), nth_sample, max_seqs), max_seqs)
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
    control, config = state.cache.control, state.cache.config
    wanted = (state.num_to_compute > 0).astype(jnp.int32)
    is_short = (needs(control, wanted, config).of_all_rows > num_available(control)).any()
    carry = state, jnp.zeros_like(state.is_ended)
    return run_if_due(is_short, lambda carry: _preempt(carry[0], wanted, is_short, options), carry)


def _preempt(
    state: EngineState, wanted: jax.Array, is_short: jax.Array, options: Options
) -> tuple[EngineState, jax.Array]:
    cache = state.cache
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
        fits, goes, victim = computed_once((fits, goes, jnp.where(goes, order[worst], max_seqs)))
        control, _ = free_rows(control, victim[None], config=cache.config)
        granted += jnp.where(fits, need, 0)
        is_stalled = set_at(is_stalled, jnp.where(fits | goes, max_seqs, row), True)
        return control, set_at(wanted, victim, 0), is_stalled, granted, rank + jnp.where(goes, 0, 1)

    rank = jnp.where(is_short, 0, max_seqs).astype(jnp.int32)
    loop = cache.control, wanted, jnp.zeros(max_seqs, bool), jnp.zeros(len(cache.config.groups), jnp.int32)
    control, _, is_stalled, _, _ = lax.while_loop(lambda loop: loop[4] < max_seqs, settle, (*loop, rank))

    is_victim = state.is_running & ~control.is_active
    slots = jnp.where(is_victim, state.row_request, state.requests.num_slots)
    # Who computed a part alone has had no row of its own, and is yet to be told what is cached.
    counted = jnp.where(state.is_alone, state.requests.num_slots, slots)
    state = state.with_control(
        control,
        phase=set_at(state.phase, slots, Phase.PREEMPTED),
        num_preemptions=add_at(state.num_preemptions, counted, 1),
        row_request=jnp.where(is_victim, state.requests.num_slots, state.row_request),
        may_admit=state.may_admit | is_victim.any(),
        parts=None if state.parts is None else state.parts.where(~is_victim),
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
