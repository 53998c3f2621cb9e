"""One step of the engine: requests end and start, rows get blocks, the model is called, tokens are drawn."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, first_true, get_at, read_first, run_if, set_at
from kvcache_jax.attention.attention_plan import each_alone, plan_attention
from kvcache_jax.core.backends import run_if_due
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.decoding.forward import Forward, width_of
from kvcache_jax.decoding.prefill import padded_step
from kvcache_jax.decoding.sampling import are_numbers
from kvcache_jax.engine.admit import fork_samples, preempt
from kvcache_jax.engine.draw import Computed, draw, next_tokens, note_prompts, write_down
from kvcache_jax.engine.inputs import AdvanceInputs, asks_for, inputs_of
from kvcache_jax.engine.joined_step import can_join, join, without_rows
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.order import rows_in_order
from kvcache_jax.engine.parts import forget_failed, keep_ends, make_room_for_next
from kvcache_jax.engine.schedule import PromptPieces, is_unusual, schedule
from kvcache_jax.engine.state import EngineState, count
from kvcache_jax.operations.commit import commit_rows
from kvcache_jax.operations.extend import extend_packed
from kvcache_jax.operations.reserve import extend_reserved, lacks, needs, num_free, reserve
from kvcache_jax.operations.rewrite import rewrite

ProcessLogits = Callable[..., jax.Array]
"""`(logits f32[max_seqs, vocab], state) -> logits`, pure; row i belongs to request `state.row_request[i]`.

A parameter `inputs` is handed each row's, `params` the model's.
"""


STEPS, NEXT_TOKENS, WITH_PROMPTS = "kvcache.steps", "kvcache.next_tokens", "kvcache.with_prompts"
"""Names of the loop of steps, and of those, of one trip or none, around a step without and with prompts."""


class Prompts(NamedTuple):
    """Pieces of prompts, i32[P, T], and the padded step that reserved slots for them, without plans."""

    tokens: jax.Array
    step: Step
    kept_len: jax.Array  # i32[max_seqs], tokens of each row before its pieces


@dataclasses.dataclass(frozen=True)
class Model:
    """The functions that the program is made of (static)."""

    forward: Forward
    process_logits: ProcessLogits | None = None  # changes logits before a token is drawn; or None
    advance_inputs: AdvanceInputs | None = None  # changes inputs after a token was drawn; or None

    def call(
        self,
        params: Any,
        state: EngineState,
        tokens: jax.Array,
        cache: Cache,
        step: Step,
        logits_at: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Calls the model on a padded step of rows of the state."""
        more: dict[str, Any] = {} if logits_at is None else {"logits_at": logits_at}
        if asks_for(self.forward, "inputs"):
            slots = get_at(state.row_request, step.seq_ids, state.requests.num_slots)
            more["inputs"] = inputs_of(state.requests.inputs, slots)
        result = self.forward(params, tokens, cache, step, **more)
        width_of(result, cache, *(tokens.shape if logits_at is None else (logits_at.size, 1)))
        return result

    def process(self, params: Any, state: EngineState, logits: jax.Array) -> jax.Array:
        """Processes the logits f32[max_seqs, vocab] of the rows."""
        assert self.process_logits is not None
        found = {"inputs": inputs_of(state.requests.inputs, state.row_request), "params": params}
        return self.process_logits(
            logits, state, **{name: x for name, x in found.items() if asks_for(self.process_logits, name)}
        )

    def advanced(self, params: Any, state: EngineState, slots: jax.Array, tokens: jax.Array) -> EngineState:
        """Advances the inputs of requests `slots` i32[n] by a token each; R for none."""
        if self.advance_inputs is None:
            return state
        columns, given = state.requests.inputs, inputs_of(state.requests.inputs, slots)
        more = {"params": params} if asks_for(self.advance_inputs, "params") else {}
        changed = self.advance_inputs(dict(given), tokens, **more)
        if not isinstance(changed, Mapping):
            raise TypeError(f"advance_inputs returned {changed!r}, expected {{name: array}} of what changed")
        for name, value in changed.items():
            if name not in given or not _is_like(value, given[name]):
                found = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
                raise TypeError(
                    f"advance_inputs returned {name!r} of {found}, expected inputs that it was given: "
                    f"{ ({n: f'{x.dtype}{list(x.shape)}' for n, x in given.items()}) }"
                )
        inputs = columns | {name: set_at(columns[name], slots, value) for name, value in changed.items()}
        return dataclasses.replace(state, requests=dataclasses.replace(state.requests, inputs=inputs))

    def advanced_again(
        self, params: Any, state: EngineState, slots: jax.Array, num_generated: jax.Array
    ) -> EngineState:
        """Advances the inputs of requests that come back by the tokens i32[n] that they had generated."""
        if self.advance_inputs is None:
            return state
        requests = state.requests
        start = get_at(requests.start + requests.prompt_len, slots, 0)

        def advance(i: jax.Array, state: EngineState) -> EngineState:
            tokens = get_at(requests.tokens, start + i)
            return self.advanced(
                params, state, jnp.where(i < num_generated, slots, requests.num_slots), tokens
            )

        small = dataclasses.replace(state, cache=dataclasses.replace(state.cache, pools=(), kept=None))
        small = lax.fori_loop(0, jnp.max(num_generated), advance, small)
        return dataclasses.replace(state, requests=small.requests)


