"""Whole blocks of all layers, K and V, moved by the copy engine: out of the pools, into them, within them.

A block of one layer is contiguous, so it moves as it lies, cut into chunks that fit into shared memory. Every
CTA takes each `num_ctas`-th chunk and keeps a ring of them in flight; no register ever sees the data. How
many blocks move is known on the device only: the grid is fixed, and the CTAs share what there is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.interpret import launch
from pallas_kernels.mosaic_gpu.limits import check_moved_pool, num_sms, target
from pallas_kernels.move_arguments import check_block_values, check_moved_blocks

MAX_CHUNK_BYTES = 16 * 1024
"""Of K; as many of V travel with them."""
RING_BYTES = 96 * 1024
"""Of one CTA, in flight, unless chunks are so small that they are too many; two such CTAs share an SM of an
H200, and fill one of an RTX 50."""
MAX_STAGES = 8
MAX_CTAS_PER_SM = 8
_MAX_BOX = 256  # rows of one transfer


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the work is cut; static.

    Attributes:
      num_layers: Of the pools.
      num_ids: Blocks of one layer, at most.
      rows: Of `head_dim` elements, in one chunk.
      chunks: Of one block.
      stages: Chunks of K, and of V, in the ring of a CTA; at least 2.
      max_ctas: As many as run side by side.
      is_in_order: The same part of all blocks is moved by the same CTA, one block after the other: a source
        is read before a later copy overwrites it.
    """

    num_layers: int
    num_ids: int
    rows: int
    chunks: int
    stages: int
    max_ctas: int
    is_in_order: bool

    @property
    def num_ctas(self) -> int:
        """No more than there can be chunks."""
        return min(self.num_ids * self.num_layers * self.chunks, self.max_ctas)


