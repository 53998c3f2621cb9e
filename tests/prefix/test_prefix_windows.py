"""Prefix caching over several layer groups: what every group still has can be reused, and nothing else."""

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import append_donated, assert_invariants
from tests.support.random_script import padded
from tests.support.window_script import MAX_LEN, commit, num_cached


def rolled_config(**sizes):
    """CASES aa: block size 1, a window of 4 beside full attention."""
    layers = [kv.FullAttention(1, 5), kv.SlidingWindow(1, 5, window=4, **sizes.pop("window", {}))]
    return kv.CacheConfig(
        layers,
        **{"num_blocks": 16, "block_size": 1, "max_seqs": 3, "max_seq_len": MAX_LEN} | sizes,
        enable_prefix_caching=True,
    )


# Beside blocks of 4 tokens, a window's of 2, of which it keeps the first, and of 6.
FINER = rolled_config(num_blocks=32, block_size=4, window={"block_size": 2, "num_sink_tokens": 2})
COARSER = rolled_config(num_blocks=32, block_size=4, window={"block_size": 6})


def run(cache, row, tokens, *, one_by_one=True, commits="at the end"):
    """Starts a row, computes its tokens and ends it; returns the cache and the tokens that were cached."""
    tokens = list(tokens)
    cache, admission = kv.allocate(cache, [row], [len(tokens)], tokens=padded([tokens], MAX_LEN))
    assert admission.status.tolist() == [kv.Status.OK]
    num_cached = int(admission.num_cached[0])
    assert testing.check_tokens(cache, {row: tokens[:num_cached]}) == []
    at_most = 1 if one_by_one else MAX_LEN
    for start in range(num_cached, len(tokens), at_most):
        new = [tokens[start : start + at_most] if i == row else [] for i in range(cache.max_seqs)]
        cache, status = append_donated(cache, padded(new, MAX_LEN), np.array([*map(len, new)]))
        assert status[row] == kv.Status.OK
        if commits == "at every step":
            cache, _ = commit(cache, np.array([row, cache.max_seqs]))
    if commits == "at the end":
        cache, _ = commit(cache, np.array([row, cache.max_seqs]))
    assert testing.check_tokens(cache, {row: tokens}) == []
    assert_invariants(cache)
    cache, _ = kv.free(cache, [row])
    assert_invariants(cache)
    return cache, num_cached


TEN = list(range(10, 20))


def test_case_aa_a_rolled_window_serves_only_what_is_still_there():
    cache, _ = run(kv.init(rolled_config()), 0, TEN)
    assert num_cached(cache, [*TEN[:7], 1, 2, 3]) == 0  # tokens 4 to 6 left the window
    assert num_cached(cache, [*TEN, 1]) == 10
    cache, hit = run(cache, 1, [*TEN[:5], 1])
    assert hit == 0  # tokens 2 to 4 as well
    assert num_cached(cache, [*TEN[:5], 7, 7]) == 5  # the second entry has them
    assert num_cached(cache, [*TEN[:7], 1, 2, 3]) == 5
    assert num_cached(cache, [*TEN, 1]) == 10


def test_what_is_committed_before_it_leaves_the_window_stays_cached():
    cache, _ = run(kv.init(rolled_config()), 0, TEN, commits="at every step")
    for length in range(1, 10):
        assert num_cached(cache, [*TEN[:length], 1]) == length
    cache, hit = run(cache, 2, [*TEN[:7], 1, 2, 3])
    assert hit == 7


@pytest.mark.slow
@pytest.mark.parametrize(("config", "step"), [(FINER, 4), (COARSER, 12)], ids=["finer", "coarser"])
def test_hits_are_whole_blocks_of_every_group(config, step):
    tokens = list(range(1, 27))
    cache, _ = run(kv.init(config), 0, tokens, one_by_one=False)
    for length in range(1, 27):
        expected = min(length, len(tokens)) // step * step
        assert num_cached(cache, [*tokens[:length], 99]) == expected
    _, hit = run(cache, 1, [*tokens[: 2 * step], 99], one_by_one=False)
    assert hit == 2 * step


@pytest.mark.slow
def test_blocks_are_linked_once_they_are_full():
    """Linked earlier, the window's block would be published, and the next token would copy it."""
    cache, _ = run(kv.init(COARSER), 0, range(1, 27), commits="at every step")
    assert int(kv.stats(cache).num_copies) == 0
    assert num_cached(cache, [*range(1, 27), 99]) == 24


@pytest.mark.slow
def test_poison_spares_what_is_cached_in_any_group():
    tokens = list(range(1, 27))
    cache, _ = run(kv.init(FINER), 0, tokens, one_by_one=False)
    # What the hit holds is compared with the tokens.
    _, hit = run(testing.poison(cache), 1, [*tokens[:24], 99], one_by_one=False)
    assert hit == 24


