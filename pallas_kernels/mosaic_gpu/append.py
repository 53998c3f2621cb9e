"""Keys and values of new tokens, written into the blocks of one layer."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.interpret import launch
from pallas_kernels.mosaic_gpu.limits import check_moved_pool, num_sms, target
from pallas_kernels.move_arguments import check_append

MAX_TOKENS_PER_CTA = 8
MAX_CTA_BYTES = 32 * 1024
"""Of K in one CTA; as many of V."""
_CTAS_PER_SM = 4
_MAX_HEADS = 256  # rows of one transfer


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
    num_tokens, num_heads, head_dim = k.shape
    if num_heads > _MAX_HEADS:
        raise ValueError(
            f"the pools have {num_heads} key/value heads, expected at most {_MAX_HEADS} on a GPU"
        )
    token_bytes = num_heads * head_dim * k_pool.dtype.itemsize
    gpu = target()
    max_token_bytes = (gpu.shared_memory - 1024) // 2  # of K; as many of V lie beside them, and a barrier
    if token_bytes > max_token_bytes:
        raise ValueError(
            f"the keys of a token have {token_bytes} bytes, expected at most {max_token_bytes} on a GPU like "
            f"{gpu.example}: shard the heads"
        )
    if not num_tokens:
        return k_pool, v_pool
    block_size = k_pool.shape[2]
    cta_tokens = _tokens_per_cta(num_tokens, token_bytes)

    def body(k_ref, v_ref, slots_ref, layer_ref, k_pool_ref, v_pool_ref, k_smem, v_smem, barrier):
        own = lax.axis_index("cta") * cta_tokens
        # The last CTA reads a whole transfer too: tokens of its predecessor again, which it does not write.
        first = jnp.minimum(own, num_tokens - cta_tokens)
        plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(first, cta_tokens)], k_smem, barrier)
        plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(first, cta_tokens)], v_smem, barrier)
        first_block = layer_ref[0] * num_blocks
        cta_slots = [slots_ref[first + nth] for nth in range(cta_tokens)]
        plgpu.barrier_wait(barrier)
        for nth, slot in enumerate(cta_slots):

            @pl.when((first + nth >= own) & (slot >= 0) & (slot < num_blocks * block_size))
            def _(nth=nth, slot=slot):
                block, offset = first_block + lax.div(slot, block_size), lax.rem(slot, block_size)
                plgpu.copy_smem_to_gmem(k_smem.at[nth], k_pool_ref.at[block, :, offset])
                plgpu.copy_smem_to_gmem(v_smem.at[nth], v_pool_ref.at[block, :, offset])

        plgpu.wait_smem_to_gmem(0)

    pools = [jax.new_ref(k_pool), jax.new_ref(v_pool)]
    smem = plgpu.SMEM((cta_tokens, num_heads, head_dim), k_pool.dtype)
    num_bytes = 4 * k.size * k_pool.dtype.itemsize  # K and V, read and written
    launch(
        body,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_bytes),
        interpret=interpret,
        grid=(-(-num_tokens // cta_tokens),),
        grid_names=("cta",),
        scratch_types=[smem, smem, plgpu.Barrier(num_arrivals=2)],
        kernel_name="append_kv",
    )(
        k.astype(k_pool.dtype),
        v.astype(v_pool.dtype),
        slots,
        jnp.asarray(layer, jnp.int32).reshape(1),
        *pools,
    )
    return pools[0][...], pools[1][...]


def _tokens_per_cta(num_tokens: int, token_bytes: int) -> int:
    """One while all CTAs run side by side, then more, so that few transfers read what many write."""
    most = min(MAX_TOKENS_PER_CTA, max(1, MAX_CTA_BYTES // token_bytes))
    return max(1, min(num_tokens // (num_sms() * _CTAS_PER_SM), most))
