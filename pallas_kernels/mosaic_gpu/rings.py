"""Tiles of keys, or of values, on their way from device memory to a product, inside the decode."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.eight_bits import in_float32, widened
from pallas_kernels.gpus import Gpu
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS, Tiling
from pallas_kernels.mosaic_gpu.tiles import tiled

_ALIGNMENT = 128
"""Bytes of shared memory to which the copy engine wants what it writes aligned."""


class Tile(NamedTuple):
    """A tile as it is multiplied.

    Attributes:
      numbers: `[TILE_ROWS, head_dim]` of 16 bits, in shared memory.
      scale: f32[TILE_ROWS] of the numbers, by rows of a product; None for 1.
      offset: f32[TILE_ROWS], added to scaled numbers; None for 0.
    """

    numbers: Any
    scale: jax.Array | None = None
    offset: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory, each for a tile of keys or of values and what is stored beside them.

    Numbers of 8 bits are widened when they are read, into one place for all tiles: a tile is multiplied
    before the next one is read.

    Attributes:
      pools: In device memory: numbers, and beside them scales and offsets, where there are any.
      smem: `ring_smem` for these.
      barrier: Of each slot; gets an arrival for each copy.
      tiling: Static.
      wide_smem: `[TILE_ROWS, head_dim]` for numbers that were widened; None where numbers have 16 bits.
    """

    pools: tuple
    smem: tuple
    barrier: Any
    tiling: Tiling
    wide_smem: Any = None

    def fetch(self, slot: Any, nth: Any, place: tuple, start: Any) -> None:
        """Starts copying the nth piece of a tile: from token `start` of a block and head on."""
        for pool, smem in zip(self.pools, self.smem, strict=True):
            step = self.tiling.piece_len if len(smem.shape) == 3 else _step(smem.dtype, self.tiling)
            plgpu.copy_gmem_to_smem(
                pool.at[*place, pl.ds(start, self.tiling.piece_len)],
                smem.at[slot, pl.ds(nth * step, self.tiling.piece_len)],
                self.barrier.at[slot],
            )

    def read(self, slot: Any, is_refilled: Any) -> Tile:
        """Waits for a slot's tile; what was widened may be multiplied at once.

        Args:
          slot: i32[].
          is_refilled: bool[], whether the slot gets another tile after this one.
        """
        plgpu.barrier_wait(self.barrier.at[slot])
        if self.wide_smem is None:
            return Tile(self.smem[0].at[slot])
        per_key = self.widen(slot)
        plgpu.commit_smem()
        return Tile(self.wide_smem, *per_key)

    def widen(self, slot: Any) -> list[jax.Array]:
        """Widens a slot's tile of 8 bits, which is there; to be followed by `commit_smem`.

        Returns:
          What lies beside its numbers, f32[TILE_ROWS] each.
        """
        numbers, *beside = self.smem
        layout = plgpu.Layout.WGMMA_UPCAST_2X
        stored = plgpu.load(numbers.at[slot], layout=layout, optimized=False)
        self.wide_smem[...] = widened(stored, self.wide_smem.dtype)
        return [in_float32(self._per_key(smem, slot)) for smem in beside]

    def _per_key(self, smem: Any, slot: Any) -> jax.Array:
        """`[TILE_ROWS]` of pieces that lie apart: of each load, as long as a tile, the piece's own part."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        piece_len = self.tiling.piece_len
        apart = _step(smem.dtype, self.tiling) - piece_len

        def load(nth: int) -> jax.Array:
            piece = smem.at[slot, pl.ds(nth * apart, TILE_ROWS)]
            return plgpu.load(piece, layout=layout, optimized=False)

        found = load(0)
        for nth in range(1, self.tiling.pieces_per_tile if apart else 1):
            key = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=layout)
            found = jnp.where(key >= nth * piece_len, load(nth), found)
        return found


@dataclasses.dataclass(frozen=True)
class ThreadRing(Ring):
    """A ring that threads fill, on GPUs without a copy engine; of numbers of 16 bits alone.

    A thread waits until no more than so many of its copies are on their way, which land in the order in which
    they began. So rings of keys and of values are filled and read in turns, and nothing else is copied.
    """

    def fetch(self, slot: Any, nth: Any, place: tuple, start: Any) -> None:
        [pool], [smem] = self.pools, self.smem
        piece_len = self.tiling.piece_len
        plgpu.copy_gmem_to_smem(
            pool.at[*place, pl.ds(start, piece_len)],
            smem.at[slot, pl.ds(nth * piece_len, piece_len)],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def read(self, slot: Any, is_refilled: Any) -> Tile:
        # Copies to both rings' other slots, and to the refilled one of keys while values are read.
        num_later = (2 * self.smem[0].shape[0] - 1) * self.tiling.pieces_per_tile
        pl.when(is_refilled)(lambda: plgpu.wait_gmem_to_smem(num_later))
        pl.when(~is_refilled)(lambda: plgpu.wait_gmem_to_smem(0))
        return Tile(self.smem[0].at[slot])


def ring_on(gpu: Gpu, is_interpreted: bool) -> type[Ring]:
    """Returns the rings for a GPU; jax's interpreter knows the copy engine alone."""
    return Ring if gpu.has_copy_engine or is_interpreted else ThreadRing


def ring_smem(tiling: Tiling, num_stages: int, pools: tuple[jax.Array, ...], gpu: Gpu) -> tuple:
    """Shared memory for so many tiles of pools: of numbers, and what is stored beside them."""
    numbers, *beside = pools
    head_dim, dtype = numbers.shape[3], numbers.dtype
    # Where threads copy, each of 4 warps takes a fourth of the tiles that a swizzle cuts a piece into.
    widest = 128 if gpu.has_copy_engine else head_dim * tiling.piece_len // 16
    transforms = tiled(head_dim, dtype.itemsize, widest)
    rings = [plgpu.SMEM((num_stages, TILE_ROWS, head_dim), dtype, transforms=transforms)]
    for array in beside:
        length = tiling.pieces_per_tile * _step(array.dtype, tiling)
        rings.append(plgpu.SMEM((num_stages, length), array.dtype))
    return tuple(rings)


def beside_bytes(tiling: Tiling) -> int:
    """Bytes of a tile's scales and offsets in a ring, at most."""
    return 2 * tiling.pieces_per_tile * _step(jnp.float32, tiling) * 4


def _step(dtype: Any, tiling: Tiling) -> int:
    """Numbers from one piece's scales to the next one's: each where a copy may write."""
    return max(_ALIGNMENT // jnp.dtype(dtype).itemsize, tiling.piece_len)
