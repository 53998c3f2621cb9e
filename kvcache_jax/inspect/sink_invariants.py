"""Checks of sinks that moved along, whose original keys rows hold in blocks beside those that they read."""

import numpy as np

from kvcache_jax.core.state import BlockPool, Cache


def blocks_of_sinks(pool: BlockPool) -> np.ndarray:
    """Lists the blocks with original keys, each as often as it is held, i64[any]."""
    if pool.sink_blocks is None:
        return np.zeros(0, np.int64)
    ids = np.asarray(pool.sink_blocks, np.int64)
    return ids[ids < pool.num_blocks]


def check_sinks(cache: Cache) -> list[str]:
    """Finds what is wrong with moved sinks: they stand in front of tokens that their row dropped."""
    violations, holes = [], cache.control.holes
    for g, (pool, group) in enumerate(zip(cache.control.block_pools, cache.config.groups, strict=True)):
        if pool.sink_blocks is None or holes is None:
            continue
        is_held, table = np.asarray(pool.sink_blocks) < pool.num_blocks, np.asarray(pool.block_table)
        starts = np.asarray(holes.start) * ~np.asarray(holes.is_plain)
        for row, column in zip(*np.nonzero(is_held), strict=True):
            if column * group.block_size >= starts[row]:
                violations.append(
                    f"group {g}: row {row} keeps original sinks of column {column}, where none are"
                )
            if table[row, column] == np.asarray(pool.sink_blocks)[row, column]:
                violations.append(f"group {g}: row {row} reads the original sinks of column {column}")
    return violations
