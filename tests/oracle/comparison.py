"""Compares a cache with the oracle that went through the same calls."""

import numpy as np

from kvcache_jax.core.counter import Counter
from kvcache_jax.core.state import Cache
from tests.oracle.oracle import Oracle


def check_against_oracle(cache: Cache, oracle: Oracle) -> list[str]:
    """Compares rows, chunks, lengths, free blocks, copies and the sharing of blocks.

    Returns:
      One sentence per difference; empty if the cache is the oracle's up to the names of blocks.
    """
    found = []
    active = np.flatnonzero(np.asarray(cache.is_active)).tolist()
    if active != sorted(oracle.rows):
        return [f"rows {active} are active, expected {sorted(oracle.rows)}"]
    lengths = np.asarray(cache.context_len)
    found += [
        f"row {row} holds {lengths[row]} tokens, expected {len(oracle.rows[row].tokens)}"
        for row in active
        if lengths[row] != len(oracle.rows[row].tokens)
    ]
    if cache.control.source_len is not None:
        source_len = np.asarray(cache.control.source_len)
        found += [
            f"row {row} has a source of {source_len[row]} tokens, expected {oracle.rows[row].source_len}"
            for row in active
            if source_len[row] != oracle.rows[row].source_len
        ]
    if (holes := cache.control.holes) is not None:
        for row in active:
            dropped, gone = oracle.rows[row].dropped, oracle.rows[row].gone
            want = min(dropped, default=0), len(dropped) - len(gone), len(gone), oracle.rows[row].num_kept
            of_row = holes.start, holes.num_hidden, holes.num_dropped, holes.num_kept
            if (got := tuple(int(values[row]) for values in of_row)) != want:
                found.append(f"row {row} dropped (start, hidden, gone, kept) {got}, expected {want}")
    if (first_composed := cache.control.first_composed) is not None:
        for row in active:
            got, want = int(first_composed[row]) - 1, oracle.rows[row].first_composed
            if got != (-1 if want is None else want):
                found.append(f"row {row} is composed from {got} on, expected {want}")
    counters = np.asarray(cache.control.counters)
    for counter, expected in (
        (Counter.COPIES, oracle.num_copies),
        (Counter.EVICTIONS, oracle.num_evictions),
        (Counter.ADOPTIONS, oracle.num_adoptions),
    ):
        if (count := int(counters[counter])) != expected % 2**32:
            found.append(f"{count} {counter.name.lower()}, expected {expected}")
    found += _check_chunks(cache, oracle)
    for g, pool in enumerate(cache.control.block_pools):
        if int(pool.num_free) != oracle.num_free(g):
            found.append(f"group {g} has {int(pool.num_free)} free blocks, expected {oracle.num_free(g)}")
        holders = {f"row {row}": oracle.rows[row].tables[g] for row in active}
        lines = np.asarray(pool.block_table)[active]
        if (chunks := cache.control.chunks) is not None:
            holders |= {f"chunk {i}": chunk.blocks[g] for i, chunk in oracle.chunks.items()}
            lines = [*lines, *np.asarray(chunks.block_ids[g])[[*oracle.chunks]]]
        names, taken = {}, {}
        for (holder, expected), line in zip(holders.items(), lines, strict=True):
            columns = np.flatnonzero(line < pool.num_blocks).tolist()
            if columns != sorted(expected):
                found.append(f"group {g}: {holder} holds columns {columns}, expected {sorted(expected)}")
                continue
            for column in columns:
                block, name = int(line[column]), expected[column]
                if names.setdefault(name, block) != block or taken.setdefault(block, name) != name:
                    found.append(f"group {g}: {holder} column {column} is not shared as expected")
    return found + _check_published(cache, oracle)


def _check_chunks(cache: Cache, oracle: Oracle) -> list[str]:
    """Compares the names of chunks, and where they began."""
    if (chunks := cache.control.chunks) is None:
        return []
    tokens, lengths = np.asarray(chunks.tokens), np.asarray(chunks.length)
    texts = {i: tokens[i, : lengths[i]].tolist() for i in np.flatnonzero(lengths).tolist()}
    starts = np.asarray(chunks.start).tolist()
    namespaces = np.asarray(chunks.namespace).tolist()
    got = {i: (tuple(namespaces[i]), tuple(text), starts[i]) for i, text in texts.items()}
    want = {i: (chunk.namespace, chunk.tokens, chunk.start) for i, chunk in oracle.chunks.items()}
    return [
        f"chunk {i} is (namespace, tokens, start) {got.get(i)}, expected {want.get(i)}"
        for i in sorted(got.keys() | want.keys())
        if got.get(i) != want.get(i)
    ]


def _check_published(cache: Cache, oracle: Oracle) -> list[str]:
    """Compares the published contents, and what the eviction policy is told of them."""
    index, cached = cache.control.prefix_index, cache.control.block_pools[cache.config.indexed_group].cached
    if index is None or cached is None or len(cache.config.groups) > 1:
        return []
    parent, tokens, namespace = map(np.asarray, (index.parent, index.block_tokens, index.namespace))
    found, prefixes = [], {}
    for block in np.flatnonzero(np.asarray(cached.is_published)).tolist():
        chain = [block]
        while parent[chain[-1]] < len(parent) and len(chain) <= len(parent):
            chain.append(int(parent[chain[-1]]))
        prefixes[tuple(namespace[block].tolist()), tuple(tokens[chain[::-1]].reshape(-1).tolist())] = block
    for prefix in sorted(prefixes.keys() ^ oracle.published.keys()):
        is_there = "is" if prefix in prefixes else "is not"
        found.append(f"{prefix[1]} in namespace {prefix[0]} {is_there} published")
    history = {} if index.history is None else vars(index.history)
    fields = {name: np.asarray(values) for name, values in history.items() if values is not None}
    fields.pop("num_children", None)
    for prefix in prefixes.keys() & oracle.published.keys():
        expected = oracle.history[oracle.published[prefix]]
        for field, values in fields.items():
            if (value := int(values[prefixes[prefix]])) != getattr(expected, field):
                found.append(f"{prefix[1]} has {field} {value}, expected {getattr(expected, field)}")
    return found
