"""One derivative for all backends of attention: whichever ran forward, XLA runs backward."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from kvcache_jax.arrays.derivatives import reverse_mode_only
from kvcache_jax.arrays.same_form import same_form
from kvcache_jax.arrays.sharding import axis_of_types, axis_to_map, over_heads
from kvcache_jax.attention import split_context, xla
from kvcache_jax.blocks import storage
from kvcache_jax.blocks.split_blocks import require_whole
from kvcache_jax.core.backends import Backend
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import AttentionPlan, KVPool
from kvcache_jax.layers.layer_group import LayerGroup


class Call(NamedTuple):
    """The static part of a call of attention."""

    config: CacheConfig
    group_id: int
    backend: Backend
    scale: float  # like `soft_cap`, as in `attention.attention`
    soft_cap: float | None
    num_kv_heads: int  # heads of the keys that the kind computes

    @property
    def group(self) -> LayerGroup:
        """The layer group."""
        return self.config.groups[self.group_id]


def attend(
    call: Call,
    pool: KVPool,
    q: jax.Array,
    weights: Any,
    sink_logits: jax.Array | None,
    block_table: jax.Array,
    plan: AttentionPlan,
    layer: jax.Array,
) -> tuple[KVPool, jax.Array, jax.Array]:
    """Computes attention of `q` over the blocks of one layer.

    The pool is handed through, so that a chain of layers has one chain of gradients, updated in
    place, and not a pool-sized gradient per layer. `q` is `[r, t, h, g, d]`, of the plan's `r` rows,
    `sink_logits` f32[h, g]. Beside the pool are returned out f32[r, t, h, g, e], as wide as values, and lse
    f32[r, t, h, g]: 0 and -inf where nothing is seen.
    """
    inputs = reverse_mode_only("attention", (pool, q, weights, sink_logits))
    return _attend(call, *inputs, block_table, plan, layer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, pool, *inputs):
    return _handed_through(pool, *_forward(call, pool, *inputs))


def _forward(call, pool, q, weights, sink_logits, block_table, plan, layer):
    options = dict(scale=call.scale, soft_cap=call.soft_cap)
    backend, arguments = call.backend, (pool, q, weights, sink_logits, block_table, plan, layer)
    backend_attend = backend.attend(q.shape[1])

    def by_xla(pool, q, weights, sink_logits, block_table, plan, layer):
        more = options | dict(tile_tokens=call.config.tile_tokens)
        reads = block_table, plan, layer, call.group
        out, lse = split_context.forward(
            call.config.context_axis, pool, q, weights, sink_logits, *reads, **more
        )
        return typed(out), lse

    def typed(out: jax.Array) -> jax.Array:
        return out.astype(q.dtype) if backend.platform else out  # the same on all platforms

    if backend_attend is None:
        return by_xla(*arguments)

    # Each device reshapes on its own: a reshape of q would need its sharding where mesh axes are explicit.
    def local(q, pool, block_table, plan, layer, sink_logits):
        found = backend_attend(
            q, pool, block_table, plan, call.group, layer=layer, sink_logits=sink_logits, **options
        )
        # Its out may be f32 too.
        dtype = getattr(found[0], "dtype", None) if isinstance(found, tuple) and found else None
        out = jax.ShapeDtypeStruct(q.shape, jnp.float32 if dtype == jnp.float32 else q.dtype)
        lse = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)
        return same_form(f"attention of the backend {backend.name!r}", found, (out, lse))

    def by_backend(pool, q, weights, sink_logits, block_table, plan, layer):
        positions = call.group.head_positions
        axis = axis_to_map(axis_of_types(pool.arrays, positions), call.config.head_axis)
        heads = (2, KVPool(arrays=positions), None, None, None, None if sink_logits is None else 0)
        is_layer = layer < call.group.num_layers  # one that does not exist reads NaN
        layer = jnp.where(is_layer, layer, 0)
        found = over_heads(local, axis, heads, (2, 2))(q, pool, block_table, plan, layer, sink_logits)
        out, lse = (jnp.where(is_layer, x, jnp.nan) for x in found)
        return typed(out), lse

    return backend.run(by_backend, by_xla, *arguments)


def _handed_through(pool, *reads):
    """Fences the pool after the read from it, so that the next layer's write happens in place."""
    return lax.optimization_barrier((pool, *reads))


def _attend_fwd(call, *arguments):
    storage.require_gradient(call.group)
    arguments = jax.tree.map(lambda x: x.value, arguments)
    pool, q, weights, sink_logits, block_table, plan, layer = arguments
    require_whole("a gradient", pool, call.group)
    out, lse = _forward(call, *arguments)
    saved = xla.save(pool, block_table, plan, call.group, layer)
    pool, out, lse, saved = _handed_through(pool, out, lse, saved)
    return (pool, out, lse), (saved, q, weights, sink_logits, out, lse)


def _attend_bwd(call, residuals, grads):
    lse = residuals[-1]

    def materialised(grad: Any, make: Callable[..., jax.Array]) -> jax.Array:
        return make(shape=grad.shape, dtype=grad.dtype) if isinstance(grad, SymbolicZero) else grad

    pool_grads, *read_grads = grads
    arrays = {}
    for name, position in call.group.head_positions.items():
        after_forward = functools.partial(xla.zeros_after, lse[0, 0, :, 0], position)
        arrays[name] = materialised(pool_grads.arrays[name], after_forward)
    grads = (KVPool(arrays=arrays), *(materialised(grad, jnp.zeros) for grad in read_grads))
    return *_backward(call, *residuals, grads), None, None, None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(call, *arguments):
    """Runs `xla.backward`, which has no derivative: autodiff of it would give NaN."""
    options = call.group, call.scale, call.soft_cap, call.config.tile_tokens
    return split_context.backward(call.config.context_axis, *options, *arguments)


@_backward.defjvp
def _refuse_second_derivative(call, primals, tangents):
    raise NotImplementedError(
        "got a second derivative through attention, expected at most a gradient: to differentiate twice, "
        "read keys and values back by gather and attend to them in jax.numpy"
    )


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
