"""The way from a prefill's attention to the tokens that are computed again, in a model of two layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_invariants, statuses

ROWS, MAX_LEN, HEADS, KV_HEADS, DIM, MAX_CHUNK, LAYERS = 2, 40, 4, 2, 6, 9, 2
ROTATE = kv.key_rotation([1.0, 0.21, 0.03], MAX_LEN)
CONFIG = kv.CacheConfig(
    [kv.FullAttention(KV_HEADS, DIM)] * LAYERS,
    num_blocks=40,
    block_size=4,
    max_seqs=ROWS,
    max_seq_len=MAX_LEN,
    num_chunks=4,
    max_chunk_len=MAX_CHUNK,
    max_chunks_before=4,
)
STARTS, LENGTHS = np.array([[2, 8, 17]]), np.array([[6, 9, 7]])  # behind two tokens of no chunk
rng = np.random.default_rng(0)
weights = rng.standard_normal((LAYERS, DIM, HEADS + 2 * KV_HEADS, DIM)).astype(np.float32) / 2
embedding = rng.standard_normal((100, DIM)).astype(np.float32)


def heads(x, layer, rotate, positions):
    q, k, v = jnp.split(
        jnp.einsum("rtd,dhe->rthe", jnp.tanh(x), weights[layer]), [HEADS, HEADS + KV_HEADS], axis=2
    )
    return rotate(q, positions), rotate(k, positions), v


@jax.jit
def prefill(cache, num_new, tokens):
    """Computes tokens, and what the chunks of row 0 give to each other, mean over layers."""
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1])
    x, found = jnp.asarray(embedding)[tokens], []
    for layer in range(LAYERS):
        q, k, v = heads(x, layer, ROTATE, step.positions)
        cache, out = kv.attention(cache, layer, q, k, v, step)
        scores = kv.attention_scores(cache, layer, q, step)[:1]
        found.append(kv.chunk_attention(scores, step.cache_positions[:1], STARTS, LENGTHS))
        x = x + out.sum(axis=2)
    return cache, jax.tree.map(lambda *layers: sum(layers) / LAYERS, *found)


def dense(tokens):
    """Computes the weights [layers, query, key] of a prompt, mean over heads, in float64."""
    x, length, found = embedding[tokens].astype(float), len(tokens), []
    angle = np.arange(length)[:, None, None] * np.array([1.0, 0.21, 0.03])

    def turned(y):
        first, second = np.split(y, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    for layer in range(LAYERS):
        q, k, v = np.split(
            np.einsum("td,dhe->the", np.tanh(x), weights[layer]), [HEADS, HEADS + KV_HEADS], axis=1
        )
        k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (turned(k), v))
        logits = np.einsum("the,she->hts", turned(q), k) / np.sqrt(DIM)
        logits = np.where(np.tri(length, dtype=bool), logits, -np.inf)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        found.append(shares.mean(axis=0))
        x = x + np.einsum("hts,she->te", shares, v)
    return np.stack(found)


@pytest.mark.slow
def test_what_a_prefill_looked_at_says_what_is_computed_again():
    length = int(LENGTHS[0].sum()) + 2
    prompt = rng.integers(100, size=length)
    shares = dense(prompt).mean(axis=0)
    cache, _ = kv.allocate(kv.init(CONFIG), [0], [length])
    cache, attention = prefill(cache, [length, 0], np.stack([prompt] * ROWS))

    spans = [range(start, start + size) for start, size in zip(STARTS[0], LENGTHS[0], strict=True)]
    inter = np.array([[shares[np.ix_(i, j)].sum() * (j[0] < i[0]) for j in spans] for i in spans])
    intra = np.array([shares[np.ix_(i, i)].sum() for i in spans])
    np.testing.assert_allclose(attention.inter[0], inter, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(attention.intra[0], intra, rtol=1e-4)

    names = np.zeros((3, MAX_CHUNK), int)
    for k, span in enumerate(spans):
        names[k, : len(span)] = prompt[span]
    digests = kv.chunk_digests(names, LENGTHS[0])
    stats = attention.stats(STARTS, LENGTHS, digests[None], MAX_CHUNK)
    stats = jax.tree.map(lambda of_rows: of_rows[0], stats)
    cache, stored = kv.store_chunk(cache, [0] * 3, STARTS[0], LENGTHS[0], names, stats=stats)
    assert stored.status.tolist() == [0] * 3

    # The third chunk, with the first two in front in the other order.
    impact = inter[2, 0] / (LENGTHS[0, 2] * LENGTHS[0, 0]) + inter[2, 1] / (LENGTHS[0, 2] * LENGTHS[0, 1])
    impact = 1 / (1 + np.exp(-impact / (intra[2] / LENGTHS[0, 2] ** 2)))
    cases = {(0, 1): 0, (1, 0): impact, (1,): impact * inter[2, 0] / inter[2].sum()}
    before = np.zeros((3, 2, 2), np.uint32)
    for i, case in enumerate(cases):
        before[i, : len(case)] = digests[np.array(case)]
    np.testing.assert_allclose(
        kv.chunk_overhead(cache, [2] * 3, before), [*cases.values()], rtol=1e-4, atol=1e-6
    )

    cache, _ = kv.allocate(cache, [1], [1])
    ids, starts = np.array([[2, 1, 0]]), np.array([[1, 9, 20]])  # 1 to 7, 9 to 17, 20 to 25
    cache, status = kv.compose(cache, [1], ids, starts, rotate=ROTATE)
    assert statuses(status) == [kv.Status.OK]
    assert_invariants(cache)
    chunks = kv.chunk_metadata(cache, ids, starts)
    outside = {}
    for id_, start in zip(ids[0], starts[0], strict=True):
        for i, place in enumerate(spans[id_]):
            outside[start + i] = shares[place, : spans[id_][0]].sum()
    best = sorted(outside, key=lambda place: -outside[place])[:5]
    places = kv.select_tokens("attention", chunks, [5], max_select=6)
    assert places.tolist() == [[*sorted(best), MAX_LEN]]
    cache, step = kv.rewrite(cache, [1], places)
    assert statuses(step.status) == [kv.Status.OK] and step.query_len.tolist() == [5]
    assert_invariants(cache)
