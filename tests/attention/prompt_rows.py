"""Rows of long prompts, in blocks of a permuted pool, and forks of them: for tests of columns in common."""

import kvcache_jax as kv
from tests.support.attention_driver import AttentionDriver, fragment

BLOCK, HEADS, GROUP, DIM = 16, 1, 2, 4
FULL = kv.FullAttention(HEADS, DIM)
SIZES = dict(num_blocks=260, block_size=BLOCK, max_seqs=24, max_seq_len=480, max_query_len=140)


def driver_of(kinds=(FULL,), *, implementation=None, **options):
    config = kv.CacheConfig(kinds, **SIZES, implementation=implementation)
    options = dict(num_q_heads=HEADS * GROUP, width=1, sink_logits=[0.5, -1]) | options
    driver = AttentionDriver(config, **options)
    driver.cache = fragment(driver.cache)
    return driver


def wide_driver(driver):
    """A driver of wide steps of the same cache."""
    wide = AttentionDriver(driver.config, num_q_heads=HEADS * GROUP, width=140, sink_logits=[0.5, -1])
    wide.cache, wide.history = driver.cache, driver.history
    return wide


def fill(driver, lengths):
    """Starts rows of so many tokens, by wide steps."""
    wide = wide_driver(driver)
    for row, length in lengths.items():
        wide.start(row, length)
    while left := {row: n - wide.length(row) for row, n in lengths.items() if n > wide.length(row)}:
        wide.step({row: min(n, 140) for row, n in left.items()})
    driver.cache = wide.cache
