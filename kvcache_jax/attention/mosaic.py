"""The backends "mosaic_gpu" and "mosaic_tpu", made of `pallas_kernels`, and their cascades.

Importing the kernels imports Pallas, so every function here imports the kernels that it calls.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.attention.attention_plan import plan_rows
from kvcache_jax.attention.cascade import cascade
from kvcache_jax.blocks.storage import copy_by_xla, write_by_xla
from kvcache_jax.core.backends import MOSAIC_GPU, MOSAIC_TPU, Backend, TargetDevice
from kvcache_jax.core.state import AttentionPlan, KVPool
from kvcache_jax.layers.layer_group import LayerGroup

_PLATFORM = {MOSAIC_GPU: "cuda", MOSAIC_TPU: "tpu"}
_MOST_HEADS = 256  # of a token that a kernel writes

is_interpreted = jax.make_user_context(False)
"""Whether kernels traced now are to run on the CPU; programs compiled for devices are not reused then."""


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Makes the kernels that are traced within it run on the CPU, where races are looked for; slow.

    Those for GPUs on one device: jax's interpreter confuses the barriers of several.
    """
    with is_interpreted(True):
        yield


def _load(name: str) -> None:
    """Imports the kernels, unless they were not tested with this jax."""
    from pallas_kernels.versions import untested_jax

    if not untested_jax():
        _kernels(name)


def _kernels(name: str) -> ModuleType:
    if name == MOSAIC_GPU:
        from pallas_kernels import mosaic_gpu

        return mosaic_gpu
    from pallas_kernels import mosaic_tpu

    return mosaic_tpu


def _supports(
    name: str, pool: KVPool, group: LayerGroup, group_size: int, device: TargetDevice
) -> str | None:
    from pallas_kernels.versions import untested_jax

    reason = untested_jax() or _why_not_here(name, device)
    kind = group.kind
    if not reason and not (kind.is_causal and kind.source_len_limit is None):
        reason = (
            "its kernels attend to a row's tokens up to the query's, and all queries of "
            f"{kind.label} layers see the same tokens"
        )
    if not reason and not kind.is_plain and not (name == MOSAIC_GPU and kind.has_scaled_numbers):
        reason = (
            f"its kernels read keys and values as they are stored, and {kind.label} layers store "
            "something else"
        )
    if not reason and kind.has_scaled_numbers and kind.dtype != jnp.bfloat16:
        reason = (
            f"its kernels multiply numbers of 8 bits in bfloat16, and {kind.label} layers do in {kind.dtype}"
        )
    return reason or _kernels(name).why_not(pool.k, group_size)


def _why_not_here(name: str, device: TargetDevice) -> str | None:
    if is_interpreted.value:
        if name == MOSAIC_GPU and jax.sharding.get_abstract_mesh().size > 1:
            return "jax's interpreter of GPU kernels confuses the barriers of several devices, expected one"
        return None
    if device.platform != _PLATFORM[name]:
        return f"it is for {_PLATFORM[name]} devices, and this is {device.platform}"
    if name == MOSAIC_GPU:
        from pallas_kernels.gpus import gpu_of, served

        capability = device.compute_capability
        if gpu_of(device.kind, capability) is None:
            of_device = f", of compute capability {capability}" if capability else ""
            return (
                f"it is for GPUs of compute capability {served()} alone, and this is {device.kind}{of_device}"
            )
    return None


def _code(name: str, device: TargetDevice) -> str | None:
    from pallas_kernels.versions import digest, untested_jax

    return None if untested_jax() or _why_not_here(name, device) else digest()


