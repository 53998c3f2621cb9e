"""Rows copy their published last blocks in a call that evicts those blocks: each reads what was there."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.oracle.comparison import check_against_oracle
from tests.oracle.oracle import Oracle

BLOCK, WIDTH = 4, 12
SIZES = dict(block_size=BLOCK, max_seqs=4, max_seq_len=16, max_query_len=WIDTH, enable_prefix_caching=True)
LRU = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=9, **SIZES)
DEEPEST = "test: deepest first"


@kv.policies.eviction_policy(DEEPEST, needs=["depth"])
def deepest_first(block):
    return -block.depth


DEEPEST_FIRST = dataclasses.replace(LRU, eviction_policy=DEEPEST)


def padded(tokens):
    """One width for all calls: few programs."""
    return jnp.array([*tokens, *[0] * (WIDTH - len(tokens))], jnp.int32)


def extend_all(cache, added):
    """{row: its new tokens} in one call of all rows, one program; returns the step too."""
    added = [added.get(row, []) for row in range(SIZES["max_seqs"])]
    tokens = jnp.stack([padded(new) for new in added])
    cache, step = kv.extend(cache, [*map(len, added)], max_new=WIDTH, tokens=tokens)
    return testing.write_tokens(cache, tokens, step), step


def filled(cache, row, tokens, **options):
    """The row holds the tokens, and all its full blocks are published."""
    cache, admission = kv.allocate(cache, [row], [len(tokens)], tokens=padded(tokens)[None], **options)
    cache, _ = extend_all(cache, {row: tokens[int(admission.num_cached[0]) :]})
    return kv.commit(cache, [row])[0]


def extended(cache, held, added, lacking=()):
    """All rows grow in one call, but for those in `lacking`; what they hold is checked before and after."""
    assert testing.check_tokens(cache, held) == []
    cache, step = extend_all(cache, added)
    expected = [
        kv.Status.OUT_OF_BLOCKS if row in lacking else kv.Status.OK for row in range(SIZES["max_seqs"])
    ]
    assert step.status.tolist() == expected
    assert kv.check_invariants(cache) == []
    new = {row: tokens for row, tokens in added.items() if row not in lacking}
    assert testing.check_tokens(cache, {row: held[row] + new.get(row, []) for row in held}) == []
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("config", [LRU, DEEPEST_FIRST], ids=["lru", "deepest first"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_three_rows_whatever_is_evicted_first(config, order):
    """Three tails, of the first, second and third block of a row; three blocks are cached besides."""
    cache = kv.init(config)
    texts = [[10 * row + i for i in range(BLOCK * num_blocks)] for row, num_blocks in enumerate((1, 2, 3))]
    for row in order:
        cache = filled(cache, row, texts[row])
    for text in ([71] * BLOCK, [72] * BLOCK, [73] * BLOCK):
        cache, _ = kv.free(filled(cache, 3, text), [3])
    cache, _ = kv.truncate(cache, [0, 1, 2], [2, 6, 10])
    assert int(kv.stats(cache).num_blocks_free) == 0
    held = {row: texts[row][: BLOCK * row + 2] for row in range(3)}
    extended(cache, held, {row: [90 + row] for row in held})


def test_case_dd_the_original_stays_cached_whatever_the_policy():
    text = list(range(1, 9))
    cache = filled(kv.init(DEEPEST_FIRST), 0, text)
    for i in range(7):
        cache, _ = kv.free(filled(cache, 3, [20 + i] * BLOCK), [3])
    cache, _ = kv.truncate(cache, [0], [6])
    cache = extended(cache, {0: text[:6]}, {0: [50]})
    assert int(kv.stats(cache).num_evictions) == 1
    assert kv.lookup(cache, padded(text)[None], [9]).tolist() == [8]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_a_parent_that_competes_only_later_goes_before_the_original_of_a_copy(batch):
    config = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=3, eviction_policy="lfu", **SIZES)
    chain, text = [1] * (2 * BLOCK), [2] * BLOCK
    cache, _ = kv.free(filled(kv.init(config), 1, chain), [1])
    cache, _ = kv.truncate(filled(cache, 0, text), [0], [3])
    assert int(kv.stats(cache).num_evictions) == 0  # up to here, so the batch has not mattered yet
    of_batch = dataclasses.replace(config, eviction_policy=kv.policies.InBatches("lfu", batch))
    cache = extended(dataclasses.replace(cache, config=of_batch), {0: text[:3]}, {0: [7, 7]})
    oracle = Oracle(of_batch)
    for row, tokens in ((1, chain), (0, text)):
        oracle.allocate([row], [len(tokens)], [tokens])
        oracle.extend([row], [tokens])
        oracle.commit([row], [len(tokens)])
        oracle.free([1])
    oracle.truncate([0], [3])
    oracle.extend([0], [[7, 7]])
    assert check_against_oracle(cache, oracle) == []
    cache = dataclasses.replace(cache, config=config)  # whose `lookup` there is already
    assert kv.lookup(cache, np.array([[*text, 9]]), [BLOCK + 1]).tolist() == [BLOCK]
    assert kv.lookup(cache, np.array([[*chain, 9]]), [2 * BLOCK + 1]).tolist() == [0]


@pytest.mark.slow
def test_a_copy_may_overwrite_in_the_next_call_what_two_read_in_this_one():
    """Rows 0 and 1 copy a block, which is evicted for row 2's copy. The gradient takes the same way back."""
    texts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]]
    # Four of the blocks are row 3's, and row 2 has one before the one that it copies.
    cache, _ = extend_all(filled(kv.init(LRU), 3, list(range(20, 32))), {3: [32, 33, 34, 35]})
    cache, _ = kv.fork(filled(cache, 0, texts[0]), [0], [1])
    cache, _ = kv.truncate(filled(cache, 2, texts[1]), [0, 1, 2], [2, 2, 6])
    held = {0: texts[0][:2], 1: texts[0][:2], 2: texts[1][:6]}
    between = extended(cache, held, {0: [50], 1: [60], 2: [70]}, lacking=[2])
    assert int(kv.stats(between).num_evictions) == 0
    after = extended(between, held | {0: [1, 2, 50], 1: [1, 2, 60]}, {2: [70]})
    tables = (np.asarray(x.control.block_pools[0].block_table) for x in (cache, after))
    blocks, blocks_after = ([*table[:2, 0].tolist(), int(table[2, 1])] for table in tables)
    assert int(kv.stats(after).num_evictions) == 1 and blocks_after[2] == blocks[0] == blocks[1]

    @jax.jit
    @jax.grad
    def grad(pools):
        after, tokens = dataclasses.replace(cache, pools=pools), jnp.array([[5], [6], [7], [0]])
        for _ in range(2):
            after, _ = kv.extend(after, [1, 1, 1, 0], max_new=1, tokens=tokens)
        return sum(kv.gather(after, row, 0)[0][len(text) - 2 : len(text)].sum() for row, text in held.items())

    expected = np.zeros_like(cache.pools[0].k)
    expected[blocks[0], :, :2], expected[blocks[2], :, :2] = 2.0, 1.0
    np.testing.assert_array_equal(grad(cache.pools)[0].k, expected)


