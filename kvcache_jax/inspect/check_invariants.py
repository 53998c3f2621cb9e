"""Checks of a cache's invariants: host-side, slow, and written without the code that keeps them.

Only the hash of a block and the bucket that it belongs into are computed by the same functions.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.cache_checks import require_values
from kvcache_jax.core.state import (
    BlockHistory,
    BlockPool,
    Cache,
    CachedBlocks,
    GroupLinks,
    PrefixIndex,
    row_fields,
    row_len,
)
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.prefix.content_hash import block_hashes, root_hash
from kvcache_jax.prefix.prefix_index import bucket_of


@explicit_transfers
def check_invariants(cache: Cache) -> list[str]:
    """Finds every broken invariant of the control state.

    Args:
      cache: Concrete (not traced, not batched).

    Returns:
      One sentence per violation; empty if all is well.

    Raises:
      TypeError: the cache is traced or has no values.
      ValueError: the cache is batched or was donated.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> kv.check_invariants(cache)
      []
    """
    require_values("check_invariants", cache)
    is_active = np.asarray(cache.control.is_active)
    context_len = np.asarray(cache.control.context_len)
    violations = []
    for name, values in row_fields(cache.control).items():
        is_set = np.asarray(values).reshape(len(is_active), -1).any(axis=1)
        violations += [
            f"row {row} is idle and its {name} is not 0" for row in np.flatnonzero(is_set & ~is_active)
        ]
    unusable = [
        f"row {row} has context_len {context_len[row]}, outside [0, {cache.config.max_seq_len}]"
        for row in np.flatnonzero((context_len < 0) | (context_len > cache.config.max_seq_len))
    ]
    for group in cache.config.groups:
        length = np.asarray(row_len(cache.control, group.kind))
        if group.holds_sources:
            unusable += [
                f"row {row} has a source of {length[row]} tokens, outside [0, {group.max_len}]"
                for row in np.flatnonzero((length < 0) | (length > group.max_len))
            ]
    if cache.control.marks is not None:
        marks = np.asarray(cache.control.marks)
        unusable += [
            f"row {row} marks {marks[row].tolist()}, lengths outside [0, {cache.config.max_seq_len}]"
            for row in np.flatnonzero(((marks < 0) | (marks > cache.config.max_seq_len)).any(axis=1))
        ]
    unusable += _check_ids(cache) + _check_holes(cache)
    if unusable:
        return violations + unusable  # the checks below look things up by them
    for g, (pool, group) in enumerate(zip(cache.control.block_pools, cache.config.groups, strict=True)):
        violations += [
            f"group {g}: {violation}" for violation in check_counts(pool, *_blocks_of_extras(cache, g))
        ]
        table, lengths = np.asarray(pool.block_table), np.asarray(row_len(cache.control, group.kind))
        waits = _columns_before_marks(cache, g)
        for row, hole in enumerate(_holes_of(cache, g)):
            length = int(lengths[row]) if is_active[row] else None
            found = _check_row(table[row], pool, group, length, hole, waits[row])
            violations += [f"group {g}: row {row} {what}" for what in found]
    return violations + cache.config.hooks.violations(cache) + _check_index(cache)


def _blocks_of_extras(cache: Cache, group_id: int) -> list[np.ndarray]:
    """Lists the blocks of a group that each extra holds, each as often as it does; i64[any]."""
    nowhere = cache.control.block_pools[group_id].num_blocks
    held = cache.config.hooks.held_blocks(cache.control, group_id)
    ids = [np.asarray(of_extra.block_ids, np.int64) for of_extra in held]
    return [of_extra[of_extra < nowhere] for of_extra in ids]


class _Hole(NamedTuple):
    """The hole of a row in a layer group; see `Holes`."""

    start: int = 0
    num_hidden: int = 0
    num_dropped: int = 0
    num_kept: int = 0
    first: int = 0


def _holes_of(cache: Cache, group_id: int) -> list[_Hole]:
    """Reads each row's holes, in a layer group."""
    if (holes := cache.control.holes) is None:
        return [_Hole()] * cache.max_seqs
    of_rows = holes.start, holes.num_hidden, holes.num_dropped, holes.num_kept, holes.first[:, group_id]
    return [_Hole(*of_row) for of_row in np.stack([np.asarray(x) for x in of_rows], axis=1).tolist()]


