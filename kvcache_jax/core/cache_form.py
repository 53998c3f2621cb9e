"""The form of a cache, one or several, with values or without, donated or not; and how it prints.

`Cache` prints itself, so this file knows its parts and not the class.
"""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.config import CacheConfig, format_bytes, memory_bytes
from kvcache_jax.core.counter import Counter

_HAS_VALUES = jax.Array, np.ndarray, np.generic


def is_batched(control: Any) -> bool:
    """Tests whether a control state is of several caches, stacked; within a `vmap` over them it is of one."""
    return control.is_active.ndim != 1


def is_traced(control: Any) -> bool:
    """Tests whether the operation that got the control state becomes part of a program."""
    return isinstance(control.is_active, Tracer)


def missing_values(control: Any) -> str | None:
    """Returns the type of an array without values, such as a tracer; None if all have values."""
    for leaf in [control.is_active, *jax.tree.leaves(control)]:  # None is no leaf
        if isinstance(leaf, Tracer) or not isinstance(leaf, _HAS_VALUES):
            return type(leaf).__name__
    return None


def is_donated(control: Any) -> bool:
    """Tests whether a step was given a cache's arrays; the control state must have values.

    The pools are not asked: operations that move no keys and values pass the pools through, so that a later
    step donates the pools of an older cache, whose control state stays.
    """
    return are_deleted(control)


def are_deleted(arrays: Any) -> bool:
    """Tests whether any of `arrays` was donated."""
    leaves = (leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array))
    return any(leaf.is_deleted() for leaf in leaves if not isinstance(leaf, Tracer))


@explicit_transfers
def summary(control: Any, pools: tuple[Any, ...], config: CacheConfig) -> str:
    """Describes a cache in two lines of figures, or of shapes where it is stacked or has no values."""
    size = f"{len(config.groups)} groups, {config.num_layers} layers, {config.dtype.name}"
    has_values = missing_values(control) is None
    if has_values and is_donated(control):
        return f"Cache({size}; donated, its arrays are deleted)"
    if not has_values or is_batched(control):
        tables = [pool.block_table for pool in control.block_pools]
        shapes = ", ".join(f"block_table {getattr(table, 'shape', table)}" for table in tables)
        return f"Cache({size}; {shapes})"
    used = [int((np.asarray(pool.ref_count) > 0).sum()) for pool in control.block_pools]
    blocks = ", ".join(f"{u}/{pool.num_blocks}" for u, pool in zip(used, control.block_pools, strict=True))
    used_bytes = sum(u * group.block_bytes for u, group in zip(used, config.groups, strict=True))
    memory = f"{format_bytes(used_bytes)} of {format_bytes(memory_bytes(config))}" if pools else "no storage"
    shown = Counter if control.prefix_index is not None else list(Counter)[: Counter.EVICTIONS]
    counts = np.asarray(control.counters)
    counters = ", ".join(f"{c.name.lower().replace('_', ' ')} {counts[c]}" for c in shown)
    rows = int(np.asarray(control.is_active).sum())
    return (
        f"Cache({size}; blocks {blocks} used, {memory}; rows {rows}/{control.max_seqs} active;\n  {counters})"
    )