@pytest.mark.slow
def test_linked_blocks_that_go_with_what_is_evicted():
    """Evicting the indexed group's blocks frees those of other groups, which rows have just copied."""
    others = [kv.FullAttention(2, 4), kv.SlidingWindow(2, 4, window=6, max_rollback=2)]
    cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 4, num_blocks=4), *others], num_blocks=20, **SIZES))
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    for row, text in enumerate(texts):
        cache = filled(cache, row, text, namespace=kv.namespace(tenant=str(row)))
    cache, _ = kv.truncate(cache, [0, 1], [2, 2])
    cache, _ = kv.allocate(cache, [2], [0], tokens=[[0]])
    held = {0: texts[0][:2], 1: texts[1][:2], 2: []}
    cache = extended(cache, held, {0: [50], 1: [60], 2: list(range(70, 78))}, lacking=[2])
    held |= {0: [*held[0], 50], 1: [*held[1], 60]}
    extended(cache, held, {2: list(range(70, 78))})


def in_turn(cache, added):
    """Calls in which one row grows each; the statuses."""
    found = []
    for row, new in added.items():
        cache, step = extend_all(cache, {row: new})
        found.append(int(step.status[row]))
    return cache, found


def at_once(cache, added):
    cache, step = extend_all(cache, added)
    return cache, step.status[jnp.array([*added])].tolist()