def _check_holes(cache: Cache) -> list[str]:
    """Checks that holes lie within their rows, and that idle rows and rows with windows have none."""
    violations, groups = [], cache.config.groups
    by_group = [_holes_of(cache, g) for g in range(len(groups))]
    for row, length in enumerate(np.asarray(cache.control.context_len).tolist()):
        of_groups = [holes[row] for holes in by_group]
        hole, firsts = of_groups[0], [hole.first for hole in of_groups]
        if min(map(min, of_groups)) < 0 or hole.start + hole.num_hidden > length:
            violations.append(f"row {row} of {length} tokens has the impossible {hole}")
        if hole.num_kept > hole.start or max(firsts) > (hole.start if hole.num_kept else 0):
            violations.append(f"row {row} keeps {hole.num_kept} tokens, from {firsts} to {hole.start}")
        if hole.num_kept and not hole.num_dropped and not any(firsts):
            violations.append(f"row {row} keeps {hole.num_kept} tokens and dropped none")
        if any(map(any, of_groups)) and not cache.control.is_active[row]:
            violations.append(f"row {row} is idle and let tokens go")
        if hole.num_kept and not all(group.span.keeps_all for group in groups):
            violations.append(f"row {row} keeps tokens at positions that a window does not know")
    return violations


def _check_ids(cache: Cache) -> list[str]:
    """Checks that lists of block ids hold nothing else."""
    control, index = cache.control, cache.control.prefix_index
    found = []
    for g, pool in enumerate(control.block_pools):
        lists = {held.holder: held.block_ids for held in cache.config.hooks.held_blocks(control, g)}
        lists |= {"block table": pool.block_table}
        if pool.cached is not None:
            lists |= {"queue": pool.cached.queue}
        found += [(f"group {g}: the {name}", ids, pool.num_blocks) for name, ids in lists.items()]
    if index is not None:
        nowhere = index.parent.shape[0]
        cached = control.block_pools[cache.config.indexed_group].cached
        assert cached is not None
        parents = np.asarray(index.parent)[np.asarray(cached.is_published)]
        found += [("the index", index.buckets, nowhere), ("the list of parents", parents, nowhere)]
        for g, (links, pool) in enumerate(zip(index.group_links, control.block_pools, strict=True)):
            if links is not None:
                found.append((f"group {g}: the list of linked blocks", links.block_ids, pool.num_blocks))
                found.append((f"group {g}: the list of indexed blocks", links.indexed_ids, nowhere))
    return check_ids(found)


def check_ids(lists: Sequence[tuple[str, jax.Array, int]]) -> list[str]:
    """Checks that lists, each with a name and with its id of nowhere, hold nothing but ids."""
    violations = []
    for holder, ids, nowhere in lists:
        ids = np.asarray(ids)
        for entry in sorted({*ids[(ids < 0) | (ids > nowhere)].tolist()}):
            violations.append(f"{holder} holds {entry}, which is neither a block nor nowhere ({nowhere})")
    return violations


