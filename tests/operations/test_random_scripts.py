"""Long and short random scripts of all operations; their drivers check the cache after every one.

A script is only worth something if it went everywhere: the table says how often per 1,000 operations, at
least, operations returned a status, rows of one call met, rows were in a state, and blocks were copied.
"""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache_jax as kv
from kvcache_jax.operations import commit
from kvcache_jax.prefix import eviction
from tests.support import script_configs as configs
from tests.support.chunk_script import ChunkDriver, PrefixChunkDriver
from tests.support.prefix_script import ALIKE, KEYS, MIXED, SCRIPT_CONFIG, PrefixDriver, policy_config
from tests.support.random_script import ENTRIES, NUM_PACKED, ROWS, WIDTH, Driver
from tests.support.window_script import ChunkScript, WindowScript, grouped_config, partial_config

NUM_BLOCKS = 12  # too few for all rows to be long


def each(name, *statuses, least=1.25):
    return {f"{name} {status}": least for status in statuses}


ON_IDS = "SKIPPED", "BAD_SEQ_ID", "DUPLICATE_SEQ_ID"
OF_ROWS = {
    **each("allocate", "OK", "OUT_OF_BLOCKS", "TOO_LONG", "SEQ_IN_USE", "BAD_LENGTH", *ON_IDS),
    **each("extend", "OK", "OUT_OF_BLOCKS", "TOO_LONG", "SEQ_NOT_ACTIVE"),
    **each("extend_some", "OK", "OUT_OF_BLOCKS", "TOO_LONG", "SEQ_NOT_ACTIVE", *ON_IDS),
    **each("extend_packed", "OK", "OUT_OF_BLOCKS", "SEQ_NOT_ACTIVE", *ON_IDS),
    **each("fork", "OK", "SEQ_IN_USE", "SEQ_NOT_ACTIVE", *ON_IDS),
    **each("reorder", "OK", "SEQ_NOT_ACTIVE", *ON_IDS),
    **each("truncate", "OK", "TOO_LONG", "BAD_LENGTH", "SEQ_NOT_ACTIVE", *ON_IDS),
    **each("free", "OK", "SEQ_NOT_ACTIVE", *ON_IDS),
    **each("rewrite", "OK", "BAD_LENGTH", "SEQ_NOT_ACTIVE", *ON_IDS),
    "several lack blocks": 40,
    "one gets blocks and another none": 40,
    "a later one gets blocks": 15,
    "a copy where blocks are short": 4,
    "several copies": 6,
    "a repeated row": 40,
    "a repeated row that failed": 10,
    "a chain of forks": 7,
    "a parent that changes": 10,
    "copies": 40,
}
OF_SOURCES = each(
    "write_source", "OK", "OUT_OF_BLOCKS", "HAS_SOURCE", "TOO_LONG", "BAD_LENGTH", "SEQ_NOT_ACTIVE", *ON_IDS
)
DROPPING = {"gone": 100, **each("drop", "OK", "BAD_LENGTH", "SEQ_NOT_ACTIVE", least=10), "rewrite OK": 10}
OF_PREFIXES = {
    "several lack blocks": 20,
    "one gets blocks and another none": 30,
    "a later one gets blocks": 10,
    "a copy where blocks are short": 2,
    "several copies": 4,
    "a repeated row": 40,
    "a repeated row that failed": 10,
    "entries that hit the same blocks": 4,
    "a chain of forks": 4,
    "hits": 25,
    **dict.fromkeys(("evictions", "adoptions", "copies"), 14),
}
SHARED = dict.fromkeys(("hits", "evictions", "adoptions"), 11)
BY_POLICY = {"hits": 25, "evictions": 25, "adoptions": 12.5}
KEPT = {"drop OK": 37, "kept": 222, "composed": 222, "kept and composed": 22}
PUBLISHED = {"published before what was kept": 15, "published and composed": 50}
PUBLISHED |= {"hits": 10, "evictions": 5, "adoptions": 5}
OF_CHUNKS = {
    "store_chunk OK": 25,
    "store_chunk BAD_LENGTH": 35,
    "store_chunk OUT_OF_BLOCKS": 5,
    "store_chunk OUT_OF_CHUNKS": 4,
    "store_chunk SEQ_NOT_ACTIVE": 5,
    "compose OK": 80,
    "compose BAD_LENGTH": 20,
    "compose BAD_CHUNK_ID": 10,
    "compose OUT_OF_BLOCKS": 5,
    "free_chunks OK": 10,
    "free_chunks BAD_CHUNK_ID": 5,
    "rewrite OK": 15,
    "rewrite BAD_LENGTH": 5,
    "truncate BAD_LENGTH": 2,
}
COMPRESSED = OF_CHUNKS | {"compress OK": 30, "compress OUT_OF_BLOCKS": 2, "compress BAD_LENGTH": 20}
LOST = OF_CHUNKS | {f"{name} WINDOW_LOST": 6 for name in ("store_chunk", "compose", "rewrite", "truncate")}
OF_WINDOWS = {"hits": 67, "refused": 1, "evictions": 21}
OF_WINDOWS |= dict.fromkeys(("DUPLICATE_SEQ_ID", "OUT_OF_BLOCKS", "SEQ_NOT_ACTIVE", "SEQ_IN_USE"), 21)
OF_PARTIAL = {"partial": 12, "OUT_OF_BLOCKS": 12}
IN_BOTH = {"store OK": 20, "store WINDOW_LOST": 20, "store OUT_OF_BLOCKS": 2, "compose OK": 34}
IN_BOTH |= {"compose OUT_OF_BLOCKS": 4, "hits": 50, "evictions": 34}

