"""Checks of the store of chunks, and of the rows that were composed."""

import numpy as np

from kvcache_jax.core.state import Cache


def blocks_of_chunks(cache: Cache, group_id: int) -> np.ndarray:
    """Lists the blocks that chunks hold in a layer group, each as often as it is held, i64[any]."""
    if (chunks := cache.control.chunks) is None:
        return np.zeros(0, np.int64)
    ids = np.asarray(chunks.block_ids[group_id], np.int64)
    return ids[ids < cache.control.block_pools[group_id].num_blocks]


def is_composed(cache: Cache, row: int) -> bool:
    """Tells whether chunks were put into a row."""
    return cache.control.first_composed is not None and int(cache.control.first_composed[row]) > 0


def plain_len_of(cache: Cache, row: int) -> int:
    """Counts the tokens of a row in front of its first chunk."""
    if not is_composed(cache, row):
        return int(cache.control.context_len[row])
    assert cache.control.first_composed is not None
    return int(cache.control.first_composed[row]) - 1


def check_chunks(cache: Cache) -> list[str]:
    """Finds what is wrong with chunks: their names, their blocks, and the places that rows note."""
    if (chunks := cache.control.chunks) is None:
        return []
    violations = []
    tokens, namespaces = np.asarray(chunks.tokens), np.asarray(chunks.namespace)
    names: dict[tuple, int] = {}
    for chunk, length in enumerate(np.asarray(chunks.length).tolist()):
        start = int(chunks.start[chunk])
        if not 0 <= length <= tokens.shape[1] or not 0 <= start <= cache.config.max_seq_len - length:
            violations.append(f"chunk {chunk} has {length} tokens from {start}, which do not fit")
            continue
        if tokens[chunk, length:].any() or not length and (start or namespaces[chunk].any()):
            violations.append(f"chunk {chunk} of {length} tokens has more in its name")
        name = namespaces[chunk].tobytes(), tokens[chunk, :length].tobytes()
        if length and names.setdefault(name, chunk) != chunk:
            violations.append(f"chunks {names[name]} and {chunk} have the same name")
        for known in ("num_uses", "last_used"):
            if not length and int(getattr(chunks, known)[chunk]):
                violations.append(f"place {chunk} holds no chunk and has {known}")
        for g, (pool, group) in enumerate(zip(cache.control.block_pools, cache.config.groups, strict=True)):
            is_held = np.asarray(chunks.block_ids[g][chunk]) < pool.num_blocks
            first, end = start // group.block_size, -(-(start + length) // group.block_size)
            columns = first + np.arange(len(is_held))
            may_hold = must_hold = columns < (end if length else first)
            if group.window is not None:  # of what a window let go there is what the next token reads
                first_read = start + length + 1 - group.window
                must_hold = may_hold & ((columns + 1) * group.block_size > first_read)
            if (is_held & ~may_hold).any() or (must_hold & ~is_held).any():
                violations.append(
                    f"group {g}: chunk {chunk} holds blocks {np.flatnonzero(is_held).tolist()}, expected "
                    f"{np.flatnonzero(must_hold).tolist()}"
                )
    for g, pool in enumerate(cache.control.block_pools):
        held = blocks_of_chunks(cache, g)
        is_published = np.zeros(pool.num_blocks, bool)
        if pool.cached is not None:
            is_published = np.asarray(pool.cached.is_published)
        for block in held[is_published[held]]:
            violations.append(f"group {g}: block {block} of a chunk is published")
    for row, length in enumerate(np.asarray(cache.context_len).tolist()):
        if not 0 <= plain_len_of(cache, row) <= length:
            violations.append(f"row {row} of {length} tokens is composed from {plain_len_of(cache, row)} on")
    return violations
