"""Paged decode attention: few queries per row, keys and values read block by block.

One warpgroup per program computes transposed: S^T = K Q^T and O^T = V^T P^T, so that the 64 rows of a product
are tokens (then head_dim), and its columns are lanes, the queries of one key/value head: 8 lanes cost 8
columns, not 64 padded rows. Two rings of shared memory, for K and for V, are filled by asynchronous copies
(TMA), one per piece of a block; the program that uses a slot also refills it.

The softmax is online and to the base 2, with `scale * log2(e)` folded into one factor. Keys and values of 8
bits are multiplied as they are stored, in bfloat16: of `scale * number + offset`, keys' scales and offsets go
into logits, values' into weights and results.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_rows import (
    MAX_QUERIES,
    DecodeOptions,
    DecodeRows,
    check_decode,
    check_rows,
    check_size,
)
from pallas_kernels.eight_bits import WIDENED, Scaling, check_scaling
from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.decode_budget import cost, num_stages, programs_per_sm
from pallas_kernels.mosaic_gpu.decode_mask import KeyMask
from pallas_kernels.mosaic_gpu.decode_plan import (
    MAX_GROUP_SIZE,
    MAX_LANES,
    TILE_ROWS,
    DecodePlan,
    Item,
    Tiling,
    check_plan,
    plan_decode,
    tiling_of,
)
from pallas_kernels.mosaic_gpu.grid import unflatten
from pallas_kernels.mosaic_gpu.interpret import launch, store
from pallas_kernels.mosaic_gpu.lanes import (
    as_lanes,
    as_queries,
    fetch_queries,
    lanes_smem,
    load_queries,
    num_query_copies,
    result_shapes,
    sinks_of_lanes,
    store_results,
    write_results,
)
from pallas_kernels.mosaic_gpu.limits import num_sms, target, why_not, why_not_block
from pallas_kernels.mosaic_gpu.logits import LOG2_E, MASKED, scaled
from pallas_kernels.mosaic_gpu.merge import merge_items
from pallas_kernels.mosaic_gpu.products import commit_on, multiply_on
from pallas_kernels.mosaic_gpu.rings import Ring, ring_on, ring_smem
from pallas_kernels.mosaic_gpu.tiles import tiled

_INTERPRETED_PROGRAMS = 8


def paged_decode(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    rows: DecodeRows,
    options: DecodeOptions,
    *,
    layer: jax.Array | int = 0,
    sink_logits: jax.Array | None = None,
    plan: DecodePlan | None = None,
    scaling: Scaling | None = None,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of few queries per row over the blocks of one layer; see `reference.paged_decode`.

    Args:
      q: `[r, t, h, g, d]`, t at most 8, g at most 16; computed in the pool's dtype, of 8 bits in bfloat16.
      k_pool: `[num_layers * num_blocks, h, block_size, d]` bfloat16, float16, or of 8 bits (see
        `eight_bits`), d 64, 128 or, of 16 bits, 256, block_size a multiple of 8 up to 512.
      v_pool: Like `k_pool`.
      block_table: i32[max_rows, columns].
      rows: Who asks.
      options: Static.
      layer: i32[].
      sink_logits: f32[h, g] or None.
      plan: From `plan_for` with the same rows, to share between layers; or None.
      scaling: Beside pools of 8 bits.
      out_dtype: Of `out`, which is computed in float32; of 16 bits it costs no conversion.
      interpret: Run on the CPU, and look for races.

    Returns:
      out `[r, t, h, g, d]` and lse f32[r, t, h, g].

    Raises:
      ValueError: the arguments do not fit together, or this kernel does not take them.
    """
    check_decode(q, k_pool, v_pool, block_table, rows, options, sink_logits, layer)
    check_scaling(k_pool, scaling)
    if reason := why_not(k_pool, q.shape[3]):
        raise ValueError(reason)
    num_rows, num_queries, num_heads, group_size, head_dim = q.shape
    dtype, block_size = k_pool.dtype, k_pool.shape[2]
    tiling = tiling_of(num_queries, group_size, head_dim, block_size, dtype.itemsize)
    if plan is not None:
        check_plan(plan, num_rows)
    else:
        plan = plan_for(rows, q.shape, block_table.shape[1], block_size, dtype=dtype, interpret=interpret)

    gpu, layer = target(), jnp.asarray(layer, jnp.int32).reshape(1)
    of_keys, of_values = ((), ()) if scaling is None else (scaling.of_keys(), scaling.of_values())
    q = q.astype(WIDENED if scaling is not None else dtype)
    queries = q if gpu.has_copy_engine else as_lanes(q, tiling)
    inputs = [queries, k_pool, v_pool, block_table, plan.items, layer, *of_keys, *of_values]
    if sink_logits is not None:
        inputs.append(sinks_of_lanes(sink_logits.astype(jnp.float32) * LOG2_E, tiling))
    num_items, can_split = plan.items.shape[0], plan.num_parts > 0
    results = result_shapes(q.shape, tiling, out_dtype, gpu)
    if can_split:
        results += result_shapes((plan.num_parts, *q.shape[1:]), tiling, jnp.float32, gpu)

    stages = num_stages(tiling, head_dim, gpu)
    ring = ring_smem(tiling, stages, (k_pool, *of_keys), gpu)
    ring_barrier = plgpu.Barrier(num_barriers=stages, num_arrivals=tiling.pieces_per_tile * len(ring))
    scratch: dict[str, Any] = dict(
        q_smem=plgpu.SMEM((tiling.num_lanes, head_dim), q.dtype, transforms=tiled(head_dim, 2)),
        k_smem=ring,
        v_smem=ring,
        p_smem=plgpu.SMEM((tiling.num_lanes, TILE_ROWS), q.dtype, transforms=tiled(TILE_ROWS, 2)),
    )
    if gpu.has_copy_engine:
        # The result and the sink logits: two rows of 128 bytes, to which the copy engine wants them aligned.
        scratch["per_lane_smem"] = plgpu.SMEM((2, MAX_LANES), jnp.float32)
        num_copies = num_query_copies(tiling, head_dim) + (sink_logits is not None)
        scratch["q_barrier"] = plgpu.Barrier(num_arrivals=num_copies)
    if ring_on(gpu, interpret) is Ring:
        scratch |= dict(k_barrier=ring_barrier, v_barrier=ring_barrier)
    if scaling is not None:
        scratch["wide_smem"] = plgpu.SMEM((TILE_ROWS, head_dim), q.dtype, transforms=tiled(head_dim, 2))
    out, lse, *parts = launch(
        functools.partial(_decode, options, tiling, can_split, gpu, interpret),
        cost=cost(q, (k_pool, *of_keys), block_table),
        interpret=interpret,
        out_type=results,
        grid=(num_items * tiling.num_lane_tiles * num_heads,),
        grid_names=("program",),
        kernel_name="paged_decode",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs)
    if can_split:
        part_out, part_lse = parts
        out, lse = merge_items(out, lse, part_out, part_lse, plan.first_part, tiling, interpret=interpret)
    if out.ndim == 4:
        out = as_queries(out.swapaxes(2, 3), tiling)
    return out, as_queries(lse, tiling)


