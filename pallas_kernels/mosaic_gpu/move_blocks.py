"""Whole blocks of all layers, K and V, moved by the copy engine: out of the pools, into them, within them.

A block of one layer is contiguous, so it moves as it lies, cut into chunks that fit into shared memory. Every
CTA takes each `num_ctas`-th chunk and keeps a ring of them in flight; no register ever sees the data. How
many blocks move is known on the device only: the grid is fixed, and the CTAs share what there is.

Without a copy engine threads load a chunk and store it, and as many CTAs as fit have a chunk each in flight.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.interpret import launch, store
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
_THREADS = 128


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the work is cut; static.

    Attributes:
      num_layers: Of the pools.
      num_ids: Blocks of one layer, at most.
      rows: Of `head_dim` elements, in one chunk.
      chunks: Of one block.
      stages: Chunks of K, and of V, in the ring of a CTA; at least 2, or 0 where threads move them.
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
    k_pool: jax.Array, v_pool: jax.Array, block_ids: jax.Array, *, num_blocks: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The blocks `block_ids` of all layers, block after block; see `reference.gather_blocks`.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]` of 16 or 32 bits, d 64, 128 or 256, block_size a
        multiple of 8 up to 512.
      v_pool: Like `k_pool`.
      block_ids: i32[n]; those outside of `[0, num_blocks)` are no blocks.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      k and v, `[n, num_layers, h, block_size, d]`; 0 for no block.

    Raises:
      ValueError: The arguments do not fit together, or this kernel does not take them.
    """
    check_moved_blocks(k_pool, v_pool, num_blocks, block_ids=block_ids)
    cut = _cut(k_pool, num_blocks, block_ids)
    shape = (cut.num_ids, cut.num_layers, *k_pool.shape[1:])
    if not cut.num_ids:
        return jnp.zeros(shape, k_pool.dtype), jnp.zeros(shape, v_pool.dtype)

    def body(ids_ref, zeros_ref, k_ref, v_ref, k_out_ref, v_out_ref, *scratch):
        ends = _Ends(
            sources=(k_ref, v_ref),
            source_of=lambda layer, nth: layer * num_blocks + ids_ref[nth],
            targets=(k_out_ref, v_out_ref),
            target_of=lambda layer, nth: nth * cut.num_layers + layer,
            is_block=lambda nth: _is_block(ids_ref[nth], num_blocks),
            zeros=zeros_ref,
        )
        _move(cut, cut.num_ids, ends, *scratch)

    k_chunks, v_chunks = _chunks(cut, k_pool), _chunks(cut, v_pool)
    zeros = jnp.zeros((cut.rows, k_pool.shape[3]), k_pool.dtype)
    out = jax.ShapeDtypeStruct((cut.num_layers * cut.num_ids, *k_chunks.shape[1:]), k_pool.dtype)
    k, v = _launch(body, "gather_blocks", cut, out, interpret, out_type=(out, out))(
        block_ids, zeros, k_chunks, v_chunks
    )
    return k.reshape(shape), v.reshape(shape)


