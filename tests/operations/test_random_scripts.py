"""Long and short random scripts of all operations, against the oracle after every one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache_jax as kv
from tests.support.random_script import ROWS, WIDTH, Driver, full_config, grouped_config, random_operation

NUM_BLOCKS = 18  # too few for all rows to be long


# Together 12,000 operations; another 21,000 of a full group are in test_prefix_scripts.py.
# The quick one is a quarter of the others.
@pytest.mark.quick_cases("grouped_config-875-0")
@pytest.mark.parametrize(
    ("make_config", "num_steps", "seed"),
    [(grouped_config, 875, 0)]
    + [(full_config, 2_500, seed) for seed in (0, 1)]
    + [(grouped_config, 3_500, seed) for seed in (0, 1)],
)
def test_a_long_random_script(make_config, num_steps, seed):
    """Each operation is followed by every check there is."""
    rng, driver = np.random.default_rng(seed), Driver(make_config(num_blocks=NUM_BLOCKS))
    for _ in range(num_steps):
        driver.apply(*random_operation(rng, driver))
    # The script is only worth something if it went everywhere.
    for name in ("allocate", "extend", "extend_some", "extend_packed"):
        assert driver.statuses[name, "OUT_OF_BLOCKS"] > 0, (name, driver.statuses)
    for name in ("fork", "reorder", "truncate", "free"):
        assert driver.statuses[name, "OK"] > num_steps // 50, (name, driver.statuses)
    assert driver.oracle.num_copies > num_steps // 25
    if make_config is grouped_config:
        assert driver.statuses["truncate", "WINDOW_LOST"] > num_steps // 350


rows = st.sampled_from([*range(ROWS)] * 4 + [-1, ROWS, ROWS + 7])
lengths = st.integers(-1, 33)


def pairs(other, count):
    return st.tuples(
        st.lists(rows, min_size=count, max_size=count), st.lists(other, min_size=count, max_size=count)
    )


operations = st.one_of(
    pairs(lengths, 2).map(lambda args: ("allocate", *args)),
    st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS).map(lambda new: ("extend", new)),
    pairs(st.integers(0, WIDTH), 3).map(lambda args: ("extend_some", *args)),
    pairs(st.integers(0, 3), 3).map(lambda args: ("extend_packed", *args)),
    pairs(rows, 2).map(lambda args: ("fork", *args)),
    pairs(rows, 3).map(lambda args: ("reorder", *args)),
    pairs(lengths, 2).map(lambda args: ("truncate", *args)),
    st.lists(rows, min_size=2, max_size=2).map(lambda ids: ("free", ids)),
)


@given(st.lists(operations, max_size=25))
def test_any_script_of_a_full_group(script):
    run_script(full_config(num_blocks=9), script)


@pytest.mark.slow
@given(st.lists(operations, max_size=25))
def test_any_script_of_three_groups(script):
    run_script(grouped_config(num_blocks=9), script)


def run_script(config, script):
    driver = Driver(config)
    driver.apply("allocate", [0, 1], [7, 0])
    driver.apply("extend", [5, 3, 0, 0, 0, 0])
    for operation in script:
        driver.apply(*operation)


def test_forks_of_forks_freed_in_any_order():
    driver = Driver(full_config(num_blocks=NUM_BLOCKS))
    driver.apply("allocate", [0, ROWS], [9, 0])
    driver.apply("extend", [5, 0, 0, 0, 0, 0])
    for row in range(ROWS - 1):
        driver.apply("fork", [row, ROWS], [row + 1, ROWS])
        driver.apply("extend", [1 if r == row else 0 for r in range(ROWS)])
    for row in np.random.default_rng(3).permutation(ROWS).tolist():
        driver.apply("free", [row, ROWS])
    assert int(kv.stats(driver.cache).num_blocks_free) == NUM_BLOCKS
