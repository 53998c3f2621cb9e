"""One step of the engine whose logits do not depend on the other rows of the batch, to the last bit.

    admit -> reserve for prompts                                  under a guard, a loop of 0 or 1 trips
    a part of the prompts -> model                                as often as there are parts
    fork -> preempt -> reserve -> next tokens -> model            the last trip of the same loop
    draw -> write down -> publish

Floating point sums depend on their order, and XLA chooses the order by shapes: one row's products differ
between batches of 1, 8 and 64 tokens. So the model is called at one place of the program, in the body of a
loop, always on as many tokens, `body_len`, each a row of one token: prompts are a few trips more. One
thing is left: a row of that one shape must not depend on its place in it, nor on the other rows:

* Products, norms and rotations work row by row, and XLA computes each row of a product alike. `body_len` is a
  multiple of 16, so that no row falls to the remainder of a vectorised loop.
* Attention goes through tiles of one length from each row's first block on. A tile after a row's last one,
  which only longer rows need, changes nothing: it adds 0 and scales by exp(0) = 1.

Where layers have states, a step has one part of prompts at most: it keeps no state for a second part to go on
from.

Tests hold this for XLA's programs on CPUs; other backends, and models that mix rows, promise nothing.

References:
  Defeating Nondeterminism in LLM Inference (He, Thinking Machines Lab, 2025), for the causes and fixed tiles.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import num_true, run_if
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.core.config import ceil_div
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.engine.draw import Computed, note_prompts
from kvcache_jax.engine.joined_step import by_token
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.schedule import is_unusual, schedule
from kvcache_jax.engine.state import EngineState
from kvcache_jax.engine.step import Model, draw_next, make_room, reserve_next, reserve_prompts


class PromptTokens(NamedTuple):
    """The prompt tokens of a step."""

    tokens: jax.Array  # i32[n, 1]
    step: Step  # of n rows of one token each, without plans
    num_parts: jax.Array  # i32[], bodies that they fill


class Next(NamedTuple):
    """The rows' next tokens: i32[max_seqs, width], and the step that reserved slots for them."""

    tokens: jax.Array
    step: Step


def take_invariant_step(model: Model, params: Any, state: EngineState, options: Options) -> EngineState:
    """Makes one step: every running row computes its next token, or a part of its prompt."""
    length = options.body_len(state.cache.max_seqs)
    is_rare = is_unusual(state)

    def plan_prompts(state: EngineState) -> tuple[EngineState, PromptTokens]:
        state, plan = schedule(state, options)
        state, step = reserve_prompts(state, plan)
        num_rows = ceil_div(plan.tokens.size, length) * length
        tokens, step = _by_token(state.cache, plan.tokens, step, num_rows)
        num_tokens = num_true(plan.num_tokens > 0)
        return state, PromptTokens(tokens, step, (num_tokens + length - 1) // length)

    def plan_next(state: EngineState) -> tuple[EngineState, Next]:
        none = jnp.zeros(state.cache.max_seqs, bool)
        state, is_stalled = run_if(is_rare, lambda carry: make_room(carry[0], options), (state, none))
        state, tokens, step = reserve_next(state, is_stalled, options)
        return state, Next(tokens, dataclasses.replace(step, plans=()))

    def call(carry: tuple) -> tuple:
        state, prompts, following, _, i = carry
        is_last = i == prompts.num_parts
        state, following = run_if(is_last, lambda carry: plan_next(carry[0]), (state, following))
        part = lax.rem(i, jnp.maximum(prompts.num_parts, 1))  # any, where the next tokens are wanted
        part = _part_of(prompts, part * length, length)
        last = _by_token(state.cache, following.tokens, following.step, length)
        body = jax.tree.map(lambda x, y: jnp.where(is_last, x, y), last, part)
        cache, logits = _call(model, params, state, state.cache, *body)
        state = dataclasses.replace(state, cache=cache)
        if options.prompt_logprobs:
            state = note_prompts(state, body[1], logits[:, None])
        return state, prompts, following, logits, i + 1

    empty = _zeros_like(jax.eval_shape(plan_prompts, state)[1])
    state, prompts = run_if(is_rare, lambda carry: plan_prompts(carry[0]), (state, empty))
    following = _zeros_like(jax.eval_shape(plan_next, state)[1])
    body = _by_token(state.cache, following.tokens, following.step, length)
    logits = _zeros_like(
        jax.eval_shape(lambda cache: _call(model, params, state, cache, *body)[1], state.cache)
    )
    carry = state, prompts, following, logits, jnp.int32(0)
    state, _, following, logits, _ = lax.while_loop(lambda carry: carry[4] <= carry[1].num_parts, call, carry)
    shape = following.tokens.shape
    logits = logits[: following.tokens.size].reshape(*shape, -1)
    computed = Computed(following.step.query_len, logits, following.tokens)
    return draw_next(model, params, state, computed, options)


def _call(
    model: Model, params: Any, state: EngineState, cache: Cache, tokens: jax.Array, step: Step
) -> tuple[Cache, jax.Array]:
    """Calls the model on tokens i32[n, 1]; returns the cache, and the logits [n, vocab]."""
    logits, cache = model.call(params, state, tokens, cache, plan_attention(cache, step))
    return cache, logits[:, 0]


def _by_token(cache: Cache, tokens: jax.Array, step: Step, num_rows: int) -> tuple[jax.Array, Step]:
    tokens = jnp.pad(tokens.reshape(-1), (0, num_rows - tokens.size))[:, None]
    return tokens, by_token(cache, step, num_rows)


def _part_of(prompts: PromptTokens, first: jax.Array, length: int) -> tuple[jax.Array, Step]:
    """Cuts out `length` tokens, from `first` i32[] on."""
    rows = prompts.tokens, prompts.step
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, length), rows)


def _zeros_like(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
