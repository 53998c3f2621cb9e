"""Deviations of keys and values from those that rows hold, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.few_kernels import compile_for_users

ROWS, WIDTH, MAX_LEN, HEADS, DIM = 3, 11, 20, 2, 6
CONFIG = kv.CacheConfig(
    [kv.FullAttention(HEADS, DIM)] * 2,
    num_blocks=20,
    block_size=4,
    max_seqs=ROWS,
    max_seq_len=MAX_LEN,
    dtype=jnp.bfloat16,
)


@pytest.mark.slow
def test_deviations_stand_at_the_places_of_the_tokens():
    rng = np.random.default_rng(0)
    lengths = np.array([7, 11, 4])
    cache, _ = kv.allocate(kv.init(CONFIG), [0, 1, 2], lengths)
    k, v = (rng.standard_normal((2, ROWS, WIDTH, HEADS, DIM), np.float32) for _ in "kv")
    cache, _ = kv.append(testing.poison(cache), jnp.asarray(k), jnp.asarray(v), lengths)
    indices = np.array([[2, 5, MAX_LEN], [0, 4, 10], [3, MAX_LEN, MAX_LEN], [1, 2, MAX_LEN]])
    rows = [1, 0, 2, 0]  # the last one fails
    indices[:2] = indices[1::-1]
    cache, step = kv.rewrite(cache, rows, indices)
    assert step.status.tolist() == [0, 0, 0, int(kv.Status.DUPLICATE_SEQ_ID)]

    new = rng.standard_normal((2, 4, 3, HEADS, DIM), np.float32)
    new[:, 2, 1:], new[:, 3] = np.nan, np.nan
    new[0, 0, 1] = k[1, 1, 4]  # a key that is the same
    _, got = jax.jit(kv.chunks.deviation, static_argnums=1)(cache, 1, *map(jnp.asarray, new), step)
    for values, stored, found in zip(new, (k, v), got, strict=True):
        want = np.zeros((4, MAX_LEN), np.float32)
        for i, row in enumerate(rows[:3]):
            for j, place in enumerate(indices[i]):
                if place < MAX_LEN:
                    both = [
                        np.asarray(jnp.bfloat16(x), np.float32) for x in (values[i, j], stored[1, row, place])
                    ]
                    want[i, place] = ((both[0] - both[1]) ** 2).sum()
        np.testing.assert_allclose(found, want, rtol=1e-5)
    assert float(got[0][0, 4]) == 0

    with pytest.raises(ValueError, match=r"k has shape \(4, 3, 2, 5\), expected \(4, 3, 2, 6\)"):
        kv.chunks.deviation(cache, 0, *map(jnp.asarray, new[..., :5]), step)
    packed = dataclasses.replace(step, cu_query_lens=jnp.zeros(5, jnp.int32))
    with pytest.raises(ValueError, match="chunk_deviation got a packed step, expected a padded one"):
        kv.chunks.deviation(cache, 0, *map(jnp.asarray, new), packed)


@pytest.mark.slow
def test_a_step_that_looks_and_writes_copies_no_pool():
    def step_fn(cache, indices, k, v):
        cache, step = kv.rewrite(cache, jnp.arange(ROWS), indices)
        cache, deviations = kv.chunks.deviation(cache, 0, k, v, step)
        return kv.write(cache, 0, k, v, step), deviations

    config = dataclasses.replace(CONFIG, num_blocks=100_000)
    cache = jax.eval_shape(lambda: kv.init(config))
    new = jnp.zeros((ROWS, 4, HEADS, DIM), jnp.bfloat16)
    lowered = kv.donate(step_fn).lower(cache, jnp.zeros((ROWS, 4), jnp.int32), new, new)
    memory = compile_for_users(lowered).memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * kv.memory_bytes(config)
