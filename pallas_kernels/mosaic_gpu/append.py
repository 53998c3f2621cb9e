"""Keys and values of new tokens, and what lies beside them, written into the blocks of one layer."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.eight_bits import Scaling, check_scaling
from pallas_kernels.mosaic_gpu.interpret import launch
from pallas_kernels.mosaic_gpu.limits import check_moved_pool, num_sms, target, why_not
from pallas_kernels.move_arguments import check_append

MAX_TOKENS_PER_CTA = 8
MAX_CTA_BYTES = 32 * 1024
"""Of K in one CTA; as many of V."""
_CTAS_PER_SM = 4
_MAX_HEADS = 256  # rows of one transfer
_ALIGNMENT = 128  # bytes of shared memory, for what a transfer reads
_ROW_BYTES = 16  # a transfer's rows are multiples of it


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
    """The pools with keys and values of new tokens, in place where donated; see `reference.append_kv`.

    A CTA reads a few neighbours with one transfer and writes each with a transfer of its own, a row of
    `head_dim` for each head: slots may lie anywhere, and longer runs would not write longer rows.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]` of 16 or 32 bits, d 64, 128 or 256, block_size a
        multiple of 8 up to 512, h at most 256, a token of all heads at most 113 KiB (49 on an RTX 50).
      v_pool: Like `k_pool`.
      k: `[n, h, d]`, cast to the pool's dtype.
      v: Like `k`.
      slots: i32[n], all different; out of `[0, num_blocks * block_size)` means nowhere.
      num_blocks: Blocks of one layer.
      layer: i32[].
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools.

    Raises:
      ValueError: The arguments do not fit together, or this kernel does not take them.
    """
    check_append(k_pool, v_pool, k, v, slots, num_blocks, layer)
    check_moved_pool(k_pool)
    k, v = (x.astype(k_pool.dtype) for x in (k, v))
    k_pool, v_pool = _append((k_pool, v_pool), (k, v), slots, num_blocks, layer, interpret)
    return k_pool, v_pool


def append_scaled(
    k_pool: jax.Array,
    v_pool: jax.Array,
    scaling: Scaling,
    k: jax.Array,
    v: jax.Array,
    new_scaling: Scaling,
    slots: jax.Array,
    *,
    num_blocks: int,
    layer: jax.Array | int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, Scaling]:
    """The pools of 8 bits with new tokens, all arrays by one kernel, in place; see `reference.append_scaled`.

    Whatever rounds keys and values to 8 bits has done so: the numbers are written as they are.

    Args:
      k_pool: `[num_layers * num_blocks, h, block_size, d]` of 8 bits (see `eight_bits`), d 64 or 128,
        block_size a multiple of 8 up to 512, h at most 256.
      v_pool: Like `k_pool`.
      scaling: Beside the pools.
      k: `[n, h, d]` in the pool's dtype.
      v: Like `k`.
      new_scaling: Of the new tokens, `[n, h]` each.
      slots: i32[n], all different; out of `[0, num_blocks * block_size)` means nowhere.
      num_blocks: Blocks of one layer.
      layer: i32[].
      interpret: Run on the CPU, and look for races.

    Returns:
      The pools, and what lies beside them.

    Raises:
      ValueError: The arguments do not fit together, or this kernel does not take them.
    """
    check_append(k_pool, v_pool, k, v, slots, num_blocks, layer)
    check_scaling(k_pool, scaling)
    if reason := why_not(k_pool, 1):
        raise ValueError(reason)
    names = [name for name, array in zip(Scaling._fields, scaling, strict=True) if array is not None]
    beside, new = ([getattr(each, name) for name in names] for each in (scaling, new_scaling))
    for name, pool, values in zip(("k", "v", *names), (k_pool, v_pool, *beside), (k, v, *new), strict=True):
        expected = (slots.shape[0], pool.shape[1], *pool.shape[3:])
        if values is None or values.shape != expected or values.dtype != pool.dtype:
            found = None if values is None else f"{values.dtype}{values.shape}"
            raise ValueError(f"{name} is {found}, expected {pool.dtype}{expected}")
    k_pool, v_pool, *beside = _append(
        (k_pool, v_pool, *beside), (k, v, *new), slots, num_blocks, layer, interpret
    )
    return k_pool, v_pool, scaling._replace(**dict(zip(names, beside, strict=True)))


def _append(
    pools: tuple[jax.Array, ...],
    new: tuple[jax.Array, ...],
    slots: jax.Array,
    num_blocks: int,
    layer: jax.Array | int,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Writes keys, values, and arrays of a number per token and head into as many pools."""
    num_tokens, num_heads, head_dim = new[0].shape
    if num_heads > _MAX_HEADS:
        raise ValueError(
            f"the pools have {num_heads} key/value heads, expected at most {_MAX_HEADS} on a GPU"
        )
    dtype, block_size = pools[0].dtype, pools[0].shape[2]
    token_bytes, gpu = num_heads * head_dim * dtype.itemsize, target()
    if not gpu.has_copy_engine:
        raise ValueError(f"a GPU like {gpu.example} has no copy engine: let XLA write new tokens")
    max_token_bytes = (gpu.shared_memory - 1024) // 2  # of K; as many of V lie beside them, and a barrier
    if token_bytes > max_token_bytes:
        raise ValueError(
            f"the keys of a token have {token_bytes} bytes, expected at most {max_token_bytes} on a GPU like "
            f"{gpu.example}: shard the heads"
        )
    if not num_tokens:
        return pools
    lengths = len(new), len(new), len(new) + 1
    cta_tokens = 1 if token_bytes % _ALIGNMENT else _tokens_per_cta(num_tokens, token_bytes)

    def body(slots_ref, layer_ref, *refs):
        new_refs, pool_refs, (*smems, barrier) = (refs[i * len(new) :][:n] for i, n in enumerate(lengths))
        own = lax.axis_index("cta") * cta_tokens
        # The last CTA reads a whole transfer too: tokens of its predecessor again, which it does not write.
        first = jnp.minimum(own, num_tokens - cta_tokens)
        for ref, smem in zip(new_refs, smems, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[pl.ds(first, cta_tokens)], smem, barrier)
        first_block = layer_ref[0] * num_blocks
        cta_slots = [slots_ref[first + nth] for nth in range(cta_tokens)]
        plgpu.barrier_wait(barrier)
        for nth, slot in enumerate(cta_slots):

            @pl.when((first + nth >= own) & (slot >= 0) & (slot < num_blocks * block_size))
            def _(nth=nth, slot=slot):
                size = jnp.int32(block_size)
                block, offset = first_block + lax.div(slot, size), lax.rem(slot, size)
                for smem, ref in zip(smems[:2], pool_refs[:2], strict=True):
                    plgpu.copy_smem_to_gmem(smem.at[nth], ref.at[block, :, offset])
                if beside := list(zip(smems[2:], pool_refs[2:], strict=True)):

                    @pl.loop(0, num_heads)
                    def _(head):
                        for smem, ref in beside:
                            ref[block, head, offset] = smem[nth, head]

        plgpu.wait_smem_to_gmem(0)

    padded = [_padded(values) for values in new]
    scratch = [plgpu.SMEM((cta_tokens, *values.shape[1:]), values.dtype) for values in padded]
    refs = [jax.new_ref(pool) for pool in pools]
    launch(
        body,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * sum(x.nbytes for x in new)),
        interpret=interpret,
        grid=(-(-num_tokens // cta_tokens),),
        grid_names=("cta",),
        scratch_types=[*scratch, plgpu.Barrier(num_arrivals=len(new))],
        kernel_name="append_kv" if len(new) == 2 else "append_scaled",
    )(slots, jnp.asarray(layer, jnp.int32).reshape(1), *padded, *refs)
    return tuple(ref[...] for ref in refs)


def _padded(values: jax.Array) -> jax.Array:
    """Of a number per head, rows that a transfer can read."""
    if values.ndim > 2:
        return values
    return jnp.pad(values, ((0, 0), (0, -values.shape[1] % (_ROW_BYTES // values.dtype.itemsize))))


def _tokens_per_cta(num_tokens: int, token_bytes: int) -> int:
    """One while all CTAs run side by side, then more, so that few transfers read what many write."""
    most = min(MAX_TOKENS_PER_CTA, max(1, MAX_CTA_BYTES // token_bytes))
    return max(1, min(num_tokens // (num_sms() * _CTAS_PER_SM), most))