def gather_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_ids: jax.Array,
    count: jax.Array,
    *,
    num_blocks: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The blocks `block_ids[:count]` of all layers, contiguous; see `reference.gather_blocks`.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]` of 16 or 32 bits, d 64, 128 or 256, block_size a
        multiple of 8 up to 512.
      v_pool: Like `k_pool`.
      block_ids: i32[n].
      count: i32[], at most `n`.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      k and v, `[num_layers, n, h, block_size, d]`; uninitialised from `count` on.

    Raises:
      ValueError: The arguments do not fit together, or this kernel does not take them.
    """
    check_moved_blocks(k_pool, v_pool, count, num_blocks, block_ids=block_ids)
    cut = _cut(k_pool, num_blocks, block_ids)
    shape = (cut.num_layers, cut.num_ids, *k_pool.shape[1:])
    if not cut.num_ids:
        return jnp.zeros(shape, k_pool.dtype), jnp.zeros(shape, v_pool.dtype)

    def body(ids_ref, count_ref, k_ref, v_ref, k_out_ref, v_out_ref, *scratch):
        def source(layer, nth):
            return layer * num_blocks + ids_ref[nth]

        def target(layer, nth):
            return layer * cut.num_ids + nth

        _move(cut, count_ref[0], (k_ref, v_ref), source, (k_out_ref, v_out_ref), target, *scratch)

    k_chunks, v_chunks = _chunks(cut, k_pool), _chunks(cut, v_pool)
    out = jax.ShapeDtypeStruct((cut.num_layers * cut.num_ids, *k_chunks.shape[1:]), k_pool.dtype)
    k, v = _launch(body, "gather_blocks", cut, out, interpret, out_type=(out, out))(
        block_ids, jnp.reshape(count, 1), k_chunks, v_chunks
    )
    return k.reshape(shape), v.reshape(shape)


def scatter_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_ids: jax.Array,
    count: jax.Array,
    *,
    num_blocks: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `gather_blocks`, in place where the pools are donated; see `reference.scatter_blocks`.

    Args:
      k_pool: Like `gather_blocks`'s.
      v_pool: Like `k_pool`.
      k: `[num_layers, n, h, block_size, d]`, cast to the pool's dtype.
      v: Like `k`.
      block_ids: i32[n], different from each other up to `count`.
      count: i32[], at most `n`.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or this kernel does not take them.
    """
    check_moved_blocks(k_pool, v_pool, count, num_blocks, block_ids=block_ids)
    check_block_values(k_pool, k, v, block_ids, num_blocks)
    cut = _cut(k_pool, num_blocks, block_ids)
    if not cut.num_ids:
        return k_pool, v_pool

    def body(ids_ref, count_ref, k_ref, v_ref, k_pool_ref, v_pool_ref, *scratch):
        def source(layer, nth):
            return layer * cut.num_ids + nth

        def target(layer, nth):
            return layer * num_blocks + ids_ref[nth]

        _move(cut, count_ref[0], (k_ref, v_ref), source, (k_pool_ref, v_pool_ref), target, *scratch)

    blocks = [_chunks(cut, x.astype(k_pool.dtype).reshape(-1, *k_pool.shape[1:])) for x in (k, v)]
    pools = [jax.new_ref(_chunks(cut, pool)) for pool in (k_pool, v_pool)]
    _launch(body, "scatter_blocks", cut, blocks[0], interpret)(
        block_ids, jnp.reshape(count, 1), *blocks, *pools
    )
    return pools[0][...].reshape(k_pool.shape), pools[1][...].reshape(v_pool.shape)


def copy_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    count: jax.Array,
    *,
    num_blocks: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Block `dst[i]` like `src[i]` in every layer, in place where donated; see `reference.copy_blocks`.

    Args:
      k_pool: Like `gather_blocks`'s.
      v_pool: Like `k_pool`.
      src: i32[n].
      dst: i32[n], up to `count` different from each other; one may be the source of an earlier copy, not of a
        later one.
      count: i32[], at most `n`.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or this kernel does not take them.
    """
    check_moved_blocks(k_pool, v_pool, count, num_blocks, src=src, dst=dst)
    cut = _cut(k_pool, num_blocks, src, is_in_order=True)
    if not cut.num_ids:
        return k_pool, v_pool

    def body(src_ref, dst_ref, count_ref, k_ref, v_ref, *scratch):
        def source(layer, nth):
            return layer * num_blocks + src_ref[nth]

        def target(layer, nth):
            return layer * num_blocks + dst_ref[nth]

        _move(cut, count_ref[0], (k_ref, v_ref), source, (k_ref, v_ref), target, *scratch)

    pools = [jax.new_ref(_chunks(cut, pool)) for pool in (k_pool, v_pool)]
    moved = jax.ShapeDtypeStruct((cut.num_layers * cut.num_ids, *pools[0].shape[1:]), k_pool.dtype)
    _launch(body, "copy_blocks", cut, moved, interpret)(src, dst, jnp.reshape(count, 1), *pools)
    return pools[0][...].reshape(k_pool.shape), pools[1][...].reshape(v_pool.shape)


def _cut(pool: jax.Array, num_blocks: int, ids: jax.Array, is_in_order: bool = False) -> _Cut:
    check_moved_pool(pool)
    _, num_heads, block_size, head_dim = pool.shape
    rows_of_block = num_heads * block_size
    row_bytes = head_dim * pool.dtype.itemsize
    most = min(_MAX_BOX, MAX_CHUNK_BYTES // row_bytes)
    rows = max(n for n in range(1, most + 1) if rows_of_block % n == 0)
    stage_bytes = 2 * rows * row_bytes
    stages = min(RING_BYTES // stage_bytes, MAX_STAGES)
    num_layers, chunks = pool.shape[0] // num_blocks, rows_of_block // rows
    max_ctas = num_sms() * min(target().shared_memory // (stages * stage_bytes), MAX_CTAS_PER_SM)
    if is_in_order:
        max_ctas = max(n for n in range(1, max_ctas + 1) if num_layers * chunks % n == 0)
    return _Cut(
        num_layers=num_layers,
        num_ids=ids.shape[0],
        rows=rows,
        chunks=chunks,
        stages=stages,
        max_ctas=max_ctas,
        is_in_order=is_in_order,
    )


def _chunks(cut: _Cut, blocks: jax.Array) -> jax.Array:
    """`[blocks, chunks, rows, head_dim]`, a view."""
    return blocks.reshape(blocks.shape[0], cut.chunks, cut.rows, blocks.shape[-1])


def _launch(
    body: Callable[..., None],
    name: str,
    cut: _Cut,
    moved: jax.Array | jax.ShapeDtypeStruct,
    interpret: bool,
    **options: Any,
) -> Callable[..., Any]:
    """`moved` is like what moves of K, if all does."""
    smem = plgpu.SMEM((cut.stages, cut.rows, moved.shape[-1]), moved.dtype)
    num_bytes = 4 * moved.size * moved.dtype.itemsize  # K and V, read and written
    return launch(
        body,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_bytes),
        interpret=interpret,
        grid=(cut.num_ctas,),
        grid_names=("cta",),
        scratch_types=[smem, smem, plgpu.Barrier(num_barriers=cut.stages, num_arrivals=2)],
        kernel_name=name,
        **options,
    )


def _move(cut: _Cut, count, sources, source_of, targets, target_of, k_smem, v_smem, barrier) -> None:
    """Moves block `source_of(layer, nth)` of the sources to `target_of(layer, nth)` of the targets, for all
    layers and `nth < count`; both are `[blocks, chunks, rows, head_dim]` of K and V."""
    cta = lax.axis_index("cta")
    num_chunks = jnp.minimum(count, cut.num_ids) * (cut.num_layers * cut.chunks)
    num_steps = lax.div(jnp.maximum(num_chunks - cta, 0) + (cut.num_ctas - 1), cut.num_ctas)

    def place(step, block_of):
        """(block, chunk) of this CTA's step; chunks first, then layers, so that neighbours are neighbours."""
        nth_chunk = cta + step * cut.num_ctas
        nth_block = lax.div(nth_chunk, cut.chunks)
        layer, nth = lax.rem(nth_block, cut.num_layers), lax.div(nth_block, cut.num_layers)
        return block_of(layer, nth), lax.rem(nth_chunk, cut.chunks)

    def fetch(step, slot):
        block, chunk = place(step, source_of)
        for ref, smem in zip(sources, (k_smem, v_smem), strict=True):
            plgpu.copy_gmem_to_smem(ref.at[block, chunk], smem.at[slot], barrier.at[slot])

    @pl.loop(0, jnp.minimum(num_steps, cut.stages))
    def _(step):
        fetch(step, step)

    @pl.loop(0, num_steps)
    def _(step):
        slot = lax.rem(step, cut.stages)
        block, chunk = place(step, target_of)
        plgpu.barrier_wait(barrier.at[slot])
        if cut.is_in_order:
            plgpu.commit_smem()  # what was read is read before anything is written
        for smem, ref in zip((k_smem, v_smem), targets, strict=True):
            plgpu.copy_smem_to_gmem(smem.at[slot], ref.at[block, chunk])

        # The slot of the step before is free once its writes have read it; this step's two go on meanwhile.
        later = step + (cut.stages - 1)

        @pl.when((step > 0) & (later < num_steps))
        def _():
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            fetch(later, lax.rem(later, cut.stages))

    plgpu.wait_smem_to_gmem(0)
