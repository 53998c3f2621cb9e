"""Attention between chunks against loops over queries, keys and chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv

ROWS, HEADS, QUERIES, PLACES = 2, 3, 9, 19
# First places and lengths of chunks, not in order, some of them none; row 1's stand behind a gap.
STARTS, LENGTHS = [[9, 0, 4], [3, 12, 11]], [[6, 4, 5], [8, 0, 5]]
rng = np.random.default_rng(0)


def weights(places):
    scores = np.zeros((ROWS, HEADS, len(places[0]), PLACES), np.float32)
    for row, of_row in enumerate(places):
        for i, place in enumerate(of_row):
            if place < PLACES:
                scores[row, :, i, : place + 1] = rng.dirichlet(np.ones(place + 1), HEADS)
    return jnp.asarray(scores)


def by_loops(scores, places):
    inter, intra, outside = np.zeros((ROWS, 3, 3)), np.zeros((ROWS, 3)), np.zeros((ROWS, PLACES))
    for row in range(ROWS):
        chunk_of = {
            place: k for k in range(3) for place in range(STARTS[row][k], STARTS[row][k] + LENGTHS[row][k])
        }
        for i, query in enumerate(places[row]):
            if (own := chunk_of.get(query)) is None:
                continue
            for key in range(query + 1):
                weight = float(np.mean(scores[row, :, i, key]))
                other = chunk_of.get(key)
                outside[row, query] += weight * (key < STARTS[row][own])
                intra[row, own] += weight * (other == own)
                if other not in (None, own):
                    inter[row, own, other] += weight
    inter, intra, outside = map(jnp.asarray, (inter, intra, outside))
    return kv.ChunkAttention(inter=inter, intra=intra, outside=outside)


def test_attention_between_chunks_is_that_of_each_pair_of_tokens():
    # Of a step of `rewrite`: some of the places, padded; then the others, which add up.
    first = [[0, 1, 4, 6, 7, 9, 10, 12, 15], [0, 2, 3, 4, 7, 10, 13, 15, PLACES]]
    second = [[2, 3, 5, 8, 11, 13, 14, 17, PLACES], [1, 5, 6, 8, 9, 11, 12, 14, 16]]
    pieces = []
    for places in (first, second):
        scores = weights(places)
        got, want = kv.chunk_attention(scores, places, STARTS, LENGTHS), by_loops(np.asarray(scores), places)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)
        pieces.append(got)
    whole = jax.tree.map(lambda x, y: x + y, *pieces)
    # All that a token of a chunk gives is 1, and none of row 0's chunks stands behind a gap.
    np.testing.assert_allclose(whole.intra[0] + whole.inter[0].sum(axis=1), LENGTHS[0], rtol=1e-5)
    np.testing.assert_allclose(whole.outside[0].sum(), whole.inter[0].sum(), rtol=1e-5)
    assert float(whole.outside[1, 3:8].min()) > 0  # to the gap


@pytest.mark.slow
def test_statistics_are_of_the_chunks_in_front_in_their_order():
    shape = ROWS, 3
    attention = kv.ChunkAttention(
        inter=jnp.asarray(rng.random((*shape, 3), np.float32)),
        intra=jnp.asarray(rng.random(shape, np.float32)),
        outside=jnp.asarray(rng.random((ROWS, PLACES), np.float32)),
    )
    digests = jnp.asarray(1 + np.arange(ROWS * 3 * 2).reshape(*shape, 2), jnp.uint32)
    stats = attention.stats(STARTS, LENGTHS, digests, 9)
    for row in range(ROWS):
        in_order = sorted((k for k in range(3) if LENGTHS[row][k]), key=lambda k: STARTS[row][k])
        for k, (start, size) in enumerate(zip(STARTS[row], LENGTHS[row], strict=True)):
            front = [j for j in in_order if size and STARTS[row][j] < start]
            inter = [float(attention.inter[row, k, j]) for j in front]
            rest = [0] * (3 - len(front))
            np.testing.assert_array_equal(stats.inter[row, k], [*inter, *rest])
            before = [digests[row, j].tolist() for j in front] + [[0, 0]] * len(rest)
            assert stats.before[row, k].tolist() == before
            a = sum(x / LENGTHS[row][j] / size for x, j in zip(inter, front, strict=True))
            b = float(attention.intra[row, k]) / max(size, 1) ** 2
            np.testing.assert_allclose([stats.a[row, k], stats.b[row, k]], [a, b], rtol=1e-6)
            tokens = [*attention.outside[row, start : start + size].tolist(), *[0] * (9 - size)]
            assert stats.attention[row, k].tolist() == tokens
    with pytest.raises(
        ValueError, match=r"shapes \(2, 3\), \(2, 3\) and \(2, 3\), expected \(2, 3\), \(2, 3\) and"
    ):
        attention.stats(STARTS, LENGTHS, digests[..., 0], 9)


def test_what_does_not_fit_is_refused():
    scores = jnp.zeros((ROWS, HEADS, QUERIES, PLACES))
    places = np.zeros((ROWS, QUERIES), int)
    with pytest.raises(TypeError, match="scores has dtype int32, expected a floating dtype"):
        kv.chunk_attention(scores.astype(int), places, STARTS, LENGTHS)
    with pytest.raises(ValueError, match=r"scores has shape \(3, 9, 19\), expected \[n, num_q_heads, w"):
        kv.chunk_attention(scores[0], places, STARTS, LENGTHS)
    with pytest.raises(ValueError, match=r"places has shape \(2, 8\), expected \(2, 9\) as scores"):
        kv.chunk_attention(scores, places[:, :8], STARTS, LENGTHS)
    with pytest.raises(ValueError, match=r"have shapes \(2, 3\) and \(2, 2\), expected \(2, K\)"):
        kv.chunk_attention(scores, places, STARTS, np.array(LENGTHS)[:, :2])
