"""Random scripts of all operations with chunks, drops, compression and rewriting in the mix.

Together they are 20,000 operations. After each the oracle is asked, and no bit of a block may have changed
that forks or chunks share.
"""

import numpy as np
import pytest

from tests.support.chunk_script import (
    ChunkDriver,
    PrefixChunkDriver,
    chunk_config,
    prefix_chunk_config,
    random_chunk_operation,
    window_chunk_config,
)

# So often per 1,000 operations, at least, did entries of calls get these statuses.
STATUSES = {
    ("store_chunk", "OK"): 25,
    ("store_chunk", "BAD_LENGTH"): 35,
    ("store_chunk", "OUT_OF_BLOCKS"): 5,
    ("store_chunk", "OUT_OF_CHUNKS"): 4,
    ("store_chunk", "SEQ_NOT_ACTIVE"): 5,
    ("compose", "OK"): 80,
    ("compose", "BAD_LENGTH"): 20,
    ("compose", "BAD_CHUNK_ID"): 10,
    ("compose", "OUT_OF_BLOCKS"): 5,
    ("free_chunks", "OK"): 10,
    ("free_chunks", "BAD_CHUNK_ID"): 5,
    ("rewrite", "OK"): 15,
    ("rewrite", "BAD_LENGTH"): 5,
    ("truncate", "BAD_LENGTH"): 2,
}
COMPRESSED = {("compress", "OK"): 30, ("compress", "OUT_OF_BLOCKS"): 2, ("compress", "BAD_LENGTH"): 20}
LOST = {(name, "WINDOW_LOST"): 6 for name in ("store_chunk", "compose", "rewrite", "truncate")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_random_script(seed):
    driver, num_seen = run(ChunkDriver(chunk_config(num_blocks=12)), seed, 2_700, COMPRESSED)
    assert driver.statuses["drop", "OK"] > 100
    assert min(num_seen["kept"], num_seen["composed"]) > 600 and num_seen["both"] > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_random_script_of_windows(seed):
    driver, num_seen = run(ChunkDriver(window_chunk_config(num_blocks=14)), seed, 1_600, LOST)
    assert driver.statuses["drop", "OK"] > 80 and num_seen["composed"] > 400


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_random_script_of_rows_that_share_prefixes(seed):
    """They publish no more than what still is a prefix, and what others publish stays right."""
    driver = PrefixChunkDriver(prefix_chunk_config(num_blocks=15))
    driver, num_seen = run(driver, seed, 2_000, COMPRESSED)
    assert num_seen["published behind what was kept"] > 30 and num_seen["published and composed"] > 100
    assert driver.num_hits > 20 and min(driver.oracle.num_evictions, driver.oracle.num_adoptions) > 10


def run(driver, seed, num_steps, more_statuses):
    """Runs a script; returns the driver, and after how many operations a row was such."""
    rng, num_seen = (
        np.random.default_rng(seed),
        dict.fromkeys(
            ("kept", "composed", "both", "published behind what was kept", "published and composed"), 0
        ),
    )
    for _ in range(num_steps):
        driver.apply(*random_chunk_operation(rng, driver))
        rows = driver.oracle.rows.values()
        is_composed = [row.first_composed is not None for row in rows]
        num_seen["kept"] += any(row.num_kept for row in rows)
        num_seen["composed"] += any(is_composed)
        num_seen["both"] += any(
            row.num_kept and composed for row, composed in zip(rows, is_composed, strict=True)
        )
        num_seen["published behind what was kept"] += any(row.num_kept and row.num_published for row in rows)
        num_seen["published and composed"] += any(
            row.num_published and composed for row, composed in zip(rows, is_composed, strict=True)
        )
    for (name, status), per_thousand in (STATUSES | more_statuses).items():
        count = driver.statuses[name, status]
        assert count * 1000 >= per_thousand * num_steps, (name, status, driver.statuses)
    return driver, num_seen
