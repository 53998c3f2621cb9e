"""Keys and values of new tokens, written into the blocks of one layer in place."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.interpret import launch

MAX_TOKENS_PER_CTA = 8
"""Read by one transfer; each token is written by a transfer of its own, for slots may lie anywhere."""


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
    """See `pallas_kernels.reference.append_kv`. In place where the pools are donated."""
    num_tokens, num_kv_heads, head_dim = k.shape
    block_size = k_pool.shape[2]
    num_tokens_per_cta = 1 if num_tokens <= 1024 else MAX_TOKENS_PER_CTA
    num_ctas = -(-num_tokens // num_tokens_per_cta)

    def body(k_ref, v_ref, slots_ref, layer_ref, k_pool_ref, v_pool_ref, k_smem, v_smem, barrier):
        own = lax.axis_index("cta") * num_tokens_per_cta
        # The last CTA reads a whole transfer too: tokens of its predecessor again, which it does not write.
        first = jnp.minimum(own, num_tokens - num_tokens_per_cta)
        plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(first, num_tokens_per_cta)], k_smem, barrier)
        plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(first, num_tokens_per_cta)], v_smem, barrier)
        first_block = layer_ref[0] * num_blocks
        plgpu.barrier_wait(barrier)
        for nth in range(num_tokens_per_cta):
            slot = slots_ref[first + nth]

            @pl.when((first + nth >= own) & (slot >= 0) & (slot < num_blocks * block_size))
            def _(nth=nth, slot=slot):
                block, offset = first_block + lax.div(slot, block_size), lax.rem(slot, block_size)
                plgpu.copy_smem_to_gmem(k_smem.at[nth], k_pool_ref.at[block, :, offset])
                plgpu.copy_smem_to_gmem(v_smem.at[nth], v_pool_ref.at[block, :, offset])

        plgpu.wait_smem_to_gmem(0)

    k_pool_ref, v_pool_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    smem = plgpu.SMEM((num_tokens_per_cta, num_kv_heads, head_dim), k_pool.dtype)
    num_bytes = 4 * k.size * k_pool.dtype.itemsize  # K and V, read and written
    launch(
        body,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_bytes),
        interpret=interpret,
        grid=(num_ctas,),
        grid_names=("cta",),
        scratch_types=[smem, smem, plgpu.Barrier(num_arrivals=2)],
        kernel_name="append_kv",
    )(
        k.astype(k_pool.dtype),
        v.astype(v_pool.dtype),
        slots,
        jnp.asarray(layer, jnp.int32).reshape(1),
        k_pool_ref,
        v_pool_ref,
    )
    return k_pool_ref[...], v_pool_ref[...]
