"""One of two functions for a program, chosen when it is lowered, for only then its platform is known."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src.core import Primitive, jaxpr_as_fun  # jax.extend, where they are public, imports Pallas
from jax._src.state.discharge import discharge_state, register_discharge_rule  # without a public name
from jax.interpreters import batching, mlir

_either = Primitive("either")
_either.multiple_results = True


def on_platform(platform: str, own: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `own` in programs that jax compiles for `platform`, `other` in those for others and in exports.

    An export may come to run anywhere, and jax exports no GPU kernel for several platforms. Both functions
    are traced; they return the same shapes and dtypes, have no derivative and close over no traced values.
    """
    flat, tree = jax.tree.flatten(arguments)

    def traced(function: Callable[..., Any]) -> tuple[Any, Any]:
        return jax.make_jaxpr(lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True)(
            *flat
        )

    (own_jaxpr, shapes), (other_jaxpr, _) = traced(own), traced(other)
    out = _either.bind(*flat, platform=platform, own=own_jaxpr, other=other_jaxpr)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


@_either.def_impl
def _run(*arguments, **choice):
    return jax.jit(functools.partial(_either.bind, **choice))(*arguments)


@_either.def_effectful_abstract_eval
def _types(*_, platform, own, other):
    return own.out_avals, own.effects | other.effects


def _lower(ctx, *arguments, platform, own, other):
    program = ctx.module_context
    is_own = [*program.platforms] == [platform] and not program.lowering_parameters.for_export
    return mlir.lower_fun(jaxpr_as_fun(own if is_own else other), multiple_results=True)(ctx, *arguments)


def _batch(arguments, axes, *, platform, own, other):
    own, other = (jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(axes)) for jaxpr in (own, other))
    out = on_platform(platform, own, other, *arguments)
    return out, [0] * len(out)


@register_discharge_rule(_either)
def _without_references(ctx, *arguments, platform, own, other):
    """Kernels for GPUs write through references, which jax turns into values at the end."""
    own, other = discharge_state(own), discharge_state(other)
    return [None] * len(arguments), _either.bind(*arguments, platform=platform, own=own, other=other)


mlir.register_lowering(_either, _lower)
batching.primitive_batchers[_either] = _batch
