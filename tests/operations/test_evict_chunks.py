"""Uses of chunks and their eviction, against a store in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_invariants, statuses

ROWS, MAX_LEN, NUM_CHUNKS, MAX_CHUNK, ENTRIES = 3, 40, 6, 6, 3
LAYER = kv.FullAttention(1, 8)
CONFIG = kv.CacheConfig(
    [LAYER],
    num_blocks=40,
    block_size=4,
    max_seqs=ROWS,
    max_seq_len=MAX_LEN,
    extras=[kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK)],
)
# Passages of rows 0 and 1: first place and length.
SPANS = [(0, 4), (5, 6), (17, 5), (0, 6)]
OK = kv.Status.OK

pytestmark = pytest.mark.slow


def passage(row, start, length):
    places = np.arange(MAX_CHUNK)
    return np.where(places < length, 100 * row + start + places, 0)


class Store:
    """A cache of rows 0 and 1 with texts, beside what its store holds."""

    def __init__(self):
        cache = kv.init(CONFIG, storage=False)
        cache, _ = kv.allocate(cache, [0, 1], [24, 24], namespace=jnp.stack([kv.namespace()] * 2))
        self.cache, _ = kv.extend(cache, [24, 24, 0], max_new=24)
        self.chunks = {}  # id: (row, start, length, uses, clock of the last one)

    def check(self):
        assert_invariants(self.cache)
        chunks = self.cache.control.extras["chunks"]
        assert chunks is not None
        assert np.flatnonzero(chunks.length).tolist() == sorted(self.chunks)
        for id_, (row, start, length, uses, last) in self.chunks.items():
            assert chunks.tokens[id_].tolist() == passage(row, start, length).tolist()
            assert (int(chunks.length[id_]), int(chunks.start[id_])) == (length, start)
            assert (int(chunks.num_uses[id_]), int(chunks.last_used[id_])) == (uses, last)

    def num_free(self):
        return int(self.cache.control.block_pools[0].num_free)

    def find(self, row, nth):
        start, length = SPANS[nth]
        ids = [id_ for id_, chunk in self.chunks.items() if chunk[:3] == (row, start, length)]
        return ids[0] if ids else NUM_CHUNKS

    def store(self, *entries):
        """Stores entries (row, nth span)."""
        want, taken = [], {}
        empty = [i for i in range(NUM_CHUNKS) if i not in self.chunks]
        for entry in entries:
            if (there := self.find(*entry)) < NUM_CHUNKS:
                taken[entry] = there
            elif entry not in taken:
                taken[entry] = empty.pop(0) if empty else NUM_CHUNKS
            is_stored = taken[entry] < NUM_CHUNKS
            want.append((OK if is_stored else kv.Status.OUT_OF_CHUNKS, taken[entry]))
        spans = [(row, *SPANS[nth]) for row, nth in entries]
        names = np.stack([passage(*span) for span in spans])
        self.cache, stored = store(self.cache, *np.array(spans).T, names)
        assert list(zip(statuses(stored.status), stored.chunk_ids.tolist(), strict=True)) == want
        clock = int(self.cache.control.clock)
        for (row, nth), id_ in taken.items():
            if id_ < NUM_CHUNKS:
                self.chunks.setdefault(id_, (row, *SPANS[nth], 0, clock))
        self.check()

    def use(self, ids):
        """Composes row 2 of chunks, one after the other."""
        self.cache, _ = kv.allocate(self.cache, [2, ROWS], [1, 0])
        ids = [id_ for id_ in ids if id_ in self.chunks][:3]
        starts = np.cumsum([0, *(self.chunks[id_][2] for id_ in ids)])[:3]
        padded = np.array([ids + [NUM_CHUNKS] * (3 - len(ids))])
        starts = np.array([[*starts[: len(ids)], *[0] * (3 - len(ids))]])
        self.cache, status = compose(self.cache, [2], padded, starts, rotate=None)
        assert statuses(status) == [OK]
        clock = int(self.cache.control.clock)
        for id_ in ids:
            *rest, uses, _ = self.chunks[id_]
            self.chunks[id_] = *rest, uses + 1, clock
        self.check()
        self.cache, _ = kv.free(self.cache, [2, ROWS])

    def evict(self, num_places, keep=()):
        clock = int(self.cache.control.clock)
        may_go = [i for i in self.chunks if i not in keep]
        order = sorted(
            may_go, key=lambda i: (self.chunks[i][3] * self.chunks[i][2], -(clock - self.chunks[i][4]), i)
        )
        num = max(num_places - (NUM_CHUNKS - len(self.chunks)), 0)
        num = num if num <= len(order) else 0
        kept = np.array([*keep, *[NUM_CHUNKS] * (2 - len(keep))])
        self.cache, num_evicted = evict(self.cache, num_places, keep=kept)
        assert int(num_evicted) == num
        for id_ in order[:num]:
            del self.chunks[id_]
        self.check()


store, evict = jax.jit(kv.chunks.store), jax.jit(kv.chunks.evict)
compose = jax.jit(kv.chunks.compose, static_argnames="rotate")


def test_a_random_script_of_uses_and_evictions():
    rng, kept = np.random.default_rng(0), Store()
    for _ in range(120):
        what = rng.choice(["store", "use", "evict", "free"], p=[0.45, 0.25, 0.2, 0.1])
        if what == "store":
            kept.store(*map(tuple, rng.integers([2, 4], size=(ENTRIES, 2)).tolist()))
        elif what == "use":
            kept.use(rng.permutation(NUM_CHUNKS)[: rng.integers(1, 4)].tolist())
        elif what == "evict":
            kept.evict(
                int(rng.integers(NUM_CHUNKS + 2)), rng.permutation(NUM_CHUNKS)[: rng.integers(3)].tolist()
            )
        elif kept.chunks:
            id_ = int(rng.choice(list(kept.chunks)))
            kept.cache, status = kv.chunks.free(kept.cache, [id_])
            assert statuses(status) == [OK]
            del kept.chunks[id_]
            kept.check()
    kept.cache, status = kv.chunks.free(kept.cache, list(kept.chunks))
    kept.cache, _ = kv.free(kept.cache, [0, 1])
    assert_invariants(kept.cache)
    assert int(kept.cache.control.block_pools[0].num_free) == CONFIG.num_blocks


def test_chunks_are_evicted_for_blocks_that_nobody_else_holds():
    kept = Store()
    kept.store((0, 0), (0, 1), (1, 2))  # a block of row 0, two copies, two copies
    kept.use([0, 1, 2])
    kept.use([2])
    before = kept.num_free()
    cases = [
        (0, NUM_CHUNKS, 0),
        (1, 3, 2),
        (2, 3, 2),
        (3, 3, 3),
        (4, 3, 3),
        (5, 3, 0),
        (1, 1, 2),
        (2, 2, 2),
        (3, 2, 0),
    ]
    for num_more, keep, num_gone in cases:
        cache, num_evicted = evict(kept.cache, 0, num_blocks=before + num_more, keep=np.array([keep] * 2))
        assert int(num_evicted) == num_gone, (num_more, keep)
        assert_invariants(cache)
        assert int(cache.control.block_pools[0].num_free) >= before + num_more * (num_gone > 0)


def test_the_least_uses_times_tokens_go_first_and_then_the_oldest_use():
    kept = Store()
    kept.store((0, 0), (0, 1), (1, 1))  # of 4, 6 and 6 tokens
    for id_ in (2, 1, 0):
        kept.use([id_])
    for num_left, left in [(2, {1, 2}), (1, {1}), (0, set())]:
        kept.evict(NUM_CHUNKS - num_left)
        assert {*kept.chunks} == left


def test_a_block_of_two_chunks_is_free_once_both_are_gone():
    kept = Store()
    kept.store((0, 0), (0, 3), (1, 2))
    kept.cache, _ = kv.free(kept.cache, [0])
    before = kept.num_free()
    cache, num_evicted = evict(kept.cache, 0, num_blocks=before + 2, keep=np.array([2, NUM_CHUNKS]))
    assert int(num_evicted) == 2 and int(cache.control.block_pools[0].num_free) == before + 2
    assert_invariants(cache)