with_ = functools.partial  # a driver with its config; the seed is the script's
grouped = with_(Driver, configs.grouped_config(num_blocks=NUM_BLOCKS))
full = with_(Driver, configs.full_config(num_blocks=NUM_BLOCKS))
sources = with_(Driver, configs.source_config(num_blocks=NUM_BLOCKS))
dropping = with_(Driver, configs.dropping_config(num_blocks=NUM_BLOCKS))
prefix = with_(PrefixDriver, SCRIPT_CONFIG)
chunks = with_(ChunkDriver, configs.chunk_config(num_blocks=12))
window_chunks = with_(ChunkDriver, configs.window_chunk_config(num_blocks=14))
prefix_chunks = with_(PrefixChunkDriver, configs.prefix_chunk_config(num_blocks=15))
window = kv.SlidingWindow(1, 3, window=6, max_rollback=2)
partial = with_(WindowScript, config=partial_config(kv.FullAttention(1, 3)), num_namespaces=2)
# No layer keeps all tokens: prefixes are found by blocks of tokens alone.
narrow = kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=40)
windows_alone = with_(WindowScript, config=grouped_config(layers=[narrow, window]))
alone_partial = with_(WindowScript, config=partial_config(window), num_namespaces=2)
window_partial = with_(WindowScript, config=partial_config(kv.FullAttention(1, 3), window), num_namespaces=2)


def by_policy(policy, batch, seed):
    """How tokens are laid out, which other scripts vary, is nothing to a policy."""
    left_out = "allocate", "extend_some", "extend_packed", "rewrite"
    return PrefixDriver(policy_config(policy, batch), seed, KEYS[policy], left_out)


def seeds(name, num_seeds, make, num_steps, least):
    return {f"{name} {seed}": (make, seed, num_steps, least) for seed in range(num_seeds)}


