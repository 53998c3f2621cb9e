"""Arrays at computed places: reads and updates that skip what is outside, masks counted and ranked.

What is built from these can be part of a `single_kernel`.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
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

    Entries outside, negative ones among them, are `fill`; without it they are some element of the array.
    """
    array = jnp.asarray(array)  # numpy's, of a cache that was fetched to the host
    found = array.at[index].get(mode="clip", wrap_negative_indices=False)
    if fill is None:
        return found
    index = index if isinstance(index, tuple) else (index,)
    window = array.ndim - len(index)
    is_inside = _is_inside(index, array.shape)
    is_inside = is_inside.reshape(*is_inside.shape, *(1 for _ in range(window)))
    return jnp.where(is_inside, found, jnp.asarray(fill, array.dtype))


def _is_inside(index: Sequence[ArrayLike], shape: tuple[int, ...]) -> jax.Array:
    """Which entries, one per leading axis, lie within `shape`."""
    # Negative ones are beyond any size without their sign.
    is_below = [
        jnp.asarray(place).astype(jnp.uint32) < jnp.uint32(size)
        for place, size in zip(index, shape, strict=False)
    ]
    return functools.reduce(operator.and_, is_below)


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
    if not num_entries:
        return array
    places = [axis.reshape(-1) for axis in index]
    entry_shape = (*(1 for _ in places), *window)
    if values.size > 1:
        values = jnp.broadcast_to(values, index[0].shape + window).reshape(-1, *entry_shape[1:])
    else:
        values = values.reshape(1)

    def update_one(i: ArrayLike, array: jax.Array) -> jax.Array:
        place = [_entry(axis, i) for axis in places]
        start = [axis.reshape(()) for axis in place]
        start += [jnp.zeros_like(start[0]) for _ in window]
        old = lax.dynamic_slice(array, start, entry_shape, allow_negative_indices=False)
        new = combine(old, jnp.broadcast_to(_entry(values, i), entry_shape))
        is_inside = _is_inside(place, array.shape).reshape(1, *(1 for _ in entry_shape[1:]))
        return lax.dynamic_update_slice(
            array, jnp.where(is_inside, new, old), start, allow_negative_indices=False
        )

    if num_entries == 1:
        return update_one(0, array)
    return lax.fori_loop(0, num_entries, update_one, array, unroll=unroll)


def _entry(array: jax.Array, i: ArrayLike) -> jax.Array:
    """`array[i : i + 1]`; its only entry if there is one."""
    if array.shape[0] == 1:
        return array
    return lax.dynamic_index_in_dim(array, i, allow_negative_indices=False)


def quotient(lengths: jax.Array, size: int) -> jax.Array:
    """`lengths // size` of what is not negative: one operation, where signs to look at make it ten."""
    return lax.div(lengths, lax.full_like(lengths, size))


def remainder(lengths: jax.Array, size: int) -> jax.Array:
    """`lengths % size` of what is not negative."""
    return lax.rem(lengths, lax.full_like(lengths, size))


def any_of(masks: list[jax.Array]) -> jax.Array:
    """Elementwise or."""
    return functools.reduce(operator.or_, masks)


def num_true(mask: jax.Array) -> jax.Array:
    """i32[], true entries; stays 32-bit when x64 is enabled."""
    return jnp.sum(mask, dtype=jnp.int32)


def first_true(mask: jax.Array) -> jax.Array:
    """i32[...], place of the first true entry along the last axis of bool[..., n], 0 where there is none."""
    return jnp.argmax(mask, axis=-1).astype(jnp.int32)


def first_of_equal(array: jax.Array, mask: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of masked entries of `index` that are equal, the first.

    Args:
      array: i32[m], not negative; lent for marks.
      mask: bool[...].
      index: i32[...], places in `array`.

    Returns:
      bool[...]; and `array`, negative at the places of masked entries, which the caller must set again.
    """
    mark = jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape) - index.size
    marked = min_at(array, jnp.where(mask, index, array.shape[0]), mark)
    return mask & (get_at(marked, index, 0) == mark), marked


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
