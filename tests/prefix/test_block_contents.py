"""Blocks that leave a cache and come back: `eviction_candidates`, `export_blocks`, `import_blocks`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import assert_invariants, leaf_bytes, statuses

OK = kv.Status.OK
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 2, 12, 9
LAYERS = [kv.FullAttention(1, 4), kv.SlidingWindow(1, 4, window=3, block_size=1, num_blocks=32)]
CONFIG = kv.CacheConfig(
    LAYERS,
    num_blocks=NUM_BLOCKS,
    block_size=BLOCK_SIZE,
    max_seqs=3,
    max_seq_len=WIDTH,
    enable_prefix_caching=True,
)
export = jax.jit(kv.tiers.export_blocks)
import_ = kv.donate(kv.tiers.import_blocks)


@kv.donate
def fill(cache, tokens, lengths, namespace):
    """Writes three prompts as their tokens' codes, and publishes them."""
    rows = jnp.arange(3, dtype=jnp.int32)
    cache, admission = kv.allocate(cache, rows, lengths, tokens=tokens, namespace=namespace)
    left = lengths - admission.num_cached
    order = jnp.arange(WIDTH, dtype=jnp.int32)[None] + admission.num_cached[:, None]
    new = jnp.take_along_axis(tokens, jnp.minimum(order, WIDTH - 1), axis=1)
    cache, step = kv.extend(cache, jnp.where(admission.status == OK, left, 0), max_new=WIDTH, tokens=new)
    cache = testing.write_tokens(cache, new, step)
    cache, _ = kv.commit(cache)
    return cache, admission


def prompts(*texts):
    tokens = np.zeros((3, WIDTH), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return tokens, np.array([*(len(text) for text in texts), 0, 0, 0][:3], np.int32)


def filled(config, *texts, namespace=(0, 0, 0)):
    words = np.zeros((3, 4), np.uint32)
    words[:, 0] = namespace
    cache, admission = fill(kv.init(config), *prompts(*texts), words)
    assert statuses(admission.status) == [OK] * 3
    return kv.free(cache, [0, 1, 2])[0]


A, B = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 8]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "hyperbolic"])
def test_candidates_are_what_eviction_gives_up(policy):
    cache = filled(dataclasses.replace(CONFIG, eviction_policy=policy), A, B, [5, 5, 5])
    before = leaf_bytes(cache)
    published = np.asarray(cache.control.block_pools[0].cached.is_published)
    for n in (1, 5, NUM_BLOCKS):
        chosen = np.asarray(kv.tiers.eviction_candidates(cache, n))
        after, num_evicted = kv.evict(cache, n)
        gone = published & ~np.asarray(after.control.block_pools[0].cached.is_published)
        assert sorted(chosen[chosen < NUM_BLOCKS]) == np.flatnonzero(gone).tolist()
        assert int(num_evicted) == (chosen < NUM_BLOCKS).sum() == min(n, 5)
    assert leaf_bytes(cache) == before


@pytest.mark.slow
def test_what_comes_back_is_what_left():
    """Read back by rows that hit it: every token of every layer, windows and all; no other row finds it."""
    cache = filled(CONFIG, A, B, [5, 5, 5], namespace=(0, 0, 3))
    contents = export(cache, kv.tiers.eviction_candidates(cache, 6))
    assert sorted(contents.num_tokens.tolist()) == [0, 2, 2, 4, 4, 6]
    again, status = import_(testing.poison(kv.init(CONFIG)), contents)
    assert sorted(statuses(status)) == [OK] * 5 + [kv.Status.SKIPPED]
    assert_invariants(again)
    tokens, lengths = prompts(A, B, [5, 5, 5])
    words = np.zeros((3, 4), np.uint32)
    words[2, 0] = 3
    assert kv.lookup(again, tokens, lengths, words).tolist() == [6, 4, 2]
    assert kv.lookup(again, tokens, lengths).tolist() == [6, 4, 0]
    again, admission = fill(again, tokens, lengths, words)
    assert admission.num_cached.tolist() == [6, 4, 2]
    assert testing.check_tokens(again, {0: A, 1: B, 2: [5, 5, 5]}) == []
    assert_invariants(again)


