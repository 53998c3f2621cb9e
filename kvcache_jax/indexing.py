"""Arrays at computed places: reads and updates that skip what is outside, masks counted and ranked.

What is built from these can be part of a `single_kernel`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

Index = ArrayLike | tuple[ArrayLike, ...]

is_one_kernel = jax.make_user_context(False)
"""Whether what is traced now becomes a single kernel, which cannot hold a scatter."""


def get_at(array: jax.Array, index: Index, fill: float | None = None) -> jax.Array:
    """`array` at `index`: i32[...], or one per leading axis.

    Entries outside, negative ones among them, are `fill`; without it they are some element.
    """
    array = jnp.asarray(array)  # numpy's, of a cache that was fetched to the host
    if fill is None:
        return array.at[index].get(mode="clip", wrap_negative_indices=False)
    return array.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def set_at(array: jax.Array, index: Index, values: ArrayLike, unroll: int = 1) -> jax.Array:
    """`array` with `values` at `index`: i32[...], or one per leading axis; entries outside are skipped.

    Of equal entries the last one stays in a single kernel, and any of them elsewhere. In a kernel a trip of
    the loop updates `unroll` entries: the processor waits for several places of a big array at once.
    """
    return _update("set", lambda old, new: new, array, index, values, unroll)


def add_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """`set_at` that adds; equal entries add up."""
    return _update("add", lax.add, array, index, values)


def min_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """`set_at` that keeps the lesser value."""
    return _update("min", lax.min, array, index, values)


def max_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """`set_at` that keeps the greater value."""
    return _update("max", lax.max, array, index, values)


def _update(
    method: str, combine: Callable, array: jax.Array, index: Index, values: ArrayLike, unroll: int = 1
) -> jax.Array:
    array, index = jnp.asarray(array), index if isinstance(index, tuple) else (index,)
    values = jnp.asarray(values, array.dtype)
    if not is_one_kernel.value:
        return getattr(array.at[index], method)(values, mode="drop", wrap_negative_indices=False)
    index = jnp.broadcast_arrays(*index)
    window = array.shape[len(index) :]
    num_entries = math.prod(index[0].shape)
    values = jnp.broadcast_to(values, index[0].shape + window).reshape(num_entries, *window)
    places = [axis.reshape(-1) for axis in index]

    def update_one(i: ArrayLike, array: jax.Array) -> jax.Array:
        place = [
            lax.dynamic_index_in_dim(axis, i, keepdims=False, allow_negative_indices=False) for axis in places
        ]
        is_inside = jnp.bool_(True)
        for at, size in zip(place, array.shape, strict=False):
            is_inside &= (at >= 0) & (at < size)
        start = (*place, *(jnp.zeros_like(place[0]) for _ in window))
        old = lax.dynamic_slice(array, start, (*(1 for _ in place), *window), allow_negative_indices=False)
        value = lax.dynamic_index_in_dim(values, i, allow_negative_indices=False)
        new = combine(old, value.reshape(old.shape))
        return lax.dynamic_update_slice(
            array, jnp.where(is_inside, new, old), start, allow_negative_indices=False
        )

    if num_entries > 1:
        return lax.fori_loop(0, num_entries, update_one, array, unroll=unroll)
    return update_one(0, array) if num_entries else array


def num_true(mask: jax.Array) -> jax.Array:
    """i32[], true entries; stays 32-bit when x64 is enabled."""
    return jnp.sum(mask, dtype=jnp.int32)


def first_true(mask: jax.Array) -> jax.Array:
    """i32[...], place of the first true entry along the last axis of bool[..., n], 0 where there is none."""
    return jnp.argmax(mask, axis=-1).astype(jnp.int32)


def rank_true(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[n], how many true entries of bool[n] come before each, and i32[], how many there are."""
    up_to = jnp.cumsum(mask, dtype=jnp.int32)
    return up_to - mask.astype(jnp.int32), up_to[-1]


def read_first(values: Any, array: jax.Array) -> tuple[Any, jax.Array]:
    """`values` (a pytree), read from `array`, and `array`, to be written only after the read.

    Without the fence XLA may plan the write first and keep a copy of the whole array for the read.
    """
    return lax.optimization_barrier((values, array))


def run_if(condition: jax.Array, fn: Callable, state: Any) -> Any:
    """`fn(state)` where `condition` bool[] holds, else `state`, a pytree of arrays.

    A loop of at most one trip: `lax.cond` would copy the big arrays that it passes through.
    """

    def once(carry):
        state, is_left = carry
        return fn(state), is_left & False

    return lax.while_loop(lambda carry: carry[1], once, (state, condition))[0]
