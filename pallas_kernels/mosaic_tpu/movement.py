"""Whole blocks moved within HBM: gathered, scattered, copied. One DMA moves a block of all layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu.limits import check_scalars, check_tpu_pool, pallas_call
from pallas_kernels.move_arguments import check_block_values, check_moved_blocks

NUM_IN_FLIGHT = 8
"""Blocks on their way at a time, keys and values each."""


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
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      block_ids: i32[n], within a layer; arbitrary from `count` on.
      count: i32[], at most `n`.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      k and v, `[num_layers, n, h, block_size, d]`; unspecified from `count` on.

    Raises:
      ValueError: The arguments do not fit together, or are not for a TPU (`check_tpu_pool`); the ids do
        not fit into SMEM.
    """
    check_moved_blocks(k_pool, v_pool, count, num_blocks, block_ids=block_ids)
    check_tpu_pool(k_pool)

    def ends(i, ids, pool, moved):
        return pool.at[:, ids[i]], moved.at[:, i]

    pools = _by_layer(k_pool, num_blocks), _by_layer(v_pool, num_blocks)
    num_layers, _, *block_shape = pools[0].shape
    if not block_ids.size:
        nothing = jnp.zeros((num_layers, 0, *block_shape), k_pool.dtype)
        return nothing, nothing
    moved = jax.ShapeDtypeStruct((num_layers, block_ids.shape[0], *block_shape), k_pool.dtype)
    return _move("gather_blocks", ends, (block_ids,), count, pools, (moved, moved), interpret)


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
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      k: `[num_layers, n, h, block_size, d]`, cast to the pool's dtype.
      v: Like `k`.
      block_ids: i32[n], within a layer, different ones; arbitrary from `count` on.
      count: i32[], at most `n`.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or are not for a TPU (`check_tpu_pool`); the ids do
        not fit into SMEM.
    """
    check_moved_blocks(k_pool, v_pool, count, num_blocks, block_ids=block_ids)
    check_block_values(k_pool, k, v, block_ids, num_blocks)
    check_tpu_pool(k_pool)

    def ends(i, ids, moved, pool):
        return moved.at[:, i], pool.at[:, ids[i]]

    sources = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
    pools = _by_layer(k_pool, num_blocks), _by_layer(v_pool, num_blocks)
    k, v = _move("scatter_blocks", ends, (block_ids,), count, sources, pools, interpret)
    return k.reshape(k_pool.shape), v.reshape(v_pool.shape)


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
    """Copies blocks of all layers, in place where the pools are donated; see `reference.copy_blocks`.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      src: i32[n], block ids within a layer; arbitrary from `count` on.
      dst: i32[n], different from each other; a destination may be the source of an earlier copy, not of a
        later one. Arbitrary from `count` on.
      count: i32[], at most `n`.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or are not for a TPU (`check_tpu_pool`); the ids do
        not fit into SMEM.
    """
    check_moved_blocks(k_pool, v_pool, count, num_blocks, src=src, dst=dst)
    check_tpu_pool(k_pool)

    def ends(i, src, dst, _, pool):
        return pool.at[:, src[i]], pool.at[:, dst[i]]

    def overwrites(i, earlier, src, dst):
        return dst[i] == src[earlier]

    pools = _by_layer(k_pool, num_blocks), _by_layer(v_pool, num_blocks)
    k, v = _move("copy_blocks", ends, (src, dst), count, (), pools, interpret, overwrites)
    return k.reshape(k_pool.shape), v.reshape(v_pool.shape)


def _by_layer(pool: jax.Array, num_blocks: int) -> jax.Array:
    return pool.reshape(-1, num_blocks, *pool.shape[1:])


def _move(
    name: str,
    ends: Callable[..., tuple],
    ids: tuple[jax.Array, ...],
    count: jax.Array,
    sources: tuple[jax.Array, ...],
    targets: tuple[jax.Array, jax.Array] | tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
    interpret: bool,
    overwrites: Callable[..., jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Makes `count` copies, each of keys and of values.

    Args:
      name: Of the kernel.
      ends: `ends(i, *ids, source, target)` are the places that copy `i` reads and writes.
      ids: What `ends` needs to know, in SMEM.
      count: i32[].
      sources: Keys and values; or nothing, and the targets are read as well.
      targets: Keys and values, written in place; or the shape of new ones.
      interpret: Run on the CPU, and look for races.
      overwrites: `overwrites(i, earlier, *ids)` is whether copy `i` writes what copy `earlier` reads, and so
        must wait for it.
    """
    check_scalars("the list of block ids", sum(each.size for each in ids))
    num_scalars = len(ids) + 1
    in_place = [target for target in targets if isinstance(target, jax.Array)]

    def kernel(*refs):
        *ids_refs, count_ref = refs[:num_scalars]
        *target_refs, arrived = refs[-3:]
        source_refs = refs[num_scalars:][: len(sources)] or target_refs

        def copies(i):
            for kind in range(2):
                source, target = ends(i, *ids_refs, source_refs[kind], target_refs[kind])
                yield pltpu.make_async_copy(source, target, arrived.at[lax.rem(i, NUM_IN_FLIGHT), kind])

        def wait(i):
            for copy in copies(i):
                copy.wait()

        def start(i, num_ended):
            must_end = jnp.maximum(num_ended, i + 1 - NUM_IN_FLIGHT)
            if overwrites is not None:
                for distance in reversed(range(1, NUM_IN_FLIGHT)):
                    earlier = jnp.maximum(i - distance, 0)
                    is_in_its_way = (i >= distance) & overwrites(i, earlier, *ids_refs)
                    must_end = jnp.where(is_in_its_way, jnp.maximum(must_end, earlier + 1), must_end)
            pl.loop(num_ended, must_end)(wait)
            for copy in copies(i):
                copy.start()
            return must_end

        num_ended = lax.fori_loop(0, count_ref[0], start, jnp.int32(0))
        pl.loop(num_ended, count_ref[0])(wait)

    num_moved = ids[0].size * targets[0].size // targets[0].shape[1]
    in_hbm, in_smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
    num_sources = num_scalars + len(sources)
    k, v = pallas_call(
        kernel,
        in_specs=[in_smem] * num_scalars + [in_hbm] * (len(sources) + len(in_place)),
        out_specs=[in_hbm, in_hbm],
        out_shape=[jax.ShapeDtypeStruct(target.shape, target.dtype) for target in targets],
        scratch_shapes=[pltpu.SemaphoreType.DMA((NUM_IN_FLIGHT, 2))],
        input_output_aliases={num_sources + kind: kind for kind in range(len(in_place))},
        # Keys and values, read and written.
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=4 * num_moved * targets[0].dtype.itemsize
        ),
        interpret=interpret,
        name=name,
    )(*ids, jnp.clip(count, 0, ids[0].size).astype(jnp.int32).reshape(1), *sources, *in_place)
    return k, v
