"""One step of the engine.

    finish -> admit -> prompts -> fork -> preempt -> reserve      under one guard, a loop of 0 or 1 trips
    next tokens -> draw -> write down -> publish                  in every step

In an ordinary step the guard is not passed: each row has a free block for its next token, and nothing else is
to be done. Then the host is waited for by the loop, the guard, sampling (greedy or not), and `commit` (once,
and once more for each trip): not by `extend`, whose loops are under the guard.

The two halves have the two shapes of the program: a step that only decodes computes `max_seqs` tokens, one
with prompts the budget.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import run_if
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.decoding.forward import width_of
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.parts import Model, draw_next, make_room, reserve_next, reserve_prompts
from kvcache_jax.engine.schedule import Plan, is_unusual, schedule
from kvcache_jax.engine.state import EngineState


def take_step(model: Model, params: Any, state: EngineState, options: Options) -> EngineState:
    """Makes one step: every running row computes its next token, or a part of its prompt."""

    def rare(carry):
        state, _ = carry
        state, plan = schedule(state, options)
        state = _compute_prompts(model, params, state, plan)
        return make_room(state, options)

    none = jnp.zeros(state.cache.max_seqs, bool)
    state, is_stalled = run_if(is_unusual(state), rare, (state, none))
    state, tokens, step = reserve_next(state, is_stalled, options)
    result = model.forward(params, tokens, state.cache, step)
    width_of(result, *tokens.shape)
    state = dataclasses.replace(state, cache=result[1])
    return draw_next(model, state, step, tokens, result[0], options)


def _compute_prompts(model: Model, params: Any, state: EngineState, plan: Plan) -> EngineState:
    """Computes pieces of prompts, if there are any; their logits are not read."""

    def compute(state: EngineState) -> EngineState:
        state, step = reserve_prompts(state, plan)
        result = model.forward(params, plan.tokens, state.cache, plan_attention(state.cache, step))
        width_of(result, *plan.tokens.shape)
        return dataclasses.replace(state, cache=result[1])

    return run_if((plan.num_tokens > 0).any(), compute, state)