def _is_like(value: Any, other: jax.Array) -> bool:
    """Tests whether a value can take the place of an array: its shape, and a dtype of its kind."""
    is_kind = hasattr(value, "dtype") and np.can_cast(value.dtype, other.dtype, "same_kind")
    return is_kind and value.shape == other.shape


def reserve_prompts(state: EngineState, plan: PromptPieces) -> tuple[EngineState, Step]:
    """Reserves slots for pieces of prompts: a padded step of the pieces, without plans."""
    num_pieces, piece_len = plan.tokens.shape
    cache, max_seqs = state.cache, state.cache.max_seqs
    begins = (plan.nth == 0) & (plan.num_tokens > 0)
    # Each piece's entry is that at which its row begins.
    entry = jnp.arange(num_pieces, dtype=jnp.int32) - plan.nth
    num_new = add_at(jnp.zeros(num_pieces, jnp.int32), entry, plan.num_tokens)
    rows = jnp.where(begins, plan.rows, max_seqs)
    # Each piece is followed by its padding, which belongs to no row.
    entries = jnp.stack([rows, jnp.full_like(rows, max_seqs)], axis=1).reshape(-1)
    lens = jnp.stack([num_new, piece_len - plan.num_tokens], axis=1).reshape(-1)
    tokens = plan.tokens.reshape(-1)
    has_windows = not all(group.span.keeps_all for group in cache.config.groups)
    if has_windows or cache.config.partial_hits:
        cache, step = extend_packed(cache, lens, tokens, entries, get_at(state.kept_len, entries, 0))
    else:  # `allocate` reserved all blocks, and no block of a prompt that is computed is shared
        cache, step = extend_reserved(cache, lens, tokens, entries)
    step = padded_step(step, 2 * entry, plan.first, plan.num_tokens, plan.tokens.shape)
    num_tokens = jnp.sum(step.query_len, dtype=jnp.int32)
    state = dataclasses.replace(state, cache=cache)
    return count(state, prefill_steps=(num_tokens > 0)[None], prefill_tokens=num_tokens), step