def check_counts(pool: BlockPool, *held_besides: np.ndarray) -> list[str]:
    """Checks references, and the partition of the blocks into free, referenced and cached."""
    violations = []
    table, ref_count = np.asarray(pool.block_table), np.asarray(pool.ref_count)
    num_free, nowhere = int(pool.num_free), pool.num_blocks
    held = np.concatenate([table[table < nowhere], *held_besides])
    entries = np.bincount(held, minlength=nowhere)
    for block in np.flatnonzero(entries != ref_count):
        violations.append(
            f"block {block} has ref_count {ref_count[block]} and {entries[block]} table or other entries"
        )
    if not 0 <= num_free <= nowhere:
        return [*violations, f"num_free is {num_free}, outside [0, {nowhere}]"]
    free_ids = np.asarray(pool.free_stack)[:num_free]
    if ((free_ids < 0) | (free_ids >= nowhere)).any():
        return [*violations, "the free stack holds an id that is no block"]
    times_free = np.bincount(free_ids, minlength=nowhere)
    is_published = np.zeros(nowhere, bool) if pool.cached is None else np.asarray(pool.cached.is_published)
    is_cached = is_published & (ref_count == 0)
    for block in np.flatnonzero(times_free > 1):
        violations.append(f"block {block} is {times_free[block]} times on the free stack")
    for block in np.flatnonzero((times_free > 0) & (ref_count > 0)):
        violations.append(f"block {block} is free and has ref_count {ref_count[block]}")
    for block in np.flatnonzero((times_free > 0) & is_published):
        violations.append(f"block {block} is free and published")
    for block in np.flatnonzero((times_free == 0) & (ref_count == 0) & ~is_cached):
        violations.append(f"block {block} is lost: neither free nor referenced nor cached")
    num_used, peak_used = (ref_count > 0).sum(), int(pool.peak_used)
    if not num_used <= peak_used <= nowhere:
        violations.append(f"peak_used is {peak_used}, not from the {num_used} in use to {nowhere} blocks")
    if pool.cached is not None:
        violations += _check_queue(pool.cached, is_cached, is_published & (ref_count > 0))
    return violations


def _check_queue(cached: CachedBlocks, is_cached: np.ndarray, will_be_cached: np.ndarray) -> list[str]:
    """Checks that each cached block is once in the queue, nothing else is, and those to come have room."""
    violations = []
    if int(cached.num_cached) != is_cached.sum():
        violations.append(f"num_cached is {int(cached.num_cached)}, and {is_cached.sum()} blocks are cached")
    queue, queued_at = np.asarray(cached.queue), np.asarray(cached.queued_at)
    head, tail = int(cached.head), int(cached.tail)
    if (tail - head) % 2**32 > len(queue):
        return [*violations, f"the queue of {len(queue)} entries reaches from {head} to {tail}"]
    num_left = len(queue) - (tail - head) % 2**32
    if will_be_cached.sum() > num_left:
        violations.append(
            f"{will_be_cached.sum()} published blocks have owners, and the queue has room for {num_left}"
        )
    positions = (head + np.arange((tail - head) % 2**32)) % 2**32
    entries = queue[positions % len(queue)]
    is_valid = entries < len(is_cached)
    entries, positions = entries[is_valid], positions[is_valid]
    listed = np.sort(entries[(queued_at[entries] == positions) & is_cached[entries]]).tolist()
    if listed != np.flatnonzero(is_cached).tolist():
        violations.append(f"the queue lists {listed}, and {np.flatnonzero(is_cached).tolist()} are cached")
    return violations


