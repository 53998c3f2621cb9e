"""Attention of rows that dropped tokens, against a dense reference with explicit positions and masks."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import statuses
from tests.support.texts import DIM, FULL, MAX_LEN, OK, WIDTH, WINDOW, Texts


@pytest.mark.slow
@pytest.mark.parametrize("layers", [[FULL], [WINDOW, FULL]], ids=["full", "window"])
def test_an_endless_text_in_fixed_memory(layers):
    """Sinks and a window of odd lengths: seen is exactly what is not dropped, whatever the block edges."""
    texts = Texts(layers)
    sinks, window = 3, 11
    for i in range(17):
        texts.grow([1 + i % WIDTH, 2, 1])
        for row in (0, 1):
            num_tokens = len(texts.k[row])
            if num_tokens > sinks + window:
                assert texts.drop(row, sinks, num_tokens - sinks - window) == OK
                assert int((~texts.dropped[row]).sum()) == sinks + window
                held = int((texts.cache.control.block_pools[-1].block_table[row] < 30).sum())
                assert held <= -(-(sinks + window) // 4) + 2
    assert len(texts.k[0]) > MAX_LEN < len(texts.k[1])
    again = [len(texts.k[0]) - n for n in ((6, 4, 1) if layers == [FULL] else (1,))]
    texts.again(0, again)
    texts.grow([3, 1, 2])


@pytest.mark.slow
def test_forks_of_rows_that_dropped_tokens_go_their_own_ways():
    texts = Texts([FULL])
    for _ in range(4):
        texts.grow([4, 1, 0])
    before = [np.asarray(x) for x in kv.gather(texts.cache, 0, 0)]
    texts.cache, _ = kv.free(texts.cache, [2])
    texts.cache, status = kv.fork(texts.cache, [0], [2])
    for held in (texts.k, texts.v, texts.dropped):
        held[2] = held[0].copy()
    num_free = int(kv.num_available_blocks(texts.cache))
    assert texts.drop(2, 2, 9) == OK  # tokens 4 to 7 are a whole block, which the source keeps
    assert int(kv.num_available_blocks(texts.cache)) == num_free
    for now, then in zip(kv.gather(texts.cache, 0, 0), before, strict=True):
        np.testing.assert_array_equal(now, then)
    texts.grow([1, 1, 3])
    assert texts.drop(2, 2, 12) == OK
    texts.grow([2, 0, 4])


def test_what_cannot_be_dropped():
    texts = Texts([WINDOW, FULL])
    for _ in range(4):
        texts.grow([4, 1, 0])
    before = [
        np.asarray(leaf).tobytes() for leaf in (texts.cache.context_len, texts.cache.control.holes.start)
    ]
    for start, length in ((1, 3), (-1, 2), (3, -1), (3, 14), (17, 1), (2**31 - 1, 1)):
        assert texts.drop(0, start, length) == kv.Status.BAD_LENGTH
    assert texts.drop(0, 3, 0) == OK
    after = [
        np.asarray(leaf).tobytes() for leaf in (texts.cache.context_len, texts.cache.control.holes.start)
    ]
    assert after == before
    assert texts.drop(0, 6, 3) == OK
    assert texts.drop(0, 2, 3) == texts.drop(0, 10, 2) == kv.Status.BAD_LENGTH  # apart from the first
    assert texts.drop(0, 9, 2) == texts.drop(0, 4, 2) == texts.drop(0, 5, 4) == OK
    texts.grow([2, 2, 2])


def test_a_row_is_cut_behind_what_it_dropped_or_in_front_of_it():
    texts = Texts([FULL])
    for _ in range(4):
        texts.grow([4, 4, 0])
    for row in (0, 1):
        assert texts.drop(row, 3, 7) == OK  # of which 4 are gone, 3 hidden
    refused = kv.truncate(texts.cache, [0, 1], [4, 5])[1]
    assert statuses(refused) == [kv.Status.BAD_LENGTH] * 2
    texts.cache, status = kv.truncate(texts.cache, [0, 1], [7, 2])
    assert statuses(status) == [OK] * 2
    for row, length in ((0, 11), (1, 2)):
        texts.k[row], texts.v[row] = texts.k[row][:length], texts.v[row][:length]
        texts.dropped[row] = texts.dropped[row][:length]
    texts.grow([3, 4, 1])


def test_a_cache_that_drops_nothing_refuses_and_prefix_caching_is_refused():
    sizes = dict(num_blocks=4, max_seqs=2, max_seq_len=32)
    with pytest.raises(
        ValueError, match="drop got a cache whose rows cannot drop tokens, expected one built"
    ):
        kv.compression.drop(kv.init(kv.CacheConfig([FULL], **sizes)), [0], [1], [1])
    with pytest.raises(ValueError, match="drop got a cache with enable_prefix_caching=True, expected False"):
        published = kv.CacheConfig(
            [FULL], enable_prefix_caching=True, extras=[kv.compression.Dropping()], **sizes
        )
        kv.compression.drop(kv.init(published), [0], [1], [1])
    with pytest.raises(
        NotImplementedError, match="implementation 'mosaic_gpu' is asked for and rows may hide tokens"
    ):
        cache = kv.init(
            kv.CacheConfig([FULL], extras=[kv.compression.Dropping()], implementation="mosaic_gpu", **sizes)
        )
        kv.extend(cache, [1, 1], max_new=1)


@pytest.mark.slow
def test_keep_everything_is_the_same_bit_for_bit():
    """A cache that may drop and does not computes what one does that cannot."""
    q, k, v = (np.random.default_rng(i).standard_normal((2, 5, 1, DIM), np.float32) for i in range(3))
    outs = []
    for extras in ([], [kv.compression.Dropping()]):
        cache = kv.init(kv.CacheConfig([FULL], num_blocks=4, max_seqs=2, max_seq_len=32, extras=extras))
        cache, _ = kv.allocate(cache, [0, 1], [5, 3])
        if extras:
            cache, _ = kv.compression.drop(cache, [0, 1], [0, 0], [0, 0])
        cache, reserved = kv.extend(cache, [5, 3], max_new=5)
        outs.append(np.asarray(kv.attention(cache, 0, q, k, v, reserved)[1]))
    np.testing.assert_array_equal(*outs)
