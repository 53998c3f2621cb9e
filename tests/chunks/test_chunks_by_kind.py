"""Chunks of full, window and latent layers, rotated by frequencies of their own, against dense float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import assert_invariants, assert_same, statuses

ROWS, WIDTH, MAX_LEN, MAX_CHUNK, NUM_CHUNKS, HEADS, KV_HEADS, DIM = 3, 9, 40, 12, 4, 4, 2, 6
LATENT, ROPE = 5, 4
WINDOW, SINKS = 7, 2
LAYERS = [
    kv.FullAttention(KV_HEADS, DIM, num_blocks=30),
    kv.SlidingWindow(KV_HEADS, DIM, window=WINDOW, num_sink_tokens=SINKS, block_size=3, num_blocks=30),
    kv.LatentAttention(LATENT, ROPE, num_blocks=30),
]
FREQUENCIES = [np.array([1.0, 0.21, 0.03]), np.array([0.7, 0.4, 0.11]), np.array([0.9, 0.05])]
ROTATIONS = [kv.chunks.key_rotation(frequencies, MAX_LEN) for frequencies in FREQUENCIES]
FIRST_ROTATED = [0, 0, LATENT]
SHAPES = [(KV_HEADS, DIM), (KV_HEADS, DIM), (1, LATENT + ROPE)]
OK = kv.Status.OK


@kv.donate
def grow(cache, q, k, v, num_new):
    cache, step = kv.extend(cache, num_new, max_new=WIDTH)
    outs = []
    for layer in range(len(LAYERS)):
        cache, out = kv.attention(cache, layer, q[layer], k[layer], v[layer], step, scale=0.4)
        outs.append(out)
    return cache, outs, step.status


store, compose = jax.jit(kv.chunks.store), jax.jit(lambda *args: kv.chunks.compose(*args, rotate=ROTATIONS))


def rotated(layer, keys, positions):
    """Rotates `[tokens, heads, d]` in float64, of a latent what is after the compressed token."""
    first, angle = FIRST_ROTATED[layer], np.asarray(positions)[:, None, None] * FREQUENCIES[layer]
    x, y = np.split(np.asarray(keys[..., first:], float), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([keys[..., :first], x * cos - y * sin, y * cos + x * sin], axis=-1)


def attended(layer, q, keys, values, position):
    """What the query `[HEADS, d]` at `position` gets."""
    places = np.arange(position + 1)
    if layer == 1:
        places = places[(places > position - WINDOW) | (places < SINKS)]
    k, v = (np.repeat(x[places], HEADS // x.shape[1], axis=1) for x in (keys, values))
    logits = 0.4 * np.einsum("hd,shd->hs", q, k)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hs,shd->hd", shares / shares.sum(-1, keepdims=True), v)


class Texts:
    """Rows beside their keys before rotation and their values, a list per layer."""

    def __init__(self):
        config = kv.CacheConfig(
            LAYERS,
            block_size=4,
            max_seqs=ROWS,
            max_seq_len=MAX_LEN,
            max_query_len=WIDTH,
            extras=[kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK)],
        )
        self.cache, self.rng, self.texts, self.chunks = kv.init(config), np.random.default_rng(0), {}, {}
        for row in range(ROWS):
            self.restart(row)

    def restart(self, row):
        self.cache, _ = kv.free(self.cache, [row])
        self.cache, _ = kv.allocate(self.cache, [row], [0])
        widths = DIM, DIM, LATENT  # of values
        shapes = [((0, *shape), (0, shape[0], width)) for shape, width in zip(SHAPES, widths, strict=True)]
        self.texts[row] = [(np.zeros(keys), np.zeros(values)) for keys, values in shapes]

    def grow(self, *num_new):
        firsts = self.cache.context_len.tolist()
        q, k, v, keys = [], [], [], []
        for layer, (heads, dim) in enumerate(SHAPES):
            draw = [
                self.rng.standard_normal((ROWS, WIDTH, n, dim), np.float32) for n in (HEADS, heads, heads)
            ]
            q.append(draw[0])
            keys.append(draw[1])
            k.append(
                np.float32([rotated(layer, draw[1][r], firsts[r] + np.arange(WIDTH)) for r in range(ROWS)])
            )
            v.append(None if layer == 2 else draw[2])
        self.cache, outs, status = grow(testing.poison(self.cache), q, k, v, np.array(num_new))
        assert statuses(status) == [OK] * ROWS
        assert_invariants(self.cache)
        for row, num in enumerate(num_new):
            for layer in range(len(LAYERS)):
                raw = keys[layer][row, :num]
                values = raw[..., :LATENT] if layer == 2 else v[layer][row, :num]
                self.texts[row][layer] = self.appended(row, layer, (raw, values))
                text = rotated(layer, self.texts[row][layer][0], np.arange(firsts[row] + num))
                for i in range(num):
                    want = attended(layer, q[layer][row, i], text, self.texts[row][layer][1], firsts[row] + i)
                    np.testing.assert_allclose(outs[layer][row, i], want, rtol=1e-5, atol=1e-5)

    def appended(self, row, layer, new):
        pairs = zip(self.texts[row][layer], new, strict=True)
        return tuple(np.concatenate(pair) for pair in pairs)

    def store(self, row, start, length):
        """Stores a span, which nothing else is named like; returns its status."""
        name = np.zeros((1, MAX_CHUNK), int)
        name[0, :3] = row, start, length
        self.cache, stored = store(testing.poison(self.cache), [row], [start], [length], name)
        assert_invariants(self.cache)
        [status] = statuses(stored.status)
        if status == OK:
            span = slice(start, start + length)
            self.chunks[int(stored.chunk_ids[0])] = [(k[span], v[span]) for k, v in self.texts[row]]
        return status

    def compose(self, row, *placed):
        """Composes chunks one after the other; returns the status."""
        ids, starts = np.full((1, 3), NUM_CHUNKS), np.zeros((1, 3), int)
        for i, (chunk, start) in enumerate(placed):
            ids[0, i], starts[0, i] = chunk, start
        before = testing.poison(self.cache)
        self.cache, status = compose(before, [row], ids, starts)
        assert_invariants(self.cache)
        [status] = statuses(status)
        if status != OK:
            assert_same(self.cache, before)
            return status
        for chunk, _ in placed:
            for layer, new in enumerate(self.chunks[chunk]):
                self.texts[row][layer] = self.appended(row, layer, new)
        return status

    def num_held(self, row):
        return [int((pool.block_table[row] < 30).sum()) for pool in self.cache.control.block_pools]


@pytest.mark.slow
def test_windows_and_latents_are_composed_with_what_the_next_token_reads():
    texts = Texts()
    texts.grow(9, 5, 1)
    texts.grow(8, 0, 0)
    assert texts.store(0, 5, 12) == texts.store(1, 0, 5) == OK
    assert texts.compose(2, (0, 1), (0, 13)) == OK
    # Of 25 places the window keeps those that its last 9 read, from 25 - 9 - 7 + 1 = 10 on, and the sinks.
    assert texts.num_held(2) == [7, 1 + 6, 7]
    texts.grow(0, 3, 4)
    assert texts.compose(2, (1, 29)) == texts.compose(1, (0, 8)) == OK
    texts.grow(1, 2, 3)
    texts.grow(0, 9, 1)

    # What left the window before it was stored is no chunk, or one for other places alone.
    assert texts.store(0, 0, 2) == OK  # sinks
    assert texts.store(1, 0, 9) == kv.Status.BAD_LENGTH  # it ends in a chunk
    texts.restart(2)
    texts.grow(0, 0, 9)
    texts.grow(0, 0, 9)
    texts.grow(0, 0, 9)  # 27 tokens: 0 to 2 and 12 to 26 in the window group
    assert texts.store(2, 8, 9) == kv.Status.WINDOW_LOST
    texts.cache, _ = kv.chunks.free(texts.cache, [0])
    assert texts.store(2, 9, 12) == OK  # 9 to 11 are gone
    texts.restart(0)
    assert texts.compose(0, (0, 0)) == kv.Status.WINDOW_LOST  # at the start they are sinks
    texts.grow(4, 0, 0)
    assert texts.compose(0, (0, 4), (1, 16)) == OK
    assert texts.num_held(0) == [6, 1 + 4, 6]  # from 9 on, for place 6 is gone
    texts.grow(9, 0, 2)


@pytest.mark.slow
def test_a_composed_row_of_windows_is_computed_again_where_it_is_in_reach():
    texts = Texts()
    texts.grow(9, 5, 0)
    assert texts.store(0, 2, 7) == OK and texts.compose(1, (0, 5)) == OK
    rewrite = jax.jit(kv.rewrite)
    _, step = rewrite(texts.cache, [1], [[5, 7, 11, MAX_LEN]])
    assert statuses(step.status) == [OK]
    texts.grow(0, 9, 0)
    texts.grow(0, 1, 0)
    cache, step = rewrite(texts.cache, [1], [[5, 7, 11, MAX_LEN]])
    assert statuses(step.status) == [kv.Status.WINDOW_LOST]
    assert_same(cache, texts.cache)


def test_rotations_of_a_layer_group_are_one():
    sizes = dict(num_blocks=4, max_seqs=1, max_seq_len=9, extras=[kv.chunks.Store(2, 3)])
    cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 4)] * 2, **sizes))
    one = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"rotate differs among layers \(0, 1\), which are one group"):
        kv.chunks.compose(cache, [0], one, one, rotate=[ROTATIONS[0], None])
    for wrong in ([None], [None, 3]):
        with pytest.raises(TypeError, match="or a list with one of them for each of 2 layers"):
            kv.chunks.compose(cache, [0], one, one, rotate=wrong)
