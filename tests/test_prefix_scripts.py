"""Long random scripts with prefix caching, against the oracle after every operation."""

import numpy as np
import pytest
from prefix_script import PrefixDriver, prefix_config, random_prefix_operation

STEPS = 7_000


@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 24), (1, 17), (2, 30)])
def test_a_long_random_script(seed, num_blocks):
    rng, driver = np.random.default_rng(seed), PrefixDriver(prefix_config(num_blocks=num_blocks))
    for _ in range(STEPS):
        driver.apply(*random_prefix_operation(rng, driver))
    assert driver.num_hits > 150, driver.num_hits
    assert driver.oracle.num_evictions > 100, driver.oracle.num_evictions
    assert driver.oracle.num_adoptions > 100, driver.oracle.num_adoptions
    assert driver.oracle.num_copies > 100
    num_refused = sum(n for (_, status), n in driver.statuses.items() if status == "OUT_OF_BLOCKS")
    assert num_refused > 5, driver.statuses
