"""Variants of chunks, their choice, and eviction, against a store in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_invariants, statuses

ROWS, MAX_LEN, NUM_CHUNKS, MAX_CHUNK, BEFORE, VARIANTS, ENTRIES = 3, 40, 6, 6, 3, 2, 3
LAYER = kv.FullAttention(1, 8)
CONFIG = kv.CacheConfig(
    [LAYER],
    num_blocks=40,
    block_size=4,
    max_seqs=ROWS,
    max_seq_len=MAX_LEN,
    num_chunks=NUM_CHUNKS,
    max_chunk_len=MAX_CHUNK,
    max_chunks_before=BEFORE,
    max_chunk_variants=VARIANTS,
)
# Passages of rows 0 and 1: first place and length.
SPANS = [(0, 4), (5, 6), (17, 5), (0, 6)]
OK, SKIPPED = kv.Status.OK, kv.Status.SKIPPED

pytestmark = pytest.mark.slow


def passage(row, start, length):
    places = np.arange(MAX_CHUNK)
    return np.where(places < length, 100 * row + start + places, 0)


def digests(*numbers):
    """Digests of chunks in front by small numbers, u32[BEFORE, 2]."""
    found = np.zeros((BEFORE, 2), np.uint32)
    for i, number in enumerate(numbers):
        found[i] = number, 1
    return found


def stats_of(entries):
    """Statistics of entries (a, b, chunks in front, attention to them)."""
    columns = dict(a=[], b=[], attention=[], before=[], inter=[])
    for a, b, before, inter in entries:
        columns["a"].append(a)
        columns["b"].append(b)
        columns["attention"].append(np.arange(MAX_CHUNK) * a)
        columns["before"].append(digests(*before))
        columns["inter"].append(np.pad(np.array(inter, float), (0, BEFORE - len(inter))))
    types = dict(before=jnp.uint32)
    return kv.ChunkStats(
        **{name: jnp.asarray(np.array(x), types.get(name, jnp.float32)) for name, x in columns.items()}
    )


class Store:
    """A cache of rows 0 and 1 with texts, beside what its store holds."""

    def __init__(self):
        cache = kv.init(CONFIG, storage=False)
        cache, _ = kv.allocate(cache, [0, 1], [24, 24], namespace=jnp.stack([kv.namespace()] * 2))
        self.cache, _ = kv.extend(cache, [24, 24, 0], max_new=24)
        self.chunks = {}  # id: (row, start, length, stats entry, uses, clock of the last one)

    def check(self):
        assert_invariants(self.cache)
        chunks = self.cache.control.chunks
        assert chunks is not None
        assert np.flatnonzero(chunks.length).tolist() == sorted(self.chunks)
        for id_, (row, start, length, stats, uses, last) in self.chunks.items():
            assert chunks.tokens[id_].tolist() == passage(row, start, length).tolist()
            assert (int(chunks.length[id_]), int(chunks.start[id_])) == (length, start)
            assert (int(chunks.num_uses[id_]), int(chunks.last_used[id_])) == (uses, last)
            one = jax.tree.map(lambda x: x[0], stats_of([stats]))
            of_store = jax.tree.map(lambda x, i=id_: x[i], chunks.stats)
            jax.tree.map(np.testing.assert_array_equal, of_store, one)

    def num_free(self):
        return int(self.cache.control.block_pools[0].num_free)

    def namesakes(self, *span):
        return [i for i, chunk in sorted(self.chunks.items()) if chunk[:3] == span]

    def best(self, ids, before):
        """Chooses by the share to compute again, then by chunks in front again, then by id."""
        padded = np.array([*ids, *[NUM_CHUNKS] * (VARIANTS - len(ids))])
        shares = overhead(self.cache, padded, np.stack([digests(*before)] * VARIANTS)).tolist()
        common = [len({*self.chunks[i][3][2]} & {*before}) for i in ids]
        return min(zip(shares, [-x for x in common], ids, strict=False))[2] if ids else NUM_CHUNKS

    def store(self, entries):
        """Stores entries (row, nth span, statistics)."""
        spans = [(row, *SPANS[nth]) for row, nth, _ in entries]
        names = np.stack([passage(*span) for span in spans])
        want, taken, leaders = [], {}, {}
        empty = [i for i in range(NUM_CHUNKS) if i not in self.chunks]
        for (row, start, length), (_, _, stats) in zip(spans, entries, strict=True):
            there = self.namesakes(row, start, length)
            new = leaders.setdefault((row, start, length), {})
            same = [i for i in there if self.chunks[i][3][2] == stats[2]]
            if same:
                want.append((OK, same[0]))
            elif stats[2] in new:
                want.append(new[stats[2]])
            elif len(there) + len(new) >= VARIANTS:
                want.append((OK, self.best(there, stats[2])) if there else next(iter(new.values())))
            else:
                id_ = empty.pop(0) if empty else NUM_CHUNKS
                new[stats[2]] = (OK, id_) if id_ < NUM_CHUNKS else (kv.Status.OUT_OF_CHUNKS, NUM_CHUNKS)
                want.append(new[stats[2]])
                if id_ < NUM_CHUNKS:
                    taken[id_] = row, start, length, stats, 0, int(self.cache.control.clock)
        columns = np.array(spans).T
        self.cache, stored = store(
            self.cache, *columns, names, stats=stats_of([stats for *_, stats in entries])
        )
        assert list(zip(statuses(stored.status), stored.chunk_ids.tolist(), strict=True)) == want
        self.chunks |= taken
        self.check()

    def find(self, row, nth, before):
        name = passage(row, *SPANS[nth])[None]
        got = find(self.cache, name, [SPANS[nth][1]], before=digests(*before)[None])
        assert got.tolist() == [self.best(self.namesakes(row, *SPANS[nth]), before)]
        return int(got[0])

    def use(self, ids):
        """Composes row 2 of chunks, one behind the other."""
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
            may_go, key=lambda i: (self.chunks[i][4] * self.chunks[i][2], -(clock - self.chunks[i][5]), i)
        )
        num = max(num_places - (NUM_CHUNKS - len(self.chunks)), 0)
        num = num if num <= len(order) else 0
        kept = np.array([*keep, *[NUM_CHUNKS] * (2 - len(keep))])
        self.cache, num_evicted = evict(self.cache, num_places, keep=kept)
        assert int(num_evicted) == num
        for id_ in order[:num]:
            del self.chunks[id_]
        self.check()


store, find, evict = jax.jit(kv.store_chunk), jax.jit(kv.find_chunks), jax.jit(kv.evict_chunks)
compose, overhead = jax.jit(kv.compose, static_argnames="rotate"), jax.jit(kv.chunk_overhead)
BEHIND = [((), ()), ((1,), (4,)), ((1, 2), (2, 1)), ((2, 1), (1, 1)), ((3,), (1,))]


def test_a_random_script_of_variants():
    rng, kept = np.random.default_rng(0), Store()
    for _ in range(120):
        what = rng.choice(["store", "find", "use", "evict", "free"], p=[0.35, 0.25, 0.2, 0.12, 0.08])
        if what == "store":
            entries = []
            for _ in range(ENTRIES):
                before, inter = BEHIND[rng.integers(len(BEHIND))]
                stats = float(rng.choice([0.25, 1])), float(rng.choice([0, 0.5, 1])), before, inter
                entries.append((int(rng.integers(2)), int(rng.integers(2)), stats))
            kept.store(entries)
        elif what == "find":
            kept.find(int(rng.integers(2)), int(rng.integers(2)), BEHIND[rng.integers(len(BEHIND))][0])
        elif what == "use":
            kept.use(rng.permutation(NUM_CHUNKS)[: rng.integers(1, 4)].tolist())
        elif what == "evict":
            kept.evict(
                int(rng.integers(NUM_CHUNKS + 2)), rng.permutation(NUM_CHUNKS)[: rng.integers(3)].tolist()
            )
        elif kept.chunks:
            id_ = int(rng.choice(list(kept.chunks)))
            kept.cache, status = kv.free_chunks(kept.cache, [id_])
            assert statuses(status) == [OK]
            del kept.chunks[id_]
            kept.check()
    kept.cache, status = kv.free_chunks(kept.cache, list(kept.chunks))
    kept.cache, _ = kv.free(kept.cache, [0, 1])
    assert_invariants(kept.cache)
    assert int(kept.cache.control.block_pools[0].num_free) == CONFIG.num_blocks


def test_the_variant_that_fits_best_is_found():
    kept = Store()
    one, both = (0.5, 0.5, (1,), (8,)), (0.5, 0.5, (1, 2), (6, 2))
    kept.store([(0, 1, one), (0, 1, both), (0, 1, (0.5, 0.5, (3,), (1,)))])  # of which a third has no room
    assert len(kept.chunks) == 2
    assert [kept.find(0, 1, before) for before in [(1,), (1, 2), (2, 1), (1, 3), (3,), ()]] == [
        0,
        1,
        0,
        0,
        0,
        0,
    ]
    impact = 1 / (1 + np.exp(-1))
    before = np.stack([digests(1, 2), digests(2, 1), digests(1), digests()])
    shares = kv.chunk_overhead(kept.cache, [1, 1, 1, 1], before)
    np.testing.assert_allclose(shares, [0, impact, impact / 4, impact], rtol=1e-6)
    doubled = kv.chunk_overhead(kept.cache, [1, 0, 3, NUM_CHUNKS], before, alpha=2)
    np.testing.assert_allclose(doubled, [0, 0, 1, 1], rtol=1e-6)
    # What nothing is known of is all to be computed again.
    kept.store([(1, 1, (0.0, 0.0, (), ())), (1, 1, (0.5, 0.5, (2,), (8,))), (1, 1, (0.0, 0.0, (), ()))])
    assert kept.find(1, 1, (1,)) == 3 and kv.chunk_overhead(kept.cache, [2], before[:1]).tolist() == [1]


def test_chunks_are_evicted_for_blocks_that_nobody_else_holds():
    kept, nothing = Store(), (0.0, 0.0, (), ())
    kept.store(
        [(0, 0, nothing), (0, 1, nothing), (1, 2, nothing)]
    )  # a block of row 0, two copies, two copies
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
    kept, nothing = Store(), (0.0, 0.0, (), ())
    kept.store([(0, 0, nothing), (0, 1, nothing), (1, 1, nothing)])  # of 4, 6 and 6 tokens
    for id_ in (2, 1, 0):
        kept.use([id_])
    for num_left, left in [(2, {1, 2}), (1, {1}), (0, set())]:
        kept.evict(NUM_CHUNKS - num_left)
        assert {*kept.chunks} == left


def test_a_block_of_two_chunks_is_free_once_both_are_gone():
    kept, nothing = Store(), (0.0, 0.0, (), ())
    kept.store([(0, 0, nothing), (0, 3, nothing), (1, 2, nothing)])
    kept.cache, _ = kv.free(kept.cache, [0])
    before = kept.num_free()
    cache, num_evicted = evict(kept.cache, 0, num_blocks=before + 2, keep=np.array([2, NUM_CHUNKS]))
    assert int(num_evicted) == 2 and int(cache.control.block_pools[0].num_free) == before + 2
    assert_invariants(cache)


def test_digests_are_of_the_tokens_alone():
    tokens = np.arange(24).reshape(2, 12)
    narrow = kv.chunk_digests(tokens[:, :7], [7, 5])
    assert kv.chunk_digests(tokens, [7, 5]).tolist() == narrow.tolist()
    others = [*kv.chunk_digests(tokens, [6, 5]).tolist(), *kv.chunk_digests(tokens[:, ::-1], [7, 5]).tolist()]
    assert narrow.tolist()[0] not in others and narrow.dtype == jnp.uint32
    assert kv.chunk_digests(tokens, [0, -1]).tolist() == [[0, 0]] * 2
    assert kv.chunk_digests(np.zeros((1, 3), int), [1]).tolist() != [[0, 0]]


def test_variants_and_eviction_copy_no_pool_and_no_array_of_blocks():
    def step(cache, stats):
        rows, names = jnp.arange(ENTRIES), jnp.zeros((ENTRIES, MAX_CHUNK), jnp.int32)
        cache, _ = kv.store_chunk(cache, rows, rows, rows + 3, names, stats=stats)
        before = kv.chunks_before(kv.chunk_digests(names, rows + 3)[None])[0]
        ids = kv.find_chunks(cache, names, rows + 3, before=before)
        cache, _ = kv.compose(cache, rows, ids[:, None], ids[:, None] + 20, rotate=None)
        return kv.evict_chunks(cache, 4, num_blocks=50, keep=ids)

    config = dataclasses.replace(CONFIG, num_blocks=100_000)
    cache = jax.eval_shape(lambda: kv.init(config))
    stats = jax.eval_shape(lambda: stats_of([(0.5, 0.5, (1,), (8,))] * ENTRIES))
    memory = kv.donate(step).lower(cache, stats).compile().memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert beside < config.num_blocks  # a byte per block
