"""A row's keys and values as contiguous arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.core import backends
from kvcache_jax.testing import poison
from tests.support.helpers import ROOMY, TokenDriver, append, assert_same, leaf_bytes, tiny_config

HEADS, DIM = 2, 5


def test_gather_is_zero_where_no_token_is():
    window = kv.SlidingWindow(HEADS, DIM, window=3, num_sink_tokens=2, block_size=2)
    config = kv.CacheConfig(
        [kv.FullAttention(HEADS, DIM), window],
        num_blocks=12,
        block_size=4,
        max_seqs=3,
        max_seq_len=18,
        max_query_len=7,
    )
    cache, _ = kv.allocate(poison(kv.init(config)), [1], [17])
    for count in (7, 4):
        ones = [np.ones((3, 7, HEADS, DIM), np.float32)] * 2
        cache, _ = append(cache, ones, ones, np.array([0, count, 0], np.int32))
    cache = poison(cache)
    for layer, held in ((0, [*range(11)]), (1, [0, 1, *range(4, 11)])):
        expected = np.zeros(18)
        expected[held] = 1
        k, v, length = jax.device_get(kv.gather(cache, 1, layer))
        assert length == 11
        for half in (k, v):
            assert half.shape == (18, HEADS, DIM)
            np.testing.assert_array_equal(half, np.broadcast_to(expected[:, None, None], half.shape))
        for row in (0, 2, 3, -1, -2, 2**31 - 1, np.int64(2**32 + 1), 2**40 + 1):
            k, v, length = kv.gather(cache, row, layer)
            assert int(length) == 0 and not np.asarray(k).any() and not np.asarray(v).any(), row


def test_a_traced_layer_that_does_not_exist_holds_nothing():
    driver = TokenDriver(tiny_config(**ROOMY))
    driver.start(0, 3)
    gather = jax.jit(lambda layer: kv.gather(driver.cache, 0, layer))
    assert [int(gather(layer)[2]) for layer in (0, 1, 2, -1, 2**31 - 1)] == [3, 3, 0, 0, 0]


@pytest.mark.slow
def test_programs_for_tpus_store_and_read_the_same(monkeypatch):
    """They write head by head and read whole blocks, for the sake of TPUs' layouts."""
    config = kv.CacheConfig(
        [kv.FullAttention(3, 4)] * 2, num_blocks=9, block_size=4, max_seqs=3, max_seq_len=12
    )
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 3, 5, 3, 4)).astype(np.float32)
    q = rng.standard_normal((3, 5, 6, 4)).astype(np.float32)

    def run(cache, k, v, q):
        cache, step = kv.append(cache, k, v, [5, 0, 3])
        cache, out = kv.attend(cache, 1, q, step)
        return cache, out, kv.gather(cache, 2, 0)

    def compiled():
        cache, _ = kv.allocate(kv.init(config), [2, 0], [3, 5])
        jax.clear_caches()
        return jax.jit(run)(testing.poison(cache), k, v, q)

    want = compiled()
    monkeypatch.setattr(backends, "target_device", lambda: backends.TargetDevice("tpu", "TPU v6e"))
    got = compiled()
    assert_same(leaf_bytes(got[0]), leaf_bytes(want[0]))
    for x, y in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(want[1:]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_keys_and_values_have_the_caches_dtype(format):
    kind = kv.Quantised(kv.FullAttention(1, 16), format, rotate=True)
    config = kv.CacheConfig([kind], num_blocks=2, max_seqs=1, max_seq_len=16, dtype="bfloat16")
    k, v, _ = jax.eval_shape(lambda: kv.gather(kv.init(config), 0, 0))
    assert k.dtype == v.dtype == jnp.bfloat16
