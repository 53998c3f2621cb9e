"""The formulas of Cache-Craft against three chunks by hand."""

import math

import jax
import numpy as np
import pytest

import kvcache_jax as kv

# Chunk 2 of 4 tokens, behind chunks 0 and 1 of 4 tokens: attention 6 and 2 to them, 8 to itself.
INTER, INTRA, SIZE = [6.0, 2.0], 8.0, 4
A, B = 8 / 16, 8 / 16


def test_three_chunks_by_hand():
    impact = float(jax.jit(kv.context_impact)(A, B))
    np.testing.assert_allclose(impact, 1 / (1 + math.exp(-1)), rtol=1e-6)
    cases = {  # places of chunks 0 and 1 now: beta'
        (0, 1): 1.0,  # the same in front, nothing to do
        (1, 0): 0.0,  # in the other order nothing is left of the overlap
        (3, 5): 1.0,  # others between them
        (2, -1): 0.75,  # 6 of 8
        (-1, 0): 0.25,
        (-1, -1): 0.0,
    }
    overlap = jax.jit(kv.prefix_overlap)(np.array(INTER, np.float32), np.array([*cases]))
    np.testing.assert_allclose(overlap, list(cases.values()), rtol=1e-6)
    overhead = kv.fix_overhead(impact, overlap)
    np.testing.assert_allclose(overhead, [impact * (1 - x) for x in cases.values()], rtol=1e-6)
    # 0.731 x 4 = 2.92, a quarter of it 0.731, three quarters of it 2.19
    assert kv.num_of_share(overhead, SIZE).tolist() == [0, 3, 0, 1, 3, 3]
    assert kv.num_of_share(kv.fix_overhead(impact, overlap, alpha=2), SIZE).tolist() == [0, 4, 0, 2, 4, 4]


@pytest.mark.slow
def test_pairs_of_four_chunks_count_by_their_order():
    # Of 0, 1 and 3, which are there again, the pairs (0, 1) and (0, 3) are turned: gamma is 2/3, beta 7/8.
    np.testing.assert_allclose(kv.prefix_overlap([4.0, 1, 1, 2], [7, 2, -1, 4]), 7 / 8 / 3, rtol=1e-6)
    # Absent ones at the end, without attention, as chunks with fewer in front of them have.
    np.testing.assert_allclose(kv.prefix_overlap([4.0, 1, 0, 0], [7, 2, -1, -1]), 0, atol=1e-7)


@pytest.mark.slow
def test_what_is_zero():
    assert kv.prefix_overlap([[0.0, 0.0]], [[-1, -1]]).tolist() == [1]  # nothing stood in front
    assert kv.context_impact([0.0, 0.0, 1.0], [0.5, 0.0, 0.0]).tolist() == [0.5, 0.5, 1.0]
    assert kv.fix_overhead(1.0, [0.0, 1.0], alpha=3).tolist() == [1, 0]


@pytest.mark.slow
def test_a_share_is_rounded_up_and_no_further():
    for length in range(1, 400):
        shares = [k / 20 for k in range(21)]
        assert kv.num_of_share(np.array(shares), length).tolist() == [-(-k * length // 20) for k in range(21)]
    assert kv.num_of_share(1e-3, [1, 0]).tolist() == [1, 0]
