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


def fill_packed(driver):
    """Packs tokens of two prompts into steps, until row 1 has 190; returns the last step.

    Tokens of a prompt share what comes before all of them, and none sees a later one.
    """
    for row in (1, 6):
        driver.start(row, 400)
    while driver.length(1) < 190:
        step = driver.step({1: min(40, 190 - driver.length(1)), 6: 30})
    return step


def step_of_forks_packed(driver):
    """Goes on with row 1, a fork of it, and row 6, in one packed step."""
    driver.fork(1, 3)
    driver.step({1: 33, 3: 33, 6: 4})
