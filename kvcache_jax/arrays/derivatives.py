"""Derivatives that do not exist are refused by name, where jax would speak of its own loops and rules."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

Primitive = type(lax.sin_p)  # jax.extend.core's, without the kernels that its import brings along


def reverse_mode_only[T](name: str, arrays: T) -> T:
    """Returns arrays whose derivatives in forward mode are refused, when one is computed.

    The error calls them `name`. Arrays of the pytree that are no floats are handed on.
    """
    message = (
        f"got a derivative of {name} in forward mode (jax.jvp, jax.jacfwd), expected reverse mode: jax.grad, "
        "jax.vjp or jax.jacrev"
    )
    return _marked(arrays, forward=message, reverse=None)


def forward_mode_only[T](name: str, instead: str, arrays: T) -> T:
    """Returns arrays whose gradients are refused, when one is computed; as `reverse_mode_only`."""
    return _marked(arrays, forward=None, reverse=f"got a gradient of {name}, which has none, {instead}")


def no_derivative[T](message: str, arrays: T) -> T:
    """Returns arrays of which every derivative is refused with `message`, when one is computed."""
    return _marked(arrays, forward=message, reverse=message)


def _marked(arrays: Any, **messages: str | None) -> Any:
    def mark(x: jax.Array) -> jax.Array:
        return _mark.bind(x, **messages) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(mark, arrays)


# Both hand an array on. Programs hold `_mark`; `_mark_tangent` is its derivative, which is linear:
# reverse mode transposes it and never runs it, so that to run it is forward mode.
_mark, _mark_tangent = Primitive("kvcache_mark"), Primitive("kvcache_mark_tangent")


def _tangent(tangents: Any, primals: Any, **messages: str | None) -> Any:
    (x,), (tangent,) = primals, tangents
    tangent = tangent if isinstance(tangent, ad.Zero) else _mark_tangent.bind(tangent, **messages)
    return _mark.bind(x, **messages), tangent


def _run_tangent(x: Any, *, forward: str | None, reverse: str | None) -> Any:
    if forward is not None:
        raise NotImplementedError(forward)
    return x


def _transpose(cotangent: Any, x: Any, *, forward: str | None, reverse: str | None) -> Any:
    if reverse is not None:
        raise NotImplementedError(reverse)
    return (cotangent,)


for _primitive in (_mark, _mark_tangent):
    _primitive.def_abstract_eval(lambda x, **messages: x)
    batching.defvectorized(_primitive)
_mark.def_impl(lambda x, **messages: x)
_mark_tangent.def_impl(_run_tangent)
mlir.register_lowering(_mark, lambda ctx, x, **messages: [x])
mlir.register_lowering(_mark_tangent, lambda ctx, x, **messages: [_run_tangent(x, **messages)])
ad.primitive_jvps[_mark] = lambda primals, tangents, **messages: _tangent(tangents, primals, **messages)
ad.deflinear2(_mark_tangent, _transpose)
