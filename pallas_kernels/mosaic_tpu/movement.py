"""Whole blocks moved within HBM: gathered, scattered, copied. One DMA moves a block of all layers."""

import dataclasses
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
    k_pool: jax.Array, v_pool: jax.Array, block_ids: jax.Array, *, num_blocks: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The blocks `block_ids` of all layers, block after block; see `reference.gather_blocks`.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      block_ids: i32[n], within a layer; those outside of `[0, num_blocks)` are no blocks.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      k and v, `[n, num_layers, h, block_size, d]`; 0 for no block.

    Raises:
      ValueError: The arguments do not fit together, or are not for a TPU (`check_tpu_pool`); the ids do
        not fit into SMEM.
    """
    check_moved_blocks(k_pool, v_pool, num_blocks, block_ids=block_ids)
    check_tpu_pool(k_pool)

    def ends(i, ids, pool, moved):
        return pool.at[:, jnp.clip(ids[i], 0, num_blocks - 1)], moved.at[i]

    pools = _by_layer(k_pool, num_blocks), _by_layer(v_pool, num_blocks)
    num_layers, _, *block_shape = pools[0].shape
    moved = jax.ShapeDtypeStruct((block_ids.shape[0], num_layers, *block_shape), k_pool.dtype)
    if not block_ids.size:
        return jnp.zeros(moved.shape, moved.dtype), jnp.zeros(moved.shape, moved.dtype)
    nothing = _Nothing(num_blocks, jnp.zeros(moved.shape[1:], moved.dtype))
    return _move("gather_blocks", ends, (block_ids,), None, pools, (moved, moved), interpret, nothing=nothing)


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
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      k: `[n, num_layers, h, block_size, d]`, cast to the pool's dtype.
      v: Like `k`.
      block_ids: i32[n], within a layer, different ones; those outside of `[0, num_blocks)` are written
        nowhere.
      num_blocks: Blocks of one layer.
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or are not for a TPU (`check_tpu_pool`); the ids do
        not fit into SMEM.
    """
    check_moved_blocks(k_pool, v_pool, num_blocks, block_ids=block_ids)
    check_block_values(k_pool, k, v, block_ids, num_blocks)
    check_tpu_pool(k_pool)

    def ends(i, ids, moved, pool):
        return moved.at[i], pool.at[:, jnp.clip(ids[i], 0, num_blocks - 1)]

    sources = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
    pools = _by_layer(k_pool, num_blocks), _by_layer(v_pool, num_blocks)
    if not block_ids.size:
        return k_pool, v_pool
    nothing = _Nothing(num_blocks)
    k, v = _move("scatter_blocks", ends, (block_ids,), None, sources, pools, interpret, nothing=nothing)
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
    check_moved_blocks(k_pool, v_pool, num_blocks, count, src=src, dst=dst)
    check_tpu_pool(k_pool)

    def ends(i, src, dst, _, pool):
        return pool.at[:, src[i]], pool.at[:, dst[i]]

    def overwrites(i, earlier, src, dst):
        return dst[i] == src[earlier]

    pools = _by_layer(k_pool, num_blocks), _by_layer(v_pool, num_blocks)
    if not src.size:
        return k_pool, v_pool
    k, v = _move("copy_blocks", ends, (src, dst), count, (), pools, interpret, overwrites)
    return k.reshape(k_pool.shape), v.reshape(v_pool.shape)


def _by_layer(pool: jax.Array, num_blocks: int) -> jax.Array:
    return pool.reshape(-1, num_blocks, *pool.shape[1:])


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """What becomes of ids outside of `[0, num_blocks)`: `zeros` are moved for them, or None for nothing."""

    num_blocks: int
    zeros: jax.Array | None = None


def _move(
    name: str,
    ends: Callable[..., tuple],
    ids: tuple[jax.Array, ...],
    count: jax.Array | None,
    sources: tuple[jax.Array, ...],
    targets: tuple[jax.Array, jax.Array] | tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
    interpret: bool,
    overwrites: Callable[..., jax.Array] | None = None,
    nothing: _Nothing | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Makes `count` copies, each of keys and of values.

    Args:
      name: Of the kernel.
      ends: `ends(i, *ids, source, target)` are the places that copy `i` reads and writes.
      ids: What `ends` needs to know, in SMEM.
      count: i32[]; None for all.
      sources: Keys and values; or nothing, and the targets are read as well.
      targets: Keys and values, written in place; or the shape of new ones.
      interpret: Run on the CPU, and look for races.
      overwrites: `overwrites(i, earlier, *ids)` is whether copy `i` writes what copy `earlier` reads, and so
        must wait for it.
      nothing: Of ids, the first list of which has some that are no blocks.
    """
    check_scalars("the list of block ids", sum(each.size for each in ids))
    num_scalars = len(ids) + 1
    in_place = [target for target in targets if isinstance(target, jax.Array)]
    zeros = [] if nothing is None or nothing.zeros is None else [nothing.zeros]

    def kernel(*refs):
        *ids_refs, count_ref = refs[:num_scalars]
        *target_refs, arrived = refs[-3:]
        source_refs = refs[num_scalars:][: len(sources)] or target_refs
        zeros_ref = refs[num_scalars + len(sources)] if zeros else None

        def each(i, act):
            """Starts copy `i` of keys and of values, or waits for it."""

            def act_on(of_zeros):
                for kind in range(2):
                    source, target = ends(i, *ids_refs, source_refs[kind], target_refs[kind])
                    arrives = arrived.at[lax.rem(i, NUM_IN_FLIGHT), kind]
                    act(pltpu.make_async_copy(zeros_ref if of_zeros else source, target, arrives))

            if nothing is None:
                return act_on(of_zeros=False)
            is_block = (ids_refs[0][i] >= 0) & (ids_refs[0][i] < nothing.num_blocks)
            pl.when(is_block)(lambda: act_on(of_zeros=False))
            if zeros:
                pl.when(~is_block)(lambda: act_on(of_zeros=True))

        def wait(i):
            each(i, lambda copy: copy.wait())

        def start(i, num_ended):
            must_end = jnp.maximum(num_ended, i + 1 - NUM_IN_FLIGHT)
            if overwrites is not None:
                for distance in reversed(range(1, NUM_IN_FLIGHT)):
                    earlier = jnp.maximum(i - distance, 0)
                    is_in_its_way = (i >= distance) & overwrites(i, earlier, *ids_refs)
                    must_end = jnp.where(is_in_its_way, jnp.maximum(must_end, earlier + 1), must_end)
            pl.loop(num_ended, must_end)(wait)
            each(i, lambda copy: copy.start())
            return must_end

        num_ended = lax.fori_loop(0, count_ref[0], start, jnp.int32(0))
        pl.loop(num_ended, count_ref[0])(wait)

    num_ids = ids[0].size
    num_moved = num_ids * (in_place or sources)[0].size // (in_place or sources)[0].shape[1]
    in_hbm, in_smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
    num_sources = num_scalars + len(sources) + len(zeros)
    count = jnp.clip(num_ids if count is None else count, 0, num_ids).astype(jnp.int32)
    k, v = pallas_call(
        kernel,
        in_specs=[in_smem] * num_scalars + [in_hbm] * (len(sources) + len(zeros) + len(in_place)),
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
    )(*ids, count.reshape(1), *sources, *zeros, *in_place)
    return k, v
