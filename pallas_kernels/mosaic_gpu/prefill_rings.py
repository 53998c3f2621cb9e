"""Tiles of keys and values on their way to the products of a prefill: what its copying warpgroup does.

Numbers of 16 bits are copied to where they are multiplied. Of 8 bits one tile is copied ahead, and widened
when its slot is free, with what lies beside its numbers: the warpgroups that multiply find it all in
registers' own formats, once for both of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS, Tiling, tiling_of
from pallas_kernels.mosaic_gpu.prefill_mask import QueryMask, Walk
from pallas_kernels.mosaic_gpu.rings import Ring, ring_smem
from pallas_kernels.mosaic_gpu.tiles import tiled

STAGES = 2
"""Tiles of keys, and of values, that are in shared memory at a time."""
_ALIGNMENT = 1024  # bytes of shared memory; an array of scales or offsets has no more


class RingSmem(NamedTuple):
    """Shared memory of keys, or of values, and its barriers.

    Attributes:
      tiles: `[STAGES, tile_len, head_dim]` of 16 bits.
      loaded: Of each slot; gets an arrival for each copy, or one for all that was widened.
      consumed: Of each slot; gets an arrival of each warpgroup that multiplies.
      stored: `ring_smem` for one tile of 8 bits; else empty.
      copied: Its barrier; gets an arrival for each copy.
      per_key: f32[STAGES, scale and offset, tile_len] of a tile of 8 bits.
    """

    tiles: Any
    loaded: Any
    consumed: Any
    stored: tuple = ()
    copied: Any = None
    per_key: Any = None


@dataclasses.dataclass(frozen=True)
class PrefillRing:
    """A ring of tiles, of 8 bits as long as a decode's.

    Attributes:
      pools: In device memory: numbers, and beside them scales and offsets, where there are any.
      smem: See `RingSmem`.
      tiling: The cut of a tile.
    """

    pools: tuple
    smem: RingSmem
    tiling: Tiling

    def widen(self, slot: Any, first_key: Any, mask: QueryMask) -> None:
        """Waits for the tile from the `first_key` on, and brings it into its slot.

        What lies beside keys that no query sees may be NaN, and gets 0.
        """
        copies = dataclasses.replace(self.copies(), wide_smem=self.smem.tiles.at[slot])
        is_seen = mask.is_seen_by_any(first_key, (TILE_ROWS,), plgpu.Layout.WGMMA.reduce(1))
        plgpu.barrier_wait(self.smem.copied.at[0])
        for nth, found in enumerate(copies.widen(0)):
            self.smem.per_key.at[slot, nth][...] = jnp.where(is_seen, found, jnp.zeros_like(found))
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.loaded.at[slot])

    def per_key(self, slot: Any, nth: int, num_rows: int) -> jax.Array:
        """f32[num_rows, tile_len], scales or offsets of a tile that is loaded, the same in all rows."""
        of_slot = self.smem.per_key.at[slot, nth]
        found = plgpu.load(of_slot, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(found, (num_rows, found.shape[0]), [1])

    def copies(self) -> Ring:
        """The ring that copies fill: this one, or the one slot of what is stored in 8 bits."""
        smem = self.smem
        if smem.stored:
            return Ring(self.pools, smem.stored, smem.copied, self.tiling)
        return Ring(self.pools, (smem.tiles,), smem.loaded, self.tiling)


def tiling_for(pool: jax.Array, tile_len: int) -> Tiling:
    """The cut of a tile."""
    _, _, block_size, head_dim = pool.shape
    return tiling_of(1, 1, head_dim, block_size, pool.dtype.itemsize, tile_len)


def smem_for(pools: tuple[jax.Array, ...], dtype: Any, tile_len: int, num_readers: int, gpu: Gpu) -> RingSmem:
    """Shared memory for a ring of pools, multiplied in a dtype by so many warpgroups."""
    tiling, head_dim = tiling_for(pools[0], tile_len), pools[0].shape[3]
    tiles = plgpu.SMEM((STAGES, tile_len, head_dim), dtype, transforms=tiled(head_dim, 2))
    consumed = plgpu.Barrier(num_barriers=STAGES, num_arrivals=num_readers)
    if len(pools) == 1:
        loaded = plgpu.Barrier(num_barriers=STAGES, num_arrivals=tiling.pieces_per_tile)
        return RingSmem(tiles, loaded, consumed)
    return RingSmem(
        tiles,
        plgpu.Barrier(num_barriers=STAGES),
        consumed,
        stored=ring_smem(tiling, 1, pools, gpu),
        copied=plgpu.Barrier(num_barriers=1, num_arrivals=tiling.pieces_per_tile * len(pools)),
        per_key=plgpu.SMEM((STAGES, len(pools) - 1, tile_len), jnp.float32),
    )


def rings_bytes(pool: jax.Array, tile_len: int) -> int:
    """Bytes of both rings."""
    head_dim = pool.shape[3]
    num_bytes = STAGES * tile_len * head_dim * 2
    if pool.dtype.itemsize == 1:
        num_bytes += tile_len * head_dim + 3 * _ALIGNMENT  # scales and offsets as stored, and in float32
    return 2 * num_bytes


def slot_of(step: Any) -> Any:
    """The slot of a step's tile."""
    return lax.rem(step, jnp.int32(STAGES))


