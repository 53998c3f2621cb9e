"""What `chunk_metadata` says of chunks at their places, against loops."""

from typing import Any

import jax
import jax.export
import numpy as np
import pytest

import kvcache_jax as kv

ROWS, MAX_LEN, NUM_CHUNKS, MAX_CHUNK = 3, 21, 4, 6
LAYER = kv.FullAttention(1, 8)
SIZES: dict[str, Any] = dict(num_blocks=20, block_size=4, max_seqs=ROWS, max_seq_len=MAX_LEN)
CONFIG = kv.CacheConfig([LAYER], **SIZES, extras=[kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK)])


def stored():
    """Chunks 0 to 2 of row 1, computed from places 0, 5 and 9 on."""
    cache = kv.init(CONFIG, storage=False)
    cache, _ = kv.allocate(cache, [1], [14])
    cache, _ = kv.extend(cache, [0, 14, 0], max_new=14)
    tokens = np.arange(3 * MAX_CHUNK).reshape(3, MAX_CHUNK)
    cache, stored = kv.chunks.store(cache, [1, 1, 1], [0, 5, 9], [4, 2, 5], tokens)
    assert stored.chunk_ids.tolist() == [0, 1, 2]
    return cache


@pytest.mark.slow
def test_tokens_of_chunks_are_described_at_their_places():
    cache = stored()
    # An exact one and itself again, one that was computed elsewhere; none, an empty place of the store.
    ids, starts = [[0, 2, 0], [1, NUM_CHUNKS, 3]], [[0, 15, 7], [0, 2, 9]]
    got = kv.chunks.metadata(cache, ids, starts)
    assert (got.attention, got.k_deviation, got.v_deviation, got.key) == (None,) * 4
    lengths, want = [4, 2, 5, 0], {}
    for row, of_row in enumerate(ids):
        for k, (chunk, start) in enumerate(zip(of_row, starts[row], strict=True)):
            is_exact = chunk == 0 and start == 0
            for i in range(lengths[chunk] if chunk < NUM_CHUNKS else 0):
                want[row, start + i] = (not is_exact, k, i, lengths[chunk])
    for row in range(2):
        for place in range(MAX_LEN):
            said = want.get((row, place))
            assert bool(got.is_token[row, place]) == (said is not None and said[0])
            if said is not None:
                assert tuple(int(x[row, place]) for x in got[1:4]) == said[1:]
    assert kv.chunks.select_tokens("first", got, [[9, 1, 2], [1, 0, 0]], max_select=3).tolist() == [
        [7, 8, 15],
        [0, 21, 21],
    ]


def test_a_step_that_returns_it_is_exported():
    cache = stored()

    def described(cache):
        return kv.chunks.metadata(cache, np.array([[0, 2]]), np.array([[0, 15]]))

    exported, refused = jax.export.export(jax.jit(described))(cache), None
    try:
        found = jax.export.deserialize(exported.serialize()).call(cache)
    except ValueError as error:
        refused = error
    assert refused is None and isinstance(found, kv.chunks.Metadata)
    assert [x.tolist() for x in found[:4]] == [x.tolist() for x in described(cache)[:4]]


def test_what_is_no_chunk_at_a_place_is_refused():
    without = kv.init(kv.CacheConfig([LAYER], **SIZES), storage=False)
    with pytest.raises(ValueError, match="chunk_metadata got a cache without a store of chunks"):
        kv.chunks.metadata(without, [[0]], [[0]])
    with pytest.raises(ValueError, match=r"have shapes \(1, 1\) and \(1, 2\), expected one \(n, K\)"):
        kv.chunks.metadata(kv.init(CONFIG, storage=False), [[0]], [[0, 1]])
