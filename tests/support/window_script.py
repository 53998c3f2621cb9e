"""Random scripts with prefix caching over several layer groups, by rows of several namespaces."""

import collections

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax import Status, testing
from tests.support.chunk_script import compose_some, store_some
from tests.support.helpers import changed_leaves
from tests.support.random_script import padded

ROWS, WIDTH, PROMPT_WIDTH = 6, 5, 23
ENTRIES = 3  # of each call that takes ids
MAX_LEN = 32  # of the prompts that `num_cached` takes
NAMESPACES = [kv.namespace(), kv.namespace(tenant="a")]
NUM_CHUNKS, MAX_CHUNK, CHUNKS_PER_ROW = 4, 8, 2
OPERATIONS = ("admit", "extend", "extend", "commit", "free", "fork", "truncate", "reorder")


def grouped_config(**sizes):
    full = kv.FullAttention(1, 5)
    window = kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=40)
    other = kv.FullAttention(2, 5, block_size=8, num_blocks=14)
    defaults = dict(layers=[window, full, other, window], num_blocks=24, block_size=4)
    limits = dict(max_seqs=ROWS, max_seq_len=31, max_query_len=9, enable_prefix_caching=True)
    return kv.CacheConfig(**defaults | limits | sizes)


def partial_config(*kinds):
    """Prompts may begin inside a published block."""
    sizes = dict(num_blocks=20, block_size=4, max_seqs=ROWS, max_seq_len=31)
    return kv.CacheConfig(kinds, **sizes, enable_prefix_caching=True, partial_hits=True)


@kv.donate
def append_as(cache, tokens, codes, num_new):
    """Appends `tokens` and writes `codes` as their keys and values."""
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], tokens=tokens)
    return testing.write_tokens(cache, codes, step), step.status


allocate, lookup, commit = jax.jit(kv.allocate), jax.jit(kv.lookup), jax.jit(kv.commit)


def num_cached(cache, tokens, namespace=None):
    return int(kv.lookup(cache, padded([tokens], MAX_LEN), [len(tokens)], namespace)[0])


def longest_chain(cache, text, namespace):
    """The published blocks that begin like a text, and how many more tokens one more has; in numpy."""
    index, pool = cache.control.prefix_index, cache.control.block_pools[cache.config.indexed_group]
    is_there = np.asarray(pool.cached.is_published) & (np.asarray(index.namespace) == namespace).all(axis=1)
    parents, tokens = np.asarray(index.parent), np.asarray(index.block_tokens)
    chain, block_size = [len(parents)], cache.config.block_size
    while True:
        at, length = chain[-1], (len(chain) - 1) * block_size
        same = {}
        for block in np.flatnonzero(is_there & (parents == at)).tolist():
            agrees = [a == b for a, b in zip(tokens[block].tolist(), text[length:], strict=False)]
            same[block] = (*agrees, False).index(False)
        best = max(same, key=same.get, default=None)
        if best is None or same[best] < block_size:
            return chain[1:], same.get(best, 0)
        chain.append(best)