def compute_again(model: Model, params: Any, state: EngineState, options: Options) -> EngineState:
    """Computes places of the best row whose prompt was put together, as many as the budget of prompts has."""
    if state.parts is None:
        return state
    cache, max_seq_len = state.cache, state.cache.config.max_seq_len
    has_some = state.parts.is_again.any(axis=1)
    num_places = min(options.num_pieces * options.piece_len, cache.config.query_len_limit)

    def compute(state: EngineState) -> EngineState:
        assert state.parts is not None
        order = rows_in_order(state, options)
        row = order[first_true(has_some[order])][None]
        places = jnp.arange(max_seq_len, dtype=jnp.int32)
        places = jnp.sort(jnp.where(state.parts.is_again[row], places, max_seq_len), axis=1)[:, :num_places]
        tokens = get_at(state.requests.tokens, state.row_start[row][:, None] + places)
        tokens = jnp.where(places < max_seq_len, tokens, 0)
        cache, step = rewrite(state.cache, row, places)
        # No logits are read: a model that asks which are wanted is told of one.
        logits_at = jnp.zeros(1, jnp.int32) if asks_for(model.forward, "logits_at") else None
        _, cache = model.call(params, state, tokens, cache, step, logits_at)
        is_again = state.parts.is_again.at[row[:, None], places].set(False, mode="drop")
        parts = dataclasses.replace(state.parts, is_again=is_again)
        num_tokens = jnp.sum(step.query_len, dtype=jnp.int32)
        state = dataclasses.replace(state, cache=cache, parts=parts)
        return count(state, prefill_steps=jnp.ones(1, bool), prefill_tokens=num_tokens)

    return run_if(has_some.any(), compute, state)


def make_room(
    state: EngineState, options: Options, kept_len: jax.Array | None = None
) -> tuple[EngineState, jax.Array]:
    """Forks samples of prompts that were computed, and reserves blocks for the rows' next tokens.

    Masks the rows that go on without one, bool[max_seqs]. The model is still to be called on the tokens of
    rows from `kept_len` i32[max_seqs] on; by default on none of those before.
    """
    state = make_room_for_next(fork_samples(state), options)
    state, is_stalled = preempt(state, options)
    if state.cache.config.has_states:
        is_stalled |= state.num_to_compute > 1
    wanted = ((state.num_to_compute > 0) & ~is_stalled).astype(jnp.int32)
    if kept_len is not None:
        # A copy of a block now would lack the tokens that are still to be computed, here or where it forked.
        copies = needs(state.cache.control, wanted, state.cache.config).copies.any(axis=0)
        is_stalled |= copies & (kept_len < state.cache.context_len)
        wanted = jnp.where(is_stalled, 0, wanted)
    # Where there are free blocks for all, and no copies, the step takes them itself.
    control, keeper = state.cache.control, state.cache.config.keeper
    is_due = lacks(state.cache, wanted) | ~jnp.asarray(keeper.is_settled(control))
    kept_len = state.kept_len if kept_len is None else kept_len
    cache = run_if_due(is_due, lambda cache: reserve(cache, wanted, 1, kept_len), state.cache)
    return dataclasses.replace(state, cache=cache), is_stalled


def reserve_next(
    state: EngineState, is_stalled: jax.Array, options: Options, kept_len: jax.Array | None = None
) -> tuple[EngineState, jax.Array, Step]:
    """Reserves slots for the next tokens i32[max_seqs, width] of running rows; see `make_room`."""
    cache, config = state.cache, state.cache.config
    wanted = (state.num_to_compute > 0) & ~is_stalled
    tokens, num_new = next_tokens(state, wanted, options)
    (tokens, num_new), table = read_first((tokens, num_new), state.requests.tokens)
    state = dataclasses.replace(state, requests=dataclasses.replace(state.requests, tokens=table))
    free = num_free(cache.control, cache.config)
    if options.num_drafts:
        # Drafts never cost a row its next token, nor another row a block in reach.
        is_short = needs(cache.control, num_new, config).of_all_rows > free
        num_new = jnp.where(is_short.any(), jnp.minimum(num_new, 1), num_new)
    need = needs(cache.control, num_new, config)
    fits = (jnp.cumsum(need.num_blocks, axis=1, dtype=jnp.int32) <= free[:, None]) | (need.num_blocks == 0)
    num_new = jnp.where(fits.all(axis=0) & ~need.copies.any(axis=0), num_new, 0)
    kept_len = state.kept_len if kept_len is None else kept_len
    cache, step = extend_reserved(cache, num_new, tokens, kept_len=kept_len)
    return dataclasses.replace(state, cache=cache), tokens, step


