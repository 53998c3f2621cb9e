"""Arrays read and updated at computed places, where those outside are skipped; masks counted and ranked."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

Index = ArrayLike | tuple[ArrayLike, ...]

_FEW_ENTRIES, _FEW_PAIRS = 31, 2048
"""Entries, and pairs of them with places, that are compared with each other.

A scatter is a launch of its own; comparisons become part of what is computed before and after them, on GPUs
as long as they reduce less than a warp of entries.
"""


def get_at(array: jax.Array, index: Index, fill: float | None = None) -> jax.Array:
    """Reads `array` at `index`: i32[...], or one per leading axis.

    Entries outside, negative ones included, are `fill`; without it they are some element of the array.
    """
    array = jnp.asarray(array)  # numpy's, of a cache that was fetched to the host
    found = array.at[index].get(mode="clip", wrap_negative_indices=False)
    if fill is None:
        return found
    is_inside = _is_inside(index if isinstance(index, tuple) else (index,), array.shape)
    sharding = jax.typeof(found).sharding  # of explicit mesh axes
    is_inside = lax.broadcast_in_dim(
        is_inside, found.shape, range(is_inside.ndim), out_sharding=sharding if any(sharding.spec) else None
    )
    return lax.select(is_inside, found, lax.full_like(found, fill))


def _is_inside(index: Sequence[ArrayLike], shape: tuple[int, ...]) -> jax.Array:
    """Masks the entries, one per leading axis that lie within `shape`."""
    # Without their sign, negative entries are beyond any size.
    unsigned = [jnp.asarray(place).astype(jnp.uint32) for place in index]
    is_below = [lax.lt(x, lax.full_like(x, size)) for x, size in zip(unsigned, shape, strict=False)]
    return functools.reduce(lax.bitwise_and, jnp.broadcast_arrays(*is_below))


def set_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """Sets `array` to `values` at `index`: i32[...], or one per leading axis.

    Entries outside are skipped. Of equal entries any one stays.
    """
    return _update(array, index, values, "set")


def add_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """Adds `values` at `index`, as `set_at`; equal entries add up."""
    return _update(array, index, values, "add")


def min_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """Keeps the lesser of old and new values at `index`, as `set_at`."""
    return _update(array, index, values, "min")


def max_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """Keeps the greater of old and new values at `index`, as `set_at`."""
    return _update(array, index, values, "max")


def _update(array: jax.Array, index: Index, values: ArrayLike, how: str) -> jax.Array:
    array = jnp.asarray(array)
    values = jnp.asarray(values, array.dtype)
    if not isinstance(index, tuple) and _are_few(jnp.size(index), array.size):
        return _update_all(array, jnp.asarray(index), values, how)
    return getattr(array.at[index], how)(values, mode="drop", wrap_negative_indices=False)


def _are_few(num_entries: int, size: int) -> bool:
    return 0 < num_entries <= _FEW_ENTRIES and 0 < num_entries * size <= _FEW_PAIRS


def _update_all(array: jax.Array, index: jax.Array, values: jax.Array, how: str) -> jax.Array:
    """Looks at each place of `array` which entries of `index` name it; of equal ones the last is set."""
    values = jnp.broadcast_to(values, (*index.shape, *array.shape[1:])).reshape(-1, *array.shape[1:])
    places = lax.broadcasted_iota(index.dtype, (index.size, array.shape[0]), 1)
    is_it = places == index.reshape(-1, 1)
    if how == "set":
        entry = jnp.max(jnp.where(is_it, lax.broadcasted_iota(jnp.int32, is_it.shape, 0), -1), axis=0)
        is_named = jnp.expand_dims(entry >= 0, range(1, array.ndim))
        return jnp.where(is_named, get_at(values, entry), array)
    is_it = jnp.expand_dims(is_it, range(2, array.ndim + 1))
    if how == "add":
        return array + jnp.sum(jnp.where(is_it, values[:, None], 0), axis=0, dtype=array.dtype)
    combine, reduce = {"min": (jnp.minimum, jnp.min), "max": (jnp.maximum, jnp.max)}[how]
    return combine(array, reduce(jnp.where(is_it, values[:, None], array[None]), axis=0))


def count_down(counts: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes one from `counts` per entry of `index` i32[...], which may repeat; entries outside are skipped.

    Masks the entries that took the last one, bool like `index`: of equal entries, the last did.
    """
    left = add_at(counts, index, -1)
    is_zero, left = read_first(get_at(left, index, 1) == 0, left)
    is_last, left = last_of_equal(left, is_zero, index, held=0)
    return left, is_last


