"""Attention to what is in front of chunks, against loops over queries and keys."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv

ROWS, HEADS, QUERIES, PLACES = 2, 3, 9, 19
# First places and lengths of chunks, not in order, some of them none; row 1's stand after a gap.
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
    outside = np.zeros((ROWS, PLACES))
    for row in range(ROWS):
        start_of = {
            place: start
            for start, length in zip(STARTS[row], LENGTHS[row], strict=True)
            for place in range(start, start + length)
        }
        for i, query in enumerate(places[row]):
            for key in range(start_of.get(query, 0)):
                outside[row, query] += float(np.mean(scores[row, :, i, key]))
    return outside


def test_attention_in_front_of_chunks_is_that_of_each_pair_of_tokens():
    # Of a step of `rewrite`: some of the places, padded; then the others, which add up.
    first = [[0, 1, 4, 6, 7, 9, 10, 12, 15], [0, 2, 3, 4, 7, 10, 13, 15, PLACES]]
    second = [[2, 3, 5, 8, 11, 13, 14, 17, PLACES], [1, 5, 6, 8, 9, 11, 12, 14, 16]]
    pieces = []
    for places in (first, second):
        scores = weights(places)
        got = kv.chunks.attention(scores, places, STARTS, LENGTHS)
        np.testing.assert_allclose(got, by_loops(np.asarray(scores), places), rtol=1e-5, atol=1e-6)
        pieces.append(got)
    whole = pieces[0] + pieces[1]
    assert float(whole[1, 3:8].min()) > 0  # to the gap


def test_what_does_not_fit_is_refused():
    scores = jnp.zeros((ROWS, HEADS, QUERIES, PLACES))
    places = np.zeros((ROWS, QUERIES), int)
    with pytest.raises(TypeError, match="scores has dtype int32, expected a floating dtype"):
        kv.chunks.attention(scores.astype(int), places, STARTS, LENGTHS)
    with pytest.raises(ValueError, match=r"scores has shape \(3, 9, 19\), expected \[n, num_q_heads, w"):
        kv.chunks.attention(scores[0], places, STARTS, LENGTHS)
    with pytest.raises(ValueError, match=r"places has shape \(2, 8\), expected \(2, 9\) as scores"):
        kv.chunks.attention(scores, places[:, :8], STARTS, LENGTHS)
    with pytest.raises(ValueError, match=r"have shapes \(2, 3\) and \(2, 2\), expected \(2, K\)"):
        kv.chunks.attention(scores, places, STARTS, np.array(LENGTHS)[:, :2])