@pytest.mark.slow
def test_a_last_block_that_is_published_before_the_call_is_copied():
    """Row 0 has a block evicted with which the publication of row 1's last window block goes: only then."""
    layers = [
        kv.FullAttention(1, 4, num_blocks=6, block_size=2),
        kv.SlidingWindow(1, 4, window=8, num_blocks=3),
    ]
    cache = kv.init(kv.CacheConfig(layers, num_blocks=1, **SIZES))
    cache, _ = kv.truncate(filled(cache, 1, list(range(10, 18))), [1], [6])
    cache, _ = kv.free(filled(cache, 2, [7, 8]), [2])
    cache, _ = kv.allocate(cache, [0], [2], tokens=padded([5, 6])[None])
    cache, _ = in_turn(cache, {0: [5, 6]})
    assert [int(kv.num_available_blocks(cache, group=g)) for g in range(2)] == [2, 0]
    added = {0: [1], 1: [2]}
    (after, found), (_, found_in_turn) = at_once(cache, added), in_turn(cache, added)
    assert found == [kv.Status.OK, kv.Status.OUT_OF_BLOCKS] and found_in_turn == [kv.Status.OK] * 2
    assert kv.check_invariants(after) == []
    assert in_turn(after, {1: [2]})[1] == [kv.Status.OK]


def test_an_original_is_not_evicted_in_the_call_that_copies_it():
    """Deepest first: in the next call that would be what row 0 gave up, and not what is cached besides."""
    cache, texts = kv.init(DEEPEST_FIRST), [[71] * BLOCK, [72] * BLOCK, [73] * BLOCK, list(range(3 * BLOCK))]
    for text in texts[:3]:
        cache, _ = kv.free(filled(cache, 3, text), [3])
    cache, _ = kv.truncate(filled(cache, 0, texts[3]), [0], [2 * BLOCK + 2])
    for row, num_blocks in ((1, 1), (2, 2)):
        text = [80 + row] * BLOCK * num_blocks
        cache, _ = kv.allocate(cache, [row], [len(text)], tokens=padded(text)[None])
        cache, _ = in_turn(cache, {row: text})
    assert int(kv.stats(cache).num_blocks_free) == 0
    added = {0: [1], 1: [2]}
    for (after, found), expected in (
        (at_once(cache, added), [0, 0, BLOCK, 3 * BLOCK]),
        (in_turn(cache, added), [0, BLOCK, BLOCK, 2 * BLOCK]),
    ):
        assert found == [kv.Status.OK] * 2
        hits = [int(kv.lookup(after, padded([*text, 0])[None], [len(text) + 1])[0]) for text in texts]
        assert hits == expected


def test_random_states():
    """Rows of common and of own beginnings, cut anywhere, in a pool that is full."""
    rng, num_evicted = np.random.default_rng(0), 0
    for _ in range(25):
        cache, held = kv.init(DEEPEST_FIRST), {}
        for row in range(4):
            text = [1, 2, 3, 4, 5, 6, 7, 8] if rng.random() < 0.4 else rng.integers(9, 99, 8).tolist()
            cache = filled(cache, row, text)
            length = int(rng.integers(1, 8))
            cache, _ = kv.truncate(cache, [row], [length])
            held[row] = text[:length]
        if int(kv.num_blocks_needed(cache, [1, 1, 1, 1]).sum()) > int(kv.num_available_blocks(cache)):
            continue
        cache = extended(cache, held, {row: [100 + row] for row in held})
        num_evicted += int(kv.stats(cache).num_evictions)
    assert num_evicted > 10, num_evicted


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before it is published", "after it was published", "before it is adopted"])
def test_a_row_holds_a_part_of_a_block_that_another_row_publishes(when):
    """Row 1 forks row 0 and is cut into the second block; row 0 or 2 publishes that, and row 1 writes on."""
    text = [5, 6, 7, 8, 9, 1, 2, 3]
    cache = kv.init(LRU)
    cache, _ = kv.allocate(cache, [0], [len(text)], tokens=padded(text)[None])
    cache, _ = extend_all(cache, {0: text})
    if when == "before it is adopted":  # an equal block of another row is published first
        cache = filled(cache, 2, text)
    cache, _ = kv.fork(cache, [0], [1])
    if when == "after it was published":
        cache, _ = kv.commit(cache, [0])
    cache, _ = kv.truncate(cache, [1], [6])
    if when != "after it was published":
        cache, _ = kv.commit(cache, [0])
    cache, _ = kv.free(cache, [0, 2])
    assert kv.check_invariants(cache) == []
    assert cache.control.num_published.tolist() == [0, 2, 0, 0]
    assert kv.num_blocks_needed(cache, [0, 1, 0, 0]).tolist() == [0, 1, 0, 0]
    cache = extended(cache, {1: text[:6]}, {1: [4]})
    assert int(kv.stats(cache).num_copies) == 1
    assert cache.control.num_published.tolist() == [0, 1, 0, 0]
    assert kv.lookup(cache, padded([*text, 4])[None], [9]).tolist() == [8]
