"""Layer kinds and the kernels: they serve what they read, and refuse the others by name."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu  # noqa: F401  imported later, it would make jax trace anew

import kvcache_jax as kv
from kvcache_jax import testing
from pallas_kernels import mosaic_gpu, mosaic_tpu

HEAD_DIM = {"mosaic_gpu": 64, "mosaic_tpu": 128}
REFUSED = {
    "latent": r"keys and values as they are stored, and LatentAttention\(48 \+ 16\) layers store something",
    "quantised": r"keys and values as they are stored, and Quantised\(FullAttention, int4\) layers store",
    "cross": r"attend to a row's tokens up to the query's, and all queries of CrossAttention\(20\) layers",
}


def cache_of(implementation, layers):
    sizes = dict(num_blocks=8, block_size=16, max_seqs=2, max_seq_len=32, dtype="bfloat16")
    config = kv.CacheConfig(layers, implementation=implementation, **sizes)
    return jax.eval_shape(functools.partial(kv.init, config))


def layers_of(name, head_dim):
    full = kv.FullAttention(1, head_dim)
    return {
        "latent": [kv.LatentAttention(48, 16)],
        "quantised": [kv.Quantised(full, "int4")],
        "cross": [full, kv.CrossAttention(1, head_dim, max_source_len=20)],
        "shared": [full, kv.SharedWith(0)],
    }[name]


def extend(cache):
    return kv.extend(cache, [1, 0], max_new=1)


@pytest.mark.parametrize("implementation", HEAD_DIM)
@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_the_kernels_do_not_read_is_named(implementation, name):
    cache = cache_of(implementation, layers_of(name, HEAD_DIM[implementation]))
    with (
        testing.interpreted(),
        pytest.raises(NotImplementedError, match=f"{implementation}.*{REFUSED[name]}"),
    ):
        jax.eval_shape(extend, cache)
    jax.eval_shape(extend, cache_of(None, layers_of(name, HEAD_DIM[implementation])))


@pytest.mark.parametrize("implementation", HEAD_DIM)
def test_shared_layers_are_read_by_the_kernels(implementation, monkeypatch):
    module, calls = {"mosaic_gpu": mosaic_gpu, "mosaic_tpu": mosaic_tpu}[implementation], []
    decode = module.paged_decode
    monkeypatch.setattr(
        module, "paged_decode", lambda *args, **options: calls.append(1) or decode(*args, **options)
    )

    def step(cache, q, k):
        cache, step = extend(cache)
        cache, out = kv.attention(cache, 0, q, k, k, step)
        return kv.attend(cache, 1, out, step)

    shape = 2, 1, 2, HEAD_DIM[implementation]
    q, k = (jax.ShapeDtypeStruct((*shape[:2], heads, shape[3]), jnp.bfloat16) for heads in (2, 1))
    with testing.interpreted():
        _, out = jax.eval_shape(step, cache_of(implementation, layers_of("shared", shape[3])), q, k)
    assert out.shape == shape and calls
