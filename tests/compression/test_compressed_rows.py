"""Attention of rows that were compressed, against a dense reference of what each layer and head kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import assert_invariants, assert_same, changed_leaves, row_snapshot, statuses

ROWS, WIDTH, MAX_LEN, HEADS, KV_HEADS, DIM = 4, 5, 26, 4, 2, 3
NARROW = kv.FullAttention(KV_HEADS, DIM, block_size=2, num_blocks=44)
WIDE = kv.FullAttention(KV_HEADS, DIM)
ONE_GROUP = dict(layers=[WIDE] * 2)
TWO_GROUPS = dict(layers=[NARROW, WIDE, NARROW], enable_prefix_caching=True)  # blocks of 2 and 4 tokens
OK, BAD_LENGTH = kv.Status.OK, kv.Status.BAD_LENGTH


@kv.donate
def step(cache, q, k, v, num_new, tokens):
    cache, reserved = kv.extend(cache, num_new, max_new=WIDTH, tokens=tokens)
    outs = []
    for layer in range(cache.config.num_layers):
        cache, out = kv.attention(cache, layer, q[layer], k[layer], v[layer], reserved)
        outs.append(out)
    return cache, jnp.stack(outs), reserved


compress = jax.jit(kv.compression.compress)


class Texts:
    """Rows beside what each layer and head keeps of their texts."""

    def __init__(self, options, **sizes):
        sizes = dict(num_blocks=26, block_size=4, max_seqs=ROWS, max_seq_len=MAX_LEN) | sizes
        self.config = kv.CacheConfig(extras=[kv.compression.Dropping()], **options, **sizes)
        self.num_layers = self.config.num_layers
        self.cache, self.rng = kv.init(self.config), np.random.default_rng(0)
        self.k, self.v, self.kept = {}, {}, {}

    def start(self, rows):
        """Prompts without a common prefix."""
        prompt = np.arange(ROWS)[:, None] * 100 + np.arange(MAX_LEN)
        self.cache, admission = kv.allocate(self.cache, rows, [1] * len(rows), tokens=prompt[rows])
        assert statuses(admission.status) == [OK] * len(rows)
        for row in rows:
            self.k[row] = self.v[row] = np.zeros((self.num_layers, 0, KV_HEADS, DIM), np.float32)
            self.kept[row] = np.zeros((self.num_layers, KV_HEADS, 0), int)

    def grow(self, num_new):
        draw = self.rng.standard_normal
        q, k, v = (
            draw((self.num_layers, ROWS, WIDTH, n, DIM), np.float32) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        tokens = self.rng.integers(1000, size=(ROWS, WIDTH))
        self.cache, out, reserved = step(testing.poison(self.cache), q, k, v, np.array(num_new), tokens)
        assert statuses(reserved.status) == [OK] * ROWS
        for row, num in enumerate(num_new):
            if not num:
                continue
            first = self.k[row].shape[1]
            assert reserved.positions[row, :num].tolist() == list(range(first, first + num))
            self.k[row] = np.concatenate([self.k[row], k[:, row, :num]], axis=1)
            self.v[row] = np.concatenate([self.v[row], v[:, row, :num]], axis=1)
            new = np.broadcast_to(np.arange(first, first + num), (*self.kept[row].shape[:2], num))
            kept = self.kept[row] = np.concatenate([self.kept[row], new], axis=-1)
            for i in range(num):
                want = self.expected(row, first + i, q[:, row, i], kept[..., : kept.shape[2] - num + i + 1])
                got = out[:, row, i]
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=f"row {row}, new {i}")
        assert_invariants(self.cache)

    def expected(self, row, position, q, kept):
        """What the query at `position` sees in each layer, f32[layers, heads, d]; -1 is no token."""
        out = np.zeros((self.num_layers, HEADS, DIM))
        for layer in range(self.num_layers):
            for head in range(HEADS):
                seen = kept[layer, head // 2][kept[layer, head // 2] >= 0]
                assert (seen <= position).all()
                logits = self.k[row][layer, seen, head // 2].astype(float) @ q[layer, head] / np.sqrt(DIM)
                shares = np.exp(logits - logits.max())
                out[layer, head] = shares / shares.sum() @ self.v[row][layer, seen, head // 2]
        return out

    def compress(self, rows, num_keep, num_axes=2):
        """Compresses by random scores, of all layers and heads, of layers alone, or of rows."""
        num_keep, shape = np.array(num_keep), (self.num_layers, KV_HEADS)[:num_axes]
        scores = self.rng.standard_normal((ROWS, *shape, MAX_LEN), np.float32)
        before = testing.poison(self.cache)
        nobody = ROWS - len(rows)  # one program serves all
        padded = np.pad(num_keep, [(0, nobody)] + [(0, 0)] * (num_keep.ndim - 1))
        self.cache, status = compress(before, np.array([*rows, *[ROWS] * nobody]), scores, padded)
        assert_invariants(self.cache)
        full = scores.reshape(ROWS, *shape, *[1] * (2 - num_axes), MAX_LEN)
        full = np.broadcast_to(full, (ROWS, self.num_layers, KV_HEADS, MAX_LEN))
        per_layer = num_keep if num_keep.ndim == 2 else np.tile(num_keep[:, None], (1, self.num_layers))
        for i, row in enumerate(rows):
            if statuses(status)[i] != OK:
                continue
            new = np.full((self.num_layers, KV_HEADS, per_layer[i].max()), -1)
            for layer in range(self.num_layers):
                for head in range(KV_HEADS):
                    held, num = self.kept[row][layer, head], per_layer[i, layer]
                    place_scores = np.where(held >= 0, full[i, layer, head, : len(held)], -np.inf)
                    best = np.sort(np.argsort(-place_scores, kind="stable")[:num])
                    new[layer, head, new.shape[2] - num :] = held[best]
            self.kept[row] = new
        self.check_others(before, rows)
        return statuses(status)[: len(rows)]

    def check_others(self, before, rows):
        """Blocks that others held, or that were published, are as they were bit for bit."""
        for g, pool in enumerate(before.control.block_pools):
            table, num_blocks = np.asarray(pool.block_table), pool.num_blocks
            held = {*table[[row for row in range(ROWS) if row not in rows]].reshape(-1).tolist()}
            if pool.cached is not None:
                held |= {*np.flatnonzero(np.asarray(pool.cached.is_published)).tolist()}
            held = np.array(sorted(held - {num_blocks}), int)
            for name in before.pools[g].arrays:
                old, new = (np.asarray(c.pools[g].arrays[name]) for c in (before, self.cache))
                for layer in range(self.config.groups[g].num_layers):
                    at = layer * num_blocks + held
                    assert old[at].tobytes() == new[at].tobytes()

    def fork(self, source, target):
        self.cache, status = kv.fork(self.cache, [source], [target])
        assert statuses(status) == [OK]
        for held in (self.k, self.v, self.kept):
            held[target] = held[source].copy()

    def num_free(self):
        return [int(pool.num_free) for pool in self.cache.control.block_pools]


@pytest.mark.parametrize(
    "options", [ONE_GROUP, pytest.param(TWO_GROUPS, marks=pytest.mark.slow)], ids=["group", "groups"]
)
def test_each_layer_and_head_keeps_its_own_tokens(options):
    """In private blocks, in a fork's and in published ones; twice, and with tokens after."""
    texts = Texts(options, num_blocks=13 if options is ONE_GROUP else 26)
    texts.start([2, 0, 1])
    for num_new in ([5, 5, 3, 0], [5, 4, 0, 0], [5, 5, 4, 0], [4, 0, 0, 0]):
        texts.grow(num_new)
    if texts.config.enable_prefix_caching:
        texts.cache, _ = kv.commit(texts.cache, [1])
    texts.fork(0, 3)
    if options is ONE_GROUP:  # row 0 shares its blocks, wants 3 and there are 2; the others give back 1 and 2
        assert texts.num_free() == [2]
        before = row_snapshot(texts.cache, 0)
        assert texts.compress([0, 2, 1], [9, 4, 5]) == [kv.Status.OUT_OF_BLOCKS, OK, OK]
        assert texts.num_free() == [5] and row_snapshot(texts.cache, 0) == before
        assert texts.compress([0], [9]) == [OK] and texts.num_free() == [2]
    else:
        assert texts.compress([0, 2, 1], [9, 4, 5]) == [OK] * 3
    assert np.asarray(texts.cache.context_len).tolist() == [9, 5, 4, 19]
    texts.grow([5, 3, 2, 1])
    assert texts.compress([3, 0, 1], [1, 7, 8]) == [OK] * 3  # row 1 keeps all
    texts.grow([1, 5, 5, 5])
    texts.cache, status = kv.truncate(texts.cache, [0, 2], [7, 4])
    assert statuses(status) == [OK] * 2
    for row, length in ((0, 7), (2, 4)):
        texts.kept[row] = texts.kept[row][..., :length]
        text_len = length + int(texts.cache.control.holes.num_dropped[row])
        for held in (texts.k, texts.v):
            held[row] = held[row][:, :text_len]
    texts.grow([2, 1, 3, 0])
    fails(texts)


