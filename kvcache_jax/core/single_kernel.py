"""One kernel per operation on CPUs, where dozens of tiny ones would mostly wait for threads.

XLA's CPU backend makes a kernel of every loop that it fuses and hands them to a pool of threads. That pays
for big arrays; `extend` is dozens of loops over a few hundred integers. A call that carries the attributes
below is compiled as XLA compiles small loops: into one function, run by one thread.

Such a function cannot hold a scatter. So the operations update their arrays through `indexing.set_at` and
its like, which are loops there, and scatters on accelerators and under `vmap`.

The attributes are XLA's own, so versions of jax that were not tested get the many kernels. So does
`jax.disable_jit`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import xla_metadata
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from kvcache_jax.arrays.loops import is_one_kernel
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.core.state import Control

OLDEST_TESTED, BEFORE = (0, 11, 2), (0, 13)
# Elements of an array that `fn` may replace as a whole. Fewer: XLA ends the process over a larger one that
# nothing read. More: arrays that are only edited have an element read too, ahead of all edits.
_SMALL = 4096


def single_kernel(fn: Callable, state: Any, *args: Any) -> Any:
    """`fn(state, *args)`, as one kernel where it is lowered for CPUs and not under `vmap`.

    Args:
      fn: Of pytrees of arrays, without scatters, sorts, products of matrices and random numbers. It outlives
        the call and is traced more than once, so what is traced comes to it as an argument.
      state: What `fn` returns the next version of, all arrays of it; big ones are edited, not replaced.
      *args: Pytrees of arrays.
    """
    state, args = as_varied((state, args))
    if not OLDEST_TESTED <= jax.__version_info__ < BEFORE or jax.config.jax_disable_jit:
        return fn(state, *args)
    from jax.extend.core import jaxpr_as_fun  # here: it imports Pallas

    leaves, treedef = jax.tree.flatten((state, args))
    # The rule for `vmap` outlives this call, so it holds no arrays that may be traced, only their types.
    types = [jax.typeof(leaf) for leaf in leaves]

    def flat(*leaves: jax.Array) -> Any:
        state, args = treedef.unflatten(leaves)
        return fn(state, *args)

    def flat_as_one(*leaves: jax.Array) -> Any:
        with is_one_kernel(True):
            return flat(*leaves)

    traced, outputs = jax.make_jaxpr(flat_as_one, return_shape=True)(*leaves)
    is_passed, is_read, given_back = _interface(traced.jaxpr, len(jax.tree.leaves(state)))

    def run(fn: Callable, *passed: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """The results of `fn` that are no arguments; and what was read of these, ahead of all else."""
        # Read before anything is written, or XLA would copy the arrays.
        firsts = _sum_of_firsts(itertools.compress(passed, is_read))
        firsts, passed = lax.optimization_barrier((firsts, passed))
        rest = iter(passed)
        arguments = [
            next(rest) if is_given else jnp.zeros(type_.shape, type_.dtype)
            for type_, is_given in zip(types, is_passed, strict=True)
        ]
        results = jax.tree.leaves(fn(*arguments))
        return [result for result, place in zip(results, given_back, strict=True) if place is None], firsts

    as_usual = functools.partial(run, flat)
    in_kernel = xla_metadata.xla_metadata_call(
        functools.partial(run, jaxpr_as_fun(traced)), inlineable=False, xla_cpu_small_call=True
    )

    @custom_vmap
    def call(*passed: jax.Array) -> Any:
        kernel, outputs = jax.make_jaxpr(in_kernel, return_shape=True)(*passed)
        many = functools.partial(
            _traced_later().bind,
            fn=lambda *passed: jax.tree.leaves(as_usual(*passed)),
            types=tuple(kernel.out_avals),
        )
        results = lax.platform_dependent(*passed, cpu=jaxpr_as_fun(kernel), default=many)
        return jax.tree.unflatten(jax.tree.structure(outputs), results)

    @call.def_vmap
    def _(axis_size: int, is_batched: list[bool], *passed: jax.Array) -> tuple[Any, Any]:
        axes = [0 if batched else None for batched in is_batched]
        result = jax.vmap(as_usual, axes, axis_size=axis_size)(*passed)
        return result, jax.tree.map(lambda _: True, result)

    # XLA ends the process over a parameter that nothing in the kernel reads. So an element of each array is
    # read; one barrier keeps constants from being put in its place, the other keeps all that comes out, also
    # where little of it is used.
    passed = lax.optimization_barrier(_on_every_device(tuple(itertools.compress(leaves, is_passed))))
    results = iter(_on_every_device(lax.optimization_barrier(call(*passed)))[0])
    return jax.tree.unflatten(
        jax.tree.structure(outputs),
        [next(results) if place is None else leaves[place] for place in given_back],
    )


def one_control_kernel(fn: Callable, control: Control, *args: Any) -> Any:
    """`single_kernel`, except with an eviction policy: that is anybody's code, and looks at all blocks."""
    index = control.prefix_index
    if index is not None and index.history is not None:
        control, args = as_varied((control, args))
        return fn(control, *args)
    return single_kernel(fn, control, *args)


def _interface(jaxpr: Any, num_states: int) -> tuple[list[bool], list[bool], list[int | None]]:
    """What of a function's arguments and results goes through its kernel.

    Args:
      jaxpr: The function's.
      num_states: How many arguments come first of which it returns the next versions, in this order.

    Returns:
      Per argument, it is passed: it is looked at, and has elements.
      Per argument that is passed, an element of it must be read. Not of a big one that is edited: a part of
      it is replaced, which reads it.
      Per result, the argument that it is, or None.
    """
    from jax.extend.core import Literal

    places = {variable: place for place, variable in enumerate(jaxpr.invars)}
    given_back = [None if isinstance(v, Literal) else places.get(v) for v in jaxpr.outvars]
    looked_at = {v for equation in jaxpr.eqns for v in equation.invars if not isinstance(v, Literal)}
    is_passed = [v in looked_at and v.aval.size > 0 for v in jaxpr.invars]
    is_edited = [
        place < num_states and given_back[place] is None and variable.aval.size > _SMALL
        for variable, place in places.items()
    ]
    return is_passed, [not edited for edited in itertools.compress(is_edited, is_passed)], given_back


def _on_every_device(arrays: Any) -> Any:
    """The arrays whole on each device where XLA would choose, which cannot split a single kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.auto_axes:
        return arrays
    return lax.with_sharding_constraint(arrays, PartitionSpec())


@functools.cache
def _traced_later() -> Any:
    """A primitive for what accelerators run: it is traced when it is lowered for one, for CPUs never."""
    from jax.extend.core import Primitive

    primitive = Primitive("traced_later")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *passed, fn, types: types)
    primitive.def_impl(lambda *passed, fn, types: fn(*passed))
    lowering = mlir.lower_fun(lambda *passed, fn, types: fn(*passed), multiple_results=True)
    mlir.register_lowering(primitive, lowering)
    return primitive


def _sum_of_firsts(arrays: Iterable[jax.Array]) -> jax.Array:
    """i32[], which is of no use, but reads an element of each array."""
    firsts = (lax.slice_in_dim(lax.reshape(x, (x.size,)), 0, 1).astype(jnp.int32) for x in arrays)
    return functools.reduce(lax.add, firsts, jnp.zeros(1, jnp.int32))
