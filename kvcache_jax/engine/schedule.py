"""The schedule of steps, a pure function of the state: rows freed, requests admitted, tokens computed.

A step computes at most `max_seqs * width + num_pieces * piece_len` tokens, its budget. The rows' next tokens
come first: every running row computes one in every step, whatever it has left to do. The rest of the budget
goes to the prompts of running rows, the best row first, and then to the prompts just admitted. The last token
of a prompt is always such a next token, so that tokens are drawn in one place, and prompts are computed
without logits that no row needs. With recurrent layers the other ones never are: a row whose prompt is not
computed yet gets pieces alone, which end where the pieces of every other row do; see `CacheConfig.piece_len`.

Progress. There is a request of which every step computes a token, as long as one waits or runs:

1. If no row runs, the first request of the policy's order is admitted: all blocks are free or cached, the
   watermark does not bind, and its blocks fit into the pool, or it would have been refused.
2. The best running row computes its next token, or pieces of its prompt, in every step: it is never
   preempted, and after `preempt` it has a block. It waits once where it is forked while its prompt is
   computed, and at its first part while worse rows go, one a step, until there are blocks for its parts.
3. The order of running rows changes by preemptions alone, and by each request's at most three times; so from
   some step on a row stays the best until it is done or a better one is admitted. Better ones are finitely
   many: by arrival those that came before; by priority those that came before or within the steps that
   their priority is worth.

So every request ends after finitely many steps, also where the pool has just the blocks that it needs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient, rank_true, run_of, set_at
from kvcache_jax.core.backends import by_platform, run_if_due
from kvcache_jax.core.state import Control
from kvcache_jax.engine.admit import admit
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.order import rows_in_order, waits
from kvcache_jax.engine.parts import keep_computed, put_parts
from kvcache_jax.engine.state import EngineState
from kvcache_jax.operations.free import free_rows
from kvcache_jax.operations.reserve import lacks

_FREED_ON_CPUS = 2
"""Rows at once: of each all columns of its table are looked at."""
_STEPS_BETWEEN_ADMISSIONS = 16
"""Where nothing changed but the time."""


class PromptPieces(NamedTuple):
    """The prompt tokens of a step: `P` pieces of `T`, the best row's first, a row's in order."""

    tokens: jax.Array  # i32[P, T]; 0 where there is none
    rows: jax.Array  # i32[P]; `max_seqs` for a piece without row
    first: jax.Array  # i32[P], position of its first token
    nth: jax.Array  # i32[P], its number among the row's pieces
    num_tokens: jax.Array  # i32[P]


def is_unusual(state: EngineState) -> jax.Array:
    """Tests whether a step needs more than a free block for each row's next token, bool[].

    More is: requests that may be admitted, prompts of more than a token, blocks that must be evicted or
    copied, rows that must be preempted, and prompts that are put together.
    """
    cache = state.cache
    wanted = (state.num_to_compute > 0).astype(jnp.int32)
    is_rare = lacks(cache, wanted) | state.is_put_together.any()
    is_time = state.may_admit | (state.step % _STEPS_BETWEEN_ADMISSIONS == 0) | ~state.is_running.any()
    admits = is_time & ~cache.is_active.all() & waits(state).any()
    return admits | (state.num_to_compute > 1).any() | is_rare


def finish(state: EngineState) -> EngineState:
    """Frees the rows that ended; their published blocks stay cached."""
    config, max_seqs = state.cache.config, state.cache.max_seqs
    num_at_once = min(by_platform(cpu=_FREED_ON_CPUS, accelerator=max_seqs), max_seqs)

    def free_some(loop: tuple[Control, jax.Array]) -> tuple[Control, jax.Array]:
        control, is_left = loop
        nth, _ = rank_true(is_left)
        place = jnp.where(is_left, nth, num_at_once)
        none = jnp.full(num_at_once, max_seqs, jnp.int32)
        rows = set_at(none, place, jnp.arange(max_seqs, dtype=jnp.int32))
        return free_rows(control, rows, config=config)[0], is_left & (nth >= num_at_once)

    loop = state.cache.control, state.is_ended
    if num_at_once == max_seqs:
        control, _ = free_some(loop)
    else:
        control, _ = lax.while_loop(lambda loop: loop[1].any(), free_some, loop)
    return state.with_control(
        control,
        is_ended=jnp.zeros_like(state.is_ended),
        may_admit=state.may_admit | state.is_ended.any(),
        parts=None if state.parts is None else state.parts.where(state.is_running),
    )


def schedule(state: EngineState, options: Options, num_next: int = 0) -> tuple[EngineState, PromptPieces]:
    """Admits requests, and shares the budget among prompts; see `plan_prompts`."""
    state = keep_computed(state, options)
    has_place = ~state.cache.is_active.all() & waits(state).any()
    state = put_parts(run_if_due(has_place, lambda state: admit(state, options), state), options)
    plan = plan_prompts(state, options, num_next)
    if state.parts is not None:  # what is computed again takes the budget of prompts
        num_tokens = jnp.where(state.parts.is_again.any(), 0, plan.num_tokens)
        plan = plan._replace(num_tokens=num_tokens)
    return state, plan


def plan_prompts(state: EngineState, options: Options, num_next: int = 0) -> PromptPieces:
    """Cuts the prompts of running rows, without their last tokens, into the pieces of one step.

    Windows hold what a row's pieces and `num_next` tokens after them read at once.
    """
    num_pieces, piece_len = options.num_pieces, options.piece_len
    max_seqs, limit = state.cache.max_seqs, state.cache.config.query_len_limit
    order = rows_in_order(state, options)
    most = min(limit, options.schedule.long_prefill_len or limit)
    if not all(group.span.keeps_all for group in state.cache.config.groups):
        most = min(most, limit - num_next)
    most = state.cache.config.piece_len(most) if most else 0
    want = jnp.clip(get_at(state.num_to_compute, order, 0) - 1, 0, most)
    num_wanted = quotient(want + piece_len - 1, piece_len)
    end = jnp.cumsum(num_wanted, dtype=jnp.int32)
    begin = end - num_wanted
    num_new = jnp.minimum(want, (num_pieces - jnp.minimum(begin, num_pieces)) * piece_len)

    piece = jnp.arange(num_pieces, dtype=jnp.int32)
    rank = run_of(end, piece)
    row = get_at(order, rank, max_seqs)
    nth = jnp.where(row < max_seqs, piece - get_at(begin, rank, 0), 0)
    num_tokens = jnp.clip(get_at(num_new, rank, 0) - nth * piece_len, 0, piece_len)
    first = get_at(state.cache.context_len, row, 0) + nth * piece_len
    start = get_at(state.row_start, row, 0)
    place = jnp.arange(piece_len, dtype=jnp.int32)[None]
    tokens = get_at(state.requests.tokens, (start + first)[:, None] + place)
    tokens = jnp.where(place < num_tokens[:, None], tokens, 0)
    return PromptPieces(tokens, row, first, nth, num_tokens)