# By name: what makes its driver, the seed, how many operations, and the least counts.
SCRIPTS = {
    "grouped, short": (grouped, 2, 600, OF_ROWS | each("truncate", "WINDOW_LOST")),
    "grouped": (grouped, 0, 2_000, OF_ROWS | each("truncate", "WINDOW_LOST")),
    "full": (full, 0, 1_000, OF_ROWS),
    "sources": (sources, 0, 600, OF_ROWS | OF_SOURCES),
    "dropping": (dropping, 1, 1_500, DROPPING),
    "prefix, short": (prefix, 3, 900, SHARED),
    "prefix": (prefix, 0, 4_000, OF_PREFIXES),
    # Scripts of lru, which ALIKE must equal, are the two before; MIXED keeps all that others do.
    "alike": (with_(by_policy, ALIKE, 1), 5, 800, BY_POLICY),
    "lfu": (with_(by_policy, "lfu", 3), 5, 800, BY_POLICY),
    "mixed": (with_(by_policy, MIXED, 4), 5, 800, BY_POLICY),
    **seeds("chunks", 2, chunks, 2_700, COMPRESSED | KEPT),
    **seeds("chunks of windows", 1, window_chunks, 1_600, LOST | {"drop OK": 50, "composed": 250}),
    # They publish no more than what still is a prefix, and what others publish stays right.
    **seeds("chunks and prefixes", 2, prefix_chunks, 2_000, COMPRESSED | PUBLISHED),
    # Tokens, invariants, and that a refusal is due: hits here depend on when windows roll.
    "prefixes of windows, short": (WindowScript, 2, 500, OF_WINDOWS),
    "prefixes of windows": (WindowScript, 0, 1_000, OF_WINDOWS),
    "chunks and prefixes of windows": (ChunkScript, 0, 1_200, IN_BOTH),
    "partial hits": (partial, 1, 500, OF_PARTIAL),
    "partial hits of windows": (window_partial, 2, 500, OF_PARTIAL),
    "prefixes of windows alone": (windows_alone, 3, 1_000, OF_WINDOWS),
    "partial hits of windows alone": (alone_partial, 2, 500, OF_PARTIAL),
}


@pytest.mark.quick_cases("grouped, short")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_random_script(name):
    run_script(*SCRIPTS[name])


def run_script(make, seed, num_steps, least):
    script = make(seed=seed)
    for _ in range(num_steps):
        script.step()
    counts = script.totals()
    rare = {what: counts[what] for what, each in least.items() if counts[what] * 1000 < each * num_steps}
    assert not rare, (rare, counts)


@pytest.mark.slow
def test_a_random_script_in_small_batches(monkeypatch):
    """Blocks are published, and evicted, in several batches; chains end in one before the last."""
    monkeypatch.setattr(commit, "_BATCH_ON_CPUS", 3)
    monkeypatch.setattr(eviction, "_ENTRIES_ON_CPUS", 3)
    jax.clear_caches()
    try:
        run_script(prefix, 5, 700, SHARED)
    finally:
        jax.clear_caches()


rows = st.sampled_from([*range(ROWS)] * 4 + [-1, ROWS, ROWS + 7])
lengths = st.integers(-1, 33)


def pairs(other, count):
    return st.tuples(
        st.lists(rows, min_size=count, max_size=count), st.lists(other, min_size=count, max_size=count)
    )


operations = st.one_of(
    pairs(lengths, ENTRIES).map(lambda args: ("allocate", *args)),
    st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS).map(lambda new: ("extend", new)),
    pairs(st.integers(0, WIDTH), ENTRIES).map(lambda args: ("extend_some", *args)),
    pairs(st.integers(0, NUM_PACKED // ENTRIES), ENTRIES).map(lambda args: ("extend_packed", *args)),
    pairs(rows, ENTRIES).map(lambda args: ("fork", *args)),
    pairs(rows, ENTRIES).map(lambda args: ("reorder", *args)),
    pairs(lengths, ENTRIES).map(lambda args: ("truncate", *args)),
    st.lists(rows, min_size=2, max_size=2).map(lambda ids: ("free", ids)),
    pairs(st.lists(st.integers(-1, 12), max_size=WIDTH), ENTRIES).map(lambda args: ("rewrite", *args)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_config", [configs.full_config, configs.grouped_config], ids=["full", "grouped"]
)
@given(st.lists(operations, max_size=25))
def test_any_script(make_config, script):
    driver = Driver(make_config(num_blocks=NUM_BLOCKS))
    driver.apply("allocate", [0, 1], [7, 0])
    driver.apply("extend", [5, 3, 0, 0, 0, 0])
    for operation in script:
        driver.apply(*operation)


@pytest.mark.slow
def test_forks_of_forks_freed_in_any_order():
    driver = full()
    driver.apply("allocate", [0], [9])
    driver.apply("extend", [5, 0, 0, 0, 0, 0])
    for row in range(ROWS - 1):
        driver.apply("fork", [row], [row + 1])
        driver.apply("extend", [1 if r == row else 0 for r in range(ROWS)])
    for row in np.random.default_rng(3).permutation(ROWS).tolist():
        driver.apply("free", [row])
    assert int(kv.stats(driver.cache).num_blocks_free) == NUM_BLOCKS
