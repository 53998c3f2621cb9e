"""Merging attention over disjoint sets of keys: split rows, shared prefixes, context parallelism."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_rows import check_floats
from pallas_kernels.mosaic_gpu.decode_plan import LaneTiling
from pallas_kernels.mosaic_gpu.grid import unflatten
from pallas_kernels.mosaic_gpu.interpret import launch
from pallas_kernels.mosaic_gpu.lanes import store_results, write_results
from pallas_kernels.mosaic_gpu.limits import target
from pallas_kernels.mosaic_gpu.logits import LOG2_E, MASKED
from pallas_kernels.mosaic_gpu.tiles import tiled

_MAX_STAGES = 4
_SMALL_BUFFERS = 2048
_MAX_LANES = 32  # of float32: 128 bytes, to which the copy engine wants shared memory aligned


def merge_attention(
    outs: jax.Array, lses: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys; see `reference.merge_attention`.

    Args:
      outs: `[s, ..., d]`, d a multiple of 64 up to 256; merged in float32.
      lses: f32[s, ...]; -inf where a part saw nothing.
      interpret: Run on the CPU, and look for races.

    Returns:
      out f32[..., d] and lse f32[...].

    Raises:
      ValueError: the shapes do not fit, or d is not taken.
    """
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or not outs.shape[0]:
        raise ValueError(
            f"outs and lses have shapes {outs.shape} and {lses.shape}, expected [s, ..., d] and [s, ...] "
            "with s at least 1"
        )
    check_floats("outs", outs)
    check_floats("lses", lses)
    *shape, head_dim = outs.shape[1:]
    if head_dim not in (64, 128, 192, 256):
        raise ValueError(f"outs has a last axis of {head_dim}, expected 64, 128, 192 or 256")
    num_parts, num_lanes = outs.shape[0], math.prod(shape)
    if not num_lanes:
        return jnp.zeros(outs.shape[1:], jnp.float32), jnp.zeros(shape, jnp.float32)
    padding = (0, -num_lanes % (8 if num_lanes < _MAX_LANES else _MAX_LANES))
    outs, lses = (x.astype(jnp.float32) for x in (outs, lses))
    outs = jnp.pad(outs.reshape(num_parts, 1, num_lanes, head_dim), ((0, 0), (0, 0), padding, (0, 0)))
    lses = jnp.pad(lses.reshape(num_parts, 1, num_lanes), ((0, 0), (0, 0), padding))
    outs, first_part = outs.swapaxes(2, 3), jnp.array([0, num_parts], jnp.int32)
    tile_lanes = min(_MAX_LANES, lses.shape[2])
    num_tiles = lses.shape[2] // tile_lanes
    tiling = LaneTiling(num_tiles, tile_lanes, 1, tile_lanes, num_tiles)
    out, lse = _merge(outs[:1], lses[:1], outs, lses, first_part, tiling, interpret=interpret)
    return out[0, 0, :, :num_lanes].T.reshape(*shape, head_dim), lse[0, 0, :num_lanes].reshape(shape)