def first_of_equal(
    array: jax.Array, mask: jax.Array, index: jax.Array, held: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Finds the first of the masked entries of `index` that are equal, bool[...].

    `array` i32[m], not negative, is lent for marks. Where it is `held` at the places of all masked entries it
    comes back as it was; else these may be negative, and the caller must set them again.
    """
    order = lax.iota(jnp.int32, index.size).reshape(index.shape)
    return _marked_of_equal(array, mask, index, order - index.size, held)


def last_of_equal(
    array: jax.Array, mask: jax.Array, index: jax.Array, held: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Finds the last of equal entries, as `first_of_equal`."""
    order = lax.iota(jnp.int32, index.size).reshape(index.shape)
    return _marked_of_equal(array, mask, index, -1 - order, held)


def _marked_of_equal(
    array: jax.Array, mask: jax.Array, index: jax.Array, mark: jax.Array, held: int | None
) -> tuple[jax.Array, jax.Array]:
    """Finds the masked entry with the least of the negative `mark` i32[...] at each place."""
    if _are_few(index.size, index.size):
        places, marks = jnp.where(mask, index, array.shape[0]).reshape(-1), mark.reshape(-1)
        is_beaten = (places[:, None] == places[None]) & (marks[:, None] < marks[None])
        is_found = mask & _is_inside((index,), array.shape) & ~is_beaten.any(axis=0).reshape(index.shape)
        return is_found, array
    marked = min_at(array, jnp.where(mask, index, array.shape[0]), mark)
    is_found, marked = read_first(mask & (get_at(marked, index, 0) == mark), marked)
    if held is not None:
        marked = set_at(marked, jnp.where(is_found, index, array.shape[0]), held)
    return is_found, marked


def run_if[T](condition: jax.Array, fn: Callable[[T], T], state: T) -> T:
    """Runs `fn(state)` where `condition` bool[] holds, else returns `state`, a pytree of arrays.

    A loop of at most one trip, for `lax.cond` would copy the big arrays that it passes through. On GPUs the
    host waits for the condition: an operation has few of these.
    """

    def once(carry: tuple[T, jax.Array]) -> tuple[T, jax.Array]:
        state, is_left = carry
        return fn(state), is_left & False

    return lax.while_loop(lambda carry: carry[1], once, (state, condition))[0]


def common_bound(num_trips: jax.Array) -> jax.Array:
    """Returns the trips of a loop, i32[]: under `vmap` the trips of the longest loop, for all.

    For loops that carry pools. If each cache had its own number, every trip would copy whole pools, to
    keep the pools of finished caches. So the loop goes on for all, and its body writes nowhere from a
    cache's own number of trips on.
    """
    return _common_bound(lax.stop_gradient(num_trips))


@custom_vmap
def _common_bound(num_trips: jax.Array) -> jax.Array:
    return num_trips


@_common_bound.def_vmap
def _of_longest(axis_size: int, in_batched: list[bool], num_trips: jax.Array) -> tuple[jax.Array, bool]:
    return _common_bound(jnp.max(num_trips, axis=0)), False


def quotient(lengths: jax.Array, size: int) -> jax.Array:
    """Divides integers that are not negative: one operation, where `//` looks at signs in ten."""
    return lax.div(lengths, lax.full_like(lengths, size))


def remainder(lengths: jax.Array, size: int) -> jax.Array:
    """Computes `lengths % size` of integers that are not negative."""
    return lax.rem(lengths, lax.full_like(lengths, size))


def any_of(masks: list[jax.Array]) -> jax.Array:
    """Combines masks by an elementwise or."""
    return functools.reduce(operator.or_, masks)


def num_true(mask: jax.Array) -> jax.Array:
    """Counts true entries as i32[], also where x64 is enabled."""
    return jnp.sum(mask, dtype=jnp.int32)


def first_true(mask: jax.Array) -> jax.Array:
    """Finds the first true entry along the last axis of bool[..., n], as i32[...]; n where there is none."""
    places = lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
    # The least of integers, where CPUs would compare pairs of value and place for `argmax`, one by one.
    return jnp.min(jnp.where(mask, places, mask.shape[-1]), axis=-1)


def run_of(ends: jax.Array, places: jax.Array) -> jax.Array:
    """Finds the run that holds each of `places` i32[m], i32[m]; n for those after all.

    Runs lie end to end: the i-th is `[ends[i - 1], ends[i])`, `ends` i32[n].
    """
    method = "compare_all" if ends.size <= _FEW_ENTRIES else "scan_unrolled"
    return jnp.searchsorted(ends, places, side="right", method=method).astype(jnp.int32)


def rank_true(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns i32[n], how many true entries of bool[n] come before each, and i32[], how many there are."""
    up_to = jnp.cumsum(mask, dtype=jnp.int32)
    num_in_all = up_to[-1] if mask.size else jnp.zeros_like(up_to, shape=())
    return up_to - mask.astype(jnp.int32), num_in_all


def read_first[T](values: Any, array: T) -> tuple[Any, T]:
    """Returns `values`, a pytree read from `array` (or a pytree), and `array`, to be written only then.

    Without the fence XLA may plan the write first and keep a copy of the whole array for the read.
    """
    return lax.optimization_barrier((values, array))