def fails(texts):
    """Keeping everything changes no bit, and failures neither."""
    shape = (ROWS, texts.num_layers, KV_HEADS, MAX_LEN)
    scores = np.float32(np.random.default_rng(0).standard_normal(shape))
    texts.cache, _ = kv.free(texts.cache, [3])
    length = int(texts.cache.context_len[1])
    rows, names = [1, 1, 3, -1], ["DUPLICATE_SEQ_ID", "SEQ_NOT_ACTIVE", "BAD_SEQ_ID"]
    for num_keep, first in (
        (length, "OK"),
        (0, "BAD_LENGTH"),
        (length + 1, "BAD_LENGTH"),
        (-1, "BAD_LENGTH"),
    ):
        cache, status = compress(texts.cache, np.array(rows), scores, np.full(ROWS, num_keep))
        assert [kv.Status(code).name for code in status.tolist()] == [first, *names]
        assert_same(texts.cache, cache)


def test_a_row_that_lost_tokens_in_one_group_alone_is_not_as_computed():
    """One group keeps all 16 tokens, the other six of them: all have places, and not all are there."""
    sizes = dict(num_blocks=24, block_size=4, max_seqs=2, max_seq_len=28)
    extras = [kv.compression.Dropping(), kv.chunks.Store(2, 8)]
    cache, _ = kv.allocate(kv.init(kv.CacheConfig([NARROW, WIDE], extras=extras, **sizes)), [0], [16])
    cache, _ = kv.extend(cache, [16, 0], max_new=16)
    cache, status = kv.compression.compress(cache, [0], np.zeros((1, 28), np.float32), [[6, 16]])
    assert statuses(status) == [OK]
    assert_invariants(cache)
    stored = kv.chunks.store(cache, [0], [4], [8], [range(8)])[1]
    assert statuses(stored.status) == statuses(kv.truncate(cache, [0], [9])[1]) == [BAD_LENGTH]
    cache, _ = kv.extend(cache, [6, 0], max_new=6)
    for start, expected in ((15, BAD_LENGTH), (17, BAD_LENGTH), (16, OK)):
        dropped, status = kv.compression.drop(cache, [0], [start], [4])
        assert statuses(status) == [expected]
    assert_invariants(dropped)
    cache, status = kv.truncate(dropped, [0], [0])
    assert statuses(status) == [OK] and not np.asarray(cache.control.holes.first).any()


