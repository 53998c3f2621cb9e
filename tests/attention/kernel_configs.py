"""Small caches whose attention and movement are by kernels, and how these are interpreted."""

import jax

import kvcache_jax as kv
from kvcache_jax import testing
from tests.kernels import gpu_interpreter

# The smallest pools that the kernels take; two heads where they are split over devices.
SIZES = {
    "mosaic_gpu": dict(num_kv_heads=1, head_dim=64, dtype="bfloat16"),
    "mosaic_tpu": dict(num_kv_heads=2, head_dim=128, dtype="float32"),
}
IMPLEMENTATIONS = list(SIZES)


def config_of(implementation, *, windows=(None, (9, 3)), **options):
    *heads, dtype = SIZES[implementation].values()
    layers = [
        kv.FullAttention(*heads)
        if window is None
        else kv.SlidingWindow(*heads, window=window[0], num_sink_tokens=window[1], max_rollback=2)
        for window in windows
    ]
    sizes = dict(num_blocks=16, block_size=8, max_seqs=4, max_seq_len=32, max_query_len=11) | options
    return kv.CacheConfig(layers, dtype=dtype, implementation=implementation, **sizes)


def run_interpreted(function):
    """With kernels interpreted, and a race in one of them taken for a failure."""

    def scenario():
        with testing.interpreted():
            return function()

    jax.clear_caches()
    return gpu_interpreter.run_interpreted(scenario)
