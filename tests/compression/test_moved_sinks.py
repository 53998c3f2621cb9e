"""Sinks that move along with what is dropped after them, against a dense reference that rotates them."""

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_invariants, statuses
from tests.support.texts import DIM, FULL, MAX_LEN, OK, WIDTH, WINDOW, Texts

ROTATE = kv.chunks.key_rotation(0.9 ** np.arange(DIM // 2), max_distance=200)
BAD_LENGTH = kv.Status.BAD_LENGTH
NUM_BLOCKS = 16


def moving(layers):
    num_blocks = NUM_BLOCKS if layers == [FULL] else 4 * NUM_BLOCKS
    return Texts(layers, rotate=ROTATE, max_sink_len=6, num_blocks=num_blocks)


def num_free(texts):
    return [int(pool.num_free) for pool in texts.cache.control.block_pools]


def bits(cache):
    return [np.asarray(jax.device_get(leaf)).tobytes() for leaf in jax.tree.leaves(cache)]


@pytest.mark.parametrize(
    "layers", [[FULL], pytest.param([WINDOW, FULL], marks=pytest.mark.slow)], ids=["full", "window"]
)
def test_sinks_are_as_near_as_if_nothing_was_dropped(layers):
    """Over a stream of several times the row: always from the original keys, so nothing drifts."""
    texts, sinks, window = moving(layers), 5, 9
    num_blocks = num_free(texts)
    for i in range(12):
        texts.grow([1 + i % WIDTH, 3, 0])
        for row in (0, 1):
            num_tokens = len(texts.k[row])
            if num_tokens > sinks + window:
                assert texts.drop(row, sinks, num_tokens - sinks - window) == OK
    assert len(texts.k[1]) > MAX_LEN
    texts.cache, status = kv.free(texts.cache, [0, 1, 2])
    assert statuses(status) == [OK] * 3
    assert num_free(texts) == num_blocks
    assert_invariants(texts.cache)


def test_rows_share_sinks_part_and_come_back():
    texts = moving([FULL])
    for _ in range(4):
        texts.grow([4, 1, 0])
    texts.cache, _ = kv.free(texts.cache, [2])
    assert texts.drop(0, 5, 3) == OK
    texts.cache, status = kv.fork(texts.cache, [0], [2])
    assert statuses(status) == [OK]
    for held in (texts.k, texts.v, texts.dropped):
        held[2] = held[0].copy()
    before = [np.asarray(x) for x in kv.gather(texts.cache, 0, 0)]
    assert texts.drop(2, 4, 7) == OK  # fewer sinks, further away
    for now, then in zip(kv.gather(texts.cache, 0, 0), before, strict=True):
        np.testing.assert_array_equal(now, then)
    texts.grow([1, 1, 2])

    texts.cache, status = kv.reorder(texts.cache, [0, 2, 1], [2, 0, 2])  # two change places
    assert statuses(status) == [OK] * 3
    for held in (texts.k, texts.v, texts.dropped):
        held[0], held[2], held[1] = held[2], held[0], held[2]
    texts.grow([2, 2, 1])

    texts.cache, status = kv.truncate(texts.cache, [0, 2], [3, 5])  # within the sinks, and after all of them
    assert statuses(status) == [OK] * 2
    for row, length in ((0, 3), (2, 5)):
        texts.k[row], texts.v[row] = texts.k[row][:length], texts.v[row][:length]
        texts.dropped[row] = np.zeros(length, bool)
    texts.grow([4, 1, 3])
    assert texts.drop(0, 2, 2) == OK
    texts.grow([1, 1, 1])

    [num_used] = (NUM_BLOCKS - free for free in num_free(texts))
    texts.cache, num_scrubbed = kv.scrub(texts.cache, [0, 1, 2])
    assert int(num_scrubbed) == num_used and num_free(texts) == [NUM_BLOCKS]
    assert_invariants(texts.cache)


def test_tokens_that_came_into_the_block_of_the_sinks_stay():
    texts = moving([FULL])
    texts.grow([3, 3, 0])
    assert texts.drop(0, 2, 1) == OK
    texts.grow([3, 1, 0])
    assert texts.drop(0, 2, 1) == OK
    texts.grow([1, 1, 0])


def test_without_a_block_for_the_sinks_nothing_changes():
    texts = moving([FULL])
    for i in range(6):
        texts.grow([4, 4, 4 * (i < 4)])
    assert num_free(texts) == [0]
    before = bits(texts.cache)
    assert texts.drop(0, 3, 5) == kv.Status.OUT_OF_BLOCKS
    assert bits(texts.cache) == before
    texts.cache, _ = kv.free(texts.cache, [1])
    assert texts.drop(0, 3, 4) == OK and num_free(texts) == [5]


def test_the_original_sinks_count_among_the_blocks_that_a_row_frees():
    texts = moving([FULL])
    for i in range(4):
        texts.grow([4, 4 * (i < 3), 0])
    assert texts.drop(0, 5, 4) == OK  # three blocks are left, and two that keep the sinks
    texts.cache, _ = kv.truncate(texts.cache, [0], [9])
    assert kv.select_rows_to_preempt(texts.cache, "longest", 2).tolist() == [0, 1]
    before = num_free(texts)[0]
    texts.cache, rows = kv.preempt_to_utilization(texts.cache, 3 / NUM_BLOCKS, "longest")
    assert rows.tolist() == [0, 3, 3] and num_free(texts) == [NUM_BLOCKS - 3] and before == NUM_BLOCKS - 8
    assert_invariants(texts.cache)


def test_what_a_row_with_moved_sinks_refuses():
    texts = moving([FULL])
    for _ in range(4):
        texts.grow([4, 4, 2])
    assert texts.drop(0, 7, 2) == BAD_LENGTH  # more sinks than may move
    assert texts.drop(0, 6, 2) == OK
    before = bits(texts.cache.control)
    _, step = kv.rewrite(texts.cache, [0], [[5]])
    assert statuses(step.status) == [BAD_LENGTH]
    scores = np.zeros((1, MAX_LEN), np.float32)
    assert statuses(kv.compression.compress(texts.cache, [0], scores, [8])[1]) == [BAD_LENGTH]
    assert statuses(kv.compression.drop(texts.cache, [0], [8], [2])[1]) == [
        BAD_LENGTH
    ]  # its sinks would stay
    streaming = kv.compression.Streaming(window=1, num_sink_tokens=0)
    _, rows = kv.compression.drop_to_utilization(texts.cache, 0.0, streaming=streaming)
    assert rows.tolist() == [1, 2, 3]
    assert bits(texts.cache.control) == before
    texts.cache, status = kv.compression.compress(texts.cache, [1], scores, [5])
    step = texts.extend([0, 2, 0])
    assert statuses([*status, step.status[1]]) == [OK] * 2
    assert texts.drop(1, 16, 1) == BAD_LENGTH


@pytest.mark.slow
def test_beside_sources():
    layers = [FULL, kv.CrossAttention(1, DIM, max_source_len=8)]
    sizes = dict(num_blocks=12, block_size=4, max_seqs=3, max_seq_len=MAX_LEN)
    cache = kv.init(kv.CacheConfig(layers, extras=[kv.compression.Dropping(3)], **sizes))
    cache, _ = kv.allocate(cache, [0], [20])
    cache, step = kv.extend(cache, [20, 0, 0], max_new=20)
    k = np.random.default_rng(0).standard_normal((3, 20, 1, DIM), np.float32)
    cache = kv.write(cache, 0, k, k, step)
    cache, status = kv.compression.drop(cache, [0], [3], [8], positions="cache", rotate=ROTATE)
    found = [status]
    for operation, ids in ((kv.fork, ([0], [1])), (kv.reorder, ([0, 1], [1, 0])), (kv.truncate, ([0], [2]))):
        cache, status = operation(cache, *ids)
        found.append(status)
        assert_invariants(cache)
    np.testing.assert_array_equal(kv.gather(cache, 0, 0)[0][:2], k[0, :2])
    moved = ROTATE(k[0, :3], np.full(3, 8, np.int32))
    np.testing.assert_allclose(kv.gather(cache, 1, 0)[0][:3], moved, atol=1e-6)
    cache, status = kv.free(cache, [0, 1])
    assert not any(np.asarray(part).any() for part in [*found, status])
    assert [int(pool.num_free) for pool in cache.control.block_pools] == [12, 12]


@pytest.mark.slow
def test_a_namespace_is_scrubbed_and_sinks_of_another_stay():
    sizes = dict(num_blocks=12, block_size=4, max_seqs=3, max_seq_len=MAX_LEN)
    cache = kv.init(kv.CacheConfig([FULL], extras=[kv.compression.Dropping(3)], **sizes))
    names = np.array([[1, 0, 0, 0], [2, 0, 0, 0]], np.uint32)
    cache, _ = kv.allocate(cache, [0, 1], [12, 12], namespace=names)
    cache, step = kv.extend(cache, [12, 12, 0], max_new=12)
    k = np.random.default_rng(0).standard_normal((3, 12, 1, DIM), np.float32)
    cache = kv.write(cache, 0, k, k, step)
    cache, _ = kv.fork(cache, [1], [2])  # reads two of the sinks in the block that comes to keep them
    cache, _ = kv.truncate(cache, [2], [2])
    cache, status = kv.compression.drop(cache, [0, 1], [3, 3], [5, 5], positions="cache", rotate=ROTATE)
    assert statuses(status) == [OK] * 2
    cache, _ = kv.scrub(cache, namespace=names[0])
    assert_invariants(cache)
    stored = np.asarray(cache.pools[0].arrays["k"])
    pool, originals = cache.control.block_pools[0], cache.control.extras["dropping"].block_ids[0]
    held = {*pool.block_table[1].tolist(), *pool.block_table[2].tolist(), *originals[1].tolist()}
    assert not stored[[block for block in range(12) if block not in held]].any()
    cache, status = kv.truncate(cache, [1], [3])
    assert statuses(status) == [OK]
    np.testing.assert_array_equal(kv.gather(cache, 1, 0)[0][:3], k[1, :3])


@pytest.mark.slow
def test_of_a_latent_the_key_part_moves_alone():
    latent, sizes = (
        kv.LatentAttention(latent_dim=6, rope_dim=4),
        dict(num_blocks=12, block_size=4, max_seqs=1),
    )
    config = kv.CacheConfig([latent] * 2, max_seq_len=MAX_LEN, extras=[kv.compression.Dropping(3)], **sizes)
    cache, _ = kv.allocate(kv.init(config), [0], [12])
    cache, step = kv.extend(cache, [12], max_new=12)
    values = np.random.default_rng(0).standard_normal((2, 1, 12, 1, 10), np.float32)
    for layer in range(2):
        cache = kv.write(cache, layer, values[layer], None, step)
    turns = [kv.chunks.key_rotation([angle, 0.1], max_distance=12) for angle in (1.0, 1.0)]
    with pytest.raises(ValueError, match="rotate differs among layers \\(0, 1\\), which are one group"):
        kv.compression.drop(cache, [0], [3], [5], positions="cache", rotate=turns)
    cache, status = kv.compression.drop(cache, [0], [3], [5], positions="cache", rotate=turns[:1] * 2)
    assert statuses(status) == [OK]
    stored = np.asarray(cache.pools[0].arrays["latent"])
    [rotated] = (int(pool.block_table[0, 0]) for pool in cache.control.block_pools)
    assert stored.shape[0] == 2 * 12
    for layer in range(2):
        block = stored[layer * 12 + rotated].reshape(4, 10)[:3]
        want = values[layer, 0, :3, 0].copy()
        want[:, 6:] = turns[0](want[:, None, 6:], np.full(3, 5, np.int32))[:, 0]
        np.testing.assert_allclose(block, want, atol=1e-6)


def test_options_that_do_not_fit_are_named():
    sizes = dict(num_blocks=4, max_seqs=2, max_seq_len=32)
    plain = kv.init(kv.CacheConfig([FULL], extras=[kv.compression.Dropping()], **sizes))
    with pytest.raises(ValueError, match='expected "text" or "cache"'):
        kv.compression.drop(plain, [0], [1], [1], positions="text ")
    with pytest.raises(ValueError, match="a cache without blocks for original sinks"):
        kv.compression.drop(plain, [0], [1], [1], positions="cache", rotate=ROTATE)
    with pytest.raises(ValueError, match='rotate is given with positions="text"'):
        kv.compression.drop(plain, [0], [1], [1], rotate=ROTATE)
    cache = kv.init(kv.CacheConfig([FULL], extras=[kv.compression.Dropping(4)], **sizes))
    with pytest.raises(TypeError, match="rotate is None with positions=.cache., expected a function"):
        kv.compression.drop(cache, [0], [1], [1], positions="cache")
    with pytest.raises(ValueError, match="max_sink_len is 0, expected"):
        kv.compression.Dropping(max_sink_len=0)
    for options, message in (
        (dict(max_seq_len=3), "max_sink_len is 4, expected at most max_seq_len = 3"),
        (dict(enable_prefix_caching=True), "max_sink_len is 4 and enable_prefix_caching is True, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.CacheConfig([FULL], extras=[kv.compression.Dropping(4)], **sizes | options)
    with pytest.raises(NotImplementedError, match="max_sink_len is given and layers.0. is Quantised"):
        kv.CacheConfig([kv.Quantised(FULL, "int8")], extras=[kv.compression.Dropping(4)], **sizes)