class WindowScript:
    """A cache, and what its rows ought to hold.

    Tokens are the same in all namespaces, so that prefixes would meet; what is written for them is not.

    Attributes:
      cache: The present one.
      rows: {row: its tokens}.
      spaces: {row: index of its namespace}.
      checked: The namespaces whose rows are compared with what they ought to hold.
      counts: How often an entry of a call got each status; "hits", tokens found cached; "refused", rows that
        could not grow for lack of blocks.
    """

    def __init__(self, seed, num_namespaces=1, config=None):
        self.rng, self._num_namespaces = np.random.default_rng(seed), num_namespaces
        self.cache = testing.poison(kv.init(config or grouped_config()))
        self.rows, self.spaces, self.checked = {}, {}, set(range(num_namespaces))
        self.counts = collections.Counter()

    def totals(self):
        """The counts, with evictions."""
        return self.counts + collections.Counter(evictions=int(kv.stats(self.cache).num_evictions))

    def text(self, length):
        return [int(token) for token in self.rng.choice([1, 2], length, p=[0.95, 0.05])]

    def codes(self, tokens, space):
        return np.asarray(tokens, np.int32) + 10 * space

    def step(self):
        """One call for several rows, of which some make sense and others fail."""
        name = self.rng.choice(OPERATIONS)
        rows = [int(row) for row in self.rng.integers(0, ROWS, ENTRIES)]
        getattr(self, f"_{name}")(rows)
        self.check(f"{name} {rows}")

    def predict(self, rows, check):
        """Statuses of a call that names `rows`; `check(entry, row)` is that of a row's first entry."""
        return [Status.DUPLICATE_SEQ_ID if row in rows[:i] else check(i, row) for i, row in enumerate(rows)]

    def compare(self, status, expected):
        """The entries that succeeded; only blocks may be lacking beside what is expected."""
        got = [Status(code) for code in np.asarray(status).tolist()]
        for code, want in zip(got, expected, strict=True):
            assert code == want or (want, code) == (Status.OK, Status.OUT_OF_BLOCKS), (got, expected)
        self.counts.update(code.name for code in got)
        return [i for i, code in enumerate(got) if code == Status.OK]

    def active(self, _, row):
        return Status.OK if row in self.rows else Status.SEQ_NOT_ACTIVE

    def check(self, what):
        codes = {
            row: self.codes(tokens, self.spaces[row])
            for row, tokens in self.rows.items()
            if self.spaces[row] in self.checked
        }
        violations = kv.check_invariants(self.cache) + testing.check_tokens(self.cache, codes)
        assert not violations, f"{what}: {violations}"

    def end(self, row):
        del self.rows[row], self.spaces[row]

    def longest(self, text, namespace):
        """The most first tokens of a text that a lookup may find: all but the last."""
        chain, num_more = longest_chain(self.cache, text, namespace)
        return min(len(chain) * self.cache.config.block_size + num_more, len(text) - 1)

    def _admit(self, rows):
        spaces = self.rng.integers(self._num_namespaces, size=ENTRIES).tolist()
        words = np.stack([NAMESPACES[space] for space in spaces])
        texts, lengths = [self.text(PROMPT_WIDTH) for _ in rows], self.rng.integers(1, PROMPT_WIDTH, ENTRIES)
        tokens = padded(texts, PROMPT_WIDTH)
        found = np.asarray(lookup(self.cache, tokens, lengths, words)).tolist()
        if self.cache.config.partial_hits:
            most = [self.longest(text[:n], w) for text, n, w in zip(texts, lengths, words, strict=True)]
            # A window that rolled on leaves less.
            is_right = np.equal if len(self.cache.config.groups) == 1 else np.less_equal
            assert is_right(found, most).all(), (found, most)
            self.counts["partial"] += sum(n % self.cache.config.block_size > 0 for n in found)
        before = self.cache
        self.cache, admission = allocate(before, np.array(rows), lengths, tokens=tokens, namespace=words)
        expected = self.predict(rows, lambda _, row: Status.SEQ_IN_USE if row in self.rows else Status.OK)
        succeeded = self.compare(admission.status, expected)
        assert succeeded or not changed_leaves(before, self.cache)
        hits = np.asarray(admission.num_cached).tolist()
        assert hits == [n if i in succeeded else 0 for i, n in enumerate(found)]
        for i in succeeded:
            self.rows[rows[i]], self.spaces[rows[i]] = texts[i][: hits[i]], spaces[i]
        self.counts["hits"] += sum(hits)

    def _extend(self, _):
        new = [self.text(int(n)) for n in self.rng.integers(0, WIDTH + 1, ROWS)]
        codes = [self.codes(ids, self.spaces.get(row, 0)) for row, ids in enumerate(new)]
        num_new = np.array([len(ids) for ids in new], np.int32)
        self.cache, status = append_as(self.cache, padded(new, WIDTH), padded(codes, WIDTH), num_new)
        expected = [self._growth(row, len(ids)) for row, ids in enumerate(new)]
        for row in self.compare(status, expected):
            if new[row]:
                self.rows[row] = self.rows[row] + new[row]
        self.counts["refused"] += status.tolist().count(Status.OUT_OF_BLOCKS)

    def _growth(self, row, num_new):
        if not num_new:
            return Status.OK
        if row not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        is_too_long = len(self.rows[row]) + num_new > self.cache.config.max_seq_len
        return Status.TOO_LONG if is_too_long else Status.OK

    def _commit(self, rows):
        self.cache, status = commit(self.cache, np.array(rows))
        self.compare(status, self.predict(rows, self.active))

    def _free(self, rows):
        rows = [rows[0], rows[1], *[ROWS] * (ENTRIES - 2)]
        self.cache, status = kv.free(self.cache, rows)
        expected = self.predict(rows[:2], self.active) + [Status.SKIPPED] * (ENTRIES - 2)
        for i in self.compare(status, expected):
            self.end(rows[i])

    def _fork(self, rows):
        sources = [rows[0], *rows[:-1]] if self.rng.random() < 0.5 else [rows[0]] * ENTRIES  # a chain, or not
        self.cache, status = kv.fork(self.cache, sources, rows)

        def check(i, row):
            if sources[i] not in self.rows:
                return Status.SEQ_NOT_ACTIVE
            return Status.SEQ_IN_USE if row in self.rows else Status.OK

        for i in self.compare(status, self.predict(rows, check)):
            self.rows[rows[i]], self.spaces[rows[i]] = list(self.rows[sources[i]]), self.spaces[sources[i]]

    def _reorder(self, rows):
        parents = [*rows[1:], rows[0]]
        self.cache, status = kv.reorder(self.cache, rows, parents)
        expected = self.predict(rows, lambda i, row: self.active(i, row) or self.active(i, parents[i]))
        before = dict(self.rows), dict(self.spaces)
        for i in self.compare(status, expected):
            self.rows[rows[i]], self.spaces[rows[i]] = list(before[0][parents[i]]), before[1][parents[i]]

    def _truncate(self, rows):
        lengths = [max(len(self.rows.get(row, [])) - int(self.rng.integers(0, 4)), 0) for row in rows]
        self.cache, status = kv.truncate(self.cache, rows, lengths)
        got = status.tolist()
        for code, want in zip(got, self.predict(rows, self.active), strict=True):
            assert code == want or (want, code) == (Status.OK, Status.WINDOW_LOST), got
        for row, length, code in zip(rows, lengths, got, strict=True):
            if code == Status.OK:
                del self.rows[row][length:]


