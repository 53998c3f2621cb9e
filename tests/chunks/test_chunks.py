"""Chunks of rows, stored and composed, against texts whose keys are rotated in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.few_kernels import compile_for_users
from tests.support.helpers import assert_invariants, assert_same, row_contents, statuses

ROWS, WIDTH, MAX_LEN, HEADS, KV_HEADS, DIM, MAX_CHUNK = 4, 11, 41, 4, 2, 6, 13
FREQUENCIES = np.array([1.0, 0.21, 0.03])
ROTATE = kv.chunks.key_rotation(FREQUENCIES, MAX_LEN)
WIDE, NARROW = kv.FullAttention(KV_HEADS, DIM), kv.FullAttention(KV_HEADS, DIM, block_size=3, num_blocks=80)
ONE_GROUP = dict(layers=[WIDE] * 2)
PUBLISHED = dict(layers=[NARROW, WIDE, NARROW], enable_prefix_caching=True, num_blocks=44)
BOTH = [ONE_GROUP, pytest.param(PUBLISHED, marks=pytest.mark.slow)]
NUM_CHUNKS = 5
OK, SKIPPED = kv.Status.OK, kv.Status.SKIPPED

store, find, compose = (
    jax.jit(kv.chunks.store),
    jax.jit(kv.chunks.find),
    jax.jit(kv.chunks.compose, static_argnames="rotate"),
)


@kv.donate
def grow(cache, q, k, v, num_new, tokens):
    cache, step = kv.extend(cache, num_new, max_new=WIDTH, tokens=tokens)
    outs = []
    for layer in range(cache.config.num_layers):
        cache, out = kv.attention(cache, layer, q[layer], k[layer], v[layer], step)
        outs.append(out)
    return cache, jnp.stack(outs), step


@jax.jit
def contents(cache, row):
    return [kv.gather(cache, row, layer)[:2] for layer in range(cache.config.num_layers)]


def rotated(keys, positions):
    """Rotates `[layers, tokens, heads, DIM]` by positions [tokens] in float64."""
    angle = np.asarray(positions)[:, None, None] * FREQUENCIES
    x, y = np.split(np.asarray(keys, float), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)


class Texts:
    """Rows beside the tokens, keys before rotation, and values of their texts."""

    def __init__(self, options=ONE_GROUP, seed=0, **sizes):
        sizes = dict(num_blocks=37, block_size=4, max_seqs=ROWS, max_seq_len=MAX_LEN) | options | sizes
        sizes = dict(extras=[kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK)]) | sizes
        self.config = kv.CacheConfig(**sizes)
        self.num_layers, self.rng = self.config.num_layers, np.random.default_rng(seed)
        self.cache, self.texts, self.chunks = kv.init(self.config), {}, {}

    def start(self, rows, reserved=1, namespace=None):
        padded = np.array([*rows, *[ROWS] * (2 - len(rows))])  # one program for one row and two
        prompts = np.full((2, MAX_LEN), 999) + padded[:, None]
        self.cache, admission = kv.allocate(
            self.cache, padded, [reserved] * 2, tokens=prompts, namespace=namespace
        )
        assert statuses(admission.status)[: len(rows)] == [OK] * len(rows)
        for row in rows:
            shape = self.num_layers, 0, KV_HEADS, DIM
            self.texts[row] = np.zeros(0, int), np.zeros(shape), np.zeros(shape, np.float32)

    def grow(self, num_new):
        draw = self.rng.standard_normal
        q, k, v = (
            draw((self.num_layers, ROWS, WIDTH, n, DIM), np.float32) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        tokens, turned = self.rng.integers(1000, size=(ROWS, WIDTH)), np.array(k)
        firsts = [len(self.texts[row][0]) if num else 0 for row, num in enumerate(num_new)]
        for row, first in enumerate(firsts):
            turned[:, row] = rotated(k[:, row], first + np.arange(WIDTH))
        self.cache, out, step = grow(testing.poison(self.cache), q, turned, v, np.array(num_new), tokens)
        assert statuses(step.status) == [OK] * ROWS
        out = np.asarray(out)
        for row, num in enumerate(num_new):
            if num:
                new = tokens[row, :num], k[:, row, :num], v[:, row, :num]
                self.append(row, new)
                self.check_attention(row, firsts[row], q[:, row, :num], out[:, row])
        self.check()

    def append(self, row, new):
        old = self.texts[row]
        self.texts[row] = (
            np.concatenate([old[0], new[0]]),
            *(np.concatenate(pair, axis=1) for pair in zip(old[1:], new[1:], strict=True)),
        )

    def check_attention(self, row, first, q, out):
        _, raw, values = self.texts[row]
        keys = rotated(raw, np.arange(raw.shape[1]))
        for i in range(q.shape[1]):
            seen = first + i + 1
            k, v = (np.repeat(x[:, :seen], HEADS // KV_HEADS, axis=2) for x in (keys, values))
            logits = np.einsum("lhd,lshd->lhs", q[:, i], k) / np.sqrt(DIM)
            shares = np.exp(logits - logits.max(-1, keepdims=True))
            want = np.einsum("lhs,lshd->lhd", shares / shares.sum(-1, keepdims=True), v)
            np.testing.assert_allclose(out[:, i], want, rtol=1e-5, atol=1e-5)

    def check(self):
        """Rows hold their texts: values bit for bit, and keys rotated to their places."""
        assert_invariants(self.cache)
        for row, (tokens, raw, values) in self.texts.items():
            length = len(tokens)
            assert int(self.cache.context_len[row]) == length
            keys = rotated(raw, np.arange(length))
            for layer, (k, v) in enumerate(contents(self.cache, row)):
                np.testing.assert_allclose(np.asarray(k)[:length], keys[layer], rtol=1e-5, atol=1e-5)
                assert np.asarray(v)[:length].tobytes() == values[layer].tobytes()

    def store(self, *spans):
        """Stores spans (row, start, length); returns the ids of the chunks."""
        names = np.zeros((4, MAX_CHUNK), int)
        columns = np.array([*spans, *[(ROWS, 0, 0)] * (4 - len(spans))])
        for i, (row, start, length) in enumerate(spans):
            names[i, :length] = self.texts[row][0][start : start + length]
            names[i, length:] = 77  # not looked at
        before = {row: row_contents(self.cache, row) for row in self.texts}
        self.cache, stored = store(testing.poison(self.cache), *columns.T, names)
        assert statuses(stored.status)[: len(spans)] == [OK] * len(spans)
        ids = stored.chunk_ids.tolist()[: len(spans)]
        for id_, (row, start, length) in zip(ids, spans, strict=True):
            tokens, *arrays = self.texts[row]
            self.chunks[id_] = tokens[start : start + length], *(x[:, start : start + length] for x in arrays)
        self.check()
        assert all(before[row] == row_contents(self.cache, row) for row in self.texts)
        return ids

    def compose(self, placed, rotate=ROTATE):
        """Composes rows {row: [(chunk, start), ...]}; returns the statuses."""
        rows, ids = np.full(2, ROWS), np.full((2, 3), NUM_CHUNKS)
        starts = np.full((2, 3), 5)
        for i, (row, chunks) in enumerate(placed.items()):
            rows[i] = row
            for j, (id_, start) in enumerate(chunks):
                ids[i, j], starts[i, j] = id_, start
        before = testing.poison(self.cache)
        self.cache, status = compose(before, rows, ids, starts, rotate=rotate)
        for row, outcome in zip(placed, statuses(status), strict=False):
            if outcome != OK:
                continue
            for id_, start in sorted(placed[row], key=lambda pair: pair[1]):
                tokens, raw, values = self.texts[row]
                gap = start - len(tokens)
                assert gap >= 0
                empty = np.zeros((self.num_layers, gap, KV_HEADS, DIM), np.float32)
                self.append(row, (np.zeros(gap, int), empty, empty))
                self.append(row, self.chunks[id_])
        self.check()
        self.check_others(before, placed)
        return statuses(status)[: len(placed)]

    def check_others(self, before, rows):
        """Blocks of other rows and of chunks, and published ones, are as they were bit for bit."""
        for g, pool in enumerate(before.control.block_pools):
            held = {*np.asarray(before.control.extras["chunks"].block_ids[g]).reshape(-1).tolist()}
            table = np.asarray(pool.block_table)
            held |= {*table[[row for row in range(ROWS) if row not in rows]].reshape(-1).tolist()}
            if pool.cached is not None:  # and not evicted
                stays = np.asarray(pool.cached.is_published)
                stays = stays & np.asarray(self.cache.control.block_pools[g].cached.is_published)
                held |= {*np.flatnonzero(stays).tolist()}
            held = np.array(sorted(held - {pool.num_blocks}), int)
            for name, old in before.pools[g].arrays.items():
                new = np.asarray(self.cache.pools[g].arrays[name])
                for layer in range(self.config.groups[g].num_layers):
                    at = layer * pool.num_blocks + held
                    assert np.asarray(old)[at].tobytes() == new[at].tobytes()

    def free(self, *rows):
        self.cache, status = kv.free(self.cache, [*rows, *[ROWS] * (ROWS - len(rows))])
        assert statuses(status)[: len(rows)] == [OK] * len(rows)
        for row in rows:
            del self.texts[row]

    def num_free(self):
        return [int(pool.num_free) for pool in self.cache.control.block_pools]


def grown(texts):
    """Three rows of odd lengths on permuted tables, the first two of them texts to take chunks from."""
    texts.start([2, 3])
    texts.grow([0, 0, 5, 3])
    texts.start([0], reserved=30)
    texts.free(2)
    texts.start([1])
    texts.grow([11, 7, 0, 2])
    texts.grow([11, 10, 0, 4])
    texts.grow([5, 0, 0, 0])
    return texts


@pytest.mark.parametrize("options", BOTH, ids=["group", "groups"])
def test_chunks_stand_at_any_place_of_a_row(options):
    texts = grown(Texts(options))
    first, second, third = texts.store((0, 5, 11), (1, 3, 5), (0, 16, 9))
    assert texts.store((0, 5, 11)) == [first]  # the same prompt twice
    texts.start([2], reserved=7)
    # In another order, one of them twice, with gaps; row 3 goes on after its own tokens inside a block.
    assert texts.compose({2: [(third, 15), (second, 1), (first, 29)], 3: [(second, 9), (second, 15)]}) == [
        OK,
        OK,
    ]
    assert int(texts.cache.control.extras["chunks"].first_composed[2]) == 1
    texts.grow([0, 3, 1, 5])

    texts.free(0, 1)  # chunks outlive the rows that they came from
    texts.start([0])
    texts.grow([6, 0, 0, 1])
    texts.cache, status = kv.fork(texts.cache, [0], [1])
    texts.texts[1] = texts.texts[0]
    assert texts.compose({1: [(first, 6), (third, 17)]}) == [OK]  # after tokens that a fork shares
    texts.grow([2, 2, 0, 0])

    texts.cache, status = kv.chunks.free(texts.cache, [first, second, third, first, NUM_CHUNKS])
    assert statuses(status) == [OK, OK, OK, kv.Status.BAD_CHUNK_ID, SKIPPED]
    texts.check()
    texts.free(*texts.texts)
    assert_invariants(texts.cache)
    sizes = [group.num_blocks for group in texts.config.groups]
    assert [texts.num_free(), sizes][texts.config.enable_prefix_caching] == sizes


def test_chunks_that_stay_in_place_are_the_same_bit_for_bit():
    texts = grown(Texts())
    chunks = texts.store((0, 0, 13), (0, 13, 9))
    texts.start([2])
    assert texts.compose({2: [(chunks[0], 0), (chunks[1], 13)]}) == [OK]
    for source, copy in zip(contents(texts.cache, 0), contents(texts.cache, 2), strict=True):
        for old, new in zip(source, copy, strict=True):
            assert np.asarray(old)[:22].tobytes() == np.asarray(new)[:22].tobytes()
    # A chunk's keys are the original ones, so that what was composed is no source of chunks.
    names = np.zeros((4, MAX_CHUNK), int)
    cache, stored = store(texts.cache, *np.array([(2, 0, 5), *[(ROWS, 0, 5)] * 3]).T, names)
    assert statuses(stored.status)[0] == kv.Status.BAD_LENGTH
    assert_same(cache, texts.cache)


def test_a_chunk_shares_the_whole_blocks_of_its_span():
    texts = grown(Texts())
    before = texts.num_free()[0]
    [chunk] = texts.store((0, 3, 12))  # blocks of 4 tokens: 1, 4, 4, 3
    assert texts.num_free() == [before - 2]
    table, ids = (
        texts.cache.control.block_pools[0].block_table[0],
        texts.cache.control.extras["chunks"].block_ids[0][chunk],
    )
    assert ids[1:3].tolist() == table[1:3].tolist()
    # Of the chunk's blocks the row holds two, which the picture calls shared.
    assert kv.block_map(texts.cache).count(" #2") == 2 + 1  # one in the legend
    assert kv.block_map(texts.cache).splitlines()[-1] == "= held by an extra alone"
    # Who computes such tokens again gets blocks of its own.
    kept = np.asarray(texts.cache.pools[0].k)[np.asarray(ids[:4])].tobytes()
    texts.cache, step = kv.rewrite(texts.cache, [0], [[5, 9, 10]])
    assert statuses(step.status) == [OK]
    ones = np.ones((1, 3, KV_HEADS, DIM), np.float32)
    cache = kv.write(texts.cache, 0, ones, ones, step)
    assert np.asarray(cache.pools[0].k)[np.asarray(ids[:4])].tobytes() == kept
    assert_invariants(cache)


def test_what_cannot_be_composed_is_said_and_changes_nothing():
    texts = grown(Texts())
    texts.start([2], namespace=kv.namespace(tenant="b"))
    texts.grow([0, 0, 9, 0])
    first, second = texts.store((0, 5, 11), (1, 3, 5))
    [foreign] = texts.store((2, 0, 9))
    texts.free(1)
    status = kv.Status
    for row, chunks, outcome in [
        (2, [(first, 20)], status.BAD_CHUNK_ID),  # of another namespace
        (0, [(first, 28), (foreign, 40)], status.BAD_CHUNK_ID),
        (0, [(4, 30)], status.BAD_CHUNK_ID),  # nothing stored
        (0, [(-1, 30)], status.BAD_CHUNK_ID),
        (0, [(NUM_CHUNKS + 1, 30)], status.BAD_CHUNK_ID),
        (3, [(first, 9), (second, 19)], status.BAD_LENGTH),  # they overlap
        (3, [(second, 9), (second, 9)], status.BAD_LENGTH),
        (3, [(first, 8)], status.BAD_LENGTH),  # the row holds a token there
        (3, [(first, -1)], status.BAD_LENGTH),
        (3, [(second, -(2**31))], status.BAD_LENGTH),
        (3, [(first, 31)], status.TOO_LONG),
        (3, [(second, 2**31 - 1)], status.TOO_LONG),
        (1, [(first, 0)], status.SEQ_NOT_ACTIVE),
        (-1, [(first, 0)], status.BAD_SEQ_ID),
        (ROWS, [(first, 0)], status.SKIPPED),
        (1, [], OK),
    ]:
        before = testing.poison(texts.cache)
        assert texts.compose({row: chunks}) == [outcome], (row, chunks)
        assert_same(texts.cache, before)
    # Of a call the first fits, the second does not; a row that is named twice counts once.
    assert texts.compose({3: [(first, 30)], 2: [(foreign, 9)]}) == [OK, OK]
    ids = np.full((2, 3), NUM_CHUNKS)
    ids[:, 0] = foreign
    _, twice = compose(texts.cache, np.array([2, 2]), ids, np.full((2, 3), 20), rotate=ROTATE)
    assert statuses(twice) == [OK, status.DUPLICATE_SEQ_ID]


def test_what_cannot_be_stored_is_said_and_changes_nothing():
    texts = grown(Texts())
    short = np.zeros((4, 3), int)  # tokens that are too few
    assert statuses(store(texts.cache, [0, ROWS, ROWS, ROWS], [0] * 4, [4] * 4, short)[1].status) == [
        kv.Status.BAD_LENGTH,
        *[SKIPPED] * 3,
    ]
    status, names = kv.Status, np.arange(4 * MAX_CHUNK).reshape(4, MAX_CHUNK)
    for spans, outcomes in [
        ([(0, -1, 3), (0, 0, 0), (0, 20, MAX_CHUNK + 1), (0, 22, 6)], [status.BAD_LENGTH] * 4),
        (
            [(0, 2**31 - 1, 9), (2, 0, 1), (-1, 0, 1), (ROWS, 0, 1)],
            [status.BAD_LENGTH, status.SEQ_NOT_ACTIVE, status.BAD_SEQ_ID, SKIPPED],
        ),
    ]:
        cache, stored = store(texts.cache, *np.array(spans).T, names)
        assert statuses(stored.status) == outcomes
        assert stored.chunk_ids.tolist() == [NUM_CHUNKS] * 4
        assert_same(cache, texts.cache)


@pytest.mark.slow
def test_scarce_blocks_and_places_go_in_entry_order():
    texts = grown(Texts(num_blocks=19))
    assert texts.num_free() == [3]
    names = np.arange(4 * MAX_CHUNK).reshape(4, MAX_CHUNK)
    spans = np.array([(0, 3, 12), (1, 3, 12), (1, 4, 4), (1, 5, 2)])  # with 2, 2, 0 and 1 blocks to copy
    texts.cache, stored = store(texts.cache, *spans.T, names)
    out = kv.Status.OUT_OF_BLOCKS
    assert statuses(stored.status) == [OK, out, OK, OK]
    assert stored.chunk_ids.tolist() == [0, NUM_CHUNKS, 1, 2] and texts.num_free() == [0]
    texts.check()
    rows = np.array([3, ROWS])
    for chunks, starts, outcome in (
        ([0, 0, 0], [9, 21, 33], kv.Status.TOO_LONG),
        ([0, NUM_CHUNKS, NUM_CHUNKS], [9, 9, 9], out),
    ):
        cache, status = compose(texts.cache, rows, *np.array([[chunks] * 2, [starts] * 2]), rotate=ROTATE)
        assert statuses(status)[0] == outcome
    assert_same(cache, texts.cache)

    names = np.repeat(100 + np.arange(4)[:, None], MAX_CHUNK, axis=1)
    names[1] = names[0]
    spans = np.array([(0, 4, 4), (0, 4, 4), (0, 8, 4), (0, 12, 4)])  # of which the second is the first
    texts.cache, stored = store(texts.cache, *spans.T, names)
    assert statuses(stored.status) == [OK, OK, OK, kv.Status.OUT_OF_CHUNKS]
    assert stored.chunk_ids.tolist() == [3, 3, 4, NUM_CHUNKS]
    texts.check()


@pytest.mark.slow
def test_chunks_are_found_by_all_their_tokens_in_their_namespace():
    texts = grown(Texts())
    own, foreign = kv.namespace(), kv.namespace(tenant="b")
    texts.start([2], namespace=foreign)
    texts.texts[2] = texts.texts[0]  # the same tokens
    del texts.texts[2]
    [chunk] = texts.store((0, 5, 11))
    name = np.zeros((3, MAX_CHUNK), int)
    name[:, :11] = texts.texts[0][0][5:16]
    name[1, 10] += 1
    assert find(texts.cache, name, [11, 11, 10], own).tolist() == [chunk, NUM_CHUNKS, NUM_CHUNKS]
    assert find(texts.cache, name, [11, 11, 10], foreign).tolist() == [NUM_CHUNKS] * 3
    assert find(texts.cache, name, [0, -1, 2**31 - 1], own).tolist() == [NUM_CHUNKS] * 3


@pytest.mark.slow
def test_a_composed_row_publishes_what_is_in_front_alone():
    texts = grown(Texts(PUBLISHED))
    [chunk] = texts.store((0, 5, 11))
    prompt = np.zeros((1, MAX_LEN), int)
    texts.grow([0, 0, 0, 5])
    prompt[0, :14], prompt[0, 14:25] = texts.texts[3][0], texts.chunks[chunk][0]
    assert texts.compose({3: [(chunk, 14)]}) == [OK]
    texts.grow([0, 0, 0, 7])
    texts.cache, status = kv.commit(texts.cache)
    texts.check()
    assert kv.lookup(texts.cache, prompt, [30]).tolist() == [12]  # blocks of 3 and 4 tokens
    assert int(texts.cache.control.num_published[3]) == 4
    # Once its chunk is gone the row is a plain text again, and so is a fork of it.
    texts.cache, _ = kv.fork(texts.cache, [3], [2])
    assert int(texts.cache.control.extras["chunks"].first_composed[2]) == 15
    texts.cache, _ = kv.truncate(texts.cache, [3, 2], [14, 15])
    assert texts.cache.control.extras["chunks"].first_composed[2:4].tolist() == [15, 0]
    del texts.texts[3]
    assert_invariants(texts.cache)


@pytest.mark.slow
def test_evicted_prefixes_do_not_take_chunks_along():
    texts = grown(Texts(PUBLISHED))
    [chunk] = texts.store((0, 5, 11))
    texts.cache, _ = kv.commit(texts.cache)
    texts.free(0, 1, 3)
    for _ in range(9):
        texts.start([0, 1])
        texts.grow([11, 9, 0, 0])
        assert texts.compose({0: [(chunk, 12)], 1: [(chunk, 9), (chunk, 20)]}) == [OK, OK]
        texts.cache, _ = kv.commit(texts.cache)
        texts.free(0, 1)
    assert int(kv.stats(texts.cache).num_evictions) > 0


@pytest.mark.slow
def test_scrubbing_a_namespace_forgets_its_chunks_and_no_others():
    texts = grown(Texts(PUBLISHED))
    mine = kv.namespace(tenant="b")
    texts.start([2], namespace=mine)
    texts.grow([0, 0, 9, 0])
    theirs, whole, own = texts.store((0, 5, 11), (1, 0, 13), (2, 1, 8))
    texts.cache, status = kv.truncate(texts.cache, [1], [6])  # into a block that a chunk shares
    texts.texts[1] = tuple(x[:6] if x.ndim == 1 else x[:, :6] for x in texts.texts[1])
    texts.cache, _ = kv.scrub(texts.cache, namespace=mine)
    del texts.texts[2]
    assert texts.cache.control.extras["chunks"].length.tolist() == [11, 13, 0, 0, 0]
    texts.check()
    texts.start([2])
    assert texts.compose({2: [(theirs, 3), (whole, 19)]}) == [OK]


@pytest.mark.slow
def test_a_composed_row_that_is_computed_again_is_the_prefilled_one():
    """A model of two layers, in which what a token stores depends on all before it."""
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((2, DIM, 4, HEADS + 2 * KV_HEADS, DIM)).astype(np.float32)[:, :, 0] / 2
    embedding = rng.standard_normal((100, DIM)).astype(np.float32)

    @jax.jit
    def forward(cache, step, tokens):
        x = jnp.asarray(embedding)[tokens]
        for layer in range(2):
            heads = jnp.einsum("rtd,dhe->rthe", jnp.tanh(x), weights[layer])
            q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=2)
            q, k = ROTATE(q, step.positions), ROTATE(k, step.positions)
            cache, out = kv.attention(cache, layer, q, k, v, step)
            x = x + out.sum(axis=2)
        return cache, x

    texts, length = Texts(), 26
    prompt = rng.integers(100, size=(1, length))
    pieces = [(0, 13), (13, 6), (19, 7)]
    cache, _ = kv.allocate(texts.cache, [0, 1, 2, 3], [length] * 4)
    extend = jax.jit(kv.extend, static_argnames="max_new")
    cache, step = extend(cache, [0, length, 0, 0], max_new=length)
    cache, wanted = forward(cache, step, np.tile(prompt, (ROWS, 1)))
    cache, step = extend(cache, [length, 0, 0, 0], max_new=length)  # the pieces in another order
    shuffled = np.concatenate([prompt[:, a : a + n] for a, n in reversed(pieces)], axis=1)
    cache, _ = forward(cache, step, np.tile(shuffled, (ROWS, 1)))
    names = np.zeros((4, MAX_CHUNK), int)
    for i, (start, n) in enumerate(pieces):
        names[i, :n] = prompt[0, start : start + n]
    spans = np.array([(0, 13, 13), (0, 7, 6), (0, 0, 7), (ROWS, 0, 0)])
    cache, stored = store(cache, *spans.T, names)
    ids, starts = np.array([stored.chunk_ids.tolist()[:3]] * 2), np.array([[0, 13, 19]] * 2)
    cache, status = compose(cache, np.array([2, ROWS]), ids, starts, rotate=ROTATE)
    assert statuses(status)[0] == OK
    prefilled = contents(cache, 1)

    def differences(cache):
        pairs = zip(jax.tree.leaves(prefilled), jax.tree.leaves(contents(cache, 2)), strict=True)
        return max(float(jnp.abs(a - b)[:length].max()) for a, b in pairs)

    assert differences(cache) > 0.1
    indices = np.arange(length)[None]
    cache, step = jax.jit(kv.rewrite)(cache, [2], indices)
    cache, outputs = forward(cache, step, prompt)
    assert differences(cache) < 1e-4
    np.testing.assert_allclose(outputs[0], wanted[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_storing_and_composing_copies_no_pool_and_no_array_of_blocks():
    """Beside the pool it takes the memory of the rows in one layer."""
    num_blocks = 100_000

    def store_and_compose(cache):
        rows = jnp.arange(ROWS)
        cache, stored = kv.chunks.store(cache, rows, rows, rows + 5, jnp.zeros((ROWS, 9), jnp.int32))
        ids = stored.chunk_ids[:, None]
        return kv.chunks.compose(cache, rows, ids, ids + 20, rotate=ROTATE)

    config = Texts(num_blocks=8).config
    config = dataclasses.replace(config, num_blocks=num_blocks)
    cache = jax.eval_shape(lambda: kv.init(config))
    memory = compile_for_users(kv.donate(store_and_compose).lower(cache)).memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    of_rows = ROWS * MAX_LEN * 2 * KV_HEADS * DIM * 4
    assert beside < 8 * of_rows + 4 * num_blocks
    assert beside < 0.01 * kv.memory_bytes(config)
