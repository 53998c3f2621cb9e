"""The printed form of a cache."""

import numpy as np

from kvcache_jax.core.cache_checks import is_batched, is_donated, missing_values
from kvcache_jax.core.config import format_bytes, memory_bytes
from kvcache_jax.core.counter import Counter
from kvcache_jax.core.state import Cache


def summary(cache: Cache) -> str:
    """Describes a cache in two lines of figures, or of shapes where it is stacked or has no values."""
    control, config = cache.control, cache.config
    size = f"{len(config.groups)} groups, {config.num_layers} layers, {config.dtype.name}"
    has_values = missing_values(cache) is None
    if has_values and is_donated(cache):
        return f"Cache({size}; donated, its arrays are deleted)"
    if not has_values or is_batched(cache):
        tables = [pool.block_table for pool in control.block_pools]
        shapes = ", ".join(f"block_table {getattr(table, 'shape', table)}" for table in tables)
        return f"Cache({size}; {shapes})"
    used = [int((np.asarray(pool.ref_count) > 0).sum()) for pool in control.block_pools]
    blocks = ", ".join(f"{u}/{pool.num_blocks}" for u, pool in zip(used, control.block_pools, strict=True))
    used_bytes = sum(u * group.block_bytes for u, group in zip(used, config.groups, strict=True))
    memory = f"{format_bytes(used_bytes)} of {format_bytes(memory_bytes(config))}"
    memory = memory if cache.pools else "no storage"
    shown = Counter if control.prefix_index is not None else list(Counter)[: Counter.EVICTIONS]
    counts = np.asarray(control.counters)
    counters = ", ".join(f"{c.name.lower().replace('_', ' ')} {counts[c]}" for c in shown)
    rows = int(np.asarray(control.is_active).sum())
    return (
        f"Cache({size}; blocks {blocks} used, {memory}; rows {rows}/{control.max_seqs} active;\n  {counters})"
    )