def merge_items(
    out: jax.Array,
    lse: jax.Array,
    part_out: jax.Array,
    part_lse: jax.Array,
    first_part: jax.Array,
    tiling: LaneTiling,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Puts together the rows that a plan has split.

    Args:
      out: See `lanes.result_shapes`; holds the rows that are whole.
      lse: Likewise.
      part_out: f32[num_parts, h, d, lanes], the parts of split rows.
      part_lse: f32[num_parts, h, lanes].
      first_part: i32[r + 1], see `DecodePlan`.
      tiling: Of the queries.
      interpret: Run on the CPU, and look for races.

    Returns:
      `out` and `lse` with all rows, in place.
    """
    return _merge(out, lse, part_out, part_lse, first_part, tiling, interpret=interpret)


def _merge(
    out, lse, part_out, part_lse, first_part, tiling: LaneTiling, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    _, num_heads, head_dim, _ = part_out.shape
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    gpu, part_bytes = target(), head_dim * tiling.num_lanes * 4
    # Beside the ring lies the result, as large as a part, and logs.
    stages = min(_MAX_STAGES, (gpu.shared_memory - part_bytes - _SMALL_BUFFERS) // part_bytes)
    scratch = dict(
        part_smem=plgpu.SMEM(
            (stages, head_dim, tiling.num_lanes), jnp.float32, transforms=tiled(tiling.num_lanes, 4)
        ),
        part_lse_smem=plgpu.SMEM((stages, _MAX_LANES), jnp.float32),  # of each slot the first lanes
        barrier=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
    )
    launch(
        functools.partial(_merge_row, tiling, stages if gpu.has_copy_engine else 0),
        cost=pl.CostEstimate(
            flops=3 * part_out.size,
            transcendentals=2 * part_lse.size,
            bytes_accessed=4 * part_out.size + out.dtype.itemsize * out.size,
        ),
        interpret=interpret,
        out_type=(),
        grid=(out.shape[0] * tiling.num_lane_tiles * num_heads,),
        grid_names=("program",),
        kernel_name="merge_attention",
        scratch_types=scratch if gpu.has_copy_engine else {},
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(out_ref, lse_ref, part_out, part_lse, first_part)
    return out_ref[...], lse_ref[...]


def _merge_row(
    tiling: LaneTiling,
    stages: int,
    out_ref,
    lse_ref,
    part_ref,
    part_lse_ref,
    first_part_ref,
    *,
    part_smem: Any = None,
    part_lse_smem: Any = None,
    barrier: Any = None,
) -> None:
    """One row, lane tile and key/value head; nothing, where the row has no parts.

    Without stages, and scratch, threads load the parts and store the result.
    """
    _, num_heads, head_dim, _ = part_ref.shape
    row, lane_tile, head = unflatten(lax.axis_index("program"), tiling.num_lane_tiles, num_heads)
    first, end = first_part_ref[row], first_part_ref[row + 1]
    num_lanes = tiling.num_lanes
    lanes, lanes_of_slot = pl.ds(lane_tile * num_lanes, num_lanes), pl.ds(0, num_lanes)
    layout = plgpu.Layout.WGMMA
    by_lane = layout.reduce(0)

    def fetch(part) -> None:
        slot = lax.rem(part - first, jnp.int32(stages))
        plgpu.copy_gmem_to_smem(part_ref.at[part, head, :, lanes], part_smem.at[slot], barrier.at[slot])
        plgpu.copy_gmem_to_smem(
            part_lse_ref.at[part, head, lanes], part_lse_smem.at[slot, lanes_of_slot], barrier.at[slot]
        )

    def per_lane(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (head_dim, num_lanes), [1])

    def loaded(part) -> tuple[jax.Array, jax.Array]:
        if not stages:
            part_out, part_lse = part_ref.at[part, head, :, lanes], part_lse_ref.at[part, head, lanes]
            part_out = plgpu.load(part_out, layout=layout, optimized=False)
            return part_out, plgpu.load(part_lse, layout=by_lane, optimized=False)
        slot = lax.rem(part - first, jnp.int32(stages))
        plgpu.barrier_wait(barrier.at[slot])
        part_out = plgpu.load(part_smem.at[slot], layout=layout)
        part_lse = part_lse_smem.at[slot, lanes_of_slot]
        part_lse = plgpu.load(part_lse, layout=by_lane, optimized=False)
        plgpu.commit_smem()
        pl.when(part + stages < end)(lambda: fetch(part + stages))
        return part_out, part_lse

    def add_part(part, state):
        out, peak, total = state
        part_out, part_lse = loaded(part)
        part_lse = jnp.maximum(part_lse * LOG2_E, MASKED)
        new_peak = jnp.maximum(peak, part_lse)
        weight, decay = jnp.exp2(part_lse - new_peak), jnp.exp2(peak - new_peak)
        weight = jnp.where(part_lse > MASKED, weight, 0.0)
        part_out = jnp.where(per_lane(weight) > 0, part_out * per_lane(weight), 0.0)  # it may be NaN
        return out * per_lane(decay) + part_out, new_peak, total * decay + weight

    @pl.when(end > first)
    def _():
        for i in range(stages):
            pl.when(first + i < end)(functools.partial(fetch, first + i))

        def full(shape, value, of) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), of)

        start = (
            full((head_dim, num_lanes), 0, layout),
            full((num_lanes,), MASKED, by_lane),
            full((num_lanes,), 0, by_lane),
        )
        out, peak, total = lax.fori_loop(first, end, add_part, start)
        is_empty = peak <= MASKED
        total = jnp.where(is_empty, 1.0, total)
        lse = jnp.where(is_empty, -jnp.inf, (peak + jnp.log2(total)) / LOG2_E)
        out, place = jnp.where(per_lane(is_empty), 0.0, out / per_lane(total)), (row, lane_tile, head)
        if not stages:
            return store_results(out, lse, out_ref, lse_ref, place, tiling)
        # The ring is free again: its first slot takes the result.
        part_lse_smem[0, lanes_of_slot] = lse
        write_results(out, part_lse_smem.at[0, lanes_of_slot], out_ref, lse_ref, place, tiling)
