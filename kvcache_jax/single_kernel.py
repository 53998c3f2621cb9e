"""One kernel per operation on CPUs, where dozens of tiny ones would mostly wait for threads.

XLA's CPU backend makes a kernel of every loop that it fuses and hands them to a pool of threads. That pays
for big arrays; `extend` is dozens of loops over a few hundred integers. A call that carries the attributes
below is compiled as XLA compiles small loops: into one function, run by one thread.

Such a function cannot hold a scatter. So the operations update their arrays through `set_at`, `add_at`,
`min_at` and `max_at`, which are loops there, and scatters on accelerators and under `vmap`.

The attributes are XLA's own, so versions of jax that were not tested get the many kernels.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import xla_metadata
from jax.typing import ArrayLike

Index = ArrayLike | tuple[ArrayLike, ...]

OLDEST_TESTED, BEFORE = (0, 11, 2), (0, 13)
_SMALL = 4096

_is_one_kernel = jax.make_user_context(False)


def single_kernel(fn: Callable, state: Any, *args: Any) -> Any:
    """`fn(state, *args)`, as one kernel where it is lowered for CPUs and not under `vmap`.

    Args:
      fn: Of pytrees of arrays, without scatters, sorts, products of matrices and random numbers.
      state: What `fn` returns the next version of, all arrays of it; big ones are edited, not replaced.
      *args: Pytrees of arrays.
    """
    if not OLDEST_TESTED <= jax.__version_info__ < BEFORE:
        return fn(state, *args)
    leaves, treedef = jax.tree.flatten((state, args))
    # Arguments without elements stay outside.
    is_passed = [leaf.size > 0 for leaf in leaves]

    def as_usual(*passed: jax.Array) -> Any:
        rest = iter(passed)
        pairs = zip(leaves, is_passed, strict=True)
        state, args = treedef.unflatten(
            next(rest) if given else jnp.zeros_like(leaf) for leaf, given in pairs
        )
        # Read before anything is written, or XLA would copy the arrays.
        firsts, state = lax.optimization_barrier(([_first(leaf) for leaf in jax.tree.leaves(state)], state))
        return fn(state, *args), (args, firsts)

    @functools.partial(xla_metadata.xla_metadata_call, inlineable=False, xla_cpu_small_call=True)
    def as_one(*passed: jax.Array) -> Any:
        with _is_one_kernel(True):
            return as_usual(*passed)

    @custom_vmap
    def call(*passed: jax.Array) -> Any:
        return lax.platform_dependent(*passed, cpu=as_one, default=as_usual)

    @call.def_vmap
    def _(axis_size: int, is_batched: list[bool], *passed: jax.Array) -> tuple[Any, Any]:
        axes = [0 if batched else None for batched in is_batched]
        result = jax.vmap(as_usual, axes, axis_size=axis_size)(*passed)
        return result, jax.tree.map(lambda _: True, result)

    # XLA ends the process over a parameter that nothing in the kernel reads. So the arguments come back, and
    # of the state an element of each array; one barrier keeps constants from being put in their place, the
    # other keeps all that comes back, also where little of it is used.
    passed = lax.optimization_barrier(tuple(itertools.compress(leaves, is_passed)))
    return lax.optimization_barrier(call(*passed))[0]


def _first(array: jax.Array) -> jax.Array | None:
    """An element of a small array. Of a big one a part is replaced or nothing, which reads it."""
    return lax.slice_in_dim(array.reshape(-1), 0, 1) if 0 < array.size <= _SMALL else None


def get_at(array: jax.Array, index: Index, fill: float | None = None) -> jax.Array:
    """`array` at `index`: i32[...], or one per leading axis.

    Entries outside, negative ones among them, are `fill`; without it they are some element.
    """
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
    index = index if isinstance(index, tuple) else (index,)
    values = jnp.asarray(values, array.dtype)
    if not _is_one_kernel.value:
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
