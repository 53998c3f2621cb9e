"""The properties of a layer kind in the prefix cache: "commit", "hit", "partial-hit", "evict", "transfer"."""

import dataclasses

import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.kinds.kind_rows import (
    MAX_LEN,
    NUM_ROWS,
    OK,
    WIDTH,
    Rows,
    empty,
    entries,
    indexed_config,
    padded,
    permuted,
    random_text,
)
from tests.support.helpers import assert_invariants, assert_same, leaf_bytes, num_copies, statuses


def published(kind, **options):
    """A row of 13 tokens whose full blocks are published, step by step, as states at their ends want it."""
    config = dataclasses.replace(indexed_config(kind), **options)
    rows = Rows(kind, empty(config))
    rows.allocate({2: random_text(13)})
    for start in range(0, 13, WIDTH):
        rows.step({2: random_text(13)[start : start + WIDTH]})
        rows.cache, status = kv.commit(rows.cache, *entries([2]))
        assert statuses(status)[0] == OK
    return rows


def cached_len(rows, text):
    tokens = np.stack([padded(text)] * NUM_ROWS)
    return int(kv.lookup(rows.cache, tokens, [len(text)] * NUM_ROWS)[0])


def commit(kind):
    """Full blocks are published once, partial ones not, and a row that writes after them copies nothing."""
    rows = published(kind)
    text = rows.texts[2]
    assert [cached_len(rows, end) for end in (text, text[:12], text[:9] + [31, 31, 31, 31])] == [12, 8, 8]
    rows.step({2: [1, 2, 3]})
    assert num_copies(rows.cache) == 0
    assert cached_len(rows, [*text, 1, 2, 3, 4]) == 12
    rows.cache, status = kv.commit(rows.cache, *entries([2, 0]))
    assert statuses(status)[:2] == [OK, kv.Status.SEQ_NOT_ACTIVE]
    assert cached_len(rows, [*text, 1, 2, 3, 4]) == 16


def hit(kind):
    """A row finds what another published, while that lives and after, and computes the rest right."""
    rows = published(kind)
    text = rows.texts[2]
    assert rows.start({0: [*text, 7, 9]}) == [12]
    rows.free(2)
    assert rows.start({2: text, 3: [30, *text]}) == [12, 0]
    rows.free(0, 2, 3)
    assert rows.start({1: text[:12]}) == [8]


def partial_hit(kind):
    """A prompt begins inside a published block, which is copied before it is written."""
    rows = published(kind, partial_hits=True)
    text = rows.texts[2]
    assert rows.start({0: [*text[:10], 31, 30], 1: [*text[:12], 31]}) == [10, 12]
    assert num_copies(rows.cache) == len([group for group in rows.groups if not group.holds_sources])
    rows.free(2)
    assert rows.start({3: text}) == [12]


def evict(kind):
    """Cached blocks make room for rows that need it, and are not found any more."""
    rows = published(kind)
    text = rows.texts[2]
    rows.free(2)
    assert cached_len(rows, text) == 12
    rows.cache, num_evicted = kv.evict(rows.cache, 1)
    assert int(num_evicted) == 1 and cached_len(rows, text) == 8
    rows.start({0: random_text(MAX_LEN, 1), 1: random_text(17, 2)})  # takes all 13 blocks
    assert cached_len(rows, text) == 0 and int(kv.stats(rows.cache).num_evictions) == 3


def transfer(kind):
    """Blocks that were exported and evicted are found again, bit for bit, also in another cache."""
    rows = published(kind)
    text = rows.texts[2]
    rows.feed({2: [1, 2, 3]})
    rows.cache, _ = kv.commit(rows.cache, *entries([2]))
    rows.free(2)
    chosen = kv.tiers.eviction_candidates(rows.cache, 5)
    contents = kv.tiers.export_blocks(rows.cache, chosen)
    assert contents.num_tokens.tolist() == [16, 12, 8, 4, 0]
    rows.cache, num_evicted = kv.evict(rows.cache, 5)
    assert int(num_evicted) == 4 and cached_len(rows, text) == 0
    for cache in (rows.cache, kv.init(indexed_config(kind))):
        other = Rows(kind, testing.poison(permuted(cache)))
        other.cache, status = run_import(other.cache, contents)
        assert statuses(status) == [OK] * 4 + [kv.Status.SKIPPED]
        assert_invariants(other.cache)
        again = kv.tiers.export_blocks(other.cache, kv.tiers.eviction_candidates(other.cache, 5))
        assert_same(leaf_bytes(again), leaf_bytes(contents))
        assert other.start({0: [*text, 1, 2, 3, 7, 9]}) == [16]


run_import = kv.donate(kv.tiers.import_blocks)