def copy_tiles(
    rings: tuple[PrefillRing, ...],
    walk: Walk,
    mask: QueryMask,
    head: Any,
    pool_row: Callable[[Any], Any],
) -> None:
    """Fills the rings, tile after tile, until all is consumed: by then no barrier has others to arrive.

    Args:
      rings: Of keys and of values.
      walk: The tiles.
      mask: What the row reads.
      head: Of keys and values.
      pool_row: Returns the pools' row of the nth block that is read.
    """
    tiling, is_widened = rings[0].tiling, bool(rings[0].smem.stored)
    per_block = jnp.int32(tiling.pieces_per_block)

    def row_of(step: Any, nth: Any) -> Any:
        """The pools' row that a step's nth piece comes from; after the last piece, it again."""
        piece = walk.tile(jnp.minimum(step, walk.num_steps - 1)) * tiling.pieces_per_tile + nth
        return pool_row(lax.div(jnp.minimum(piece, mask.num_columns * per_block - 1), per_block))

    def rows_of(step: Any) -> list:
        return [row_of(step, nth) for nth in range(tiling.pieces_per_tile)]

    def fetch(ring: Ring, slot: Any, step: Any, nth: Any, row: Any) -> None:
        piece = walk.tile(step) * tiling.pieces_per_tile + nth
        ring.fetch(slot, nth, (row, head), lax.rem(piece, per_block) * tiling.piece_len)

    def copy(rows: list, ring: PrefillRing, step: Any) -> None:
        for nth, row in enumerate(rows):
            fetch(ring.copies(), slot_of(step), step, nth, row)

    def widen(ring: PrefillRing, step: Any) -> None:
        pl.when(step >= 0)(lambda: ring.widen(slot_of(step), walk.tile(step) * mask.tile_len, mask))
        # Of so many trips that the compiler does not unroll it: each copy takes registers.
        num_left = (walk.num_steps - 1 - step) * tiling.pieces_per_tile

        @pl.loop(0, jnp.minimum(num_left, tiling.pieces_per_tile))
        def _(nth):
            fetch(ring.copies(), 0, step + 1, nth, row_of(step + 1, nth))

    def refill(step: Any, rows: list) -> list:
        # Asked for early: they are there when they are needed. Widening takes the registers of ids.
        rows_after = [] if is_widened else rows_of(step + 1)
        for ring in rings:
            pl.when(step >= STAGES)(
                functools.partial(plgpu.barrier_wait, ring.smem.consumed.at[slot_of(step)])
            )
            fill = widen if is_widened else functools.partial(copy, rows)
            pl.when(step < walk.num_steps)(functools.partial(fill, ring, step))
        return rows_after

    @pl.when(walk.num_steps > 0)
    def _():
        first, rows = (-1, []) if is_widened else (0, rows_of(jnp.int32(0)))
        lax.fori_loop(first, walk.num_steps + STAGES, refill, rows)