def _check_index(cache: Cache) -> list[str]:
    """Checks that the index finds exactly the published blocks, and that entries match their blocks."""
    index, control = cache.control.prefix_index, cache.control
    group_id = cache.config.indexed_group
    pool = control.block_pools[group_id]
    if index is None or pool.cached is None:
        return []
    nowhere = index.parent.shape[0]
    ref_count, is_published = np.asarray(pool.ref_count), np.asarray(pool.cached.is_published)
    buckets, parent = np.asarray(index.buckets), np.where(is_published, np.asarray(index.parent), nowhere)
    tokens, namespaces = np.asarray(index.block_tokens), np.asarray(index.namespace)
    violations = []
    entries = np.sort(buckets[buckets != nowhere]).tolist()
    if entries != np.flatnonzero(is_published).tolist():
        violations.append(
            f"the index lists {entries}, and {np.flatnonzero(is_published).tolist()} are published"
        )
    published = np.flatnonzero(is_published)
    children = published[parent[published] != nowhere]
    for block in children[~is_published[parent[children]]]:
        violations.append(f"published block {block} has the unpublished parent {parent[block]}")
    for block in children[(ref_count[children] > 0) & (ref_count[parent[children]] == 0)]:
        violations.append(f"block {block} is referenced and its parent {parent[block]} is not")
    for block in children[(namespaces[children] != namespaces[parent[children]]).any(axis=1)]:
        violations.append(f"block {block} has a parent of another namespace, {parent[block]}")
    # Equal parent and equal tokens: by induction equal from the start on.
    contents: dict[tuple, int] = {}
    for block in published.tolist():
        content = int(parent[block]), namespaces[block].tobytes(), tokens[block].tobytes()
        if content in contents:
            violations.append(f"blocks {contents[content]} and {block} are published for the same tokens")
        contents[content] = block
    depth, ancestor = np.zeros(nowhere, np.int32), np.append(parent, nowhere)[parent]
    has_parent = is_published & (parent != nowhere)
    depth[has_parent] = 1
    while (has_parent := has_parent & (ancestor != nowhere)).any():
        depth[has_parent] += 1
        ancestor = np.append(parent, nowhere)[ancestor]
        if depth.max() > nowhere:
            return [*violations, "the parents of published blocks form a circle"]
    if index.history is not None:
        violations += _check_history(index.history, parent, is_published, depth)
    hashes, bucket_ids = map(np.asarray, expected_hashes(index, control.hash_key, depth))
    is_hash = (hashes == np.asarray(index.block_hash)).all(axis=1)
    is_listed = (buckets[bucket_ids] == np.arange(nowhere)[:, None]).any(axis=1)
    for block in published[~is_hash[published]]:
        violations.append(f"block {block} has another hash than its tokens")
    for block in published[is_hash[published] & ~is_listed[published]]:
        violations.append(f"block {block} is in the wrong bucket")
    for g, (links, other) in enumerate(zip(index.group_links, control.block_pools, strict=True)):
        if links is not None and other.cached is not None:
            found = check_group_links(links, is_published, np.asarray(other.cached.is_published))
            violations += [f"group {g}: {what}" for what in found]
    return violations + _check_published_rows(cache, parent, namespaces, is_published)


def _check_history(
    history: BlockHistory, parent: np.ndarray, is_published: np.ndarray, depth: np.ndarray
) -> list[str]:
    """Checks the metadata of published blocks that an eviction policy gets."""
    violations, nowhere = [], len(parent)
    parents = parent[is_published]
    expected = np.bincount(parents[parents < nowhere], minlength=nowhere)
    num_children = np.asarray(history.num_children)
    for block in np.flatnonzero(num_children != expected):
        violations.append(f"block {block} has {expected[block]} children and counts {num_children[block]}")
    if history.depth is not None:
        for block in np.flatnonzero(is_published & (np.asarray(history.depth) != depth)):
            violations.append(f"block {block} is at depth {depth[block]}, noted {history.depth[block]}")
    if history.num_hits is not None and (np.asarray(history.num_hits)[is_published] < 0).any():
        violations.append("a block has a negative number of hits")
    if history.published_at is not None and history.last_used_at is not None:
        since = np.asarray(history.last_used_at) - np.asarray(history.published_at)
        for block in np.flatnonzero(is_published & (since >= 2**31)):
            violations.append(f"block {block} was used before it was published")
    return violations


