"""A model's decode loop, to be compiled like the kernels: extend, copy-on-write, attention, next tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import kvcache_jax as kv
from models.decoder import Decoder, DecoderConfig, cache_config
from models.rope import Rope
from tests.aot.budget import Budget, CompileCase, i32

NUM_ROWS, NUM_STEPS = 32, 16
# The layers of Llama 3.2 1B, fewer of them.
DECODER = DecoderConfig(
    vocab_size=32_000,
    hidden_size=2048,
    mlp_size=8192,
    num_layers=3,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rope=Rope(theta=500_000.0),
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)
# By default XLA cuts each layer's matrices out of the stacked ones that a scan over layers reads.
LAYER_BYTES = (
    2
    * DECODER.hidden_size
    * (3 * DECODER.mlp_size + 2 * DECODER.head_dim * (DECODER.num_q_heads + DECODER.num_kv_heads))
)
# cuBLAS reads matrices where they are, unless XLA joins those of products with a common factor first.
WHERE_THEY_ARE = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
CACHE = cache_config(
    DECODER, num_blocks=8192, max_seqs=NUM_ROWS, max_seq_len=8192, implementation="mosaic_gpu"
)


def decode(k_pool, v_pool, control, decoder, tokens):
    """The last tokens and the cache's pools after `NUM_STEPS` steps of all rows."""

    def step_fn(_, state):
        cache, tokens = state
        cache, step = kv.extend(cache, jnp.ones(NUM_ROWS, jnp.int32), max_new=1)
        logits, cache = decoder(tokens[:, None], cache, step)
        return cache, jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)

    cache = kv.Cache(
        control=control, pools=(kv.state.KVPool(arrays={"k": k_pool, "v": v_pool}),), config=CACHE
    )
    cache, tokens = lax.fori_loop(0, NUM_STEPS, step_fn, (cache, tokens))
    return tokens, cache.pools, cache.control


def _arguments() -> tuple:
    cache = jax.eval_shape(lambda: kv.init(CACHE))
    decoder = jax.eval_shape(lambda: Decoder(DECODER, rngs=nnx.Rngs(0)))
    (pool,) = cache.pools
    return pool.k, pool.v, cache.control, decoder, i32(NUM_ROWS)


BUDGET = Budget(
    registers=128, shared_memory=100_000, min_wgmma=8, min_tma=39, min_fences=6, temporary_bytes=40_000_000
)
LOOP = CompileCase(
    "decode_loop",
    decode,
    _arguments,
    dataclasses.replace(BUDGET, temporary_bytes=BUDGET.temporary_bytes + LAYER_BYTES),
    kernels=("copy_blocks", "paged_decode", "merge_attention"),
    pools=(0, 1),
    in_place=(0, 1),
)
STEP_CASES = (
    LOOP,
    dataclasses.replace(LOOP, name="cublas_loop", budget=BUDGET, compiler_options=WHERE_THEY_ARE),
)
