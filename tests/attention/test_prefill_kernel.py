"""The cache's attention by the GPU's prefill kernel: which steps it serves, and that they are served right.

Which arithmetic the kernel can do is tested in `test_mosaic_gpu_prefill`.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu  # noqa: F401  imported later, it would make jax trace anew

import kvcache_jax as kv
from kvcache_jax import testing
from pallas_kernels import mosaic_gpu
from tests.kernels import gpu_interpreter
from tests.support.attention_driver import AttentionDriver, fragment

pytestmark = pytest.mark.contract


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that were traced, in order."""
    names = []

    def count(name):
        kernel = getattr(mosaic_gpu, name)
        monkeypatch.setattr(
            mosaic_gpu, name, lambda *args, **options: names.append(name) or kernel(*args, **options)
        )

    for name in ("paged_decode", "paged_prefill", "plan_for"):
        count(name)
    return names


def config_of(layers, **options):
    sizes = dict(num_blocks=24, block_size=16, max_seqs=3, max_seq_len=160, dtype="bfloat16") | options
    return kv.CacheConfig(layers, implementation="mosaic_gpu", **sizes)


@pytest.mark.slow
def test_prompts_in_two_pieces_beside_short_and_idle_rows(calls):
    window = kv.SlidingWindow(1, 64, window=30, num_sink_tokens=5)

    def scenario():
        config = config_of([kv.FullAttention(1, 64), window], max_query_len=66)
        options = dict(num_q_heads=2, cache=fragment(kv.init(config)), width=66)
        driver = AttentionDriver(config, **options, soft_cap=2.5, scale=0.3, sink_logits=[0.5, -1.0])
        driver.start(0, 90)
        driver.start(2, 9)
        with testing.interpreted():
            driver.step({0: 66, 2: 9})
            driver.step({0: 24, 2: 1})

    jax.clear_caches()
    gpu_interpreter.run_interpreted(scenario)
    assert set(calls) == {"paged_prefill"}


@pytest.mark.parametrize(
    ("kernels", "num_queries", "head_dim", "block_size", "dtype", "formats"),
    [
        (["paged_prefill"], 64, 128, 16, "bfloat16", [None, "fp8"]),
        (["plan_for", "paged_decode"], 63, 128, 16, "bfloat16", [None, "fp8"]),
        (["plan_for", "paged_decode"], 70, 256, 16, "bfloat16", [None]),  # of 8 bits it is XLA's
        (["plan_for", "paged_decode"], 70, 128, 8, "bfloat16", [None, "fp8"]),
        (["paged_decode"], 70, 128, 16, "float32", [None, "fp8"]),
    ],
)
def test_rows_that_the_prefill_does_not_take_are_decoded(
    kernels, num_queries, head_dim, block_size, dtype, formats, calls
):
    """Planned once for all layers, unless it is only queries of another dtype that the prefill refuses."""
    full = kv.FullAttention(1, head_dim)

    def step(cache, q, k):
        cache, step = kv.extend(cache, [num_queries, 0, 0], max_new=num_queries)
        return kv.attention(cache, 0, q, k, k, step)

    q, k = (jax.ShapeDtypeStruct((3, num_queries, heads, head_dim), jnp.dtype(dtype)) for heads in (2, 1))
    for format in formats:
        layer = kv.Quantised(full, format) if format else full
        config = config_of([layer], max_query_len=num_queries, block_size=block_size)
        cache = jax.eval_shape(functools.partial(kv.init, config))
        calls.clear()
        with testing.interpreted():
            _, out = jax.eval_shape(step, cache, q, k)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert list(dict.fromkeys(calls)) == kernels
