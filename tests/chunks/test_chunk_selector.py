"""The choice of tokens to compute again against loops over tokens, and one's own selectors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.chunks.chunk_selector import num_of_share, selectors

PLACES, MOST = 23, 11
SPANS = [[(2, 5), (7, 4), (13, 6)], [(0, 3), (5, 9), (14, 1)]]  # first place and length
rng = np.random.default_rng(0)


def metadata(**optional):
    """Two rows of three chunks; what is elsewhere means nothing."""
    shape = 2, PLACES
    is_token, (nth, place, length) = np.zeros(shape, bool), rng.integers(-9, 9, (3, *shape))
    for row, spans in enumerate(SPANS):
        for k, (start, num) in enumerate(spans):
            at = row, slice(start, start + num)
            is_token[at], nth[at], place[at], length[at] = True, k, np.arange(num), num
    is_token[1, 6] = False  # composed, but exact
    return kv.chunks.Metadata(*map(jnp.asarray, (is_token, nth, place, length)), **optional)


CHUNKS = metadata()


@kv.chunks.selector("test: given", needs=["attention"])
def given(chunks):
    assert (chunks.k_deviation, chunks.v_deviation, chunks.key) == (None, None, None)
    return chunks.attention


def chosen(scores, num_select, most=MOST):
    """Chooses token by token: of each part the best, of equal ones the first; then of all the best."""
    rows = []
    for row in range(2):
        value = {i: math.inf if math.isnan(scores[row][i]) else float(scores[row][i]) for i in range(PLACES)}
        best = sorted(np.flatnonzero(CHUNKS.is_token[row]).tolist(), key=lambda i: (-value[i], i))
        best = [i for i in best if value[i] > -math.inf]
        if np.ndim(num_select) == 1:
            parts = [(best, num_select[row])]
        else:
            parts = [
                ([i for i in best if CHUNKS.nth_chunk[row][i] == k], num_select[row][k]) for k in range(3)
            ]
        kept = {i for part, num in parts for i in part[: max(num, 0)]} | {
            i for i in best if value[i] == math.inf
        }
        kept = sorted([i for i in best if i in kept][:most])
        rows.append(kept + [PLACES] * (most - len(kept)))
    return rows


def test_the_highest_scores_are_chosen_and_of_equal_ones_the_first():
    per_row = [[0, 4], [7, 40], [-1, 1]]
    per_chunk = [[[1, 2, 0], [3, 1, 1]], [[9, 0, 4], [-5, 2, 0]], [[9, 9, 9]] * 2]
    for num_select in (*per_row, *per_chunk):
        scores = rng.integers(4, size=(2, PLACES)).astype(np.float32)
        scores[:, ::5], scores[0, 3], scores[1, 8] = np.inf, -np.inf, np.nan
        got = kv.chunks.select_tokens(
            "test: given", CHUNKS._replace(attention=scores, k_deviation=scores), num_select, max_select=MOST
        )
        assert got.tolist() == chosen(scores, num_select), num_select


def test_each_selector_looks_at_what_it_is_named_after():
    values = rng.permutation(3 * 2 * PLACES).reshape(3, 2, PLACES).astype(np.float32)
    known = dict(zip(("attention", "k_deviation", "v_deviation"), values, strict=True))
    chunks = CHUNKS._replace(**known, key=jax.random.key(3))
    first = -np.asarray(CHUNKS.place_in_chunk, np.float32)
    by_name = dict(zip(("attention", "key deviation", "value deviation"), values, strict=True), first=first)
    for name, scores in by_name.items():
        assert kv.chunks.select_tokens(name, chunks, [4, 5], max_select=MOST).tolist() == chosen(
            scores, [4, 5]
        )
    assert kv.chunks.select_tokens("none", CHUNKS, [4, 5], max_select=MOST).tolist() == [[PLACES] * MOST] * 2
    whole = kv.chunks.select_tokens("all", CHUNKS, [0, 0], max_select=PLACES)
    assert [[i for i in row if i < PLACES] for row in whole.tolist()] == [
        np.flatnonzero(row).tolist() for row in CHUNKS.is_token
    ]
    random = kv.chunks.select_tokens("random", chunks, [4, 5], max_select=MOST)
    assert (np.asarray(random) < PLACES).sum(axis=1).tolist() == [4, 5]
    assert random.tolist() == kv.chunks.select_tokens("random", chunks, [4, 5], max_select=MOST).tolist()
    other = kv.chunks.select_tokens("random", chunks._replace(key=jax.random.key(4)), [4, 5], max_select=MOST)
    assert random.tolist() != other.tolist()
    assert selectors.names[:7] == (*list(by_name)[:3], "first", "random", "all", "none")


@pytest.mark.slow
def test_a_share_is_rounded_up_and_no_further():
    for length in range(1, 400):
        shares = np.arange(21) / 20
        assert num_of_share(shares, length).tolist() == [-(-k * length // 20) for k in range(21)]
    assert num_of_share(1e-3, [1, 0]).tolist() == [1, 0]


def test_what_cannot_be_selected_is_refused():
    def select(name="first", chunks=CHUNKS, num_select=(1, 1), **options):
        return kv.chunks.select_tokens(name, chunks, num_select, **dict(max_select=MOST) | options)

    for name, field in (("attention", "attention"), ("key deviation", "k_deviation"), ("random", "key")):
        with pytest.raises(
            ValueError, match=f"{field} is None, expected an array: the selector '{name}' needs"
        ):
            select(name)
    with pytest.raises(ValueError, match="selector is 'best', expected one of 'attention', 'key deviation'"):
        select("best")
    with pytest.raises(
        ValueError, match=r"num_select has shape \(3,\), expected \(2,\), or \(2, K\) per chunk"
    ):
        select(num_select=[1, 1, 1])
    with pytest.raises(
        ValueError, match="max_select is 24, expected 1 <= max_select <= places of a row = 23"
    ):
        select(max_select=24)
    with pytest.raises(ValueError, match=r"is_token is int32\[2, 23\], expected bool\[n, max_seq_len\]"):
        select(chunks=CHUNKS._replace(is_token=CHUNKS.nth_chunk))
    with pytest.raises(ValueError, match=r"chunk_len has shape \(23,\), expected \(2, 23\) as is_token"):
        select(chunks=CHUNKS._replace(chunk_len=CHUNKS.chunk_len[0]))


def test_a_selector_of_ones_own_is_checked():
    with pytest.raises(ValueError, match="there is a chunk selector 'first' already, expected a new name"):
        kv.chunks.selector("first")
    with pytest.raises(TypeError, match="write @kvcache_jax.chunks.selector"):
        kv.chunks.selector(lambda chunks: chunks.attention)  # pyright: ignore[reportArgumentType]
    for needs in ("key", ["is_token"], 3):
        with pytest.raises(ValueError, match=r"expected some of \['attention', 'k_deviation', 'key'"):
            kv.chunks.selector("test: needs", needs=needs)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a function of ChunkMetadata"):
        kv.chunks.selector("test: no function")(3)  # pyright: ignore[reportArgumentType]
    kv.chunks.selector("test: integers")(lambda chunks: chunks.place_in_chunk)
    kv.chunks.selector("test: greedy")(lambda chunks: chunks.attention + 1)  # pyright: ignore
    with pytest.raises(TypeError, match=r"returned int32\[2, 23\], expected float32\[2, 23\]"):
        kv.chunks.select_tokens("test: integers", CHUNKS, [1, 1], max_select=MOST)
    with pytest.raises(TypeError) as error:
        kv.chunks.select_tokens("test: greedy", CHUNKS, [1, 1], max_select=MOST)
    assert "chunk selector 'test: greedy' has needs=[]" in error.value.__notes__[0]
