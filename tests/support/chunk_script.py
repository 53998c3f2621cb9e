"""Random scripts in which chunks are stored, composed and forgotten, with all that other scripts do."""

import jax
import numpy as np

import kvcache_jax as kv
from tests.support.prefix_script import PrefixDriver
from tests.support.random_script import (
    ENTRIES,
    Driver,
    padded,
    row_ids,
    source_ids,
)
from tests.support.script_configs import MAX_CHUNK, NUM_CHUNKS

CHUNKS_PER_ROW = 2

# Keys of the token test know no position, so that composing moves them bit for bit.
store_some, find_some = kv.donate(kv.chunks.store), jax.jit(kv.chunks.find)


@kv.donate
def compose_some(cache, seq_ids, chunk_ids, starts):
    return kv.chunks.compose(cache, seq_ids, chunk_ids, starts, rotate=None)


class ChunkDriver(Driver):
    """A `Driver` of a cache with a store of chunks."""

    def next_operation(self):
        return random_chunk_operation(self.rng, self) or super().next_operation()

    def store_chunk(self, seq_ids, start, length):
        """Spans under the names of the tokens that the rows hold there."""
        names = []
        for row, first, num in zip(seq_ids, start, length, strict=True):
            tokens = self.oracle.rows[row].tokens if row in self.oracle.rows else []
            names.append([token or 0 for token in tokens[max(first, 0) :][: max(num, 0)]])
        names = [
            [*name, *[0] * MAX_CHUNK][: min(max(num, 0), MAX_CHUNK)]
            for name, num in zip(names, length, strict=True)
        ]
        spaces = [self.oracle.rows[row].namespace if row in self.oracle.rows else (0,) * 4 for row in seq_ids]
        tokens = padded(names, MAX_CHUNK)
        found = find_some(self.cache, tokens, np.array(length, np.int32), np.array(spaces, np.uint32))
        assert found.tolist() == [self.oracle.find_chunk(*name) for name in zip(spaces, names, strict=True)]
        self.cache, stored = store_some(self.cache, *map(np.array, (seq_ids, start, length)), tokens)
        expected = self.oracle.store_chunk(seq_ids, start, length, names)
        ids = [
            NUM_CHUNKS if status else self.oracle.find_chunk(*name)
            for status, *name in zip(expected, spaces, names, strict=True)
        ]
        assert stored.chunk_ids.tolist() == ids
        return stored.status, expected

    def free_chunks(self, chunk_ids):
        self.cache, status = kv.chunks.free(self.cache, chunk_ids)
        return status, self.oracle.free_chunks(chunk_ids)

    def compose(self, seq_ids, chunk_ids, starts):
        columns = np.full((2, ENTRIES, CHUNKS_PER_ROW), NUM_CHUNKS)
        for i, pair in enumerate(zip(chunk_ids, starts, strict=True)):
            columns[:, i, : len(pair[0])] = pair
        self.cache, status = compose_some(self.cache, np.array(seq_ids), *columns)
        return status, self.oracle.compose(seq_ids, chunk_ids, starts)


class PrefixChunkDriver(ChunkDriver, PrefixDriver):
    """A `PrefixDriver` of such a cache."""


def random_chunk_operation(rng: np.random.Generator, driver: ChunkDriver) -> tuple | None:
    """(name, arguments) of an operation on chunks; None for any other."""
    name = rng.choice(["store_chunk", "compose", "free_chunks", "other"], p=[0.08, 0.11, 0.03, 0.78])
    active = sorted(driver.oracle.rows)
    if name == "store_chunk":
        rows = source_ids(rng, active)
        spans = [_span(rng, driver, row) for row in rows]
        return name, rows, [start for start, _ in spans], [length for _, length in spans]
    if name == "free_chunks":
        likely = [*driver.oracle.chunks] or [0]
        odd = [-1, NUM_CHUNKS + 1, *range(NUM_CHUNKS)]
        ids = [NUM_CHUNKS] * ENTRIES
        for i in range(int(rng.integers(1, 3))):
            ids[i] = int(rng.choice(odd if rng.random() < 0.2 else likely))
        return name, ids
    if name == "compose":
        rows = row_ids(rng, active)
        placed = [_placed(rng, driver, row) for row in rows]
        ids, starts = ([[pair[i] for pair in chunks] for chunks in placed] for i in range(2))
        return name, rows, ids, starts
    return None


def _span(rng, driver, row: int) -> tuple[int, int]:
    """Start and length of a span, mostly within what the row computed itself."""
    most = driver.oracle.rows[row].prefix_len if row in driver.oracle.rows else 0
    if rng.random() < 0.08 or not most:
        return int(rng.integers(-1, 9)), int(rng.integers(-1, MAX_CHUNK + 3))
    start = int(rng.integers(0, most))
    return start, int(rng.integers(1, min(most - start, MAX_CHUNK) + 1))


def _placed(rng, driver, row: int) -> list[tuple[int, int]]:
    """Chunks for a row and where to, mostly one after the other or with a gap, in any order."""
    place, chunks = len(driver.oracle.rows[row].tokens) if row in driver.oracle.rows else 3, []
    space = driver.oracle.rows[row].namespace if row in driver.oracle.rows else None
    likely = [i for i, chunk in driver.oracle.chunks.items() if chunk.namespace == space]
    for _ in range(int(rng.integers(0, CHUNKS_PER_ROW + 1))):
        is_odd = rng.random() < 0.06 or not likely
        chunk_id = int(rng.integers(-1, NUM_CHUNKS + 2) if is_odd else rng.choice(likely))
        place += int(rng.choice([0, 0, 1, 2, -1], p=[0.4, 0.2, 0.2, 0.17, 0.03]))
        chunks.append((chunk_id, place))
        place += len(driver.oracle.chunks[chunk_id].tokens) if chunk_id in driver.oracle.chunks else 1
    return [chunks[i] for i in rng.permutation(len(chunks))]