def _attend(
    name: str,
    q: jax.Array,
    pool: KVPool,
    block_table: jax.Array,
    plan: AttentionPlan,
    group: LayerGroup,
    *,
    layer: jax.Array,
    scale: float,
    soft_cap: float | None,
    sink_logits: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.decode_rows import DecodeOptions

    kernels, num_blocks = _kernels(name), pool.num_rows // group.num_layers
    options = DecodeOptions(num_blocks, scale, soft_cap, group.span.window, group.span.num_sink_tokens)
    own: dict[str, Any] = dict(layer=layer, sink_logits=sink_logits, interpret=is_interpreted.value)
    if name == MOSAIC_GPU:
        own.update(scaling=_scaling(pool.arrays, group))
    if _has_own_prefill(name, pool, q.shape[1]) and not kernels.why_not_prefill(pool.k, q.dtype):
        return kernels.paged_prefill(q, pool.k, pool.v, block_table, _rows(plan), options, **own)
    if name == MOSAIC_GPU:
        work = kernels.DecodePlan(*plan.work) if plan.work else None
        own.update(out_dtype=q.dtype, plan=work)
    most, attend = _max_queries(), kernels.paged_decode
    if name == MOSAIC_TPU and q.shape[1] > most:
        most, attend = kernels.queries_per_row(q.shape[1], pool.k, q.shape[3]), kernels.paged_prefill
    rows = _decode_rows(plan, group, q.shape[1], most)
    results = attend(_cut(q, most), pool.k, pool.v, block_table, rows, options, **own)
    out, lse = (x.reshape(q.shape[0], -1, *x.shape[2:])[:, : q.shape[1]] for x in results)
    return out, lse


def _scaling(arrays: Mapping[str, jax.Array], group: LayerGroup) -> Any:
    from pallas_kernels.eight_bits import Scaling

    if not group.kind.has_scaled_numbers:
        return None
    return Scaling(**{name: arrays[name] for name in Scaling._fields if name in arrays})


def _write(
    name: str,
    pool: KVPool,
    new: Mapping[str, jax.Array],
    slots: jax.Array,
    group: LayerGroup,
    *,
    layer: jax.Array,
) -> KVPool:
    # XLA writes two arrays where it computes them, and heads that are too many for one transfer.
    if not group.kind.has_scaled_numbers or pool.k.shape[1] > _MOST_HEADS:
        return write_by_xla(pool, new, slots, group, layer=layer)
    k, v, scaling = _kernels(name).append_scaled(
        pool.k,
        pool.v,
        _scaling(pool.arrays, group),
        new["k"],
        new["v"],
        _scaling(new, group),
        slots,
        num_blocks=pool.num_rows // group.num_layers,
        layer=layer,
        interpret=is_interpreted.value,
    )
    beside = {part: array for part, array in scaling._asdict().items() if array is not None}
    return KVPool(arrays={"k": k, "v": v, **beside})


def _has_own_prefill(name: str, pool: KVPool, num_queries: int) -> bool:
    """Tells whether so many queries of a row are computed at once; else they are cut into rows of fewer."""
    if name != MOSAIC_GPU:
        return False
    kernels = _kernels(name)
    return num_queries >= kernels.MIN_QUERIES and kernels.why_not_prefill(pool.k) is None


def _plan(
    plan: AttentionPlan, pool: KVPool, block_table: jax.Array, group: LayerGroup, *, num_queries: int
) -> tuple[jax.Array, ...]:
    if _has_own_prefill(MOSAIC_GPU, pool, num_queries):
        return ()
    rows = _decode_rows(plan, group, num_queries, _max_queries())
    _, num_heads, block_size, head_dim = pool.k.shape
    q_shape = (rows.table_row.shape[0], min(num_queries, _max_queries()), num_heads, 1, head_dim)
    plan_for = _kernels(MOSAIC_GPU).plan_for
    options: dict[str, Any] = dict(dtype=pool.k.dtype, interpret=is_interpreted.value)
    return tuple(plan_for(rows, q_shape, block_table.shape[1], block_size, **options))


def _copy_blocks(
    name: str, pool: KVPool, src: jax.Array, dst: jax.Array, num_copies: jax.Array, group: LayerGroup
) -> KVPool:
    if not group.kind.is_plain:  # the kernels copy keys and values alone
        return copy_by_xla(pool, src, dst, num_copies, group)
    copy, num_blocks = _kernels(name).copy_blocks, pool.num_rows // group.num_layers
    interpret = is_interpreted.value
    k, v = copy(pool.k, pool.v, src, dst, num_copies, num_blocks=num_blocks, interpret=interpret)
    return KVPool(arrays={"k": k, "v": v})


def _read_blocks(name: str, pool: KVPool, block_ids: jax.Array, group: LayerGroup) -> dict[str, jax.Array]:
    gather, num_blocks = _kernels(name).gather_blocks, pool.num_rows // group.num_layers
    k, v = gather(pool.k, pool.v, block_ids, num_blocks=num_blocks, interpret=is_interpreted.value)
    return {"k": k, "v": v}


def _write_blocks(
    name: str, pool: KVPool, arrays: Mapping[str, jax.Array], block_ids: jax.Array, group: LayerGroup
) -> KVPool:
    scatter, num_blocks = _kernels(name).scatter_blocks, pool.num_rows // group.num_layers
    own = dict(num_blocks=num_blocks, interpret=is_interpreted.value)
    k, v = scatter(pool.k, pool.v, arrays["k"], arrays["v"], block_ids, **own)
    return KVPool(arrays={"k": k, "v": v})


def _max_queries() -> int:
    from pallas_kernels.decode_rows import MAX_QUERIES

    return MAX_QUERIES


def _cut(q: jax.Array, most: int) -> jax.Array:
    """Cuts each row of `[r, t, ...]` into rows of at most so many queries."""
    num_queries = q.shape[1]
    if num_queries <= most:
        return q
    padding = [(0, -num_queries % most if axis == 1 else 0) for axis in range(q.ndim)]
    return jnp.pad(q, padding).reshape(-1, most, *q.shape[2:])


def _decode_rows(plan: AttentionPlan, group: LayerGroup, num_queries: int, most: int) -> Any:
    """Plans the rows that `_cut` makes; each reads only the columns that its own queries reach."""
    if num_queries > most:
        starts = jnp.arange(0, num_queries, most, dtype=jnp.int32)
        first_position = (plan.first_position[:, None] + starts[None]).reshape(-1)
        num_left = (plan.num_queries[:, None] - starts[None]).reshape(-1)
        table_row = jnp.repeat(plan.table_row, starts.shape[0])
        plan = plan_rows(group, table_row, first_position, jnp.clip(num_left, 0, most))
    return _rows(plan)


def _rows(plan: AttentionPlan) -> Any:
    from pallas_kernels.decode_rows import DecodeRows

    return DecodeRows(
        plan.table_row, plan.first_column, plan.num_columns, plan.first_position, plan.num_queries
    )


def _backend(name: str, plan: Any, write: Any) -> Backend:
    def own[T](function: Callable[..., T]) -> Callable[..., T]:
        return functools.partial(function, name)

    return Backend(
        name,
        supports=own(_supports),
        decode=own(_attend),
        prefill=own(_attend),
        write=write,
        copy_blocks=own(_copy_blocks),
        read_blocks=own(_read_blocks),
        write_blocks=own(_write_blocks),
        plan=plan,
        load=own(_load),
        code=own(_code),
    )


_BACKENDS = (
    _backend(MOSAIC_GPU, _plan, functools.partial(_write, MOSAIC_GPU)),
    _backend(MOSAIC_TPU, None, None),
)
BACKENDS = (*_BACKENDS, *map(cascade, _BACKENDS))
