"""Paged prefill attention: many consecutive queries per row, keys and values read block by block.

A program has three warpgroups. The last one copies: tiles of keys and of their values, piece of block by
piece, into two rings of shared memory. The others compute, each 64 queries of one query head, S = Q K^T and
O = P V, by wgmma with P in registers; a program's two are neighbours among the query heads of a key/value
head, so that both read the same keys. They take turns, half a tile apart: while one multiplies, the other has
its softmax.

The softmax is as in `decode`, and so are keys and values of 8 bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows, check_decode
from pallas_kernels.eight_bits import WIDENED, Scaling, check_scaling
from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.decode_budget import key_bytes
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS
from pallas_kernels.mosaic_gpu.grid import unflatten
from pallas_kernels.mosaic_gpu.interpret import launch
from pallas_kernels.mosaic_gpu.limits import target, why_not
from pallas_kernels.mosaic_gpu.logits import LOG2_E, MASKED, scaled
from pallas_kernels.mosaic_gpu.prefill_mask import QUERY_ROWS, QueryMask, Walk
from pallas_kernels.mosaic_gpu.prefill_rings import (
    PrefillRing,
    copy_tiles,
    rings_bytes,
    slot_of,
    smem_for,
    tiling_for,
)
from pallas_kernels.mosaic_gpu.products import Multiply, multiply_on
from pallas_kernels.mosaic_gpu.tiles import tiled

MIN_QUERIES = 64
"""Queries of a row from which on this kernel is meant to be used; with fewer, most of its rows are idle."""
HEAD_DIMS = (64, 128)
MIN_PIECE_LEN = 16
"""Tokens of a block that are copied at once; of shorter pieces the ids do not fit into `REGISTERS`."""
REGISTERS, SCALED_REGISTERS = (224, 56), (216, 72)
"""Of a thread of a warpgroup that computes, and of the one that copies; of 8 bits it also widens."""
_COMPUTING = 2  # warpgroups
_CLEARED_ROWS = 64  # values at a time, for want of registers


def paged_prefill(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    rows: DecodeRows,
    options: DecodeOptions,
    *,
    layer: jax.Array | int = 0,
    sink_logits: jax.Array | None = None,
    scaling: Scaling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of many queries per row over the blocks of one layer; see `reference.paged_decode`.

    Args:
      q: `[r, t, h, g, d]`, any t, in the pool's dtype, beside 8 bits in bfloat16.
      k_pool: `[num_layers * num_blocks, h, block_size, d]` bfloat16, float16, or of 8 bits (see
        `eight_bits`), d 64 or 128, block_size a multiple of 16 up to 512.
      v_pool: Like `k_pool`.
      block_table: i32[max_rows, columns].
      rows: Who asks.
      options: Static.
      layer: i32[].
      sink_logits: f32[h, g] or None.
      scaling: Beside pools of 8 bits.
      interpret: Run on the CPU, and look for races.

    Returns:
      out `[r, t, h, g, d]` in the dtype of q, and lse f32[r, t, h, g].

    Raises:
      ValueError: the arguments do not fit together, or this kernel does not take them.
    """
    check_decode(q, k_pool, v_pool, block_table, rows, options, sink_logits, layer, max_queries=None)
    check_scaling(k_pool, scaling)
    if reason := why_not_prefill(k_pool, q.dtype):
        raise ValueError(reason)
    of_keys, of_values = ((), ()) if scaling is None else (scaling.of_keys(), scaling.of_values())
    num_rows, num_queries, num_heads, group_size, head_dim = q.shape
    cost = _cost(q, (k_pool, *of_keys), block_table)
    padding = [(0, -num_queries % QUERY_ROWS if axis == 1 else 0) for axis in range(q.ndim)]
    q = jnp.pad(q, padding)
    padded_len, num_q_heads = q.shape[1], num_heads * group_size
    num_units = padded_len // QUERY_ROWS * group_size

    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    inputs = [
        q.reshape(num_rows, padded_len, num_q_heads, head_dim),
        k_pool,
        v_pool,
        block_table,
        *rows,
        layer,
        *of_keys,
        *of_values,
    ]
    if sink_logits is not None:
        inputs.append(sink_logits.astype(jnp.float32).reshape(-1) * LOG2_E)
    gpu = target()
    tile_len = tile_len_for(k_pool, gpu)
    ring = smem_for((k_pool, *of_keys), q.dtype, tile_len, _COMPUTING, gpu)
    scratch: dict[str, Any] = dict(
        q_smem=plgpu.SMEM((_COMPUTING, QUERY_ROWS, head_dim), q.dtype, transforms=tiled(head_dim, 2)),
        k_ring=ring,
        v_ring=ring,
        lse_smem=plgpu.SMEM((_COMPUTING, QUERY_ROWS), jnp.float32),
        q_barrier=plgpu.Barrier(num_barriers=_COMPUTING),
        turn=plgpu.Barrier(num_arrivals=_COMPUTING),
    )
    if interpret or not gpu.has_wgmma:  # neither takes a factor from the registers where it was computed
        scratch["p_smem"] = plgpu.SMEM(
            (_COMPUTING, QUERY_ROWS, tile_len), q.dtype, transforms=tiled(tile_len, 2)
        )
    out, lse = launch(
        functools.partial(_prefill, options, group_size, multiply_on(gpu, interpret)),
        cost=cost,
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, padded_len, num_q_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_rows, num_q_heads, padded_len), jnp.float32),
        ),
        grid=(num_rows * -(-num_units // _COMPUTING) * num_heads,),
        grid_names=("program",),
        num_threads=_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs)
    out = out[:, :num_queries].reshape(num_rows, num_queries, num_heads, group_size, head_dim)
    return out, lse.swapaxes(1, 2)[:, :num_queries].reshape(out.shape[:-1])


def why_not_prefill(k_pool: jax.Array, q_dtype: Any = None) -> str | None:
    """Why this kernel does not take a pool, and queries of a dtype if that is known; None if it does."""
    if reason := why_not(k_pool, 1):
        return reason
    if not target().has_copy_engine:
        return f"a GPU like {target().example} has no copy engine"
    if k_pool.shape[3] not in HEAD_DIMS:
        return f"head_dim is {k_pool.shape[3]}, expected {' or '.join(map(str, HEAD_DIMS))}"
    if k_pool.shape[2] % MIN_PIECE_LEN:
        return f"block_size is {k_pool.shape[2]}, expected a multiple of {MIN_PIECE_LEN}"
    gpu = target()
    if (num_bytes := max_shared_memory(k_pool, gpu)) > gpu.shared_memory:
        return (
            f"it needs {num_bytes} bytes of shared memory with head_dim {k_pool.shape[3]}, and a GPU like "
            f"{gpu.example} has {gpu.shared_memory}"
        )
    is_wide = k_pool.dtype.itemsize > 1
    expected = k_pool.dtype if is_wide else jnp.dtype(WIDENED)
    if q_dtype is not None and q_dtype != expected:
        like = "like" if is_wide else "beside"
        return f"the queries are {jnp.dtype(q_dtype)}, expected {expected} {like} the pools"
    return None


def tile_len_for(k_pool: jax.Array, gpu: Gpu) -> int:
    """Keys of a tile: fewer, where factors take registers, or scales and offsets."""
    return 2 * TILE_ROWS if gpu.has_wgmma and k_pool.dtype.itemsize > 1 else TILE_ROWS


def max_shared_memory(k_pool: jax.Array, gpu: Gpu) -> int:
    """Bytes of a program: rings, queries, on some GPUs weights, and barriers."""
    tile_len, head_dim = tile_len_for(k_pool, gpu), k_pool.shape[3]
    columns = head_dim if gpu.has_wgmma else head_dim + tile_len
    return rings_bytes(k_pool, tile_len) + _COMPUTING * QUERY_ROWS * columns * 2 + 3328


def _cost(q: jax.Array, of_keys: tuple[jax.Array, ...], block_table: jax.Array) -> pl.CostEstimate:
    """At full tables, of which queries see a half; as much as is stored `of_keys` is of values."""
    num_rows, num_queries, num_heads, group_size, head_dim = q.shape
    num_keys = block_table.shape[1] * of_keys[0].shape[2]
    num_products = num_rows * num_heads * group_size * num_queries * num_keys // 2
    num_bytes = 2 * (q.nbytes + num_rows * num_heads * num_keys * key_bytes(of_keys))
    return pl.CostEstimate(
        flops=4 * num_products * head_dim, transcendentals=num_products, bytes_accessed=num_bytes
    )


def _prefill(
    options: DecodeOptions,
    group_size: int,
    multiply: Multiply,
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    table_row_ref,
    first_column_ref,
    num_columns_ref,
    first_position_ref,
    num_queries_ref,
    layer_ref,
    *args,
    q_smem,
    k_ring,
    v_ring,
    lse_smem,
    q_barrier,
    turn,
    p_smem=None,
) -> None:
    """Two units of one key/value head of a row; a unit is 64 queries of one query head."""
    *more, out_ref, lse_ref = args
    num_beside = max(len(k_ring.stored) - 1, 0)
    compute_registers, copy_registers = SCALED_REGISTERS if num_beside else REGISTERS
    of_keys, of_values = more[:num_beside], more[num_beside : 2 * num_beside]
    sinks_ref = more[2 * num_beside :]
    _, num_heads, block_size, head_dim = k_ref.shape
    num_units = q_ref.shape[1] // QUERY_ROWS * group_size
    num_pairs = -(-num_units // _COMPUTING)
    row, pair, head = unflatten(lax.axis_index("program"), num_pairs, num_heads)
    warpgroup = lax.axis_index("warpgroup")
    first_unit = (num_pairs - 1 - pair) * _COMPUTING  # the last queries have most to do, and begin

    def first_query(nth: Any) -> Any:
        """Of the program's nth unit; of the last one of all, where there is none."""
        return lax.div(jnp.minimum(first_unit + nth, num_units - 1), jnp.int32(group_size)) * QUERY_ROWS

    of_row = [ref[row] for ref in (first_column_ref, num_columns_ref, first_position_ref, num_queries_ref)]
    tile_len = k_ring.tiles.shape[1]
    tiling = tiling_for(k_ref, tile_len)
    keys, values = (
        PrefillRing((pool_ref, *beside), smem, tiling)
        for pool_ref, beside, smem in ((k_ref, of_keys, k_ring), (v_ref, of_values, v_ring))
    )
    mask = QueryMask(options, block_size, *of_row, first_query=first_query(warpgroup), tile_len=tile_len)
    walk = Walk(mask, first_query(0), first_query(_COMPUTING - 1) + QUERY_ROWS)

    def pool_row(nth_block: Any) -> Any:
        block = table_ref[table_row_ref[row], mask.column(nth_block)]
        return layer_ref[0] * options.num_blocks + block

    def copy() -> None:
        plgpu.set_max_registers(copy_registers, action="decrease")
        copy_tiles((keys, values), walk, mask, head, pool_row)

    def compute() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        unit = first_unit + warpgroup
        q_head = head * group_size + lax.rem(jnp.minimum(unit, num_units - 1), jnp.int32(group_size))
        layout = plgpu.Layout.WGMMA
        by_query = layout.reduce(1)
        queries = pl.ds(mask.first_query, QUERY_ROWS)
        own_q = q_smem.at[warpgroup]

        def take_turns() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def per_query(x: jax.Array, num_columns: int) -> jax.Array:
            return lax.broadcast_in_dim(x, (QUERY_ROWS, num_columns), [0])

        def clear_unseen(tile, slot) -> None:
            for first in range(0, tile_len, _CLEARED_ROWS):
                place = v_ring.tiles.at[slot, pl.ds(first, _CLEARED_ROWS)]
                v = plgpu.load(place, layout=layout, optimized=False)
                is_seen = mask.is_seen_by_any(tile * tile_len + first, (_CLEARED_ROWS, head_dim))
                place[...] = jnp.where(is_seen, v, jnp.zeros_like(v))
            plgpu.commit_smem()

        def attend_tile(step, state):
            old_out, peak, total, shift = state
            slot, tile = slot_of(step), walk.tile(step)
            plgpu.barrier_wait(k_ring.loaded.at[slot])
            logits = multiply(own_q, k_ring.tiles.at[slot].transpose((1, 0)), begun=take_turns)
            if num_beside > 0:
                logits = logits * keys.per_key(slot, 0, QUERY_ROWS)
            if num_beside > 1:
                logits = logits + keys.per_key(slot, 1, QUERY_ROWS) * per_query(q_sum, tile_len)
            plgpu.barrier_arrive(k_ring.consumed.at[slot])
            logits = scaled(options, logits)
            logits = lax.cond(
                mask.is_all_seen(tile),
                lambda logits: logits,
                lambda logits: jnp.where(mask.is_seen(tile), logits, MASKED),
                logits,
            )
            # Before a query's first key all weights are 1, and then decay to 0.
            new_peak = jnp.maximum(peak, logits.max(axis=1))
            weights = jnp.exp2(logits - per_query(new_peak, tile_len))
            decay = jnp.exp2(peak - new_peak)
            total = total * decay + weights.sum(axis=1)

            plgpu.barrier_wait(v_ring.loaded.at[slot])
            if num_beside > 1:
                shift = shift * decay + (weights * values.per_key(slot, 1, QUERY_ROWS)).sum(axis=1)
            if num_beside > 0:
                weights = weights * values.per_key(slot, 0, QUERY_ROWS)
            weights = weights.astype(v_ring.tiles.dtype)
            # The first warpgroup is ahead by a turn: what it clears, the second one finds cleared.
            if v_ref.dtype != jnp.int8:  # of which none is NaN, and the scales of the unseen are 0
                pl.when((warpgroup == 0) & mask.is_edge(tile))(lambda: clear_unseen(tile, slot))
            if p_smem is not None:
                p_smem[warpgroup] = weights
                plgpu.commit_smem()
                weights = p_smem.at[warpgroup]
            take_turns()
            out = multiply(
                weights,
                v_ring.tiles.at[slot],
                total=lambda: old_out * per_query(decay, head_dim),
                ended=lambda: plgpu.barrier_arrive(v_ring.consumed.at[slot]),
            )
            return out, new_peak, total, shift

        def full(shape, value, of) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), of)

        plgpu.copy_gmem_to_smem(q_ref.at[row, queries, q_head], own_q, q_barrier.at[warpgroup])
        one_per_query = (QUERY_ROWS,)
        peak, total = (sinks_ref[0][q_head], 1) if sinks_ref else (MASKED, 0)
        start = (
            full((QUERY_ROWS, head_dim), 0, layout),
            full(one_per_query, peak, by_query),
            full(one_per_query, total, by_query),
            full(one_per_query, 0, by_query) if num_beside > 1 else None,
        )
        plgpu.barrier_wait(q_barrier.at[warpgroup])
        if num_beside > 1:  # an offset is added to each number of a key
            q_sum = plgpu.load(own_q, layout=layout, optimized=False).astype(jnp.float32).sum(axis=1)
        pl.when(warpgroup == 1)(take_turns)
        out, peak, total, shift = lax.fori_loop(0, walk.num_steps, attend_tile, start)
        if shift is not None:  # what all numbers of the values have in common
            out = out + per_query(shift, head_dim)
        pl.when(warpgroup == 0)(take_turns)

        nth = plgpu.broadcasted_iota(jnp.int32, one_per_query, 0, layout=by_query)
        is_empty = (peak <= MASKED) | (mask.first_query + nth >= mask.num_queries)
        total = jnp.where(is_empty, 1.0, total)
        own_q[...] = jnp.where(per_query(is_empty, head_dim), 0.0, out / per_query(total, head_dim)).astype(
            q_smem.dtype
        )
        lse_smem[warpgroup] = jnp.where(is_empty, -jnp.inf, (peak + jnp.log2(total)) / LOG2_E)
        plgpu.commit_smem()

        @pl.when(unit < num_units)
        def _():
            plgpu.copy_smem_to_gmem(own_q, out_ref.at[row, queries, q_head])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[row, q_head, queries])

        plgpu.wait_smem_to_gmem(0)

    # One or the other: what only the second one needs is in no register of the first.
    lax.cond(warpgroup == _COMPUTING, copy, compute)
