"""Attention on a cache, as the layers of a model call it."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.number_checks import static_flag
from kvcache_jax.arrays.sharding import as_varied, axis_of_types, check_split
from kvcache_jax.attention import vjp
from kvcache_jax.attention.attention_plan import in_runs
from kvcache_jax.attention.write import store
from kvcache_jax.blocks import storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer, Place
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.choose_backend import choose
from kvcache_jax.core.state import AttentionPlan, Cache, KVPool, Step

AttentionOutput = jax.Array | tuple[jax.Array, jax.Array]


@takes_one
@jax.named_scope("kvcache.attend")
def attend(
    cache: Cache,
    layer: Layer,
    q: jax.Array,
    step: Step,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
    weights: Any = None,
    implementation: str | None = None,
) -> tuple[Cache, AttentionOutput]:
    """Attends to the tokens that the step's rows hold; the reading half of `attention`.

    The returned cache has the same keys and values. Go on with it, so that
    later writes wait for this read: a donated step that writes to the old one copies a whole pool.

    Args:
      cache: Not changed, unless donated.
      layer: Model layer, as in `attention`.
      q: Queries, as in `attention`.
      step: The `Step` from `extend`, as in `attention`.
      scale: Factor of the logits, as in `attention`.
      soft_cap: Soft cap of the logits, as in `attention`.
      sink_logits: Logits of the sinks, as in `attention`.
      return_lse: Whether to return the log-sum-exp too, as in `attention`.
      weights: The layer's own weights, as in `attention`.
      implementation: Backend, as in `attention`.

    Returns:
      The cache and `out`, or `(out, lse)`, as `attention` does.

    Raises:
      ValueError, TypeError, NotImplementedError: the layer, shapes, dtypes or options do not fit.
    """
    place = arguments.located(cache, layer, step)
    return _attend(cache, place, q, step, scale, soft_cap, sink_logits, return_lse, weights, implementation)


@takes_one
@jax.named_scope("kvcache.attention")
def attention(
    cache: Cache,
    layer: Layer,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    step: Step,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
    weights: Any = None,
    implementation: str | None = None,
) -> tuple[Cache, AttentionOutput]:
    """Stores the new keys and values of one layer and attends to all; a model's layer calls it.

    Query head `i` reads key/value head `i // (num_q_heads / num_kv_heads)`. A query sees the tokens of
    its row up to its own position, in a window group the tokens in reach. It can be differentiated once, in
    reverse mode (`jax.grad`); forward mode and second derivatives raise. Within a call gradients add up in
    float32. From call to call gradients of keys and values add up in the cache's dtype: through many short
    steps (sampled token by token, say) bfloat16 loses small ones, so keep such a cache in float32.

    Args:
      cache: Not changed, unless donated.
      layer: Model layer; or a traced index if all layers form one group; or (group, index in it).
      q: `[n, max_new, num_q_heads, head_dim]`, or `[num_tokens, ...]` for a packed step.
      k: `[n, max_new, num_kv_heads, head_dim]`, or packed likewise.
      v: Like `k`; None for kinds that take no values.
      step: From `extend`; the same for all layers.
      scale: Of the logits. Default: the width of a key, `head_dim ** -0.5`.
      soft_cap: Bounds the scaled logits, `soft_cap * tanh(logits / soft_cap)`.
      sink_logits: `[num_q_heads]`, a logit per head that takes weight and adds nothing.
      return_lse: Also return the log of the sum of exponentials (sink included), f32
        `[n, max_new, num_q_heads]`, so that partial results can be merged.
      weights: The layer's own arrays, a pytree, for kinds that compute keys and values with them.
      implementation: Name of a backend, or None for the config's. Backends run forward; the gradient
        is always XLA's.

    Returns:
      The cache and `out` like `q` (or `(out, lse)`), as wide as the kind's values: 0 (and -inf) for padding
      and failed rows.

    Raises:
      ValueError, TypeError, NotImplementedError: the layer, shapes, dtypes or options do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [3])
      >>> cache, step = kv.extend(cache, [3, 0], max_new=3)
      >>> q, kv_new = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 1, 8))
      >>> cache, out = kv.attention(cache, 0, q, kv_new, kv_new, step)
      >>> out.shape, out[:, 0, 0, 0].tolist()
      ((2, 3, 4, 8), [1.0, 0.0])
    """
    place = arguments.located_to_store(cache, layer, step)
    cache = store(cache, place, k, v, step)
    place = place._replace(pool=cache.pools[place.group_id])
    return _attend(cache, place, q, step, scale, soft_cap, sink_logits, return_lse, weights, implementation)


def _attend(
    cache: Cache,
    place: Place,
    q: jax.Array,
    step: Step,
    scale: float | None,
    soft_cap: float | None,
    sink_logits: arguments.Array | None,
    return_lse: bool,
    weights: Any,
    implementation: str | None,
) -> tuple[Cache, AttentionOutput]:
    """Reads one layer; the pool is handed through (see `vjp.attend`)."""
    if step.parts:
        return _attend_by_parts(
            cache, place, q, step, scale, soft_cap, sink_logits, return_lse, weights, implementation
        )
    (group_id, layer, pool), config = place, cache.config
    group, plan = config.groups[group_id], step.plans[group_id]
    weights = arguments.jax_arrays("weights", weights)
    stored = storage.keys_values_shapes(pool, group, weights)
    num_kv_heads, _, key_dim = stored.k.shape
    arguments.require_floats("q", q)
    arguments.check_queries(q, step, num_kv_heads, key_dim)
    if sink_logits is not None:
        sink_logits = arguments.as_array("sink_logits", sink_logits)
    arguments.check_options(scale, soft_cap, sink_logits, q.shape[-2])
    return_lse = static_flag("return_lse", return_lse)
    arguments.refuse_shared_cache("q", q, cache)

    backend = choose(config, implementation, pool, group, q.shape[-2] // num_kv_heads)
    plan, num_queries = in_runs(plan, group, backend, _num_queries(step, plan))
    if backend.attend(num_queries) is None:  # others are mapped over the heads
        check_split("q", q, axis_of_types(pool.arrays, group.head_positions))
    if plan.work and backend != choose(config, None, pool, group):
        plan = dataclasses.replace(plan, work=())  # cut for the cache's own backend
    call = vjp.Call(
        config=config,
        group_id=group_id,
        backend=backend,
        scale=1 / math.sqrt(key_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        num_kv_heads=num_kv_heads,
    )
    block_table = cache.control.block_pools[group_id].block_table
    q = arguments.owned(q)
    pool, out, lse = _read(call, pool, q, weights, sink_logits, block_table, plan, layer, num_queries)
    cache = storage.with_pool(cache, group_id, pool)
    return cache, (out, lse) if return_lse else out


def _attend_by_parts(
    cache: Cache, place: Place, q: jax.Array, step: Step, *options: Any
) -> tuple[Cache, AttentionOutput]:
    """Reads one layer for each part of a step, which cuts the queries `[tokens, 1, ...]` at static places."""
    arguments.require_floats("q", q)
    if q.ndim != 4 or q.shape[:2] != step.positions.shape:
        raise ValueError(f"q has shape {q.shape}, expected {[*step.positions.shape]} and heads of a width")
    first, outs = 0, []
    for part in step.parts:
        shape = part.positions.shape
        part_q = q[first : first + part.positions.size].reshape(*shape, *q.shape[2:])
        place = place._replace(pool=cache.pools[place.group_id])
        cache, out = _attend(cache, place, part_q, part, *options)
        outs.append(jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), out))
        first += part.positions.size
    return cache, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)


def _num_queries(step: Step, plan: AttentionPlan) -> int:
    """Queries of a row of the plan, room for them at least."""
    return step.positions.size // plan.table_row.shape[0]


# Called eagerly it is one program; within another it is part of that.
@functools.partial(jax.jit, static_argnames=("call", "num_queries"), inline=True)
def _read(
    call: vjp.Call,
    pool: KVPool,
    q: jax.Array,
    weights: Any,
    sink_logits: jax.Array | None,
    block_table: jax.Array,
    plan: AttentionPlan,
    layer: jax.Array,
    num_queries: int,
) -> tuple[KVPool, jax.Array, jax.Array]:
    """Attends to one layer, by its index in the group; returns the pool, `out` and lse f32, both like `q`."""
    shape = q.shape
    q = storage.queries_of(call.group, q)
    grouped = q.reshape(-1, num_queries, call.num_kv_heads, shape[-2] // call.num_kv_heads, shape[-1])
    if sink_logits is not None:
        sink_logits = sink_logits.astype(jnp.float32).reshape(grouped.shape[2:4])
    reads = block_table, plan, layer
    varied, grouped, weights, sink_logits = as_varied((pool, grouped, weights, sink_logits), reads)
    read, out, lse = vjp.attend(call, varied, grouped, weights, sink_logits, *reads)
    if jax.tree.leaves(varied)[0] is not jax.tree.leaves(pool)[0]:
        # A pool that all devices share stays shared where their queries differ.
        read, out, lse = lax.optimization_barrier((pool, out, lse))
    out = storage.outputs_of(call.group, out.reshape(*shape[:-1], out.shape[-1]))
    return read, out.astype(q.dtype), lse.reshape(shape[:-1])
