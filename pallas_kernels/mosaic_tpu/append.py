"""New keys and values written into blocks: the tiles they fall into are read, changed, and written back."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu.limits import check_scalars, check_tpu_pool, pallas_call, sublanes
from pallas_kernels.move_arguments import check_append

MAX_CHUNK = 32
"""Tokens whose tiles are in VMEM at a time."""
TILES_BYTES = 8 * 2**20
"""Of VMEM, for these tiles."""


def append_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    num_blocks: int,
    layer: jax.Array | int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes new tokens of one layer, in place where the pools are donated; see `reference.append_kv`.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]`.
      v_pool: Like `k_pool`.
      k: `[n, h, d]`, cast to the pool's dtype.
      v: Like `k`.
      slots: i32[n], `block_id * block_size + offset`, all different; out of `[0, num_blocks * block_size)`
        means nowhere.
      num_blocks: Blocks of one layer.
      layer: i32[].
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or are not for a TPU (`check_tpu_pool`); the slots
        do not fit into SMEM, or a tile of all heads into VMEM.
    """
    check_append(k_pool, v_pool, k, v, slots, num_blocks, layer)
    check_tpu_pool(k_pool)
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return k_pool, v_pool
    tile_len = sublanes(k_pool.dtype)
    tile_bytes = tile_len * num_kv_heads * head_dim * k_pool.dtype.itemsize
    chunk = min(num_tokens, MAX_CHUNK, TILES_BYTES // (2 * tile_bytes))
    if chunk == 0:
        raise ValueError(
            f"{tile_len} tokens have {tile_bytes} bytes of keys, expected at most {TILES_BYTES // 2}: "
            "shard the heads"
        )
    num_chunks = -(-num_tokens // chunk)
    check_scalars("slots", 2 * num_chunks * chunk)

    is_stored = (slots >= 0) & (slots < num_blocks * k_pool.shape[2])
    slots = jnp.pad(jnp.where(is_stored, slots, -1), (0, num_chunks * chunk - num_tokens), constant_values=-1)
    # A tile with several tokens of a chunk is moved once, for the first of them.
    tiles = (slots // tile_len).reshape(num_chunks, chunk)
    leaders = jnp.argmax(tiles[:, :, None] == tiles[:, None, :], axis=-1).astype(jnp.int32)

    tokens = pl.BlockSpec((chunk, num_kv_heads, head_dim), lambda nth, *_: (nth, 0, 0))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scratch = pltpu.VMEM((chunk, num_kv_heads, tile_len, head_dim), k_pool.dtype)
    num_scalars = 3
    k_pool, v_pool = pallas_call(
        functools.partial(_append_kernel, num_blocks=num_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(num_chunks,),
            in_specs=[tokens, tokens, in_hbm, in_hbm],
            out_specs=[in_hbm, in_hbm],
            scratch_shapes=[scratch, scratch, pltpu.SemaphoreType.DMA((chunk, 2))],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)],
        input_output_aliases={num_scalars + 2: 0, num_scalars + 3: 1},
        # Chunk after chunk: two may have tokens of the same tile.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=4 * num_tokens * tile_bytes),
        interpret=interpret,
        name="append_kv",
    )(
        slots,
        leaders.reshape(-1),
        jnp.asarray(layer, jnp.int32).reshape(1),
        k.astype(k_pool.dtype),
        v.astype(v_pool.dtype),
        k_pool,
        v_pool,
    )
    return k_pool, v_pool


def _append_kernel(
    slots,  # i32[n], SMEM; -1 for nowhere
    leaders,  # i32[n], SMEM: the chunk's first token in the same tile
    layer,  # i32[1], SMEM
    k,  # [chunk, h, d], VMEM
    v,  # Like k
    _k_pool,
    _v_pool,
    k_pool,  # [num_layers * num_blocks, h, block_size, d], HBM
    v_pool,  # Like k_pool
    k_tiles,  # [chunk, h, tile_len, d], VMEM, each at its leader
    v_tiles,  # Like k_tiles
    arrived,  # DMA semaphores [chunk, k or v]
    *,
    num_blocks: int,
):
    block_size = k_pool.shape[2]
    chunk, num_kv_heads, tile_len, head_dim = k_tiles.shape
    first = pl.program_id(0) * chunk
    kinds = ((k, k_pool, k_tiles), (v, v_pool, v_tiles))

    def is_leader(i):
        return (slots[first + i] >= 0) & (leaders[first + i] == i)

    def copies(i, is_read):
        """Between the pools and the tile of token `i`."""
        slot = slots[first + i]
        block = layer[0] * num_blocks + lax.div(slot, block_size)
        part = pl.ds(lax.div(lax.rem(slot, block_size), tile_len) * tile_len, tile_len)
        for kind, (_, pool, tiles) in enumerate(kinds):
            stored, tile = pool.at[block, :, part], tiles.at[i]
            source, target = (stored, tile) if is_read else (tile, stored)
            yield pltpu.make_async_copy(source, target, arrived.at[i, kind])

    def for_leaders(is_read, act):
        @pl.loop(0, chunk)
        def _(i):
            @pl.when(is_leader(i))
            def _():
                for copy in copies(i, is_read):
                    act(copy)

    def insert(i):
        offset = lax.rem(slots[first + i], tile_len)
        is_it = lax.broadcasted_iota(jnp.int32, (num_kv_heads, tile_len, head_dim), 1) == offset
        for new, _, tiles in kinds:
            # In f32, which every TPU selects in.
            tile = tiles[leaders[first + i]].astype(jnp.float32)
            token = new[i].astype(jnp.float32)[:, None, :]
            tiles[leaders[first + i]] = jnp.where(is_it, token, tile).astype(tiles.dtype)

    for_leaders(True, lambda copy: copy.start())
    for_leaders(True, lambda copy: copy.wait())

    @pl.loop(0, chunk)
    def _(i):
        pl.when(slots[first + i] >= 0)(lambda: insert(i))

    for_leaders(False, lambda copy: copy.start())
    for_leaders(False, lambda copy: copy.wait())
