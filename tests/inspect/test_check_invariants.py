"""Does `check_invariants` find what is wrong? One promise broken at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv


def edited(tree: Any, path: str, place: Any, value: Any) -> Any:
    """`tree` with `value` at `place` of the array at `path`; the array as a whole if `place` is ()."""
    name, _, rest = path.partition(".")
    if isinstance(tree, tuple):
        i = int(name)
        return *tree[:i], edited(tree[i], rest, place, value), *tree[i + 1 :]
    old = getattr(tree, name)
    if rest:
        return dataclasses.replace(tree, **{name: edited(old, rest, place, value)})
    new = np.array(old)
    new[place] = value
    return dataclasses.replace(tree, **{name: new})


def assert_found(cache: kv.Cache, edits: list[tuple[str, Any, Any]], sentence: str) -> None:
    for path, place, value in edits:
        cache = edited(cache, f"control.{path}", place, value)
    violations = kv.check_invariants(cache)
    assert any(sentence in violation for violation in violations), violations


# --- rows and blocks: row 0 holds blocks 0 and 1 with 6 tokens, row 2 shares them; 2 is free next ---


@pytest.fixture(scope="module")
def rows():
    config = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=5, block_size=4, max_seqs=3, max_seq_len=16)
    cache, _ = kv.allocate(kv.init(config), [0], [6])
    cache, _ = kv.extend(cache, [6, 0, 0], max_new=6)
    cache, _ = kv.fork(cache, [0], [2])
    assert kv.check_invariants(cache) == []
    return cache


POOL = "block_pools.0"
BREAKS = {
    "block 3 is lost": [(f"{POOL}.free_stack", slice(2), [4, 2]), (f"{POOL}.num_free", (), 2)],
    "block 0 has ref_count 1 and 2 table": [(f"{POOL}.ref_count", 0, 1)],
    "block 2 has ref_count 1 and 0 table": [(f"{POOL}.ref_count", 2, 1)],
    "block 2 is 2 times on": [(f"{POOL}.free_stack", 0, 2)],
    "block 1 is free and has": [(f"{POOL}.free_stack", 0, 1)],
    "an id that is no block": [(f"{POOL}.free_stack", 0, 5)],
    "num_free is 6": [(f"{POOL}.num_free", (), 6)],
    "peak_used is 1": [(f"{POOL}.peak_used", (), 1)],
    "peak_used is 6": [(f"{POOL}.peak_used", (), 6)],
    "the block table holds -1": [(f"{POOL}.block_table", (1, 0), -1)],
    "row 1 is idle and holds": [(f"{POOL}.block_table", (1, 0), 0)],
    "row 2 of 6 tokens lacks": [(f"{POOL}.block_table", (2, 1), 5)],
    "row 2 holds a block twice": [(f"{POOL}.block_table", (2, 1), 0)],
    "row 2 reserves block 1": [("context_len", 2, 4)],
    "row 0 has context_len 17": [("context_len", 0, 17)],
    "row 0 has context_len -2147483648": [("context_len", 0, -(2**31))],
    "row 1 is idle and its priority": [("priority", 1, 1)],
}


@pytest.mark.parametrize("sentence", BREAKS)
def test_broken_rows_and_blocks_are_found(rows, sentence):
    assert_found(rows, BREAKS[sentence], sentence)


# --- the index: rows 0 and 2 share 1 to 9 in blocks 0, 1 (published), 2; block 3 of namespace 5 is cached ---

POLICY = "test: everything, for the checker"


@kv.policies.eviction_policy(POLICY, needs=["num_hits", "depth", "idle", "age", "priority"])
def everything(blocks: kv.policies.BlockMetadata) -> jax.Array:
    return blocks.num_hits


@pytest.fixture(scope="module")
def published():
    layers = [kv.FullAttention(1, 4), kv.SlidingWindow(1, 4, window=5, block_size=2)]
    config = kv.CacheConfig(
        layers,
        num_blocks=10,
        block_size=4,
        max_seqs=4,
        max_seq_len=16,
        enable_prefix_caching=True,
        eviction_policy=POLICY,
    )

    tokens = jnp.array([[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 7, 7, 7, 7, 0, 0, 0, 0]])
    namespace = np.array([[0, 0, 0, 0], [5, 0, 0, 0]], np.uint32)
    cache = kv.init(config, storage=False)
    cache, _ = kv.allocate(cache, [0, 1], [9, 5], tokens=tokens, namespace=namespace)
    cache, _ = kv.extend(cache, [9, 5], max_new=9, tokens=tokens, seq_ids=[0, 1])
    cache, _ = kv.commit(cache, [0, 1])
    cache, _ = kv.fork(cache, [0], [2])
    cache, _ = kv.free(cache, [1])
    assert kv.check_invariants(cache) == []
    return cache


INDEX, WINDOW = "prefix_index", "block_pools.1"
LISTED, NOWHERE = (9, 0), 10  # The entry of block 0.
INDEX_BREAKS = {
    "the index lists [1, 3], and [0, 1, 3]": [(f"{INDEX}.buckets", LISTED, NOWHERE)],
    "the index lists [0, 1, 2, 3], and [0, 1, 3]": [(f"{INDEX}.buckets", (0, 0), 2)],
    "the index holds 11, which is neither a block nor nowhere (10)": [(f"{INDEX}.buckets", (0, 0), 11)],
    "the list of parents holds -1": [(f"{INDEX}.parent", 1, -1)],
    "group 1: the list of linked blocks holds 21": [(f"{INDEX}.group_links.1.block_ids", (0, 0), 21)],
    "group 1: the list of indexed blocks holds 11": [(f"{INDEX}.group_links.1.indexed_ids", 0, 11)],
    "group 1: the queue holds -2": [(f"{WINDOW}.cached.queue", 3, -2)],
    "group 1: the block table holds 1000000": [(f"{WINDOW}.block_table", (0, 1), 10**6)],
    "published block 1 has the unpublished parent 2": [(f"{INDEX}.parent", 1, 2)],
    "block 1 is referenced and its parent 3 is not": [(f"{INDEX}.parent", 1, 3)],
    "block 1 has a parent of another namespace, 0": [(f"{INDEX}.namespace", (1, 3), 2)],
    "the parents of published blocks form a circle": [(f"{INDEX}.parent", 0, 1)],
    "blocks 0 and 3 are published for the same tokens": [
        (f"{INDEX}.block_tokens", 3, [1, 2, 3, 4]),
        (f"{INDEX}.namespace", 3, 0),
    ],
    "block 1 has another hash than its tokens": [(f"{INDEX}.block_tokens", (1, 3), 9)],
    "block 3 has another hash than its tokens": [(f"{INDEX}.namespace", (3, 0), 6)],
    "block 0 has another hash than its tokens": [("hash_key", 1, 0)],
    "block 0 is in the wrong bucket": [
        (f"{INDEX}.buckets", LISTED, NOWHERE),
        (f"{INDEX}.buckets", (8, 0), 0),
    ],
    "block 0 has 1 children and counts 2": [(f"{INDEX}.history.num_children", 0, 2)],
    "block 1 is at depth 1, noted 0": [(f"{INDEX}.history.depth", 1, 0)],
    "a block has a negative number of hits": [(f"{INDEX}.history.num_hits", 3, -1)],
    "block 3 was used before it was published": [(f"{INDEX}.history.last_used_at", 3, 1)],
    "num_cached is 2, and 1 blocks are cached": [(f"{POOL}.cached.num_cached", (), 2)],
    "the queue lists [], and [3] are cached": [(f"{POOL}.cached.queued_at", 3, 1)],
    "the queue of 32 entries reaches": [(f"{POOL}.cached.head", (), 2)],
    "2 published blocks have owners, and the queue has room for 1": [
        (f"{POOL}.cached.head", (), np.uint32(2**32 - 30))
    ],
    "block 4 is free and published": [(f"{POOL}.cached.is_published", 4, True)],
    "group 1: a block is linked to several": [(f"{INDEX}.group_links.1.block_ids", (1, 0), 0)],
    "group 1: [0, 1, 2, 3, 6] are linked": [(f"{INDEX}.group_links.1.block_ids", (3, 0), NOWHERE)],
    "group 1: block 5 is linked to the unpublished": [
        (f"{INDEX}.group_links.1.block_ids", (3, 0), NOWHERE),
        (f"{INDEX}.group_links.1.block_ids", (2, 0), 5),
    ],
    "group 1: block 2 is linked to block 1 and names block 0": [(f"{INDEX}.group_links.1.indexed_ids", 2, 0)],
    "group 1: block 4 is unpublished and names block 1": [(f"{INDEX}.group_links.1.indexed_ids", 4, 1)],
    "row 0 has 3 blocks published of 2 full ones": [("num_published", 0, 3)],
    "row 2 does not count its published last block": [("context_len", 2, 6), ("num_published", 2, 1)],
    "row 0 holds an unpublished block among": [
        (f"{POOL}.cached.is_published", 1, False),
        (f"{INDEX}.buckets", (11, 0), NOWHERE),
    ],
    "row 2 holds block 1 of another namespace": [("namespace", (2, 1), 7)],
    "row 2 reserves a published block": [("context_len", 2, 4)],
    "row 2 holds block 1 after 3, its parent is 0": [(f"{POOL}.block_table", (2, 0), 3)],
    "group 1: row 0 holds columns [0, 2, 3, 4] with a gap": [(f"{WINDOW}.block_table", (0, 1), NOWHERE)],
    "group 0: row 0 holds no block of column 0": [(f"{POOL}.block_table", (0, 0), NOWHERE)],
    "group 1: row 2 of 9 tokens lacks the block of column 3": [(f"{WINDOW}.block_table", (2, 3), NOWHERE)],
}


@pytest.mark.parametrize("sentence", INDEX_BREAKS)
def test_a_broken_index_is_found(published, sentence):
    assert_found(published, INDEX_BREAKS[sentence], sentence)


@pytest.mark.parametrize("mark", [-1, 17])
def test_marks_outside_of_a_row_are_found(mark):
    layers = [kv.FullAttention(1, 4), kv.ShortConvolution(4, kernel=2)]
    sizes = dict(num_blocks=4, block_size=4, max_seqs=2, max_seq_len=16, enable_prefix_caching=True)
    cache = kv.init(kv.CacheConfig(layers, **sizes), storage=False)
    assert_found(cache, [("marks", (1, 0), mark)], f"row 1 marks [{mark}, 0], lengths outside [0, 16]")