@pytest.mark.slow
def test_groups_of_layers_keep_as_many_as_their_budgets_say():
    """As PyramidKV has it: each group holds as many blocks as its own number asks for."""
    texts = Texts(TWO_GROUPS)
    texts.start([0, 1, 2, 3])
    for num_new in ([5, 5, 3, 5], [5, 4, 0, 5], [5, 5, 4, 5], [4, 0, 0, 1]):
        texts.grow(num_new)
    keep = [[3, 9, 3], [11, 2, 11], [2, 7, 3], [0, 5, 0]]
    assert texts.compress([0, 1, 2, 3], keep) == [OK, OK, BAD_LENGTH, BAD_LENGTH]
    tables = [np.asarray(pool.block_table) for pool in texts.cache.control.block_pools]
    num_held = [(table[:2] < size).sum(axis=1).tolist() for table, size in zip(tables, (44, 26), strict=True)]
    assert num_held == [[2, 6], [3, 1]]  # places 6 to 8 of 9 in blocks of 2, and 9 and 10 of 11 in one of 4
    texts.grow([5, 3, 1, 2])
    assert texts.compress([1, 0], [[4, 4, 4], [8, 10, 8]]) == [OK, OK]
    texts.grow([3, 2, 0, 1])
    assert texts.compress([1], [[6, 6, 6]], num_axes=1) == [OK]
    texts.cache, status = kv.free(texts.cache, [0, 1, 2, 3])
    assert texts.num_free() == [44, 26]


