"""Scales and offsets of keys and values count wherever these are read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing


@dataclasses.dataclass(frozen=True)
class FromTheFirst(kv.LayerKind):
    """Plain keys and values, read as a half and a quarter of how far they are from their first number.

    All is NaN of a slot that has no token, whether it holds NaN or zeros.
    """

    def keys_values(self, tile, weights=None):
        self.refuse_weights(weights)
        k, v = tile["k"].astype(jnp.float32), tile["v"].astype(jnp.float32)
        anything = jnp.where((k == 0).all(axis=-1), jnp.nan, 0)
        k, v = k + anything[..., None], v + anything[..., None]
        first_k, first_v = k[..., 0], v[..., 0]
        ones = jnp.ones_like(first_k) + anything
        k, v = (k - first_k[..., None]) / 2, (v - first_v[..., None]) / 4
        return kv.KeysValues(k.astype(self.dtype), v.astype(self.dtype), 2 * ones, 4 * ones, first_k, first_v)


def read(kind, q, k, v, weigh, **options):
    """What attention, its gradients, `attention_scores` and `gather` make of the same rows."""
    config = kv.CacheConfig([kind], num_blocks=12, block_size=4, max_seqs=3, max_seq_len=16, tile_tokens=4)
    cache, _ = kv.allocate(testing.poison(kv.init(config)), [0, 2], [7, 3])
    cache, step = kv.extend(cache, [7, 0, 3], max_new=7)

    def loss(q, k, v):
        after, (out, lse) = kv.attention(cache, 0, q, k, v, step, return_lse=True, **options)
        is_there = jnp.arange(7)[None] < jnp.array([7, 0, 3])[:, None]
        lse = jnp.where(is_there[..., None], lse, 0)
        return (out * weigh).sum() + lse.sum(), (after, out, lse)

    grads, (cache, out, lse) = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    scores = kv.attention_scores(cache, 0, q, step, **options)
    return grads, out, lse, scores, kv.gather(cache, 0, 0), kv.gather(cache, 2, 0)


@pytest.mark.quick_cases("soft cap")
@pytest.mark.parametrize("options", [{}, dict(scale=0.3, soft_cap=2.5)], ids=["plain", "soft cap"])
def test_keys_and_values_with_offsets_are_what_they_stand_for(options):
    rng = np.random.default_rng(0)
    q, k, v, weigh = (
        jnp.asarray(rng.standard_normal((3, 7, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4)
    )
    k, v = k + 3, v - 5
    found, want = (read(kind(2, 8), q, k, v, weigh, **options) for kind in (FromTheFirst, kv.FullAttention))
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, atol=3e-5)
