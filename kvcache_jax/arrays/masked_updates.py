"""Arrays at computed places: reads and updates that skip what is outside, masks counted and ranked.

What is built from these can be part of a `single_kernel`.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.loops import for_each, for_each_true, is_one_kernel

# So few entries have a trip each, also where they are skipped: to pass over them takes longer to compile.
_MOST_ONE_BY_ONE = 32

Index = ArrayLike | tuple[ArrayLike, ...]


def get_at(array: jax.Array, index: Index, fill: float | None = None) -> jax.Array:
    """`array` at `index`: i32[...], or one per leading axis.

    Entries outside, negative ones among them, are `fill`; without it they are some element of the array.
    """
    array = jnp.asarray(array)  # numpy's, of a cache that was fetched to the host
    found = array.at[index].get(mode="clip", wrap_negative_indices=False)
    if fill is None:
        return found
    is_inside = _is_inside(index if isinstance(index, tuple) else (index,), array.shape)
    is_inside = lax.broadcast_in_dim(is_inside, found.shape, range(is_inside.ndim))
    return lax.select(is_inside, found, lax.full_like(found, fill))


def _is_inside(index: Sequence[ArrayLike], shape: tuple[int, ...]) -> jax.Array:
    """Which entries, one per leading axis, lie within `shape`."""
    # Negative ones are beyond any size without their sign.
    unsigned = [jnp.asarray(place).astype(jnp.uint32) for place in index]
    is_below = [lax.lt(x, lax.full_like(x, size)) for x, size in zip(unsigned, shape, strict=False)]
    return functools.reduce(lax.bitwise_and, is_below)


class Update(NamedTuple):
    """New values for entries of an array.

    Attributes:
      array: What is updated.
      at: i32[...], or one per leading axis; entries outside are skipped.
      values: One per entry, or one for all.
      how: "set", or how a value is combined with the old one: "add", "min", "max".
    """

    array: jax.Array
    at: Index
    values: ArrayLike
    how: str = "set"


_COMBINE: dict[str, Callable] = {"set": lambda old, new: new, "add": lax.add, "min": lax.min, "max": lax.max}


def set_at(array: jax.Array, index: Index, values: ArrayLike, per_trip: int | None = None) -> jax.Array:
    """`array` with `values` at `index`: i32[...], or one per leading axis; entries outside are skipped.

    Of equal entries the last one stays in a single kernel, and any of them elsewhere.
    """
    return update_all(Update(array, index, values), per_trip=per_trip)[0]


def add_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """`set_at` that adds; equal entries add up."""
    return update_all(Update(array, index, values, "add"))[0]


def min_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """`set_at` that keeps the lesser value."""
    return update_all(Update(array, index, values, "min"))[0]


def max_at(array: jax.Array, index: Index, values: ArrayLike) -> jax.Array:
    """`set_at` that keeps the greater value."""
    return update_all(Update(array, index, values, "max"))[0]


def update_all(
    *updates: Update, per_trip: int | None = None, end: jax.Array | None = None
) -> list[jax.Array]:
    """Several arrays, each with as many entries updated; from place `end` i32[] on all are skipped.

    In a single kernel by one loop. Of many entries it passes over those that are skipped; with `per_trip` it
    takes so many at a time, skipped or not, up to `end`: faster where few are, but more to compile. Where
    there are not more than that, it takes them one by one.
    """
    arrays = [jnp.asarray(update.array) for update in updates]
    if not is_one_kernel.value:
        return [
            getattr(array.at[update.at], update.how)(
                jnp.asarray(update.values, array.dtype), mode="drop", wrap_negative_indices=False
            )
            for array, update in zip(arrays, updates, strict=True)
        ]
    axes = updates[0].at if isinstance(updates[0].at, tuple) else (updates[0].at,)
    if per_trip is not None and math.prod(np.broadcast_shapes(*map(jnp.shape, axes))) <= per_trip:
        per_trip = None
    entries = [_entries_of(update, per_trip or 1) for update in updates]
    is_inside = [_is_inside(x.places, array.shape) for x, array in zip(entries, arrays, strict=True)]
    is_changed = any_of(is_inside)
    skips_runs = per_trip is None and is_changed.shape[0] > _MOST_ONE_BY_ONE

    def update_nth(entries: list[_Entries], n: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            _put(array, entry, n, update.how, may_skip=not skips_runs or len(updates) > 1)
            for array, entry, update in zip(arrays, entries, updates, strict=True)
        ]

    if skips_runs:
        return for_each_true(is_changed, functools.partial(update_nth, entries), arrays)
    return for_each(entries, is_changed, update_nth, arrays, per_trip or 1, end)


class _Entries(NamedTuple):
    """What an update does, entry by entry, so many that the last trip is full.

    Attributes:
      places: Per leading axis i32[n].
      values: [n, ...], or [] for all.
    """

    places: list[jax.Array]
    values: jax.Array


def _entries_of(update: Update, per_trip: int) -> _Entries:
    values = jnp.asarray(update.values, update.array.dtype)
    index = jnp.broadcast_arrays(*(update.at if isinstance(update.at, tuple) else (update.at,)))
    num_entries, entry_shape = index[0].size, update.array.shape[len(index) :]

    def filled_up(entries: jax.Array) -> jax.Array:
        num_missing = -num_entries % per_trip
        nowhere = lax.full_like(entries, -1, shape=(num_missing, *entry_shape[: entries.ndim - 1]))
        return jnp.concatenate([entries, nowhere]) if num_missing else entries

    places = [filled_up(axis.reshape(-1)) for axis in index]
    if values.size == 1:
        values = values.reshape(())
    else:
        values = jnp.broadcast_to(values, index[0].shape + entry_shape)
        values = filled_up(values.reshape(-1, *entry_shape))
    return _Entries(places, values)


def _nth(array: jax.Array, n: jax.Array) -> jax.Array:
    """`array[n]`, of one axis."""
    return lax.dynamic_slice_in_dim(array, n, 1, allow_negative_indices=False).reshape(())


def _put(array: jax.Array, entries: _Entries, n: jax.Array, how: str, may_skip: bool) -> jax.Array:
    """`array` with its `n`-th entry updated; unless it `may_skip`, that one is inside."""
    places, values = entries
    place = [_nth(axis, n) for axis in places]
    shape = (*(1 for _ in places), *array.shape[len(places) :])
    start = [*place, *(jnp.zeros_like(place[0]) for _ in array.shape[len(place) :])]
    if values.ndim:
        values = lax.dynamic_slice_in_dim(values, n, 1, allow_negative_indices=False).reshape(shape)
    old = lax.dynamic_slice(array, start, shape, allow_negative_indices=False)
    new = _COMBINE[how](old, jnp.broadcast_to(values, shape))
    if may_skip:
        new = lax.select(_is_inside(place, array.shape), new, old)
    return lax.dynamic_update_slice(array, new, start, allow_negative_indices=False)


def count_down(counts: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes one from `counts` at each entry of `index` i32[n], which may repeat; entries outside are skipped.

    Returns:
      The counts; and bool[n], the entry took the last one: of equal entries, the last did.
    """
    if not is_one_kernel.value:
        left = add_at(counts, index, -1)
        is_zero, left = read_first(get_at(left, index, 1) == 0, left)
        is_last, left = first_of_equal(left, is_zero[::-1], index[::-1])
        is_last = is_last[::-1]
        return set_at(left, jnp.where(is_last, index, left.shape[0]), 0), is_last

    entries = _entries_of(Update(counts, index, -1), per_trip=1)

    def take_one(n: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        counts, is_last = state
        counts = _put(counts, entries, n, "add", may_skip=False)
        is_zero = (get_at(counts, _nth(index, n)) == 0).reshape(1)
        return counts, lax.dynamic_update_slice(is_last, is_zero, [n], allow_negative_indices=False)

    is_inside = _is_inside([index], counts.shape)
    return for_each_true(is_inside, take_one, (counts, is_inside & False))


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
    """i32[...], place of the first true entry along the last axis of bool[..., n], n where there is none."""
    places = lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
    # The least of integers, where CPUs would compare pairs of value and place for `argmax`, one by one.
    return jnp.min(jnp.where(mask, places, mask.shape[-1]), axis=-1)


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
    return read_first(mask & (get_at(marked, index, 0) == mark), marked)


def rank_true(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[n], how many true entries of bool[n] come before each, and i32[], how many there are."""
    up_to = jnp.cumsum(mask, dtype=jnp.int32)
    return up_to - mask.astype(jnp.int32), up_to[-1]


def read_first[T](values: Any, array: T) -> tuple[Any, T]:
    """`values` (a pytree), read from `array` (or a pytree of them), and `array`, to be written only then.

    Without the fence XLA may plan the write first and keep a copy of the whole array for the read.
    """
    return lax.optimization_barrier((values, array))
