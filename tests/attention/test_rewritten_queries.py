"""Queries of `rewrite`, which do not follow one another, where a backend serves runs of queries."""

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.attention import xla

WIDTH, MAX_LEN, NAME = 10, 48, "test: runs of queries"
WIDTHS = []


def decode(q, pool, block_table, plan, group, *, layer, scale, soft_cap, sink_logits):
    assert plan.positions is None
    WIDTHS.append(q.shape[1])
    options = dict(layer=layer, scale=scale, soft_cap=soft_cap, sink_logits=sink_logits, tile_tokens=16)
    return xla.forward(q, pool, None, block_table, plan, group, **options)


kv.backends.register_backend(kv.backends.Backend(NAME, lambda *_: None, decode, decode))


@pytest.mark.slow
@pytest.mark.parametrize(("of_cache", "of_call"), [("xla", NAME), (NAME, None), (NAME, "xla")])
def test_a_backend_of_runs_is_given_each_query_as_a_row(of_cache, of_call):
    layers = [kv.FullAttention(2, 8), kv.SlidingWindow(2, 8, window=40)]
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, MAX_LEN, 4, 8), np.float32)
    k, v = rng.standard_normal((2, 2, MAX_LEN, 2, 8), np.float32)
    places = np.full((2, WIDTH), MAX_LEN)
    places[0], places[1, :3] = np.sort(rng.permutation(33)[:WIDTH]), [0, 7, 20]
    taken = np.minimum(places, MAX_LEN - 1)

    def rewritten(cache, implementation):
        cache, _ = kv.allocate(cache, [0, 1], [33, 21])
        cache, step = kv.extend(cache, [33, 21], max_new=MAX_LEN)
        outs = []
        for layer in range(2):
            cache = kv.write(cache, layer, k, v, step)
        cache, step = kv.rewrite(cache, [0, 1], places)
        new = (x[np.arange(2)[:, None], taken] for x in (q, k, v))
        q_new, k_new, v_new = new
        for layer in range(2):
            cache = kv.write(cache, layer, k_new, v_new, step)
            cache, out = kv.attend(cache, layer, q_new, step, implementation=implementation)
            outs.append(out)
        return outs

    found = []
    for backend, implementation in (("xla", None), (of_cache, of_call)):
        WIDTHS.clear()
        config = kv.CacheConfig(layers, max_seqs=2, max_seq_len=MAX_LEN, implementation=backend)
        found.append(jax.jit(rewritten, static_argnums=1)(kv.init(config), implementation))
    assert WIDTHS == ([] if of_call == "xla" else [1, 1])
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert np.abs(np.asarray(want)[1, :3]).min() > 0 and not np.asarray(got)[1, 3:].any()
