"""Paged prefill attention: many consecutive queries per row, keys and values read block by block.

A program has three warpgroups. The last one copies: tiles of keys and of their values, piece of block by
piece, into two rings of shared memory. The others compute, each 64 queries of one query head, S = Q K^T and
O = P V, by wgmma with P in registers; a program's two are neighbours among the query heads of a key/value
head, so that both read the same keys. They take turns, half a tile apart: while one multiplies, the other has
its softmax.

The softmax is as in `decode`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows, check_decode
from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.decode_plan import pieces_of_blocks
from pallas_kernels.mosaic_gpu.grid import unflatten
from pallas_kernels.mosaic_gpu.interpret import launch
from pallas_kernels.mosaic_gpu.limits import DECODED, target, why_not_pool
from pallas_kernels.mosaic_gpu.logits import LOG2_E, MASKED, scaled
from pallas_kernels.mosaic_gpu.prefill_mask import QUERY_ROWS, QueryMask, Walk
from pallas_kernels.mosaic_gpu.products import Multiply, multiply_on
from pallas_kernels.mosaic_gpu.tiles import tiled

MIN_QUERIES = 64
"""Queries of a row from which on this kernel is meant to be used; with fewer, most of its rows are idle."""
HEAD_DIMS = (64, 128)
MIN_PIECE_LEN = 16
"""Tokens of a block that are copied at once; of shorter pieces the ids do not fit into `COPY_REGISTERS`."""
STAGES = 2
"""Tiles of keys, and of values, that are in shared memory at a time."""
COMPUTE_REGISTERS, COPY_REGISTERS = 224, 56
"""Of a thread of a warpgroup that computes, and of the one that copies."""
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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of many queries per row over the blocks of one layer; see `reference.paged_decode`.

    Args:
      q: `[r, t, h, g, d]`, any t, in the pool's dtype.
      k_pool: `[num_layers * num_blocks, h, block_size, d]` bfloat16 or float16, d 64 or 128, block_size a
        multiple of 16 up to 512.
      v_pool: Like `k_pool`.
      block_table: i32[max_rows, columns].
      rows: Who asks.
      options: Static.
      layer: i32[].
      sink_logits: f32[h, g] or None.
      interpret: Run on the CPU, and look for races.

    Returns:
      out `[r, t, h, g, d]` in the pool's dtype, and lse f32[r, t, h, g].

    Raises:
      ValueError: the arguments do not fit together, or this kernel does not take them.
    """
    check_decode(q, k_pool, v_pool, block_table, rows, options, sink_logits, layer, max_queries=None)
    if reason := why_not_prefill(k_pool, q.dtype):
        raise ValueError(reason)
    num_rows, num_queries, num_heads, group_size, head_dim = q.shape
    cost = _cost(q, k_pool, block_table)
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
    ]
    if sink_logits is not None:
        inputs.append(sink_logits.astype(jnp.float32).reshape(-1) * LOG2_E)
    gpu = target()
    tile_len = tile_len_on(gpu)
    piece_len, _ = pieces_of_blocks(k_pool.shape[2], tile_len)
    ring = plgpu.SMEM((STAGES, tile_len, head_dim), k_pool.dtype, transforms=tiled(head_dim, 2))
    loaded = plgpu.Barrier(num_barriers=STAGES, num_arrivals=tile_len // piece_len)
    consumed = plgpu.Barrier(num_barriers=STAGES, num_arrivals=_COMPUTING)
    scratch: dict[str, Any] = dict(
        q_smem=plgpu.SMEM((_COMPUTING, QUERY_ROWS, head_dim), q.dtype, transforms=tiled(head_dim, 2)),
        k_smem=ring,
        v_smem=ring,
        lse_smem=plgpu.SMEM((_COMPUTING, QUERY_ROWS), jnp.float32),
        q_barrier=plgpu.Barrier(num_barriers=_COMPUTING),
        k_barrier=loaded,
        v_barrier=loaded,
        k_consumed=consumed,
        v_consumed=consumed,
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


def why_not_prefill(k_pool: jax.Array, q_dtype: Any) -> str | None:
    """Why this kernel does not take a pool, and queries of a dtype; None if it does."""
    if reason := why_not_pool(k_pool, DECODED):
        return reason
    if not target().has_copy_engine:
        return f"a GPU like {target().example} has no copy engine"
    if k_pool.shape[3] not in HEAD_DIMS:
        return f"head_dim is {k_pool.shape[3]}, expected {' or '.join(map(str, HEAD_DIMS))}"
    if k_pool.shape[2] % MIN_PIECE_LEN:
        return f"block_size is {k_pool.shape[2]}, expected a multiple of {MIN_PIECE_LEN}"
    gpu = target()
    if (num_bytes := max_shared_memory(k_pool.shape[3], gpu)) > gpu.shared_memory:
        return (
            f"it needs {num_bytes} bytes of shared memory with head_dim {k_pool.shape[3]}, and a GPU like "
            f"{gpu.example} has {gpu.shared_memory}"
        )
    if q_dtype != k_pool.dtype:
        return f"the queries are {jnp.dtype(q_dtype)}, expected {k_pool.dtype} like the pools"
    return None


def tile_len_on(gpu: Gpu) -> int:
    """Keys of a tile: fewer, where factors take registers."""
    return 128 if gpu.has_wgmma else 64


def max_shared_memory(head_dim: int, gpu: Gpu) -> int:
    """Bytes of a program: rings, queries, on some GPUs weights, and barriers."""
    columns = head_dim if gpu.has_wgmma else head_dim + tile_len_on(gpu)
    rings = 2 * STAGES * tile_len_on(gpu) * head_dim * 2
    return rings + _COMPUTING * QUERY_ROWS * columns * 2 + 3328


def _cost(q: jax.Array, k_pool: jax.Array, block_table: jax.Array) -> pl.CostEstimate:
    """At full tables, of which queries see a half."""
    num_rows, num_queries, num_heads, group_size, head_dim = q.shape
    num_keys = block_table.shape[1] * k_pool.shape[2]
    num_products = num_rows * num_heads * group_size * num_queries * num_keys // 2
    num_bytes = 2 * num_rows * num_heads * head_dim * (num_keys + num_queries * group_size) * q.dtype.itemsize
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
    k_smem,
    v_smem,
    lse_smem,
    q_barrier,
    k_barrier,
    v_barrier,
    k_consumed,
    v_consumed,
    turn,
    p_smem=None,
) -> None:
    """Two units of one key/value head of a row; a unit is 64 queries of one query head."""
    *sinks_ref, out_ref, lse_ref = args
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
    tile_len = k_smem.shape[1]
    mask = QueryMask(options, block_size, *of_row, first_query=first_query(warpgroup), tile_len=tile_len)
    walk = Walk(mask, first_query(0), first_query(_COMPUTING - 1) + QUERY_ROWS)

    def slot_of(step: Any) -> Any:
        return lax.rem(step, jnp.int32(STAGES))

    @pl.when(warpgroup == _COMPUTING)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        piece_len, pieces_per_block = pieces_of_blocks(block_size, tile_len)
        num_pieces = mask.num_columns * pieces_per_block

        def pieces_of(step: Any) -> list:
            """Pool rows of the blocks that a step's pieces come from; after the last piece, it again."""
            first = walk.tile(jnp.minimum(step, walk.num_steps - 1)) * (tile_len // piece_len)
            rows = []
            for j in range(tile_len // piece_len):
                nth_block = lax.div(jnp.minimum(first + j, num_pieces - 1), jnp.int32(pieces_per_block))
                block = table_ref[table_row_ref[row], mask.column(nth_block)]
                rows.append(layer_ref[0] * options.num_blocks + block)
            return rows

        def fetch(pool_ref, ring, barrier, step, rows) -> None:
            for j, pool_row in enumerate(rows):
                nth = walk.tile(step) * (tile_len // piece_len) + j
                start = lax.rem(nth, jnp.int32(pieces_per_block)) * piece_len
                plgpu.copy_gmem_to_smem(
                    pool_ref.at[pool_row, head, pl.ds(start, piece_len)],
                    ring.at[slot_of(step), pl.ds(j * piece_len, piece_len)],
                    barrier.at[slot_of(step)],
                )

        def refill(step, rows):
            rows_after = pieces_of(step + 1)  # asked for early: they are there when they are needed
            for pool_ref, ring, barrier, consumed in (
                (k_ref, k_smem, k_barrier, k_consumed),
                (v_ref, v_smem, v_barrier, v_consumed),
            ):
                pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, consumed.at[slot_of(step)]))
                pl.when(step < walk.num_steps)(functools.partial(fetch, pool_ref, ring, barrier, step, rows))
            return rows_after

        @pl.when(walk.num_steps > 0)
        def _():
            # Until all is consumed: a barrier is not left while others are still to arrive.
            lax.fori_loop(0, walk.num_steps + STAGES, refill, pieces_of(jnp.int32(0)))

    @pl.when(warpgroup < _COMPUTING)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
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
                place = v_smem.at[slot, pl.ds(first, _CLEARED_ROWS)]
                v = plgpu.load(place, layout=layout, optimized=False)
                is_seen = mask.is_seen_by_any(tile * tile_len + first, (_CLEARED_ROWS, head_dim))
                place[...] = jnp.where(is_seen, v, jnp.zeros_like(v))
            plgpu.commit_smem()

        def attend_tile(step, state):
            old_out, peak, total = state
            slot, tile = slot_of(step), walk.tile(step)
            plgpu.barrier_wait(k_barrier.at[slot])
            logits = multiply(own_q, k_smem.at[slot].transpose((1, 0)), begun=take_turns)
            plgpu.barrier_arrive(k_consumed.at[slot])
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
            weights = weights.astype(v_smem.dtype)

            plgpu.barrier_wait(v_barrier.at[slot])
            # The first warpgroup is ahead by a turn: what it clears, the second one finds cleared.
            pl.when((warpgroup == 0) & mask.is_edge(tile))(lambda: clear_unseen(tile, slot))
            if p_smem is not None:
                p_smem[warpgroup] = weights
                plgpu.commit_smem()
                weights = p_smem.at[warpgroup]
            take_turns()
            out = multiply(
                weights,
                v_smem.at[slot],
                total=lambda: old_out * per_query(decay, head_dim),
                ended=lambda: plgpu.barrier_arrive(v_consumed.at[slot]),
            )
            return out, new_peak, total

        def full(shape, value, of) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), of)

        plgpu.copy_gmem_to_smem(q_ref.at[row, queries, q_head], own_q, q_barrier.at[warpgroup])
        one_per_query = (QUERY_ROWS,)
        peak, total = (sinks_ref[0][q_head], 1) if sinks_ref else (MASKED, 0)
        start = (
            full((QUERY_ROWS, head_dim), 0, layout),
            full(one_per_query, peak, by_query),
            full(one_per_query, total, by_query),
        )
        plgpu.barrier_wait(q_barrier.at[warpgroup])
        pl.when(warpgroup == 1)(take_turns)
        out, peak, total = lax.fori_loop(0, walk.num_steps, attend_tile, start)
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
