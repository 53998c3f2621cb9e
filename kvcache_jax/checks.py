"""Does a cache keep its promises? Host-side, slow and independent of the code that keeps them."""

import numpy as np

from kvcache_jax.config import LayerGroup, SlidingWindow
from kvcache_jax.state import BlockPool, Cache


def check_invariants(cache: Cache) -> list[str]:
    """Finds every broken invariant of the control state.

    Args:
      cache: Concrete (not traced, not batched).

    Returns:
      One sentence per violation; empty if all is well.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> kv.check_invariants(cache)
      []
    """
    is_active = np.asarray(cache.control.is_active)
    context_len = np.asarray(cache.control.context_len)
    violations = []
    for row in np.flatnonzero(~is_active):
        for name in ("context_len", "priority", "last_used", "namespace"):
            if np.asarray(getattr(cache.control, name))[row].any():
                violations.append(f"row {row} is idle and its {name} is not 0")
    for row in np.flatnonzero((context_len < 0) | (context_len > cache.config.max_seq_len)):
        violations.append(
            f"row {row} has context_len {context_len[row]}, outside [0, {cache.config.max_seq_len}]"
        )
    for g, (pool, group) in enumerate(zip(cache.control.block_pools, cache.config.groups, strict=True)):
        violations += [f"group {g}: {violation}" for violation in _check_counts(pool)]
        table = np.asarray(pool.block_table)
        for row in range(len(is_active)):
            length = int(context_len[row]) if is_active[row] else None
            violations += [
                f"group {g}: row {row} {what}" for what in _check_row(table[row], pool, group, length)
            ]
    return violations


def _check_counts(pool: BlockPool) -> list[str]:
    """References, and the partition of the blocks into free and referenced."""
    violations = []
    table, ref_count = np.asarray(pool.block_table), np.asarray(pool.ref_count)
    num_free, nowhere = int(pool.num_free), pool.num_blocks
    for entry in np.unique(table[(table < 0) | (table > nowhere)]):
        violations.append(f"the block table holds {entry}, which is neither a block nor nowhere ({nowhere})")
    entries = np.bincount(table[(table >= 0) & (table < nowhere)], minlength=nowhere)
    for block in np.flatnonzero(entries != ref_count):
        violations.append(
            f"block {block} has ref_count {ref_count[block]} and {entries[block]} table entries"
        )
    if not 0 <= num_free <= nowhere:
        return [*violations, f"num_free is {num_free}, outside [0, {nowhere}]"]
    free_ids = np.asarray(pool.free_stack)[:num_free]
    if ((free_ids < 0) | (free_ids >= nowhere)).any():
        return [*violations, "the free stack holds an id that is no block"]
    times_free = np.bincount(free_ids, minlength=nowhere)
    for block in np.flatnonzero(times_free > 1):
        violations.append(f"block {block} is {times_free[block]} times on the free stack")
    for block in np.flatnonzero((times_free > 0) & (ref_count > 0)):
        violations.append(f"block {block} is free and has ref_count {ref_count[block]}")
    for block in np.flatnonzero((times_free == 0) & (ref_count == 0)):
        violations.append(f"block {block} is lost: neither free nor referenced")
    if int(pool.peak_used) < nowhere - num_free:
        violations.append(f"peak_used is {int(pool.peak_used)}, below the {nowhere - num_free} blocks in use")
    return violations


def _check_row(entries: np.ndarray, pool: BlockPool, group: LayerGroup, length: int | None) -> list[str]:
    """One row of the block table; `length` is None for an idle row."""
    is_held = entries < pool.num_blocks
    if length is None:
        return ["is idle and holds blocks"] if is_held.any() else []
    violations = []
    held = entries[is_held]
    if len(np.unique(held)) != len(held):
        violations.append("holds a block twice")
    num_token_columns = -(-length // group.block_size)
    num_sinks, first_needed = group.num_sink_blocks, 0
    if isinstance(group.kind, SlidingWindow):
        first_needed = max(length - group.kind.window + 1, 0) // group.block_size
        if first_needed * group.block_size >= length:
            first_needed = num_token_columns
    needed = np.zeros_like(is_held)
    needed[: min(num_sinks, num_token_columns)] = True
    needed[first_needed:num_token_columns] = True
    for column in np.flatnonzero(needed & ~is_held):
        violations.append(f"of {length} tokens lacks the block of column {column}")
    behind_sinks = np.flatnonzero(is_held[num_sinks:])
    if len(behind_sinks) and len(behind_sinks) != behind_sinks[-1] - behind_sinks[0] + 1:
        violations.append(f"holds columns {(behind_sinks + num_sinks).tolist()} with a gap")
    if len(behind_sinks) and behind_sinks[0] > 0 and not isinstance(group.kind, SlidingWindow):
        violations.append(f"holds no block of column {num_sinks}")
    if is_held.sum() > group.max_held_blocks:
        violations.append(f"holds {is_held.sum()} blocks, above the bound {group.max_held_blocks}")
    ref_count = np.asarray(pool.ref_count)
    for column in np.flatnonzero(is_held[num_token_columns:]) + num_token_columns:
        if 0 <= entries[column] < pool.num_blocks and ref_count[entries[column]] != 1:
            violations.append(f"reserves block {entries[column]} that others hold")
    return violations