def scatter_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_ids: jax.Array,
    *,
    num_blocks: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `gather_blocks`, in place where the pools are donated; see `reference.scatter_blocks`.

    Args:
      k_pool: Like `gather_blocks`'s.
      v_pool: Like `k_pool`.
      k: `[n, num_layers, h, block_size, d]`, cast to the pool's dtype.
      v: Like `k`.
      block_ids: i32[n], different from each other; those outside of `[0, num_blocks)` are written nowhere.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or this kernel does not take them.
    """
    check_moved_blocks(k_pool, v_pool, num_blocks, block_ids=block_ids)
    check_block_values(k_pool, k, v, block_ids, num_blocks)
    cut = _cut(k_pool, num_blocks, block_ids)
    if not cut.num_ids:
        return k_pool, v_pool

    def body(ids_ref, k_ref, v_ref, k_pool_ref, v_pool_ref, *scratch):
        ends = _Ends(
            sources=(k_ref, v_ref),
            source_of=lambda layer, nth: nth * cut.num_layers + layer,
            targets=(k_pool_ref, v_pool_ref),
            target_of=lambda layer, nth: layer * num_blocks + ids_ref[nth],
            is_block=lambda nth: _is_block(ids_ref[nth], num_blocks),
        )
        _move(cut, cut.num_ids, ends, *scratch)

    blocks = [_chunks(cut, x.astype(k_pool.dtype).reshape(-1, *k_pool.shape[1:])) for x in (k, v)]
    pools = [jax.new_ref(_chunks(cut, pool)) for pool in (k_pool, v_pool)]
    _launch(body, "scatter_blocks", cut, blocks[0], interpret)(block_ids, *blocks, *pools)
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
    check_moved_blocks(k_pool, v_pool, num_blocks, count, src=src, dst=dst)
    cut = _cut(k_pool, num_blocks, src, is_in_order=True)
    if not cut.num_ids:
        return k_pool, v_pool

    def body(src_ref, dst_ref, count_ref, k_ref, v_ref, *scratch):
        ends = _Ends(
            sources=(k_ref, v_ref),
            source_of=lambda layer, nth: layer * num_blocks + src_ref[nth],
            targets=(k_ref, v_ref),
            target_of=lambda layer, nth: layer * num_blocks + dst_ref[nth],
        )
        _move(cut, count_ref[0], ends, *scratch)

    pools = [jax.new_ref(_chunks(cut, pool)) for pool in (k_pool, v_pool)]
    moved = jax.ShapeDtypeStruct((cut.num_layers * cut.num_ids, *pools[0].shape[1:]), k_pool.dtype)
    _launch(body, "copy_blocks", cut, moved, interpret)(src, dst, jnp.reshape(count, 1), *pools)
    return pools[0][...].reshape(k_pool.shape), pools[1][...].reshape(v_pool.shape)


def _cut(pool: jax.Array, num_blocks: int, ids: jax.Array, is_in_order: bool = False) -> _Cut:
    check_moved_pool(pool)
    _, num_heads, block_size, head_dim = pool.shape
    rows_of_block = num_heads * block_size
    row_bytes = head_dim * pool.dtype.itemsize
    gpu, most = target(), min(_MAX_BOX, MAX_CHUNK_BYTES // row_bytes)
    step = 1 if gpu.has_copy_engine else -(-_THREADS // head_dim)  # so that all threads have as much
    rows = max(n for n in range(step, most + 1, step) if rows_of_block % n == 0)
    stage_bytes = 2 * rows * row_bytes
    stages = min(RING_BYTES // stage_bytes, MAX_STAGES) if gpu.has_copy_engine else 0
    num_layers, chunks = pool.shape[0] // num_blocks, rows_of_block // rows
    by_memory = gpu.shared_memory // (stages * stage_bytes) if stages else MAX_CTAS_PER_SM
    max_ctas = num_sms() * min(by_memory, MAX_CTAS_PER_SM)
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
    scratch = []
    if cut.stages:
        smem = plgpu.SMEM((cut.stages, cut.rows, moved.shape[-1]), moved.dtype)
        scratch = [smem, smem, plgpu.Barrier(num_barriers=cut.stages, num_arrivals=2)]
    num_bytes = 4 * moved.size * moved.dtype.itemsize  # K and V, read and written
    return launch(
        body,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_bytes),
        interpret=interpret,
        grid=(cut.num_ctas,),
        grid_names=("cta",),
        scratch_types=scratch,
        kernel_name=name,
        **options,
    )


def _is_block(block_id, num_blocks: int):
    return (block_id >= 0) & (block_id < num_blocks)


@dataclasses.dataclass(frozen=True)
class _Ends:
    """From where to where blocks move.

    Attributes:
      sources: K and V, `[blocks, chunks, rows, head_dim]`.
      source_of: `(layer, nth) -> block` of the sources.
      targets: K and V, like the sources.
      target_of: `(layer, nth) -> block` of the targets.
      is_block: `nth -> bool`; the others are not written, or as `zeros`. None for all.
      zeros: A chunk of zeros, which is what there is of no block; None if nothing is written for it.
    """

    sources: tuple[Any, Any]
    source_of: Callable[..., Any]
    targets: tuple[Any, Any]
    target_of: Callable[..., Any]
    is_block: Callable[..., Any] | None = None
    zeros: Any = None


def _move(cut: _Cut, count, ends: _Ends, k_smem: Any = None, v_smem: Any = None, barrier: Any = None) -> None:
    """Moves the blocks `nth < count` of all layers."""
    cta = lax.axis_index("cta")
    num_chunks = jnp.minimum(count, cut.num_ids) * (cut.num_layers * cut.chunks)
    num_steps = lax.div(jnp.maximum(num_chunks - cta, 0) + (cut.num_ctas - 1), jnp.int32(cut.num_ctas))

    def place(step):
        """(layer, nth, chunk) of this CTA's step; chunks first, then layers: neighbours are neighbours."""
        nth_chunk = cta + step * cut.num_ctas
        nth_block = lax.div(nth_chunk, jnp.int32(cut.chunks))
        num_layers, chunks = jnp.int32(cut.num_layers), jnp.int32(cut.chunks)
        return lax.rem(nth_block, num_layers), lax.div(nth_block, num_layers), lax.rem(nth_chunk, chunks)

    def move_by_threads(step) -> None:
        """A thread has the same part of all chunks: it reads a source before it overwrites it later."""
        layer, nth, chunk = place(step)

        def move(*sources) -> None:
            layout = plgpu.Layout.WG_STRIDED(sources[0].shape, vec_size=_vector_len(sources[0]))
            found = [plgpu.load(source, layout=layout) for source in sources]
            for values, ref in zip(found, ends.targets, strict=True):
                store(ref.at[ends.target_of(layer, nth), chunk], values)

        def move_block() -> None:
            move(*(source.at[ends.source_of(layer, nth), chunk] for source in ends.sources))

        if ends.is_block is None:
            return move_block()
        pl.when(ends.is_block(nth))(move_block)
        if ends.zeros is not None:
            pl.when(~ends.is_block(nth))(lambda: move(ends.zeros, ends.zeros))

    if barrier is None:
        pl.loop(0, num_steps)(move_by_threads)
        return

    def fetch(step, slot):
        layer, nth, chunk = place(step)

        def fetch_block():
            block = ends.source_of(layer, nth)
            for ref, smem in zip(ends.sources, (k_smem, v_smem), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[block, chunk], smem.at[slot], barrier.at[slot])

        if ends.zeros is None or ends.is_block is None:
            return fetch_block()
        is_block = ends.is_block(nth)
        pl.when(is_block)(fetch_block)

        @pl.when(~is_block)
        def _():
            for smem in (k_smem, v_smem):
                plgpu.copy_gmem_to_smem(ends.zeros, smem.at[slot], barrier.at[slot])

    @pl.loop(0, jnp.minimum(num_steps, cut.stages))
    def _(step):
        fetch(step, step)

    @pl.loop(0, num_steps)
    def _(step):
        slot = lax.rem(step, jnp.int32(cut.stages))
        layer, nth, chunk = place(step)
        plgpu.barrier_wait(barrier.at[slot])
        if cut.is_in_order:
            plgpu.commit_smem()  # what was read is read before anything is written

        def write_block():
            block = ends.target_of(layer, nth)
            for smem, ref in zip((k_smem, v_smem), ends.targets, strict=True):
                plgpu.copy_smem_to_gmem(smem.at[slot], ref.at[block, chunk])

        is_written = None if ends.is_block is None or ends.zeros is not None else ends.is_block(nth)
        if is_written is None:
            write_block()
        else:
            pl.when(is_written)(write_block)

        # The slot of the step before is free once its writes have read it; this step's two go on meanwhile.
        later = step + (cut.stages - 1)

        @pl.when((step > 0) & (later < num_steps))
        def _():
            if is_written is not None:
                # Without writes of this step, the last two are of the step before.
                pl.when(~is_written)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            fetch(later, lax.rem(later, jnp.int32(cut.stages)))

    plgpu.wait_smem_to_gmem(0)


def _vector_len(chunk: Any) -> int:
    """Numbers that a thread moves at once: up to 16 bytes, and as many for all threads."""
    return math.gcd(16 // chunk.dtype.itemsize, math.prod(chunk.shape) // _THREADS)