@pytest.mark.slow
def test_a_block_that_fails_changes_nothing_and_others_go_on():
    cache = filled(CONFIG, A, B, [5, 5, 5])
    by_len = {}
    for block in range(NUM_BLOCKS):
        contents = export(cache, [block])
        by_len.setdefault(int(contents.num_tokens[0]), contents)
    first, second, third = (by_len[n] for n in (2, 4, 6))
    empty = kv.init(CONFIG)
    before = leaf_bytes(empty)
    odd = dataclasses.replace(first, num_tokens=jnp.array([3]))
    for contents, failure in (
        (second, kv.Status.NO_PARENT),
        (odd, kv.Status.BAD_LENGTH),
        (dataclasses.replace(first, num_tokens=jnp.array([WIDTH + 3])), kv.Status.BAD_LENGTH),
        (dataclasses.replace(first, num_tokens=jnp.array([-2])), kv.Status.BAD_LENGTH),
        (by_len[0], kv.Status.SKIPPED),
    ):
        after, status = kv.tiers.import_blocks(empty, contents)
        assert statuses(status) == [failure] and leaf_bytes(after) == before
    both = jax.tree.map(lambda *x: jnp.concatenate(x), third, odd, first)
    after, status = kv.tiers.import_blocks(empty, both)
    assert statuses(status) == [kv.Status.NO_PARENT, kv.Status.BAD_LENGTH, OK]
    after, status = kv.tiers.import_blocks(
        after, jax.tree.map(lambda *x: jnp.concatenate(x), third, second, first)
    )
    assert statuses(status) == [OK] * 3
    assert_invariants(after)
    assert leaf_bytes(kv.tiers.import_blocks(after, second)[0]) == leaf_bytes(after)  # it is there
    full = empty
    for row in range(3):
        full, _ = kv.allocate(full, [row], [8], tokens=prompts([0] * 8)[0][:1])
    assert int(kv.num_available_blocks(full, group=0)) == 0
    after, status = kv.tiers.import_blocks(full, first)
    assert statuses(status) == [kv.Status.OUT_OF_BLOCKS] and leaf_bytes(after) == leaf_bytes(full)


@pytest.mark.slow
@pytest.mark.parametrize("num_taken", [0, 9])
def test_blocks_imported_at_once_are_as_one_after_the_other(num_taken):
    """Any of them, repeated and without those before them; with the same places, and as long to live."""
    spaces = (0, 0, 3)
    source = filled(CONFIG, A, B, A[:5], namespace=spaces)
    published = np.flatnonzero(source.control.block_pools[0].cached.is_published)
    assert len(published) == 6
    contents = export(source, np.append(published, NUM_BLOCKS))
    tokens, lengths = prompts(A, B, A[:5])
    words = np.zeros((3, 4), np.uint32)
    words[:, 0] = spaces
    rng, found = np.random.default_rng(0), set()

    def lives(cache):
        """What prompts find, and after each block that is evicted."""
        seen = []
        for _ in range(NUM_BLOCKS):
            seen.append(kv.lookup(cache, tokens, lengths, words).tolist())
            cache, _ = kv.evict(cache, 1)
        return seen

    empty = kv.init(CONFIG)
    if num_taken:
        empty, _ = kv.allocate(empty, [0, 1, 2], [8, 8, 2], tokens=np.zeros((3, 8), np.int32))
    for _ in range(12):
        pick = rng.integers(0, 7, 7)
        some = jax.tree.map(lambda x, pick=pick: x[pick], contents)
        at_once, status = kv.tiers.import_blocks(empty, some)
        one_by_one, expected = empty, [None] * 7
        for i in np.argsort(some.num_tokens, stable=True):
            one = jax.tree.map(lambda x, i=i: x[i : i + 1], some)
            one_by_one, [expected[i]] = kv.tiers.import_blocks(one_by_one, one)
        assert status.tolist() == [int(each) for each in expected]
        assert lives(at_once) == lives(one_by_one)
        assert_invariants(at_once)
        assert at_once.pools[0].k.tobytes() == one_by_one.pools[0].k.tobytes()
        found.update(status.tolist())
    assert found == {OK, kv.Status.NO_PARENT, kv.Status.SKIPPED} | (
        {kv.Status.OUT_OF_BLOCKS} if num_taken else set()
    )


