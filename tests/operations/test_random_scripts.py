"""Long and short random scripts of all operations, against the oracle after every one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache_jax as kv
from tests.support.random_script import (
    ENTRIES,
    NUM_PACKED,
    ROWS,
    WIDTH,
    Driver,
    dropping_config,
    full_config,
    grouped_config,
    random_operation,
)

NUM_BLOCKS = 12  # too few for all rows to be long


# The scripts are only worth something if they went everywhere: so often per 1,000 operations, at least, did
# rows of one call meet.
EVENTS = {
    "several lack blocks": 40,
    "one gets blocks and another none": 40,
    "a later one gets blocks": 15,
    "a copy where blocks are short": 4,
    "several copies": 6,
    "a repeated row": 40,
    "a repeated row that failed": 10,
    "a chain of forks": 7,
    "a parent that changes": 10,
}
STATUSES = {
    "allocate": ("OK", "OUT_OF_BLOCKS", "TOO_LONG", "SEQ_IN_USE", "BAD_LENGTH"),
    "extend": ("OK", "OUT_OF_BLOCKS", "TOO_LONG", "SEQ_NOT_ACTIVE"),
    "extend_some": ("OK", "OUT_OF_BLOCKS", "TOO_LONG", "SEQ_NOT_ACTIVE"),
    "extend_packed": ("OK", "OUT_OF_BLOCKS", "SEQ_NOT_ACTIVE"),
    "fork": ("OK", "SEQ_IN_USE", "SEQ_NOT_ACTIVE"),
    "reorder": ("OK", "SEQ_NOT_ACTIVE"),
    "truncate": ("OK", "TOO_LONG", "BAD_LENGTH", "SEQ_NOT_ACTIVE"),
    "free": ("OK", "SEQ_NOT_ACTIVE"),
    "rewrite": ("OK", "BAD_LENGTH", "SEQ_NOT_ACTIVE"),
}
ON_IDS = ("SKIPPED", "BAD_SEQ_ID", "DUPLICATE_SEQ_ID")


@pytest.mark.slow
def test_a_random_script_of_rows_that_drop_tokens():
    rng, driver = np.random.default_rng(1), Driver(dropping_config(num_blocks=NUM_BLOCKS))
    num_gone, num_steps = 0, 1_500
    for _ in range(num_steps):
        driver.apply(*random_operation(rng, driver))
        num_gone += any(row.gone for row in driver.oracle.rows.values())
    assert num_gone > num_steps // 10
    for name, status in (
        ("drop", "OK"),
        ("drop", "BAD_LENGTH"),
        ("drop", "SEQ_NOT_ACTIVE"),
        ("rewrite", "OK"),
    ):
        assert driver.statuses[name, status] >= num_steps // 100, (name, status, driver.statuses)


def test_a_random_script():
    run_script_of_all(grouped_config, seed=2, num_steps=600)


# Others of a full group are in test_prefix_scripts.py.
@pytest.mark.slow
@pytest.mark.parametrize(("make_config", "num_steps"), [(full_config, 1_000), (grouped_config, 2_000)])
def test_a_long_random_script(make_config, num_steps):
    run_script_of_all(make_config, 0, num_steps)


def run_script_of_all(make_config, seed, num_steps):
    rng, driver = np.random.default_rng(seed), Driver(make_config(num_blocks=NUM_BLOCKS))
    for _ in range(num_steps):
        driver.apply(*random_operation(rng, driver))
    for event, per_thousand in EVENTS.items():
        assert driver.events[event] >= per_thousand * num_steps // 1000, (event, driver.events)
    for name, statuses in STATUSES.items():
        for status in (*statuses, *(ON_IDS if name != "extend" else ())):
            assert driver.statuses[name, status] >= max(num_steps // 800, 1), (name, status, driver.statuses)
    assert driver.oracle.num_copies > num_steps // 25
    if make_config is grouped_config:
        assert driver.statuses["truncate", "WINDOW_LOST"] >= max(num_steps // 800, 1)


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
@given(st.lists(operations, max_size=25))
def test_any_script_of_a_full_group(script):
    run_script(full_config(num_blocks=NUM_BLOCKS), script)


@pytest.mark.slow
@given(st.lists(operations, max_size=25))
def test_any_script_of_three_groups(script):
    run_script(grouped_config(num_blocks=NUM_BLOCKS), script)


def run_script(config, script):
    driver = Driver(config)
    driver.apply("allocate", [0, 1], [7, 0])
    driver.apply("extend", [5, 3, 0, 0, 0, 0])
    for operation in script:
        driver.apply(*operation)


@pytest.mark.slow
def test_forks_of_forks_freed_in_any_order():
    driver = Driver(full_config(num_blocks=NUM_BLOCKS))
    driver.apply("allocate", [0], [9])
    driver.apply("extend", [5, 0, 0, 0, 0, 0])
    for row in range(ROWS - 1):
        driver.apply("fork", [row], [row + 1])
        driver.apply("extend", [1 if r == row else 0 for r in range(ROWS)])
    for row in np.random.default_rng(3).permutation(ROWS).tolist():
        driver.apply("free", [row])
    assert int(kv.stats(driver.cache).num_blocks_free) == NUM_BLOCKS