def draw_next(
    model: Model, params: Any, state: EngineState, computed: Computed, options: Options
) -> EngineState:
    """Draws the tokens after the next ones from their logits, and publishes full blocks."""
    logits = computed.logits.astype(jnp.float32)
    state = forget_failed(state, _all_numbers(computed))  # a hook's ban says nothing of a part
    if model.process_logits is not None:
        logits = _processed(model.process(params, state, logits[:, 0]), logits[:, 0])
    computed = computed._replace(logits=logits)
    is_good = _all_numbers(computed)
    state, drawn = draw(state, computed, options)
    slots = jnp.where(drawn.num_tokens > 0, state.row_request, state.requests.num_slots)
    state = model.advanced(params, write_down(state, drawn, options), slots, drawn.tokens[:, 0])
    state, num_tokens = keep_ends(state, slots, is_good & ~state.is_running, options)
    return _publish(count(state, steps=jnp.ones(1, bool)), jnp.where(is_good, num_tokens, 0))


def _processed(processed: Any, logits: jax.Array) -> jax.Array:
    is_array = isinstance(processed, jax.Array)
    is_float = is_array and jnp.issubdtype(processed.dtype, jnp.floating)
    if not (is_float and processed.shape == logits.shape):
        found = f"{processed.dtype}{list(processed.shape)}" if is_array else repr(processed)
        raise TypeError(
            f"process_logits returned {found}, expected floating logits of the shape that it got, "
            f"{list(logits.shape)}; of a mask make jnp.where(mask, logits, -jnp.inf)"
        )
    return processed.astype(jnp.float32)[:, None]


def _all_numbers(computed: Computed) -> jax.Array:
    """Masks the rows whose tokens of this step have logits that are numbers, bool[max_seqs]; no idle rows."""
    order = jnp.arange(computed.logits.shape[1], dtype=jnp.int32)[None]
    is_good = are_numbers(computed.logits) | (order >= computed.num_tokens[:, None])
    return is_good.all(axis=1) & (computed.num_tokens > 0)


def _publish(state: EngineState, num_tokens: jax.Array) -> EngineState:
    """Publishes the full blocks of the first `num_tokens` i32[max_seqs] of rows."""
    if state.cache.control.prefix_index is None:
        return state
    final_len = jnp.where(state.may_publish & ~state.is_alone, num_tokens, 0)
    # Only a complete answer is one that a conversation goes on from.
    config, is_end = state.cache.config, state.is_ended
    control, _ = commit_rows(state.cache.control, None, final_len, config=config, is_end=is_end)
    return state.with_control(control)


def take_step(model: Model, params: Any, state: EngineState, options: Options) -> EngineState:
    """Makes one step: every running row computes its next token, or a part of its prompt."""
    is_joined = can_join(state.cache.config, model.forward, options.width)
    take = _step_in_one_call if is_joined else _step_in_two_calls
    return take(model, params, state, options)


def _step_in_one_call(model: Model, params: Any, state: EngineState, options: Options) -> EngineState:
    """Makes a step that calls the model on prompts and next tokens at once; without prompts on few tokens."""
    none = jnp.zeros(state.cache.max_seqs, bool)

    def rare(carry: tuple) -> tuple:
        state, _, computed = carry
        state, plan = schedule(state, options, options.width)
        state = compute_again(model, params, state, options)
        kept_len = state.kept_len
        state, step = reserve_prompts(state, plan)
        state, is_stalled = make_room(state, options, kept_len)
        prompts = Prompts(plan.tokens, without_rows(state.cache, step, state.is_running), kept_len)
        with jax.named_scope(WITH_PROMPTS):
            compute = functools.partial(_compute_all, model, params, prompts, options)
            return run_if((plan.num_tokens > 0).any(), compute, (state, is_stalled, computed))

    def is_left(carry: tuple) -> jax.Array:
        return carry[2].num_tokens[0] < 0

    # Traced once, for its shapes and for the loop.
    @functools.partial(jax.jit, inline=True)
    def compute(params: Any, state: EngineState, is_stalled: jax.Array) -> Carry:
        return _compute_next(model, params, options, (state, is_stalled, None))

    shapes = jax.eval_shape(compute, params, state, none)[2]
    nothing = jax.tree.map(lambda x: jnp.full(x.shape, -1, x.dtype), shapes)
    with jax.named_scope(WITH_PROMPTS):
        carry = run_if(is_unusual(state), rare, (state, none, nothing))
    with jax.named_scope(NEXT_TOKENS):
        state, _, computed = lax.while_loop(is_left, lambda carry: compute(params, *carry[:2]), carry)
    return draw_next(model, params, state, computed, options)