def plan_for(
    rows: DecodeRows,
    q_shape: tuple[int, ...],
    num_columns: int,
    block_size: int,
    *,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> DecodePlan:
    """The plan of a decode, computed on the device; the same for all layers of a step.

    Args:
      rows: Who asks.
      q_shape: `(r, t, h, g, d)`; a plan for another `g` gives the same results, and may fill the GPU worse.
      num_columns: Columns of the block table.
      block_size: Tokens of a block.
      dtype: Of the pools; another one gives the same results, too.
      interpret: As if fewer programs ran side by side.
    """
    num_rows, num_queries, num_heads, group_size, head_dim = q_shape
    check_rows(rows, num_rows)
    check_size("num_columns", num_columns, 1)
    if reason := why_not_block(block_size, head_dim):
        raise ValueError(reason)
    is_group = 1 <= group_size <= MAX_GROUP_SIZE
    if not (1 <= num_queries <= MAX_QUERIES and is_group and num_heads >= 1):
        raise ValueError(
            f"q_shape is {q_shape}, expected (rows, queries, num_kv_heads, group_size, head_dim), each at "
            f"least 1, at most {MAX_QUERIES} queries and a group of at most {MAX_GROUP_SIZE}"
        )
    tiling = tiling_of(num_queries, group_size, head_dim, block_size, jnp.dtype(dtype).itemsize)
    num_programs = num_sms() * programs_per_sm(tiling, head_dim, target())
    if interpret:
        num_programs = _INTERPRETED_PROGRAMS
    num_parallel = num_programs // (num_heads * tiling.num_lane_tiles)
    return plan_decode(rows, tiling, num_columns=num_columns, num_parallel=num_parallel)


def _decode(
    options: DecodeOptions,
    tiling: Tiling,
    can_split: bool,
    gpu: Gpu,
    is_interpreted: bool,
    *args,
    q_smem,
    k_smem,
    v_smem,
    p_smem,
    per_lane_smem: Any = None,
    q_barrier: Any = None,
    k_barrier=None,
    v_barrier=None,
    wide_smem=None,
) -> None:
    """One key/value head and lane tile of one item; or nothing, where the plan has no item."""
    num_results = 4 if can_split else 2
    inputs, results = args[:-num_results], args[-num_results:]
    q_ref, k_ref, v_ref, table_ref, items_ref, layer_ref, *more = inputs
    num_beside = len(k_smem) - 1
    *beside, sinks_ref = more[:num_beside], more[num_beside : 2 * num_beside], more[2 * num_beside :]
    multiply, commit = multiply_on(gpu, is_interpreted), commit_on(gpu, is_interpreted)

    def turn_and_store(smem, x: jax.Array) -> None:
        if not gpu.has_copy_engine:  # nor stmatrix: pairs of numbers that lie side by side must be a thread's
            x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        store(smem.transpose((1, 0)), x)

    keys, values = (
        ring_on(gpu, is_interpreted)((pool_ref, *refs), smem, barrier, tiling, wide_smem)
        for pool_ref, refs, smem, barrier in zip(
            (k_ref, v_ref), beside, (k_smem, v_smem), (k_barrier, v_barrier), strict=True
        )
    )
    item, lane_tile, head = unflatten(lax.axis_index("program"), tiling.num_lane_tiles, k_ref.shape[1])
    (
        row,
        table_row,
        first_column,
        num_columns,
        first_position,
        num_queries,
        first_tile,
        num_tiles,
        part,
    ) = (items_ref[item, column] for column in Item)
    block_size, head_dim = k_ref.shape[2:]
    stages = k_smem[0].shape[0]
    first_query = lane_tile * tiling.queries_per_tile
    lse_smem, sinks_smem = per_lane_smem, per_lane_smem
    if gpu.has_copy_engine:
        lse_smem, sinks_smem = (per_lane_smem.at[nth, pl.ds(0, tiling.num_lanes)] for nth in range(2))
    mask = KeyMask(
        options, block_size, first_column, num_columns, first_position, num_queries, tiling, first_query
    )
    layout = plgpu.Layout.WGMMA
    by_lane = layout.reduce(0)
    query = mask.query()

    def pieces_of(tile) -> list:
        """Pool rows of the blocks that a tile's pieces come from; after the last piece, its rows again."""
        first = (first_tile + tile) * tiling.pieces_per_tile
        last = jnp.maximum(num_columns * tiling.pieces_per_block, 1) - 1
        rows = []
        for j in range(tiling.pieces_per_tile):
            column = mask.column(lax.div(jnp.minimum(first + j, last), jnp.int32(tiling.pieces_per_block)))
            rows.append(layer_ref[0] * options.num_blocks + table_ref[table_row, column])
        return rows

    def fetch(ring: Ring, tile, rows) -> None:
        slot = lax.rem(tile, jnp.int32(stages))
        for j, row in enumerate(rows):
            nth = (first_tile + tile) * tiling.pieces_per_tile + j
            start = lax.rem(nth, jnp.int32(tiling.pieces_per_block)) * tiling.piece_len
            ring.fetch(slot, j, (row, head), start)

    def refill(ring: Ring, tile, rows) -> None:
        pl.when(tile < num_tiles)(lambda: fetch(ring, tile, rows))

    def per_lane(x: jax.Array, num_rows: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (num_rows, tiling.num_lanes), [1])

    def per_key(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (TILE_ROWS, tiling.num_lanes), [0])

    def attend_tile(q_sum, tile, state):
        out, peak, total, next_rows = state
        slot = lax.rem(tile, jnp.int32(stages))
        rows_after = pieces_of(tile + stages + 1)  # asked for early: they are there when they are needed
        is_refilled = tile + stages < num_tiles
        k = keys.read(slot, is_refilled)
        logits = multiply(k.numbers, q_smem.transpose((1, 0)))
        refill(keys, tile + stages, next_rows)
        if k.scale is not None:
            logits = logits * per_key(k.scale)
        if k.offset is not None:
            logits = logits + per_key(k.offset) * per_lane(q_sum, TILE_ROWS)
        logits = scaled(options, logits)
        logits = jnp.where(mask.is_seen(first_tile + tile, query), logits, MASKED)

        # Before a lane's first key all weights are 1, and then decay to 0.
        new_peak = jnp.maximum(peak, logits.max(axis=0))
        weights = jnp.exp2(logits - per_lane(new_peak, TILE_ROWS))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + weights.sum(axis=0)
        v = values.read(slot, is_refilled)
        first_key = (first_tile + tile) * TILE_ROWS

        def of_seen(x: jax.Array) -> jax.Array:
            """Numbers per key, 0 where no query sees it: they may be NaN."""
            is_seen = mask.is_seen_by_any(first_key, (TILE_ROWS,), layout.reduce(1))
            return per_key(jnp.where(is_seen, x, jnp.zeros_like(x)))

        of_numbers = weights if v.scale is None else weights * of_seen(v.scale)
        turn_and_store(p_smem, of_numbers.astype(p_smem.dtype))

        @pl.when(mask.is_edge(first_tile + tile))
        def _():
            numbers = plgpu.load(v.numbers, layout=layout, optimized=False)
            is_seen = mask.is_seen_by_any(first_key, (TILE_ROWS, head_dim))
            store(v.numbers, jnp.where(is_seen, numbers, jnp.zeros_like(numbers)))

        commit()
        new_out = multiply(v.numbers.transpose((1, 0)), p_smem.transpose((1, 0)))
        refill(values, tile + stages, next_rows)
        if v.offset is not None:
            new_out = new_out + per_lane((weights * of_seen(v.offset)).sum(axis=0), head_dim)
        if wide_smem is not None:
            commit()  # all warps have multiplied before the next keys take these values' place
        return out * per_lane(decay, head_dim) + new_out, new_peak, total, rows_after

    def begin(fetched_smem=None) -> None:
        """Starts all copies, and lays the queries out as a product reads them."""
        if fetched_smem is not None:
            fetch_queries(q_ref, (row, lane_tile, head), fetched_smem, q_barrier, tiling)
            if sinks_ref:
                plgpu.copy_gmem_to_smem(sinks_ref[0].at[head], sinks_smem, q_barrier)
        for tile in range(stages):
            rows = pieces_of(tile)
            refill(keys, jnp.int32(tile), rows)
            refill(values, jnp.int32(tile), rows)
        if fetched_smem is not None:
            plgpu.barrier_wait(q_barrier)
            load_queries(fetched_smem, q_smem)
        else:
            q = plgpu.load(q_ref.at[row, lane_tile, head], layout=layout, optimized=False)
            turn_and_store(q_smem, q)
        commit()

    def write(out, lse, refs, index) -> None:
        write_or_store: Any = write_results if gpu.has_copy_engine else store_results
        write_or_store(out, lse, *refs, (index, lane_tile, head), tiling)

    @pl.when(row >= 0)
    def _():
        if gpu.has_copy_engine:
            pl.run_scoped(begin, lanes_smem(tiling, head_dim, q_smem.dtype))
        else:
            begin()
        q_sum = None
        if num_beside > 1:  # an offset is added to each number of a key
            q = plgpu.load(q_smem.transpose((1, 0)), layout=layout, optimized=False)
            q_sum = q.astype(jnp.float32).sum(axis=0)

        def full(shape, value, of) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), of)

        one_per_lane = (tiling.num_lanes,)
        peak, total = full(one_per_lane, MASKED, by_lane), full(one_per_lane, 0, by_lane)
        if sinks_ref:  # counts once: in the row's first item
            sinks = sinks_smem if gpu.has_copy_engine else sinks_ref[0].at[head]
            sinks = plgpu.load(sinks, layout=by_lane, optimized=False)
            is_first = plgpu.layout_cast(jnp.full(one_per_lane, first_tile), by_lane) == 0
            peak, total = jnp.where(is_first, sinks, peak), jnp.where(is_first, 1.0, total)
        start = (full((head_dim, tiling.num_lanes), 0, layout), peak, total, pieces_of(stages))
        out, peak, total, _ = lax.fori_loop(0, num_tiles, functools.partial(attend_tile, q_sum), start)

        is_empty = (peak <= MASKED) | (query >= num_queries)
        total = jnp.where(is_empty, 1.0, total)
        out = jnp.where(per_lane(is_empty, head_dim), 0.0, out / per_lane(total, head_dim))
        lse = jnp.where(is_empty, -jnp.inf, (peak + jnp.log2(total)) / LOG2_E)
        if gpu.has_copy_engine:
            lse_smem[...], lse = lse, lse_smem
        if can_split:
            pl.when(part >= 0)(lambda: write(out, lse, results[2:], part))
            pl.when(part < 0)(lambda: write(out, lse, results[:2], row))
        else:
            write(out, lse, results, row)
