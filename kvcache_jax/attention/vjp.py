"""One derivative for all implementations of attention: whichever ran forward, XLA runs backward."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from kvcache_jax.attention import kernels, xla
from kvcache_jax.attention.inputs import Reads
from kvcache_jax.attention.options import Options
from kvcache_jax.core import backends

Pools = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    options: Options,
    pools: Pools,
    q: jax.Array,
    sink_logits: jax.Array | None,
    reads: Reads,
) -> tuple[Pools, jax.Array, jax.Array]:
    """Attention of `q` over the blocks of one layer.

    The pools are handed through, so that a chain of layers has one chain of gradients, updated in
    place, and not a pool-sized gradient per layer.

    Args:
      options: Static.
      pools: (k, v), `[num_layers * num_blocks, h, s, d]` each.
      q: `[r, t, h, g, d]`.
      sink_logits: f32[h, g] or None.
      reads: `r` rows of `t` queries.

    Returns:
      (pools, out f32[r, t, h, g, d], lse f32[r, t, h, g]); out is 0 and lse -inf where nothing is seen.
    """
    out, lse = _forward(options, pools, q, sink_logits, reads)
    return _handed_through(pools, out, lse)


def _forward(options, pools, q, sink_logits, reads):
    is_xla = options.implementation == backends.XLA
    forward = xla.forward if is_xla else kernels.forward
    return forward(options, pools, q, sink_logits, reads)


def _handed_through(pools, *reads):
    """Fences the pools behind what was read from them, so that the next layer's write happens in place."""
    return lax.optimization_barrier((pools, *reads))


def _attend_fwd(options, *arguments):
    pools, q, sink_logits, reads = jax.tree.map(lambda x: x.value, arguments)
    out, lse = _forward(options, pools, q, sink_logits, reads)
    saved = xla.save(options, pools, reads)
    pools, out, lse, saved = _handed_through(pools, out, lse, saved)
    return (pools, out, lse), (saved, q, sink_logits, reads.queries, out, lse)


def _attend_bwd(options, residuals, grads):
    saved, q, sink_logits, queries, out, lse = residuals

    def materialised(grad: Any, make: Callable[..., jax.Array]) -> jax.Array:
        return make(shape=grad.shape, dtype=grad.dtype) if isinstance(grad, SymbolicZero) else grad

    pool_grads, *read_grads = grads
    after_forward = functools.partial(xla.zeros_after, lse[0, 0, :, 0])
    grads = (
        tuple(materialised(grad, after_forward) for grad in pool_grads),
        *(materialised(grad, jnp.zeros) for grad in read_grads),
    )
    grad_pools, grad_q, grad_sinks = _backward(options, saved, q, sink_logits, queries, out, lse, grads)
    return grad_pools, grad_q, grad_sinks, None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(options, *arguments):
    """`xla.backward`, which has no derivative: autodiff of it would give NaN."""
    return xla.backward(options, *arguments)


@_backward.defjvp
def _refuse_second_derivative(options, primals, tangents):
    raise NotImplementedError(
        "got a second derivative through attention, expected at most a gradient: to differentiate twice, "
        "read keys and values back by gather and attend to them in jax.numpy"
    )


attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
