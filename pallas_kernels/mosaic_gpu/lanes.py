"""From queries as a model lays them out to the lanes of a program and back, inside the kernels.

A program has the lanes of a lane tile as the columns of `[d, num_lanes]`; in the model's `[r, t, h, g, d]`
each is a row. On the way they lie in shared memory, as rows of 64 numbers: loads and stores of threads turn
them, and the copy engine reads and writes the lanes of one query at a time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.decode_plan import LaneTiling
from pallas_kernels.mosaic_gpu.interpret import store
from pallas_kernels.mosaic_gpu.tiles import tiled

_COLUMNS = 64  # 128 bytes of 16 bits, what a row of the widest swizzle has


def lanes_smem(tiling: LaneTiling, head_dim: int, dtype: Any) -> Any:
    """Shared memory for the lanes of a lane tile, of 16 bits, `[d / 64, num_lanes, 64]`.

    The swizzle goes by addresses, so a tile may have fewer rows than the 8 after which it repeats: here so
    many that the lanes of each query are whole tiles.
    """
    transforms = (
        plgpu.TilingTransform((math.gcd(tiling.group_size, 8), _COLUMNS)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * _COLUMNS),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM((head_dim // _COLUMNS, tiling.num_lanes, _COLUMNS), dtype, transforms=transforms)


def num_query_copies(tiling: LaneTiling, head_dim: int) -> int:
    """Counts the copies of `fetch_queries`."""
    return tiling.queries_per_tile * (head_dim // _COLUMNS)


def fetch_queries(q_ref: Any, place: tuple, smem: Any, barrier: Any, tiling: LaneTiling) -> None:
    """Starts copying the queries of a lane tile; lanes after the last query keep what they hold.

    Args:
      q_ref: `[r, t, h, g, d]`.
      place: (row, lane tile, key/value head).
      smem: `lanes_smem`.
      barrier: Gets an arrival for each copy.
      tiling: Static.
    """
    row, lane_tile, head = place
    for nth in range(tiling.queries_per_tile):
        # After the row's last query it again: a barrier waits for the same number everywhere.
        query = jnp.minimum(lane_tile * tiling.queries_per_tile + nth, tiling.num_queries - 1)
        for part, columns in enumerate(_parts(smem)):
            source = q_ref.at[row, query, head, :, columns]
            plgpu.copy_gmem_to_smem(source, smem.at[part, _lanes_of(nth, tiling)], barrier)


def load_queries(smem: Any, q_smem: Any) -> None:
    """Lays fetched queries out as `[num_lanes, d]` for a wgmma; to be followed by `commit_smem`."""
    for part, columns in enumerate(_parts(smem)):
        q = plgpu.load(smem.at[part].transpose((1, 0)), layout=plgpu.Layout.WGMMA, optimized=False)
        q_smem.at[:, columns].transpose((1, 0))[...] = q


def as_lanes(q: jax.Array, tiling: LaneTiling) -> jax.Array:
    """Brings queries `[r, t, h, g, d]` into `[r, lane tiles, h, d, num_lanes]`, 0 where there is no query."""
    num_rows, num_queries, num_heads, group_size, head_dim = q.shape
    num_padding = tiling.num_lane_tiles * tiling.queries_per_tile - num_queries
    q = jnp.pad(q, ((0, 0), (0, num_padding), (0, 0), (0, 0), (0, 0)))
    q = q.reshape(num_rows, tiling.num_lane_tiles, -1, num_heads, group_size, head_dim)
    q = q.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, tiling.num_lane_tiles, num_heads, head_dim, -1)
    return jnp.pad(q, ((0, 0),) * 4 + ((0, tiling.num_lanes - q.shape[4]),))


def sinks_of_lanes(sinks: jax.Array, tiling: LaneTiling) -> jax.Array:
    """`[h, g]` as `[h, lanes]`, the same for all lane tiles; the lanes after the last query are 0."""
    sinks = jnp.tile(sinks, (1, tiling.queries_per_tile))
    return jnp.pad(sinks, ((0, 0), (0, tiling.num_lanes - sinks.shape[1])))


def result_shapes(
    q_shape: tuple[int, ...], tiling: LaneTiling, dtype: Any, gpu: Gpu
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What `write_results` or `store_results` writes: `out` and `lse` f32[r, h, lanes of all lane tiles].

    Args:
      q_shape: `(r, t, h, g, d)`.
      tiling: Static.
      dtype: Of `out`. Of 16 bits it has the model's layout; else `[r, h, d, lanes of all lane tiles]`, for no
        store turns 32 bits.
      gpu: Without a copy engine `out` has the second layout, too.
    """
    num_rows, _, num_heads, _, head_dim = q_shape
    num_lanes = tiling.num_lanes * tiling.num_lane_tiles
    if jnp.dtype(dtype).itemsize != 2 or not gpu.has_copy_engine:
        q_shape = (num_rows, num_heads, head_dim, num_lanes)
    lse = jax.ShapeDtypeStruct((num_rows, num_heads, num_lanes), jnp.float32)
    return jax.ShapeDtypeStruct(q_shape, dtype), lse


