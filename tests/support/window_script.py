"""Random scripts with prefix caching over several layer groups, by rows of several namespaces."""

import functools

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.random_script import padded

ROWS, WIDTH, PROMPT_WIDTH = 6, 5, 23
MAX_LEN = 32  # of the prompts that `num_cached` takes
NAMESPACES = [kv.namespace(), kv.namespace(tenant="a")]
OPERATIONS = ("admit", "extend", "extend", "commit", "free", "fork", "truncate", "reorder")


def grouped_config(**sizes):
    full = kv.FullAttention(1, 5)
    window = kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=40)
    other = kv.FullAttention(2, 5, block_size=8, num_blocks=14)
    defaults = dict(layers=[window, full, other, window], num_blocks=24, block_size=4)
    limits = dict(max_seqs=ROWS, max_seq_len=31, max_query_len=9, enable_prefix_caching=True)
    return kv.CacheConfig(**defaults | limits | sizes)


@functools.partial(kv.donate)
def append_as(cache, tokens, codes, num_new):
    """Appends `tokens` and writes `codes` as their keys and values."""
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], tokens=tokens)
    return testing.write_tokens(cache, codes, step), step.status


commit = jax.jit(kv.commit)


def num_cached(cache, tokens, namespace=None):
    return int(kv.lookup(cache, padded([tokens], MAX_LEN), [len(tokens)], namespace)[0])


class WindowScript:
    """A cache, and what its rows ought to hold.

    Tokens are the same in all namespaces, so that prefixes would meet; what is written for them is not.

    Attributes:
      cache: The present one.
      rows: {row: its tokens}.
      spaces: {row: index of its namespace}.
      checked: The namespaces whose rows are compared with what they ought to hold.
      num_hits: Tokens found cached.
      num_refused: Rows that found no blocks.
    """

    def __init__(self, seed, num_namespaces=1, config=None):
        self.rng, self._num_namespaces = np.random.default_rng(seed), num_namespaces
        self.cache = testing.poison(kv.init(config or grouped_config()))
        self.rows, self.spaces, self.checked = {}, {}, set(range(num_namespaces))
        self.num_hits = self.num_refused = 0

    def text(self, length):
        return [int(token) for token in self.rng.choice([1, 2], length, p=[0.95, 0.05])]

    def codes(self, tokens, space):
        return np.asarray(tokens, np.int32) + 10 * space

    def step(self):
        """One operation that makes sense or fails."""
        name = self.rng.choice(OPERATIONS)
        row, other = (int(i) for i in self.rng.integers(0, ROWS, 2))
        getattr(self, f"_{name}")(row, other)
        self.check(f"{name} {row} {other}")

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

    def _admit(self, row, _):
        space = int(self.rng.integers(self._num_namespaces))
        namespace, tokens = NAMESPACES[space], self.text(PROMPT_WIDTH)
        length = int(self.rng.integers(1, PROMPT_WIDTH))
        found = num_cached(self.cache, tokens[:length], namespace)
        self.cache, admission = kv.allocate(self.cache, [row], [length], tokens=[tokens], namespace=namespace)
        if int(admission.status[0]) == kv.Status.OK:
            assert row not in self.rows and int(admission.num_cached[0]) == found
            self.rows[row], self.spaces[row] = tokens[:found], space
            self.num_hits += found
        else:
            assert row in self.rows or int(admission.status[0]) == kv.Status.OUT_OF_BLOCKS

    def _extend(self, *_):
        new = [self.text(int(n)) for n in self.rng.integers(0, WIDTH + 1, ROWS)]
        codes = [self.codes(ids, self.spaces.get(row, 0)) for row, ids in enumerate(new)]
        num_new = np.array([len(ids) for ids in new], np.int32)
        self.cache, status = append_as(self.cache, padded(new, WIDTH), padded(codes, WIDTH), num_new)
        for row, code in enumerate(status.tolist()):
            if code == kv.Status.OK and new[row]:
                self.rows[row] = self.rows[row] + new[row]
            self.num_refused += code == kv.Status.OUT_OF_BLOCKS

    def _commit(self, row, other):
        self.cache, _ = commit(self.cache, np.array([row, other]))

    def _free(self, row, _):
        self.cache, status = kv.free(self.cache, [row])
        if int(status[0]) == kv.Status.OK:
            self.end(row)

    def _fork(self, row, other):
        self.cache, status = kv.fork(self.cache, [row], [other])
        if int(status[0]) == kv.Status.OK:
            self.rows[other], self.spaces[other] = list(self.rows[row]), self.spaces[row]

    def _reorder(self, row, other):
        self.cache, status = kv.reorder(self.cache, [row, other], [other, other])
        if int(status[0]) == kv.Status.OK:
            self.rows[row], self.spaces[row] = list(self.rows[other]), self.spaces[other]

    def _truncate(self, row, _):
        length = max(len(self.rows.get(row, [])) - int(self.rng.integers(0, 4)), 0)
        self.cache, status = kv.truncate(self.cache, [row], [length])
        if int(status[0]) == kv.Status.OK:
            del self.rows[row][length:]