@pytest.mark.slow
def test_sinks_are_needed_too():
    cache, _ = run(kv.init(FINER), 0, TEN[:8])
    assert num_cached(cache, [*TEN[:8], 1]) == 8
    cache, hit = run(cache, 1, [*TEN[:8], 1, 2])
    assert hit == 8
    # The window group gives up its least recently used blocks: the sinks of all rows but the last.
    held = kv.stats(cache).num_blocks_cached
    assert int(held) > 0


def test_evicting_either_of_two_linked_blocks_breaks_no_link():
    cache = kv.init(rolled_config())
    rng = np.random.default_rng(0)
    total = 0
    for i in range(60):
        start = int(rng.integers(0, 3))
        tokens = [100 * start + j for j in range(int(rng.integers(1, 9)))] + [int(rng.integers(5)) + 1]
        cache, hit = run(cache, i % 3, tokens, one_by_one=bool(i % 2), commits="at every step")
        total += hit
    assert total > 60
    assert int(kv.stats(cache).num_evictions) > 60
    cache, num_dropped = kv.reset_prefix_cache(cache)
    assert int(num_dropped) > 0
    assert_invariants(cache)
    assert int(kv.stats(cache).num_blocks_free) == 32


@pytest.mark.slow
def test_forks_that_are_committed_together_do_not_both_keep_the_block_they_share():
    """They part within a block of the indexed group, after a whole one of the other group."""
    layers = [kv.FullAttention(1, 5), kv.SlidingWindow(1, 5, window=6, block_size=2)]
    sizes = dict(num_blocks=12, block_size=4, max_seqs=4, max_seq_len=24, max_query_len=8)
    cache = kv.init(kv.CacheConfig(layers, **sizes, enable_prefix_caching=True))
    tenants = [kv.namespace(tenant=name) for name in "AB"]

    def extended(cache, new):
        tokens = padded([new.get(row, []) for row in range(4)], 8)
        num_new = np.array([len(new.get(row, [])) for row in range(4)])
        cache, status = append_donated(cache, tokens, num_new)
        assert not status.any()
        return cache

    cache, _ = kv.allocate(cache, [0], [2], tokens=padded([[1, 2]], 8), namespace=tenants[0])
    cache, _ = kv.fork(extended(cache, {0: [1, 2]}), [0], [1])
    cache = extended(cache, {0: [10, 11, 12, 13], 1: [20, 21, 22, 23]})
    cache, status = commit(cache, np.array([0, 1]))
    assert_invariants(cache)
    cache, _ = kv.free(cache, [0, 1])
    cache, _ = kv.evict(cache, 1)
    assert_invariants(cache)
    # Another tenant fills the pool; the first tenant's prompts find their own tokens or nothing.
    for row in (2, 3):
        prompt = [100 * row + i for i in range(8)]
        cache, _ = kv.allocate(cache, [row], [8], tokens=[prompt], namespace=tenants[1])
        cache = extended(cache, {row: prompt})
    for first in (10, 20):
        prompt = [1, 2, first, first + 1, 9]
        found, admission = kv.allocate(cache, [0], [5], tokens=padded([prompt], 8), namespace=tenants[0])
        assert testing.check_tokens(found, {0: prompt[: int(admission.num_cached[0])]}) == []


def test_rows_of_equal_contents_that_are_committed_together_complete_each_other():
    """The window of the first row left the beginning that the second still has."""
    short, long = TEN[:4], TEN
    cache = kv.init(rolled_config())
    for row in range(2):
        cache, _ = kv.allocate(cache, [row], [0], tokens=padded([[]], MAX_LEN))
    for i in range(10):
        new = [long[i : i + 1], short[i : i + 1], []]
        cache, _ = append_donated(cache, padded(new, MAX_LEN), np.array([*map(len, new)]))
    together, _ = commit(cache, np.array([0, 1]))
    first, _ = commit(cache, np.array([0, 3]))
    in_turn, _ = commit(first, np.array([1, 3]))
    assert num_cached(first, [*short, 1]) == 0
    for committed in (together, in_turn):
        assert_invariants(committed)
        assert num_cached(committed, [*short, 1]) == 4 and num_cached(committed, [*long, 1]) == 10


def test_of_equal_rows_that_are_committed_together_one_links_its_window():
    cache = kv.init(rolled_config())
    for row in range(2):
        cache, _ = kv.allocate(cache, [row], [0], tokens=padded([[]], MAX_LEN))
    for token in TEN[:3]:
        cache, _ = append_donated(cache, padded([[token], [token], []], MAX_LEN), np.array([1, 1, 0]))
    cache, _ = commit(cache, np.array([0, 1]))
    assert_invariants(cache)
    assert num_cached(cache, [*TEN[:3], 1]) == 3
    assert int(kv.stats(cache).num_blocks_published) == 2 * 3
