"""A decoder's first layers store what the whole of it stores, and hand out its queries."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from models.config import Latents
from models.decoder import Decoder, DecoderConfig, cache_config, forward
from models.first_layers import first_layers
from models.rope import Rope

TINY = DecoderConfig(
    vocab_size=13, hidden_size=12, mlp_size=10, num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=6
)
GEMMA = dict(
    windows=(3, None, 3),
    window_rope=Rope(theta=20.0),
    use_qk_norm=True,
    embedding_scale=3.5,
    attention_scale=0.3,
)
LATENTS = dict(
    num_kv_heads=4,
    head_dim=7,
    latents=Latents(latent_dim=9, rope_dim=4, nope_dim=3, value_dim=5, q_rank=8),
    rope=Rope(is_interleaved=True),
)


@pytest.mark.slow
@pytest.mark.parametrize("options", [GEMMA, LATENTS], ids=["gemma", "latents"])
def test_first_layers_store_and_ask_what_the_model_does(monkeypatch, options):
    """Of three layers the first two, of rows that differ in length."""
    config = dataclasses.replace(TINY, **options)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    cache = kv.init(cache_config(config, max_seqs=2, max_seq_len=16, block_size=4))
    cache, _ = kv.allocate(cache, [0, 1], [7, 4])
    tokens = np.arange(14, dtype=np.int32).reshape(2, 7) % 13
    asked, attention = [], kv.attention

    def asking(cache, layer, q, *args, scale, **options):
        asked.append(q * (1 if scale is None else scale * math.sqrt(q.shape[-1])))
        return attention(cache, layer, q, *args, scale=scale, **options)

    monkeypatch.setattr(kv, "attention", asking)

    @jax.jit
    def both(decoder, cache):
        cache, step = kv.extend(cache, [7, 4], max_new=7)
        q, some = first_layers(decoder, tokens, cache, step)
        with jax.disable_jit():  # so that queries of a scan are seen
            _, whole = forward(decoder, tokens, cache, step)
        return q, some, asked[2], whole

    q, some, wanted, whole = both(decoder, cache)
    for row, length in (0, 7), (1, 4):
        np.testing.assert_allclose(q[row, :length], wanted[row, :length], rtol=1e-5, atol=1e-6)
        for layer in range(2):
            for x, y in zip(kv.gather(some, row, layer)[:2], kv.gather(whole, row, layer)[:2], strict=True):
                assert np.asarray(y).std() > 0
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        assert not np.asarray(kv.gather(some, row, 2)[0]).any()
