"""Loops that can be part of a single kernel: over entries, over those of a mask, or of one trip at most."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

is_one_kernel = jax.make_user_context(False)
"""Whether what is traced now becomes a single kernel, which cannot hold a scatter."""


def run_if(condition: jax.Array, fn: Callable, state: Any) -> Any:
    """`fn(state)` where `condition` bool[] holds, else `state`, a pytree of arrays.

    A loop of at most one trip: `lax.cond` would copy the big arrays that it passes through.
    """

    def once(carry):
        state, is_left = carry
        return fn(state), is_left & False

    return lax.while_loop(lambda carry: carry[1], once, (state, condition))[0]


def skip_unless(condition: jax.Array, fn: Callable, state: Any) -> Any:
    """`fn(state)`, which is as good as `state` unless `condition` bool[] holds, and is skipped then.

    But in a single kernel alone: elsewhere the loop would take longer than a little that it skips.
    """
    return run_if(condition, fn, state) if is_one_kernel.value else fn(state)


def for_each_true(mask: jax.Array, fn: Callable, state: Any) -> Any:
    """`state = fn(n, state)` for the place `n` i32[] of each true entry of bool[m], in order.

    A trip per true entry, however many lie between: from words of a bit per entry it takes the lowest one.
    """
    if mask.shape[0] == 0:
        return state
    if mask.shape[0] == 1:
        return run_if(mask[0], functools.partial(fn, jnp.int32(0)), state)
    words = _bits(mask)

    def over_bits(first: jax.Array, word: jax.Array, state: Any) -> Any:
        def trip(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            word, state = carry
            others = word & (word - 1)
            num_below = lax.population_count(~word & (word - 1)).astype(jnp.int32)
            return others, fn(first + num_below, state)

        return lax.while_loop(lambda carry: carry[0] != 0, trip, (word, state))[1]

    def over_words(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        n, state = carry
        return n + 1, over_bits(n * 32, words[n], state)

    carry = jnp.int32(0), state
    if words.shape[0] == 1:
        return over_words(carry)[1]
    return lax.while_loop(lambda carry: carry[0] < words.shape[0], over_words, carry)[1]


def _bits(mask: jax.Array) -> jax.Array:
    """u32[ceil(n / 32)], an entry of bool[n] per bit, the first in the lowest."""
    missing = jnp.zeros_like(mask, shape=-mask.shape[0] % 32)
    bits = jnp.concatenate([mask, missing]).reshape(-1, 32).astype(jnp.uint32)
    return jnp.sum(bits << np.arange(32, dtype=np.uint32)[None], axis=1, dtype=jnp.uint32)


def for_each(
    entries: Any, mask: jax.Array, fn: Callable, state: Any, per_trip: int, end: jax.Array | None = None
) -> Any:
    """`state = fn(entries, n, state)` for each `n` i32[] below `m`, by a loop of `per_trip` of them per trip.

    What `fn` gets are parts of `entries`, a pytree of arrays [m, ...] and []. It changes nothing where `mask`
    bool[m] is false, as it is from `end` i32[] on.
    """
    num_entries = mask.shape[0]

    def trip(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        start, state = carry

        def part(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, per_trip, allow_negative_indices=False) if x.ndim else x

        some = jax.tree.map(part, entries)
        for n in range(per_trip):
            state = fn(some, jnp.int32(n), state)
        return start + per_trip, state

    if num_entries == 0:
        return state
    if num_entries > per_trip:
        end = jnp.int32(num_entries) if end is None else end
        return lax.while_loop(lambda carry: carry[0] < end, trip, (end & 0, state))[1]
    # XLA would dissolve a loop of one trip, and copy the arrays where it takes its parts to.
    return run_if(mask.any(), lambda state: trip((jnp.int32(0), state))[1], state)
