"""What a rotation of keys and a store of chunks accept, and the rotation itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv


def test_keys_are_rotated_by_a_table_of_float64():
    rng = np.random.default_rng(0)
    keys, frequencies = rng.standard_normal((5, 2, 8), np.float32), [1.0, 0.3, 0.01]
    distances = np.array([0, 1, -7, 30_000, -30_000])
    rotate = jax.jit(kv.chunks.key_rotation(frequencies, 40_000))
    angle = distances[:, None, None] * np.array(frequencies)
    x, y = np.split(keys[..., :6].astype(float), 2, axis=-1)
    halves = x * np.cos(angle) - y * np.sin(angle), y * np.cos(angle) + x * np.sin(angle)
    got = np.asarray(rotate(keys, distances))
    np.testing.assert_allclose(got[..., :6], np.concatenate(halves, axis=-1), rtol=1e-6, atol=1e-6)
    assert got[..., 6:].tobytes() == keys[..., 6:].tobytes() and got[0].tobytes() == keys[0].tobytes()
    pairs = np.array([0, 3, 1, 4, 2, 5, 6, 7])
    mixed = jax.jit(kv.chunks.key_rotation(frequencies, 40_000, is_interleaved=True))(
        keys[..., pairs], distances
    )
    assert np.asarray(mixed).tobytes() == got[..., pairs].tobytes()
    back = rotate(got, -distances)
    np.testing.assert_allclose(back, keys, rtol=1e-6, atol=1e-6)
    assert np.isnan(rotate(keys, np.full(5, 40_001))[..., :6]).all()
    for rope_type in ("dynamic", "longrope"):
        with pytest.raises(
            NotImplementedError, match=f"rope_type is '{rope_type}', expected one of 'default'"
        ):
            kv.chunks.key_rotation(frequencies, 9, rope_type=rope_type)
    with pytest.raises(ValueError, match="rope_type is 'x', expected one of"):
        kv.chunks.key_rotation(frequencies, 9, rope_type="x")
    for wrong in ([], [[1.0]], [np.inf]):
        with pytest.raises(ValueError, match="expected a list of finite frequencies"):
            kv.chunks.key_rotation(wrong, 9)
    with pytest.raises(TypeError, match="inv_freq is traced"):
        jax.eval_shape(lambda x: kv.chunks.key_rotation(x, 9)(keys, distances), jnp.ones(3))
    with pytest.raises(ValueError, match="keys have 8 features and inv_freq 5 frequencies"):
        kv.chunks.key_rotation([1.0] * 5, 9)(jnp.asarray(keys), distances)


def test_a_store_of_chunks_is_refused_where_it_has_no_meaning():
    sizes = dict(extras=[kv.chunks.Store(3, 8)])
    plain = kv.FullAttention(2, 8)
    for kind in (
        kv.Quantised(plain, "int8"),
        kv.CrossAttention(2, 8, max_source_len=9),
    ):
        with pytest.raises(
            NotImplementedError,
            match=r"layers\[1\] is .*, expected layers whose keys can be rotated to another",
        ):
            kv.CacheConfig([plain, kind], **sizes)
    with pytest.raises(ValueError, match="num_chunks is 0, expected at least 1"):
        kv.chunks.Store(0, 3)
    with pytest.raises(ValueError, match="max_chunk_len is 8, expected at most max_seq_len = 7"):
        kv.CacheConfig([plain], max_seq_len=7, **sizes)
    without = kv.init(kv.CacheConfig([plain], num_blocks=2, max_seqs=1, max_seq_len=9))
    ids = np.zeros((1, 1), int)
    for call in (
        lambda: kv.chunks.store(without, [0], [0], [1], ids),
        lambda: kv.chunks.find(without, ids, [1]),
        lambda: kv.chunks.free(without, [0]),
        lambda: kv.chunks.compose(without, [0], ids, ids, rotate=None),
        lambda: kv.chunks.evict(without, 1),
    ):
        with pytest.raises(ValueError, match="without a store of chunks, expected one built with"):
            call()
    cache = kv.init(kv.CacheConfig([plain], num_blocks=2, max_seqs=1, max_seq_len=9, **sizes))
    with pytest.raises(ValueError, match="tokens has 9 columns, expected at most max_chunk_len = 8"):
        kv.chunks.store(cache, [0], [0], [1], np.zeros((1, 9), int))
    with pytest.raises(TypeError, match="rotate is 3, expected a function of keys and distances"):
        kv.chunks.compose(cache, [0], ids, ids, rotate=3)
    with pytest.raises(ValueError, match=r"starts has shape \(1, 2\), expected \(1, K\)"):
        kv.chunks.compose(cache, [0], ids, np.zeros((1, 2), int), rotate=None)
    with pytest.raises(ValueError, match="rotate returned shape"):
        kv.chunks.compose(cache, [0], ids, ids, rotate=lambda keys, distance: keys[..., 1:])


def stored():
    """A store with one chunk, of tokens that end in zeros."""
    sizes = dict(num_blocks=8, block_size=4, max_seqs=2, max_seq_len=16, extras=[kv.chunks.Store(3, 8)])
    cache, _ = kv.allocate(kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes)), [0], [8])
    cache, step = kv.extend(cache, [8, 0], max_new=8)
    return kv.chunks.store(cache, [0], [0], [5], [[1, 2, 3, 0, 0]])[0], step


def test_padding_that_no_caller_wrote_is_no_token_of_a_name():
    cache, _ = stored()
    for tokens, length, found in (([1, 2, 3, 0, 0, 7], 5, 0), ([1, 2, 3], 5, 3), ([1, 2, 3, 0], 5, 3)):
        assert kv.chunks.find(cache, [tokens], [length]).tolist() == [found], tokens


def test_what_is_no_argument_of_chunks_is_refused():
    cache, step = stored()
    new = jnp.ones((2, 8, 1, 8))
    chunks = kv.chunks.metadata(cache, [[0]], [[4]])

    def select(name="first", **fields):
        return kv.chunks.select_tokens(name, chunks._replace(**fields), [1], max_select=4)

    for call, message in (
        (
            lambda: kv.chunks.AnswerParts(reuse=kv.chunks.Reuse(rotate=None), after=[1], least_len=2**31),
            r"least_len is 2147483648, expected 1 <= least_len <= 2\*\*30",
        ),
        (lambda: kv.chunks.evict(cache, 1, keep=0), r"keep has shape \(\), expected one integer per row"),
        (lambda: kv.chunks.evict(cache, 1, keep=None), "keep has dtype object, expected integers"),
        (lambda: kv.chunks.evict(cache, [0, [1]]), "num_places is no array .*, expected rows of one length"),
        (lambda: kv.chunks.free(cache, jax.random.key(0)), "chunk_ids has dtype key<fry>, expected numbers"),
        (lambda: kv.chunks.deviation(cache, 0, new, new, 3), "step is a int, expected the Step that extend"),
        (lambda: kv.chunks.select_tokens("first", 3, [1], max_select=4), "chunks is a int, expected what kv"),
        (lambda: select(is_token=None), r"is_token is object\[\], expected bool\[n, max_seq_len\]"),
        (lambda: select(nth_chunk=None), "nth_chunk has dtype object, expected integers"),
        (lambda: select("attention", attention=chunks.chunk_len), "attention has dtype int32"),
        (lambda: select("random", key=3), "key is 3, expected one key of jax.random, such as"),
        (lambda: select("random", key=jax.random.split(jax.random.key(0))), r"key is key<fry>\[2\]"),
        (lambda: kv.chunks.key_rotation("x", 9), "inv_freq is 'x', expected a list of finite frequencies"),
        (
            lambda: kv.chunks.compose(cache, [1], [[0]], [[0]], rotate=lambda keys, distance: None),
            r"rotate returned shape None, expected \(.*\) as its keys have",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert kv.chunks.evict(cache, 3, keep=[])[1] == 1
