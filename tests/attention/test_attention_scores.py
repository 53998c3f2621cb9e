"""The weights of `attention_scores`, against what attention does with them, for every kind of layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.kinds.table import HEAD_DIM, KINDS, NUM_KV_HEADS, NUM_Q_HEADS

ROWS, WIDTH, MAX_LEN, NUM_LAST = 3, 7, 24, 3
HEADS = NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS
OPTIONS = dict(soft_cap=1.5, sink_logits=np.linspace(-1, 1, NUM_Q_HEADS, dtype=np.float32))
QUICK = {"mix"}  # a window and a layer that keeps all
# These attend as parts of other lines do.
PARTS = {"full", "window", "rollback", "outside-window", "int8", "fp8", "int4", "int8-window"}


@kv.donate
def step(cache, q, k, v, num_new):
    """What each layer attends to, its weights for all queries and for the last of them, and its values."""
    cache, reserved = kv.extend(cache, num_new, max_new=WIDTH)
    found = []
    for layer, kind in enumerate(cache.config.layers):
        if layer in cache.config.own_layers:
            new = (k, v) if "v" in kind.inputs else (k[..., :1, :], None)
            cache = kv.write(cache, layer, *new, reserved)
        cache, out = kv.attend(cache, layer, q, reserved, **OPTIONS)
        weights = [kv.attention_scores(cache, layer, q, reserved, num_last=n, **OPTIONS) for n in (None, 3)]
        values = jnp.stack([kv.gather(cache, row, layer)[1] for row in range(ROWS)])
        found.append((out, *weights, values))
    return cache, found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.name, marks=[pytest.mark.slow] * (kind.name not in QUICK))
        for kind in KINDS
        if kind.name not in PARTS and not any(isinstance(layer, kv.Recurrent) for layer in kind.layers)
    ],
)
def test_weights_times_values_are_what_attention_gives(kind):
    """Rows of odd lengths, in several tiles; sinks take their part, and a cap bounds the logits."""
    sizes = dict(num_blocks=24, block_size=4, max_seqs=ROWS, max_seq_len=MAX_LEN, tile_tokens=8)
    cache = kv.init(kv.CacheConfig(kind.layers, **sizes))
    cache, _ = kv.allocate(cache, [2, 0, 1], [0] * ROWS)
    rng = np.random.default_rng(1)

    def draw(heads):
        return rng.standard_normal((ROWS, WIDTH, heads, HEAD_DIM), np.float32)

    if cache.config.source_layers:
        source = [draw(NUM_KV_HEADS)[None] for _ in "kv"]
        cache, _ = kv.write_source(cache, [0, 1, 2], *source, [5, 7, 0])
    for num_new in ([7, 2, 0], [7, 0, 1], [6, 1, 5]):
        cache, found = step(testing.poison(cache), *map(draw, HEADS), np.array(num_new, np.int32))
        for out, weights, last, values in found:
            check(num_new, *map(np.asarray, (out, weights, last, values)))


def check(num_new, out, weights, last, values):
    values = np.repeat(values, NUM_Q_HEADS // values.shape[2], axis=2)
    want = np.einsum("nhwk,nkhd->nwhd", weights, values)
    for row, num in enumerate(num_new):
        np.testing.assert_allclose(out[row, :num], want[row, :num], rtol=1e-5, atol=1e-5)
        assert not weights[row, :, num:].any()
        num_before = max(num - NUM_LAST, 0)
        np.testing.assert_allclose(last[row, :, : num - num_before], weights[row, :, num_before:num], 1e-6)
        assert not last[row, :, num - num_before :].any()


@pytest.mark.slow
def test_tokens_that_were_dropped_weigh_nothing_and_rewritten_ones_what_they_did():
    config = kv.CacheConfig(
        [kv.FullAttention(1, 4)],
        extras=[kv.compression.Dropping()],
        num_blocks=6,
        block_size=4,
        max_seqs=1,
        max_seq_len=20,
    )
    cache, _ = kv.allocate(kv.init(config), [0], [0])
    rng = np.random.default_rng(0)
    cache, reserved = kv.extend(cache, [11], max_new=11)
    q, k = (rng.standard_normal((1, 11, heads, 4), np.float32) for heads in (2, 1))
    cache = kv.write(cache, 0, k, k, reserved)
    cache, _ = kv.compression.drop(cache, [0], [2], [3])
    cache, reserved = kv.rewrite(cache, [0], [[1, 6, 10, 20]])
    q, k = (x[:, [1, 6, 10, 0]] for x in (q, k))
    cache, out = kv.attention(cache, 0, q, k, k, reserved)
    weights = kv.attention_scores(cache, 0, q, reserved)
    np.testing.assert_allclose(weights.sum(axis=-1), [[[1, 1, 1, 0]] * 2], rtol=1e-6)
    assert not weights[..., 2:5].any() and weights[0, 0, 2, 5:11].all()
    want = jnp.einsum("nhwk,kd->nwhd", weights, kv.gather(cache, 0, 0)[1][:, 0])
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_has_no_weights():
    sizes = dict(num_blocks=6, block_size=4, max_seqs=2, max_seq_len=12)
    q = np.zeros((2, 3, 1, 4), np.float32)

    def trace(reserve, q, **options):
        def run():
            cache, _ = kv.allocate(kv.init(kv.CacheConfig([kv.FullAttention(1, 4)], **sizes)), [0, 1], [0, 0])
            cache, step = reserve(cache)
            return kv.attention_scores(cache, 0, q, step, **options)

        jax.eval_shape(run)

    def packed(cache):
        return kv.extend(cache, [2, 1], num_tokens=3)

    def padded(cache):
        return kv.extend(cache, [2, 1], max_new=3)

    def again(cache):
        return kv.rewrite(cache, [0, 1], [[0, 1, 2], [0, 12, 12]])

    with pytest.raises(ValueError, match="got a packed step, expected a padded one"):
        trace(packed, q[0])
    with pytest.raises(ValueError, match="num_last is 4, expected 1 <= num_last <= the step's tokens = 3"):
        trace(padded, q, num_last=4)
    with pytest.raises(ValueError, match="q has shape"):
        trace(padded, q[:, :2])
    with pytest.raises(ValueError, match="num_last is given with a step of rewrite, expected None"):
        trace(again, q, num_last=2)
