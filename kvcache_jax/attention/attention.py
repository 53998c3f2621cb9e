"""Attention on a cache: what a model calls."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from kvcache_jax.arrays.head_axis import check_split
from kvcache_jax.arrays.manual_axes import as_varied
from kvcache_jax.arrays.number_checks import finite_number, static_flag
from kvcache_jax.attention import vjp
from kvcache_jax.attention.inputs import Reads, queries_of
from kvcache_jax.attention.options import Options
from kvcache_jax.attention.write import write
from kvcache_jax.blocks import storage
from kvcache_jax.core import arguments, backends
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache, KVPool, Step

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
    implementation: str | None = None,
) -> AttentionOutput:
    """Causal attention of the step's queries over what their rows hold; the reading half of `attention`."""
    _, out = _attend(cache, layer, q, step, scale, soft_cap, sink_logits, return_lse, implementation)
    return out


@takes_one
@jax.named_scope("kvcache.attention")
def attention(
    cache: Cache,
    layer: Layer,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    step: Step,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> tuple[Cache, AttentionOutput]:
    """Stores the new keys and values of one layer and attends: what a model's layer calls.

    Query head `i` reads key/value head `i // (num_q_heads / num_kv_heads)`. A query sees the tokens of
    its row up to its own position, in a window group those in reach. It can be differentiated once, in
    reverse mode (`jax.grad`); forward mode and second derivatives raise. Within a call gradients add up in
    float32. From call to call those of keys and values do so in the cache's dtype: through many short steps
    (sampled token by token, say) bfloat16 loses small ones, so keep such a cache in float32.

    Args:
      cache: Not changed, unless donated.
      layer: Model layer; or a traced index if all layers form one group; or (group, index in it).
      q: `[n, max_new, num_q_heads, head_dim]`, or `[num_tokens, ...]` for a packed step.
      k: `[n, max_new, num_kv_heads, head_dim]`, or packed likewise.
      v: Like `k`.
      step: From `extend`; the same for all layers.
      scale: Of the logits. Default: `head_dim ** -0.5`.
      soft_cap: Bounds the scaled logits, `soft_cap * tanh(logits / soft_cap)`.
      sink_logits: `[num_q_heads]`, a logit per head that takes weight and adds nothing.
      return_lse: Also return the log of the sum of exponentials (sink included), f32
        `[n, max_new, num_q_heads]`, so that partial results can be merged.
      implementation: "xla", "mosaic_gpu", "mosaic_tpu", or None for what the config says. Kernels run
        forward; the gradient is always XLA's.

    Returns:
      The cache and `out` like `q` (or `(out, lse)`): 0 (and -inf) for padding and failed rows.

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
    cache = write(cache, layer, k, v, step)
    return _attend(cache, layer, q, step, scale, soft_cap, sink_logits, return_lse, implementation)


def _attend(
    cache: Cache,
    layer: Layer,
    q: jax.Array,
    step: Step,
    scale: float | None,
    soft_cap: float | None,
    sink_logits: arguments.Array | None,
    return_lse: bool,
    implementation: str | None,
) -> tuple[Cache, AttentionOutput]:
    """Reads one layer; the pool is handed through (see `vjp.attend`)."""
    group_id, index = arguments.locate_layer(cache.config, layer)
    group, pool = cache.config.groups[group_id], arguments.pool_of(cache, group_id)
    num_kv_heads, head_dim = pool.k.shape[1], pool.k.shape[3]
    arguments.require_step(step, cache)
    arguments.require_floats("q", q)
    _check_queries(q, step, num_kv_heads, head_dim)
    if sink_logits is not None:
        sink_logits = arguments.as_array("sink_logits", sink_logits)
    _check_options(scale, soft_cap, sink_logits, q.shape[-2])
    return_lse = static_flag("return_lse", return_lse)
    arguments.refuse_shared_cache("q", q, cache)

    block_pool = cache.control.block_pools[group_id]
    name = backends.choose(cache.config, implementation, pool, q.shape[-2] // num_kv_heads)
    if name == backends.XLA:  # kernels are mapped over the heads
        check_split("q", q, pool.k)
    options = Options(
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        window=group.window,
        num_sink_tokens=group.num_sink_tokens,
        num_sink_blocks=group.num_sink_blocks,
        num_blocks=block_pool.num_blocks,
        implementation=name,
        head_axis=cache.config.head_axis,
    )
    pool, out, lse = _read(
        pool, block_pool.block_table, index, arguments.owned(q), sink_logits, step, options, group_id
    )
    cache = storage.with_pool(cache, group_id, pool)
    return cache, (out, lse) if return_lse else out


# Called eagerly it is one program; within another it is part of that.
@functools.partial(jax.jit, static_argnames=("options", "group_id"), inline=True)
def _read(
    pool: KVPool,
    block_table: jax.Array,
    index: jax.Array,
    q: jax.Array,
    sink_logits: jax.Array | None,
    step: Step,
    options: Options,
    group_id: int,
) -> tuple[KVPool, jax.Array, jax.Array]:
    """Attention to one layer, `index` of a group; the pool, `out` like `q`, lse f32."""
    _, num_kv_heads, block_size, head_dim = pool.k.shape
    shape = q.shape
    num_queries = shape[1] if step.cu_query_lens is None else 1
    grouped = q.reshape(-1, num_queries, num_kv_heads, shape[-2] // num_kv_heads, head_dim)
    if sink_logits is not None:
        sink_logits = sink_logits.astype(jnp.float32).reshape(grouped.shape[2:4])
    reads = Reads(
        block_table=block_table,
        layer=index,
        queries=queries_of(step, group_id, options.num_blocks * block_size),
        work=step.plans[group_id].work,
    )
    read, grouped, sink_logits = as_varied((pool, grouped, sink_logits), reads)
    (k, v), out, lse = vjp.attend(options, (read.k, read.v), grouped, sink_logits, reads)
    if read.k is not pool.k:  # What all devices share stays shared where they ask different things of it.
        k, v, out, lse = lax.optimization_barrier((pool.k, pool.v, out, lse))
    return KVPool(k=k, v=v), out.reshape(shape).astype(q.dtype), lse.reshape(shape[:-1])


def _check_queries(q: jax.Array, step: Step, num_kv_heads: int, head_dim: int) -> None:
    tokens = step.positions.shape
    heads_divide = q.ndim >= 2 and q.shape[-2] > 0 and q.shape[-2] % num_kv_heads == 0
    if q.shape[:-2] != tokens or q.shape[-1] != head_dim or not heads_divide:
        raise ValueError(
            f"q has shape {q.shape}, expected {(*tokens, 'num_q_heads', head_dim)} "
            f"with num_q_heads a multiple of num_kv_heads = {num_kv_heads}"
        )


def _check_options(scale: Any, soft_cap: Any, sink_logits: arguments.Array | None, num_q_heads: int) -> None:
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if isinstance(value, Tracer):
            raise TypeError(f"{name} is traced, expected a Python number; multiply q by it instead")
        if value is None:
            continue
        if np.ndim(value) or not jnp.isdtype(np.asarray(value).dtype, ("real floating", "integral")):
            raise TypeError(f"{name} is {value!r}, expected a Python number or None")
        finite_number(name, np.asarray(value)[()])
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, expected a positive number or None")
    if sink_logits is None:
        return
    if sink_logits.shape != (num_q_heads,):
        raise ValueError(
            f"sink_logits has shape {sink_logits.shape}, expected ({num_q_heads},), one per query head"
        )
    if not jnp.isdtype(sink_logits.dtype, ("real floating", "integral")):
        raise TypeError(f"sink_logits has dtype {sink_logits.dtype}, expected real numbers")
