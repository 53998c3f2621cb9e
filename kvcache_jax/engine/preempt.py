"""Preemption: rows give way, the worst first, so that better rows have a block for their next token.

Rows are served from the best to the worst. One that lacks a block first asks whether freeing all worse rows
would be enough. If so, they are preempted one after the other from the worst, until it is. If not, no row is
preempted, and the row computes nothing in this step.

The best row is never preempted, and never lacks a block after this: without all other rows the pool has what
the longest continuation of any request that was not refused ever holds.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, get_at, set_at
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.order import rows_in_order
from kvcache_jax.engine.state import EngineState, Phase, count
from kvcache_jax.operations.free import free_rows
from kvcache_jax.operations.reserve import needs, num_available


def preempt(state: EngineState, options: Options) -> tuple[EngineState, jax.Array]:
    """Frees rows until those that stay have a block for their next token; touches no pool.

    Returns:
      The state, and bool[max_seqs], rows that go on without one.
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
    state = dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, control=control),
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