class ChunkScript(WindowScript):
    """A `WindowScript` whose rows are also composed of chunks.

    Attributes:
      chunks: {chunk: its tokens and the index of its namespace}.
    """

    def __init__(self, seed):
        super().__init__(seed, 2, grouped_config(extras=[kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK)]))
        self.chunks = {}

    def step(self):
        name = self.rng.choice(["store", "compose", "forget", "other"], p=[0.12, 0.15, 0.03, 0.7])
        if name == "other":
            super().step()
            return
        rows = [int(row) for row in self.rng.integers(0, ROWS, ENTRIES)]
        getattr(self, f"_{name}")(rows)
        self.check(f"{name} {rows}")

    def _store(self, rows):
        starts, lengths = self.rng.integers(0, 12, ENTRIES), self.rng.integers(1, MAX_CHUNK + 1, ENTRIES)
        names, spans = np.zeros((ENTRIES, MAX_CHUNK), np.int32), []
        for i, row in enumerate(rows):
            spans.append(self.rows.get(row, [])[starts[i] : starts[i] + lengths[i]])
            names[i, : len(spans[i])] = self.codes(spans[i], self.spaces.get(row, 0))
        self.cache, stored = store_some(self.cache, np.array(rows), starts, lengths, names)
        pairs = zip(stored.chunk_ids.tolist(), stored.status.tolist(), strict=True)
        for row, span, (chunk, code) in zip(rows, spans, pairs, strict=True):
            self.counts[f"store {Status(code).name}"] += 1
            if code == Status.OK:
                self.chunks[chunk] = span, self.spaces[row]

    def _compose(self, rows):
        ids, starts = np.full((ENTRIES, CHUNKS_PER_ROW), NUM_CHUNKS), np.zeros((ENTRIES, CHUNKS_PER_ROW), int)
        placed = [[] for _ in rows]
        for i, row in enumerate(rows):
            likely = [chunk for chunk, (_, space) in self.chunks.items() if space == self.spaces.get(row)]
            end = len(self.rows.get(row, []))
            for j in range(int(self.rng.integers(0, CHUNKS_PER_ROW + 1)) if likely else 0):
                ids[i, j], starts[i, j] = self.rng.choice(likely), end
                placed[i] += self.chunks[ids[i, j]][0]
                end += len(self.chunks[ids[i, j]][0])
        self.cache, status = compose_some(self.cache, np.array(rows), ids, starts)
        for row, tokens, code in zip(rows, placed, status.tolist(), strict=True):
            if tokens:
                self.counts[f"compose {Status(code).name}"] += 1
            if tokens and code == Status.OK:
                self.rows[row] = self.rows[row] + tokens

    def _forget(self, _):
        chunk = int(self.rng.integers(NUM_CHUNKS))
        self.cache, status = kv.chunks.free(self.cache, [chunk])
        assert status.tolist() == [Status.OK if chunk in self.chunks else Status.BAD_CHUNK_ID]
        self.chunks.pop(chunk, None)
