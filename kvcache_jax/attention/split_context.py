"""XLA's attention on blocks whose tokens a mesh axis splits: each device reads its own, and parts are merged.

Beside the results, which are summed over the devices once a layer, nothing moves between them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.sharding import over_tokens
from kvcache_jax.attention import xla
from kvcache_jax.attention.tiles import MASKED
from kvcache_jax.blocks.split_blocks import is_part, merged, own_keys
from kvcache_jax.core.state import AttentionPlan, KVPool
from kvcache_jax.layers.layer_group import LayerGroup


def forward(
    axis: str | None,
    pool: KVPool,
    q: jax.Array,
    weights: Any,
    sink_logits: jax.Array | None,
    block_table: jax.Array,
    plan: AttentionPlan,
    layer: jax.Array,
    group: LayerGroup,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Computes what `xla.forward` does, on tokens that `axis` splits; None for whole blocks."""

    def local(pool, q, weights, sink_logits, block_table, plan, layer):
        more = options | dict(layer=layer, sink_logits=sink_logits)
        if axis is None or not is_part(pool, group):
            return xla.forward(q, pool, weights, block_table, plan, group, **more)
        if sink_logits is not None:  # it takes its weight once
            more["sink_logits"] = jnp.where(lax.axis_index(axis) == 0, sink_logits, MASKED)
        plan = own_keys(plan, pool, group, axis)
        return merged(*xla.forward(q, pool, weights, block_table, plan, group, **more), axis)

    inputs = KVPool(arrays=group.token_positions), *[None] * 6
    mapped = over_tokens(local, axis, inputs, (None, None))
    return mapped(pool, q, weights, sink_logits, block_table, plan, layer)


def backward(
    axis: str | None,
    group: LayerGroup,
    scale: float,
    soft_cap: float | None,
    tile_tokens: int | None,
    saved: xla.Saved,
    q: jax.Array,
    *rest: Any,
) -> tuple[KVPool, jax.Array, Any, jax.Array | None]:
    """Computes what `xla.backward` does; queries and weights get the sum of what the devices' keys give."""

    def local(saved, q, *rest):
        if axis is None or not is_part(saved.pool, group):
            return xla.backward(group, scale, soft_cap, tile_tokens, saved, q, *rest)
        saved = saved._replace(plan=own_keys(saved.plan, saved.pool, group, axis))
        # In float32, as the sums within a device.
        found = xla.backward(group, scale, soft_cap, tile_tokens, saved, q.astype(jnp.float32), *rest)
        pool_grads, grad_q, grad_weights, grad_sinks = found
        grad_q, grad_weights = lax.psum((grad_q, grad_weights), axis)
        return pool_grads, grad_q.astype(q.dtype), grad_weights, grad_sinks

    tokens = KVPool(arrays=group.token_positions)
    of_saved = saved._replace(rows=None, pool=tokens, block_table=None, plan=None)
    inputs = of_saved, *[None] * len(rest), (tokens, None, None)
    return over_tokens(local, axis, inputs, (tokens, None, None, None))(saved, q, *rest)
