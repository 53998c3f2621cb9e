"""Steps of a cache without a model, to be compiled like the kernels: on a mesh, of many tokens, packed.

Each is `extend`, copy-on-write, and the attention of all layers. And the gradient through such layers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from tests.aot import h200
from tests.aot.budget import Budget, CompileCase, i32
from tests.attention import gradient_program

NUM_LAYERS, NUM_ROWS = 2, 8
NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 8, 4, 128


def _xla(temporary_bytes: int) -> Budget:
    return Budget(registers=0, shared_memory=0, temporary_bytes=temporary_bytes)


def _case(
    name: str,
    budget: Budget,
    kernels: tuple[str, ...],
    *,
    num_devices: int = 1,
    implementation: str = "mosaic_gpu",
    **tokens: int,
) -> CompileCase:
    """A step; `tokens` is `max_new` or `num_tokens`, as in `kv.extend`."""
    config = kv.CacheConfig(
        [kv.FullAttention(NUM_KV_HEADS, HEAD_DIM)] * NUM_LAYERS,
        num_blocks=4096,
        max_seqs=NUM_ROWS,
        max_seq_len=8192,
        max_query_len=256,
        dtype=jnp.bfloat16,
        implementation=implementation,
        head_axis=h200.HEADS if num_devices > 1 else None,
    )

    def function(k_pool, v_pool, control, num_new, q, k, v):
        cache = kv.Cache(
            control=control, pools=(kv.state.KVPool(arrays={"k": k_pool, "v": v_pool}),), config=config
        )
        cache, step = kv.extend(cache, num_new, **tokens)
        for layer in range(NUM_LAYERS):
            cache, q = kv.attention(cache, layer, q, k, v, step)
        (pool,) = cache.pools
        return pool.k, pool.v, cache.control, q

    def arguments() -> tuple:
        unsplit = dataclasses.replace(config, head_axis=None)
        cache = jax.eval_shape(lambda: kv.init(unsplit))
        (pool,) = cache.pools
        shape = (NUM_ROWS, tokens["max_new"]) if "max_new" in tokens else (tokens["num_tokens"],)
        q, k = (
            jax.ShapeDtypeStruct((*shape, num_heads, HEAD_DIM), jnp.bfloat16)
            for num_heads in (NUM_KV_HEADS * GROUP_SIZE, NUM_KV_HEADS)
        )
        return pool.k, pool.v, cache.control, i32(NUM_ROWS), q, k, k

    head_axis = 2 if "max_new" in tokens else 1
    heads = {0: 1, 1: 1} | dict.fromkeys((4, 5, 6), head_axis)
    return CompileCase(name, function, arguments, budget, kernels, (0, 1), (0, 1), num_devices, heads)


def _gradient(num_layers: int) -> CompileCase:
    """Of layers under `lax.scan`, whose rows fill the pool, and of a loss that throws the cache away."""
    config = gradient_program.config_of(num_layers, num_blocks=256, max_seqs=64)
    return CompileCase(
        f"gradient_of_{num_layers}_layers",
        gradient_program.gradient(is_scanned=True, returns_cache=False),
        functools.partial(gradient_program.arguments, config),
        _xla(3 * kv.memory_bytes(config)),
        (),
    )


_COPY, _DECODE, _MERGE = "copy_blocks", "paged_decode", "merge_attention"
# What the kernels together have of each; the ring of a copy is the largest shared memory.
_SPLIT = Budget(
    registers=128, shared_memory=98_400, min_wgmma=16, min_tma=39, min_fences=6, temporary_bytes=3_300_000
)
# Temporary are, of kernels, the results in float32, as written and as returned, and a MiB of plans; of rows
# that are split, the parts. Of XLA, the keys and the values of a tile of 2,048 tokens a row, at most 256 MiB
# each, its logits and its weights, and the results. A pool has 268 MB.
CACHE_CASES = (
    _case("step_on_a_mesh", _SPLIT, (_COPY, _DECODE, _MERGE), num_devices=2, max_new=1),
    # The decode takes 8 queries a row, so of 32 it is given 4 rows. These and a packed step's may be split
    # where a few are much longer than the rest. From 64 queries on a row is the prefill's, which splits none.
    _case(
        "chunk_of_32_tokens",
        dataclasses.replace(_SPLIT, registers=208, temporary_bytes=9_000_000),
        (_COPY, _DECODE, _MERGE),
        max_new=32,
    ),
    _case(
        "chunk_of_64_tokens",
        Budget(
            registers=168,
            shared_memory=167_936,
            min_wgmma=16,
            min_tma=21,
            min_fences=4,
            temporary_bytes=4_500_000,
        ),
        (_COPY, "paged_prefill"),
        max_new=64,
    ),
    _case(
        "packed_step",
        dataclasses.replace(_SPLIT, temporary_bytes=5_100_000),
        (_COPY, _DECODE, _MERGE),
        num_tokens=64,
    ),
    _case("xla_chunk_of_64_tokens", _xla(260_000_000), (), implementation="xla", max_new=64),
    _case("xla_packed_step", _xla(570_000_000), (), implementation="xla", num_tokens=64),
    _gradient(num_layers=4),
    _gradient(num_layers=16),
)