@pytest.mark.slow
def test_scores_of_layers_and_of_rows():
    texts = Texts(ONE_GROUP)
    texts.start([0, 1])
    for num_new in ([5, 5, 0, 0], [5, 1, 0, 0], [3, 0, 0, 0]):
        texts.grow(num_new)
    assert texts.compress([0, 1], [9, 5], num_axes=1) == [OK] * 2
    texts.grow([2, 2, 0, 0])
    assert texts.compress([0, 1], [10, 2], num_axes=0) == [OK] * 2
    texts.grow([2, 2, 0, 0])


@pytest.mark.slow
def test_private_blocks_serve_again_and_the_others_go_back():
    """Blocks that `allocate` reserved stay; of the prefix that stays in front the blocks do too."""
    texts = Texts(TWO_GROUPS)
    prompt = np.arange(MAX_LEN)[None]
    texts.cache, _ = kv.allocate(texts.cache, [0], [24], tokens=prompt)
    texts.cache, _ = kv.extend(texts.cache, [18, 0, 0, 0], max_new=18, tokens=np.tile(prompt[:, :18], (4, 1)))
    texts.cache, _ = kv.commit(texts.cache)
    before = [np.asarray(pool.block_table)[0] for pool in texts.cache.control.block_pools]
    scores = np.zeros((1, MAX_LEN), np.float32)
    scores[0, :6] = 2  # the first block of 4, and half of the second
    scores[0, 13:] = 1
    cache, _ = kv.compression.compress(texts.cache, [0], scores, [9])  # 0 to 5, 13, 14, 15
    after = [np.asarray(pool.block_table)[0] for pool in cache.control.block_pools]
    assert_invariants(cache)
    # In blocks of 2: columns 0 and 1 are published and stay, 2 to 4 are new ones but for what was private.
    assert after[0][:2].tolist() == before[0][:2].tolist()
    assert after[1][0] == before[1][0] and before[1][4] in after[1][1:3]
    for old, new, num_gone in ((before[0], after[0], 9 - 5), (before[1], after[1], 5 - 3)):
        num_reserved = int((old < 44).sum()) if old is before[0] else int((old < 26).sum())
        assert int((new < (44 if old is before[0] else 26)).sum()) == num_reserved - num_gone
    assert int(cache.control.num_published[0]) == 2  # of the group of narrow blocks
    cache, _ = kv.commit(cache)
    assert int(cache.control.num_published[0]) == 2
    # A row with the same prompt finds all that was published.
    assert kv.lookup(cache, prompt, [18]).tolist() == [16]
    refused = kv.rewrite(cache, [0, 0], [[0, 5], [6, 9]])[1].status
    assert statuses(refused) == [BAD_LENGTH, kv.Status.DUPLICATE_SEQ_ID]
    assert statuses(kv.rewrite(cache, [0], [[0, 3]])[1].status) == [OK]
    for length, expected in ((4, OK), (5, BAD_LENGTH), (8, BAD_LENGTH), (9, OK), (3, OK)):
        assert statuses(kv.truncate(cache, [0], [length])[1]) == [expected]


@pytest.mark.slow
def test_what_was_compressed_is_dropped_from_behind_only():
    config = kv.CacheConfig(
        [WIDE], extras=[kv.compression.Dropping()], num_blocks=8, block_size=4, max_seqs=2, max_seq_len=28
    )
    cache, _ = kv.allocate(kv.init(config), [0], [20])
    cache, _ = kv.extend(cache, [20, 0], max_new=20)
    cache, _ = kv.compression.compress(cache, [0], np.arange(28, dtype=np.float32)[None], [7])
    cache, reserved = kv.extend(cache, [9, 0], max_new=9)
    assert reserved.positions[0].tolist() == list(range(20, 29))
    assert reserved.cache_positions[0].tolist() == list(range(7, 16))
    for start, length, expected in (
        (6, 20, BAD_LENGTH),
        (0, 3, BAD_LENGTH),
        (22, 2, BAD_LENGTH),
        (7, 13, BAD_LENGTH),  # where tokens stand that were kept
        (10, 4, BAD_LENGTH),
        (19, 7, BAD_LENGTH),
        (20, 6, OK),
    ):
        dropped, status = kv.compression.drop(cache, [0], [start], [length])
        assert statuses(status) == [expected]
    assert_invariants(dropped)
    assert int(dropped.context_len[0]) == 12 and int(dropped.control.holes.num_dropped[0]) == 17
    assert kv.extend(dropped, [1, 0], max_new=1)[1].positions[0].tolist() == [29]
    for start, length, expected in ((25, 3, BAD_LENGTH), (26, 2, OK)):
        _, status = kv.compression.drop(dropped, [0], [start], [length])
        assert statuses(status) == [expected]
    # Rows that stream to give blocks back go on after what was kept.
    streaming = kv.compression.Streaming(window=4, num_sink_tokens=2)
    gave, rows = kv.compression.drop_to_utilization(cache, 0.0, streaming=streaming)
    assert rows.tolist() == [0, 2] and int(gave.context_len[0]) == 12
    assert_invariants(gave)
    cache, status = kv.compression.compress(dropped, [0], np.arange(28, dtype=np.float32)[None], [11])
    assert statuses(status) == [BAD_LENGTH]  # 2 of the 12 are hidden
    cache, status = kv.compression.compress(dropped, [0], np.arange(28, dtype=np.float32)[None], [10])
    assert statuses(status) == [OK] and not changed_leaves(dropped, cache)