def check_group_links(links: GroupLinks, is_indexed: np.ndarray, is_published: np.ndarray) -> list[str]:
    """Checks that links between published blocks and blocks of another group agree in both directions."""
    violations, block_ids, indexed_ids = [], np.asarray(links.block_ids), np.asarray(links.indexed_ids)
    indexed, slots = np.nonzero(block_ids < len(is_published))
    linked = block_ids[indexed, slots]
    if len(np.unique(linked)) != len(linked):
        violations.append(f"a block is linked to several: {np.sort(linked).tolist()}")
    published = np.flatnonzero(is_published).tolist()
    if sorted(linked.tolist()) != published:
        violations.append(f"{sorted(linked.tolist())} are linked, and {published} are published")
    for block, other in zip(indexed.tolist(), linked.tolist(), strict=True):
        if not is_indexed[block]:
            violations.append(f"block {other} is linked to the unpublished block {block}")
        if indexed_ids[other] != block:
            violations.append(
                f"block {other} is linked to block {block} and names block {indexed_ids[other]}"
            )
    for other in np.flatnonzero((indexed_ids < len(is_indexed)) & ~is_published):
        violations.append(f"block {other} is unpublished and names block {indexed_ids[other]}")
    return violations


@jax.jit
def expected_hashes(index: PrefixIndex, hash_key: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the hash of each block that follows from its parent's, and its bucket."""
    before = index.block_hash.at[index.parent].get(mode="clip")
    is_root = (index.parent == index.parent.shape[0])[:, None]
    before = jnp.where(is_root, root_hash(hash_key, index.namespace), before)
    hashes = before + block_hashes(hash_key, index.block_tokens, depth * index.block_tokens.shape[1])
    return hashes, bucket_of(index, hashes)


def _check_published_rows(
    cache: Cache, parent: np.ndarray, namespaces: np.ndarray, is_published: np.ndarray
) -> list[str]:
    """Checks that a row's published blocks are a chain in its namespace, and none is a reserved one."""
    control, group_id, violations = cache.control, cache.config.indexed_group, []
    table, nowhere = np.asarray(control.block_pools[group_id].block_table), len(is_published)
    block_size = cache.config.groups[group_id].block_size
    num_published, row_namespaces = np.asarray(control.num_published), np.asarray(control.namespace)
    holes = _holes_of(cache, group_id)
    rows = jnp.arange(control.max_seqs, dtype=jnp.int32)
    prefix_len = np.asarray(cache.config.hooks.prefix_len(control, rows, control.context_len))
    for row, length in enumerate(np.asarray(control.context_len).tolist()):
        blocks = table[row][table[row] < nowhere]
        num_full = length // block_size
        tail = blocks[num_full : -(-length // block_size)]
        if is_published[tail].any() and num_published[row] <= num_full:
            violations.append(f"row {row} does not count its published last block")
        if not 0 <= num_published[row] <= num_full + is_published[tail].sum():
            violations.append(f"row {row} has {num_published[row]} blocks published of {num_full} full ones")
        if prefix_len[row] < length and num_published[row] * block_size > prefix_len[row]:
            violations.append(
                f"row {row} has blocks published after the {prefix_len[row]} tokens of its prefix"
            )
        hole = holes[row]
        if hole.num_dropped and num_published[row] * block_size > hole.start - hole.num_kept:
            violations.append(f"row {row} has blocks published that are no prefix")
        if not is_published[blocks[: num_published[row]]].all():
            violations.append(f"row {row} holds an unpublished block among its published ones")
        for block in blocks[is_published[blocks] & (namespaces[blocks] != row_namespaces[row]).any(axis=1)]:
            violations.append(f"row {row} holds block {block} of another namespace")
        if is_published[blocks[-(-length // block_size) :]].any():
            violations.append(f"row {row} reserves a published block")
        for before, block in itertools.pairwise([nowhere, *blocks.tolist()]):
            if is_published[block] and parent[block] != before:
                violations.append(
                    f"row {row} holds block {block} after {before}, its parent is {parent[block]}"
                )
    return violations


def _check_row_of_states(is_held: np.ndarray, group: LayerGroup, length: int) -> list[str]:
    """Checks that a row has the states that its next token reads, and none of tokens after its end."""
    violations = []
    first, end = int(group.first_column(jnp.int32(length))), int(group.num_columns(jnp.int32(length)))
    for column in range(first, end):
        if not is_held[column]:
            violations.append(f"of {length} tokens lacks the block of column {column}")
    if is_held[end:].any():
        violations.append(f"of {length} tokens holds a block after column {end - 1}")
    if is_held.sum() > group.max_held_blocks:
        violations.append(f"holds {is_held.sum()} blocks, above the bound {group.max_held_blocks}")
    return violations


def _columns_before_marks(cache: Cache, group_id: int) -> np.ndarray:
    """Masks the columns that a row may keep though they left its window; bool[max_seqs, columns]."""
    marks, group = cache.control.marks, cache.config.groups[group_id]
    order = np.arange(group.max_blocks_per_seq)
    if marks is None or group_id not in cache.config.snapshot_groups:
        return np.zeros((cache.max_seqs, len(order)), bool)
    first, end = (np.asarray(x)[..., None] for x in group.span.needed_columns(marks, group.block_size))
    return ((order >= first) & (order < end)).any(axis=1)


def _check_row(
    entries: np.ndarray,
    pool: BlockPool,
    group: LayerGroup,
    length: int | None,
    hole: _Hole,
    waits: np.ndarray,  # bool[columns], may be kept though they left the window
) -> list[str]:
    """Checks one row of the block table; `length` is None for an idle row."""
    is_held = entries < pool.num_blocks
    if length is None:
        return ["is idle and holds blocks"] if is_held.any() else []
    violations = []
    held = entries[is_held]
    if len({*held.tolist()}) != len(held):
        violations.append("holds a block twice")
    if group.span.is_read_later:
        return violations + _check_row_of_states(is_held, group, length)
    num_token_columns = -(-length // group.block_size)
    num_sinks, window = group.num_sink_blocks, group.kind.span.window
    needed = np.zeros_like(is_held)
    needed[: min(num_sinks, num_token_columns)] = True
    if window is None:
        needed[hole.first // group.block_size : num_token_columns] = True
    else:
        places = np.arange(length)
        age = length - places + hole.num_dropped * (places < hole.start)  # in the text
        is_seen = (age < window) & ((places < hole.start) | (places >= hole.start + hole.num_hidden))
        needed[places[is_seen] // group.block_size] = True
    for column in np.flatnonzero(needed & ~is_held):
        violations.append(f"of {length} tokens lacks the block of column {column}")
    behind_sinks = np.flatnonzero(is_held[num_sinks:])
    of_window = np.flatnonzero((is_held & ~waits)[num_sinks:])
    behind_sinks = behind_sinks[behind_sinks >= of_window[0]] if len(of_window) else of_window
    if len(behind_sinks) and len(behind_sinks) != behind_sinks[-1] - behind_sinks[0] + 1:
        violations.append(f"holds columns {(behind_sinks + num_sinks).tolist()} with a gap")
    first_column = hole.first // group.block_size
    if window is None and len(behind_sinks) and behind_sinks[0] > first_column:
        violations.append(f"holds no block of column {first_column}")
    if window is None and is_held[:first_column].any():
        violations.append(f"holds blocks before column {first_column}, the first with tokens")
    if is_held.sum() > group.max_held_blocks:
        violations.append(f"holds {is_held.sum()} blocks, above the bound {group.max_held_blocks}")
    ref_count = np.asarray(pool.ref_count)
    if group.holds_sources and is_held[num_token_columns:].any():
        violations.append(f"holds {is_held.sum()} blocks of a source of {length} tokens")
    for column in np.flatnonzero(is_held[num_token_columns:]) + num_token_columns:
        if ref_count[entries[column]] != 1:
            violations.append(f"reserves block {entries[column]} that others hold")
    return violations