def write_results(
    out: jax.Array, lse_smem: Any, out_ref: Any, lse_ref: Any, place: tuple, tiling: LaneTiling
) -> None:
    """Writes the results of a lane tile, and waits.

    Args:
      out: f32[d, num_lanes].
      lse_smem: f32[num_lanes], just stored.
      out_ref: See `result_shapes`.
      lse_ref: Likewise.
      place: (row, lane tile, key/value head).
      tiling: Static.
    """
    row, lane_tile, head = place
    lanes = pl.ds(lane_tile * tiling.num_lanes, tiling.num_lanes)

    def write_lanes(smem: Any) -> None:
        smem[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref.at[row, head, :, lanes])

    def write_queries(smem: Any) -> None:
        for part in range(smem.shape[0]):
            columns = slice(part * _COLUMNS, (part + 1) * _COLUMNS)
            smem.at[part].transpose((1, 0))[...] = out[columns].astype(smem.dtype)
        plgpu.commit_smem()
        for nth in range(tiling.queries_per_tile):
            query = lane_tile * tiling.queries_per_tile + nth

            @pl.when(query < tiling.num_queries)
            def _(nth=nth, query=query):
                for part, columns in enumerate(_parts(smem)):
                    target = out_ref.at[row, query, head, :, columns]
                    plgpu.copy_smem_to_gmem(smem.at[part, _lanes_of(nth, tiling)], target)

    def write(smem: Any) -> None:
        (write_queries if in_model_layout else write_lanes)(smem)
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row, head, lanes])
        plgpu.wait_smem_to_gmem(0)

    in_model_layout = len(out_ref.shape) == 5
    if in_model_layout:
        smem = lanes_smem(tiling, out.shape[0], out_ref.dtype)
    else:
        smem = plgpu.SMEM(out.shape, out_ref.dtype, transforms=tiled(tiling.num_lanes, 4))
    pl.run_scoped(write, smem)


def store_results(
    out: jax.Array, lse: jax.Array, out_ref: Any, lse_ref: Any, place: tuple, tiling: LaneTiling
) -> None:
    """`write_results` by threads, of `lse` f32[num_lanes], in the layout of 32 bits."""
    row, lane_tile, head = place
    lanes = pl.ds(lane_tile * tiling.num_lanes, tiling.num_lanes)
    store(out_ref.at[row, head, :, lanes], out.astype(out_ref.dtype))
    store(lse_ref.at[row, head, lanes], lse)


def as_queries(x: jax.Array, tiling: LaneTiling) -> jax.Array:
    """Brings results `[r, h, lanes of all lane tiles, ...]` into the model's layout `[r, t, h, g, ...]`."""
    num_rows, num_heads, _, *rest = x.shape
    x = x.reshape(num_rows, num_heads, tiling.num_lane_tiles, tiling.num_lanes, *rest)
    x = x[:, :, :, : tiling.queries_per_tile * tiling.group_size]
    x = x.reshape(num_rows, num_heads, -1, tiling.group_size, *rest)
    return x[:, :, : tiling.num_queries].swapaxes(1, 2)


def _parts(smem: Any) -> list[Any]:
    """The columns of `d` that each part of `lanes_smem` has."""
    return [pl.ds(part * _COLUMNS, _COLUMNS) for part in range(smem.shape[0])]


def _lanes_of(nth: int, tiling: LaneTiling) -> Any:
    """The lanes of the nth query of a lane tile."""
    return pl.ds(nth * tiling.group_size, tiling.group_size)
