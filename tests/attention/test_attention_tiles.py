"""XLA's attention over contexts longer than one tile, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.attention_driver import AttentionDriver

HEADS, GROUP, DIM = 2, 2, 5
FULL = kv.FullAttention(HEADS, DIM)


@pytest.mark.quick_cases("kind1")
@pytest.mark.parametrize("kind", [FULL, kv.SlidingWindow(HEADS, DIM, window=300, num_sink_tokens=20)])
def test_attention_over_several_tiles(kind):
    config = kv.CacheConfig(
        [kind],
        num_blocks=90,
        block_size=16,
        max_seqs=4,
        max_seq_len=640,
        max_query_len=110,
        tile_tokens=256,
    )
    driver = AttentionDriver(config, num_q_heads=HEADS * GROUP, width=110, sink_logits=[0.5, -1, 2, 0])
    driver.start(2, 600)
    driver.start(0, 40)
    for new_lens in ({2: 110, 0: 31}, {2: 109}, {2: 110, 0: 1}, {2: 110}, {2: 110, 0: 3}, {2: 1, 0: 1}):
        driver.step(new_lens)


@pytest.mark.slow
def test_gradients_over_several_tiles():
    num_tokens = 520
    config = kv.CacheConfig(
        [FULL], num_blocks=40, block_size=16, max_seqs=2, max_seq_len=600, tile_tokens=256
    )
    rng = np.random.default_rng(0)
    shapes = [(3, HEADS * GROUP, DIM)] * 2 + [(num_tokens, HEADS, DIM)] * 2
    q, weights, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    sinks = np.linspace(1, 4, HEADS * GROUP, dtype=np.float32)

    def paged(q, k, v, sinks):
        cache, _ = kv.allocate(kv.init(config), [1], [num_tokens])
        q, k, v = (jnp.stack([jnp.zeros_like(x), x]) for x in (q, k, v))
        cache, _ = kv.append(cache, k[None, :, :-3], v[None, :, :-3], [0, num_tokens - 3])
        cache, step = kv.extend(cache, [0, 3], max_new=3)
        new = q, k[:, -3:], v[:, -3:]
        _, (out, lse) = kv.attention(
            cache, 0, *new, step, scale=0.4, soft_cap=1.5, sink_logits=sinks, return_lse=True
        )
        return (out[1] * weights).sum() + jnp.sin(lse[1]).sum()

    def dense(q, k, v, sinks):
        k, v = (jnp.repeat(x, GROUP, axis=1) for x in (k, v))
        logits = 1.5 * jnp.tanh(jnp.einsum("thd,shd->hts", q, k) * (0.4 / 1.5))
        is_seen = jnp.arange(num_tokens)[None] <= num_tokens - 3 + jnp.arange(3)[:, None]
        logits = jnp.where(is_seen, logits, -jnp.inf)
        sinks = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))
        lse = jax.nn.logsumexp(jnp.concatenate([logits, sinks], axis=-1), axis=-1)
        out = jnp.einsum("hts,shd->thd", jnp.exp(logits - lse[..., None]), v)
        return (out * weights).sum() + jnp.sin(lse).sum()

    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(q, k, v, sinks) for f in (paged, dense))
    for name, one, other in zip("qkvs", got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6, err_msg=name)