def test_what_cannot_be_compressed():
    sizes = dict(num_blocks=8, block_size=4, max_seqs=2, max_seq_len=28)
    plain = kv.init(kv.CacheConfig([WIDE] * 2, **sizes))
    cache = kv.init(kv.CacheConfig([WIDE] * 2, extras=[kv.compression.Dropping()], **sizes))
    window = kv.init(
        kv.CacheConfig([WIDE, kv.SlidingWindow(1, 4, window=3)], extras=[kv.compression.Dropping()], **sizes)
    )
    scores = np.zeros((1, 28), np.float32)
    with pytest.raises(
        ValueError, match="compress got a cache whose rows cannot drop tokens, expected one built"
    ):
        kv.compression.compress(plain, [0], scores, [3])
    with pytest.raises(NotImplementedError, match="compress got SlidingWindow\\(3\\) layers, expected"):
        kv.compression.compress(window, [0], scores, [3])
    with pytest.raises(ValueError, match="scores has shape \\(1, 27\\), expected \\(1, 28\\)"):
        kv.compression.compress(cache, [0], scores[:, :27], [3])
    with pytest.raises(ValueError, match="and 3 layers, expected 2"):
        kv.compression.compress(cache, [0], np.zeros((1, 3, 28), np.float32), [3])
    with pytest.raises(ValueError, match="scores has 4 heads, expected 2, as the array 'k' of FullAttention"):
        kv.compression.compress(cache, [0], np.zeros((1, 2, 4, 28), np.float32), [3])
    with pytest.raises(TypeError, match="scores has dtype int"):
        kv.compression.compress(cache, [0], np.zeros((1, 28), np.int32), [3])
    with pytest.raises(ValueError, match="num_keep has shape \\(2,\\), expected \\(1,\\)"):
        kv.compression.compress(cache, [0], scores, [3, 4])
    with pytest.raises(ValueError, match="num_keep has a number per layer, and the layers are one group"):
        kv.compression.compress(cache, [0], scores, [[3, 4]])


@pytest.mark.newest
def test_heads_on_explicit_axes_are_scored_and_each_keeps_its_own():
    """Scores are split as the heads, or whole; one device chooses and keeps the same tokens."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,))
    config = kv.CacheConfig(
        [WIDE], extras=[kv.compression.Dropping()], num_blocks=8, block_size=4, max_seqs=2, max_seq_len=16
    )
    rng = np.random.default_rng(0)
    q, k, covariance = (
        rng.standard_normal(shape, np.float32) for shape in ((2, 9, 4, 3), (2, 9, 2, 3), (2, 4, 3, 3))
    )

    def compressed(put, sharding=None):
        cache, _ = kv.allocate(kv.init(config, sharding=sharding), [0, 1], [9, 7])
        cache, reserved = kv.extend(cache, [9, 7], max_new=9)
        cache = kv.write(cache, 0, put(k, 2), put(k, 2), reserved)
        queries = put(q[:, 0], 1), put(covariance, 1)
        scores = kv.compression.token_scores(
            cache, 0, put(q, 2), reserved, "expected attention", queries=queries
        )
        for given in (scores[:, None], np.asarray(scores[:, None])):
            after, status = compress(cache, np.array([0, 1]), given, np.array([7, 6]))
            assert statuses(status) == [OK] * 2
            yield from (scores, *(kv.gather(after, row, 0)[0] for row in (0, 1)))

    def split(x, position):
        return jax.device_put(x, NamedSharding(mesh, P(*[None] * position, "heads")))

    alone = compressed(lambda x, _: jnp.asarray(x))
    for one, other in zip(alone, compressed(split, NamedSharding(mesh, P(None, "heads"))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