def _step_in_two_calls(model: Model, params: Any, state: EngineState, options: Options) -> EngineState:
    """Makes a step that calls the model on prompts, and then on the next tokens."""

    def rare(carry: tuple) -> tuple:
        state, plan = schedule(carry[0], options)
        state = compute_again(model, params, state, options)
        state = _compute_prompts(model, params, state, plan, options)
        return make_room(state, options)

    none = jnp.zeros(state.cache.max_seqs, bool)
    state, is_stalled = run_if(is_unusual(state), rare, (state, none))
    state, _, computed = _compute_next(model, params, options, (state, is_stalled, None))
    return draw_next(model, params, state, computed, options)


Carry = tuple[EngineState, jax.Array, Any]
"""The state, the rows bool[max_seqs] that compute no next token in this step, and what is `Computed`."""


def _compute_next(model: Model, params: Any, options: Options, carry: Carry) -> Carry:
    """Computes the rows' next tokens."""
    state, is_stalled, _ = carry
    state, tokens, step = reserve_next(state, is_stalled, options)
    logits, cache = model.call(params, state, tokens, state.cache, step)
    state = dataclasses.replace(state, cache=cache)
    if options.prompt_logprobs:
        state = note_prompts(state, step, logits)
    return state, is_stalled, Computed(step.query_len, logits, tokens if options.num_drafts else None)


def _compute_all(model: Model, params: Any, prompts: Prompts, options: Options, carry: Carry) -> Carry:
    """Computes pieces of prompts and the rows' next tokens."""
    state, is_stalled, _ = carry
    state, tokens, step = reserve_next(state, is_stalled, options, prompts.kept_len)
    of_prompts = plan_attention(state.cache, prompts.step)
    # Few steps have prompts: that rows read shared columns together is not worth its part of the program.
    joined = join(state.cache, of_prompts, each_alone(step))
    logits_at = jnp.arange(prompts.tokens.size, joined.positions.size, dtype=jnp.int32)
    all_tokens = jnp.concatenate([x.reshape(-1, 1) for x in (prompts.tokens, tokens)])
    logits, cache = model.call(
        params, state, all_tokens, state.cache, joined, None if options.prompt_logprobs else logits_at
    )
    state = dataclasses.replace(state, cache=cache)
    if options.prompt_logprobs:
        before, logits = jnp.split(logits, [prompts.tokens.size])
        state = note_prompts(state, of_prompts, before.reshape(*prompts.tokens.shape, -1))
        state = note_prompts(state, step, logits.reshape(*tokens.shape, -1))
    logits = logits.reshape(*tokens.shape, -1)
    return state, is_stalled, Computed(step.query_len, logits, tokens if options.num_drafts else None)


def _compute_prompts(
    model: Model, params: Any, state: EngineState, plan: PromptPieces, options: Options
) -> EngineState:
    """Computes pieces of prompts, if there are any; their logits are not read but for log-probabilities."""

    def compute(state: EngineState) -> EngineState:
        state, step = reserve_prompts(state, plan)
        step = plan_attention(state.cache, step)
        logits, cache = model.call(params, state, plan.tokens, state.cache, step)
        state = dataclasses.replace(state, cache=cache)
        return note_prompts(state, step, logits) if options.prompt_logprobs else state

    return run_if((plan.num_tokens > 0).any(), compute, state)