def texts_of(*texts):
    """Contents of blocks at the ends of texts, all zeros, that hold nothing of windows."""
    empty = kv.tiers.export_blocks(kv.init(CONFIG), [NUM_BLOCKS] * len(texts))
    tokens = np.zeros((len(texts), *empty.tokens.shape[1:]), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    return dataclasses.replace(empty, tokens=jnp.asarray(tokens), num_tokens=jnp.asarray(lengths))


def test_what_is_refused_takes_nothing_that_others_need():
    """Blocks without the one before them take no place in the index, one too many none of another pool."""
    orphans = [[i, 0, i, 1] for i in range(1, 9)]
    refused = [kv.Status.NO_PARENT] * 8
    empty = kv.init(dataclasses.replace(CONFIG, num_blocks=2))
    cache, status = kv.tiers.import_blocks(empty, texts_of(*orphans, [9, 9], [9, 9, 8, 8]))
    assert statuses(status) == [*refused, OK, OK]
    assert_invariants(cache)
    # No block of windows is free: of two beginnings one has such a block.
    contents, full = texts_of(*orphans, [9, 9], [7, 7]), kv.init(CONFIG).control
    windows = dataclasses.replace(full.block_pools[1], num_free=jnp.int32(0))
    full = dataclasses.replace(full, block_pools=(full.block_pools[0], windows))
    is_held = (contents.is_held[0], contents.is_held[1].at[8, 0].set(True))
    cache = dataclasses.replace(kv.init(CONFIG), control=full)
    _, status = kv.tiers.import_blocks(cache, dataclasses.replace(contents, is_held=is_held))
    assert statuses(status) == [*refused, kv.Status.OUT_OF_BLOCKS, OK]


@pytest.mark.quick_cases("state0")
@pytest.mark.parametrize("state", [kv.GatedDeltaNet(1, 4, key_dim=4), kv.Mamba2(1, 4, state_dim=4)])
def test_few_blocks_beside_states_that_none_is_linked_to(state):
    config = dataclasses.replace(CONFIG, layers=[kv.FullAttention(1, 4), state], max_query_len=WIDTH)
    tokens, lengths = prompts(A)
    cache, _ = kv.allocate(kv.init(config), [0], lengths[:1], tokens=tokens[:1])
    cache, _ = kv.extend(cache, lengths[:1], max_new=WIDTH, tokens=tokens[:1], seq_ids=[0])
    cache, _ = kv.commit(cache, [0])
    ids = np.flatnonzero(cache.control.block_pools[0].cached.is_published)
    found, status = kv.tiers.import_blocks(kv.init(config), kv.tiers.export_blocks(cache, ids))
    assert len(ids) == 3 and statuses(status) == [OK] * 3
    assert_invariants(found)
    scrubbed, num_blocks = kv.scrub(found, namespace=np.zeros(4, np.uint32))
    assert int(num_blocks) >= 3 and int(scrubbed.control.block_pools[0].cached.num_cached) == 0
    assert_invariants(scrubbed)


@pytest.mark.slow
def test_an_imported_block_outlives_none_before_it():
    """Its predecessors, which were cached long before, are evicted after it."""
    cache = filled(CONFIG, A, [8, 8, 8], [5, 5, 5])
    contents = export(cache, kv.tiers.eviction_candidates(cache, 1))
    cache, _ = kv.evict(cache, 1)
    cache, status = kv.tiers.import_blocks(cache, contents)
    assert statuses(status) == [OK]
    tokens, lengths = prompts(A)
    found = []
    while int(kv.lookup(cache, tokens[:1], lengths[:1])[0]):
        assert_invariants(cache)
        found.append(int(kv.lookup(cache, tokens[:1], lengths[:1])[0]))
        cache, _ = kv.evict(cache, 1)
    assert found == [6, 6, 6, 4, 2]


@pytest.mark.parametrize(
    ("kinds", "changes", "said"),
    [
        (
            [kv.FullAttention(2, 8)] * 2,
            dict(block_size=8),
            "got 4 tokens a block, expected 8 of FullAttention",
        ),
        (
            [kv.FullAttention(2, 8)] * 2,
            dict(dtype=jnp.bfloat16),
            "got 'v' in float32, expected bfloat16 of Fu",
        ),
        ([kv.FullAttention(2, 8)] * 3, {}, "got 2 layers, expected 3 of FullAttention"),
        ([kv.FullAttention(1, 8)] * 2, {}, "got 2 heads, expected 1 of FullAttention"),
        ([kv.FullAttention(2, 4)] * 2, {}, "got 8 as axis 2 of 'k', expected 4 of FullAttention"),
        (
            [kv.Quantised(kv.FullAttention(2, 8), "int8")] * 2,
            {},
            r"got the arrays \['k', 'v'\], expected \['k', ",
        ),
        ([kv.FullAttention(2, 8), kv.FullAttention(1, 8)], {}, "got arrays of 1 layer groups, expected 2"),
        ([kv.FullAttention(2, 8)] * 2, dict(max_seq_len=24), "got room for 16 tokens of a text, expected 24"),
    ],
)
def test_what_differs_from_another_cache_is_said(kinds, changes, said):
    options = dict(num_blocks=4, block_size=4, max_seqs=2, max_seq_len=16, enable_prefix_caching=True)
    one = kv.init(kv.CacheConfig([kv.FullAttention(2, 8)] * 2, **options))
    contents = jax.eval_shape(kv.tiers.export_blocks, one, np.zeros(2, np.int32))
    other = kv.init(kv.CacheConfig(kinds, **(options | changes)))
    with pytest.raises(ValueError, match=f"{said}.*: export from a cache of the same") as raised:
        kv.tiers.import_blocks(other, contents)
    # What "k" and "v" have in common is said once.
    assert str(raised.value).count("got") == (2 if "'" in said and "arrays" not in said else 1)


@pytest.mark.slow
def test_contents_of_another_cache_are_refused():
    contents = export(filled(CONFIG, A), [0])
    wider = kv.init(dataclasses.replace(CONFIG, layers=[kv.FullAttention(1, 8), LAYERS[1]]))
    with pytest.raises(ValueError, match="got 4 as axis 2 of .*export from a cache of the same layer kinds"):
        kv.tiers.import_blocks(wider, contents)
    with pytest.raises(TypeError, match="contents is a dict, expected the BlockContents"):
        kv.tiers.import_blocks(wider, {})
    plain = kv.init(dataclasses.replace(CONFIG, enable_prefix_caching=False))
    for call in (lambda: kv.tiers.export_blocks(plain, [0]), lambda: kv.tiers.import_blocks(plain, contents)):
        with pytest.raises(ValueError, match="got a cache without prefix caching"):
            call()
    assert kv.tiers.eviction_candidates(plain, 2).tolist() == [NUM_BLOCKS] * 2
    with pytest.raises(ValueError, match="n is 13, expected 1 <= n <= num_blocks = 12"):
        kv.tiers.eviction_candidates(plain, 13)
