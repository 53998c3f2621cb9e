"""Random scripts with prefix caching and chunks over full and window groups, by rows of two namespaces."""

import collections

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from tests.support.window_script import ENTRIES, ROWS, WindowScript, grouped_config

NUM_CHUNKS, MAX_CHUNK, CHUNKS_PER_ROW = 4, 8, 2
store_some = kv.donate(kv.chunks.store)


@kv.donate
def compose_some(cache, seq_ids, chunk_ids, starts):
    return kv.chunks.compose(cache, seq_ids, chunk_ids, starts, rotate=None)


class ChunkScript(WindowScript):
    """A `WindowScript` whose rows are also composed of chunks.

    Attributes:
      chunks: {chunk: its tokens and the index of its namespace}.
      outcomes: How often entries of each operation on chunks got each status.
    """

    def __init__(self, seed):
        super().__init__(seed, 2, grouped_config(extras=[kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK)]))
        self.chunks, self.outcomes = {}, collections.Counter()

    def step(self):
        name = self.rng.choice(["store", "compose", "forget", "other"], p=[0.12, 0.15, 0.03, 0.7])
        if name == "other":
            super().step()
            return
        rows = [int(row) for row in self.rng.integers(0, ROWS, ENTRIES)]
        getattr(self, f"_{name}")(rows)
        self.check(f"{name} {rows}")

    def _store(self, rows):
        starts, lengths = self.rng.integers(0, 12, ENTRIES), self.rng.integers(1, MAX_CHUNK + 1, ENTRIES)
        names, spans = np.zeros((ENTRIES, MAX_CHUNK), np.int32), []
        for i, row in enumerate(rows):
            spans.append(self.rows.get(row, [])[starts[i] : starts[i] + lengths[i]])
            names[i, : len(spans[i])] = self.codes(spans[i], self.spaces.get(row, 0))
        self.cache, stored = store_some(self.cache, np.array(rows), starts, lengths, names)
        pairs = zip(stored.chunk_ids.tolist(), stored.status.tolist(), strict=True)
        for row, span, (chunk, code) in zip(rows, spans, pairs, strict=True):
            self.outcomes["store", Status(code)] += 1
            if code == Status.OK:
                self.chunks[chunk] = span, self.spaces[row]

    def _compose(self, rows):
        ids, starts = np.full((ENTRIES, CHUNKS_PER_ROW), NUM_CHUNKS), np.zeros((ENTRIES, CHUNKS_PER_ROW), int)
        placed = [[] for _ in rows]
        for i, row in enumerate(rows):
            likely = [chunk for chunk, (_, space) in self.chunks.items() if space == self.spaces.get(row)]
            end = len(self.rows.get(row, []))
            for j in range(int(self.rng.integers(0, CHUNKS_PER_ROW + 1)) if likely else 0):
                ids[i, j], starts[i, j] = self.rng.choice(likely), end
                placed[i] += self.chunks[ids[i, j]][0]
                end += len(self.chunks[ids[i, j]][0])
        self.cache, status = compose_some(self.cache, np.array(rows), ids, starts)
        for row, tokens, code in zip(rows, placed, status.tolist(), strict=True):
            if tokens:
                self.outcomes["compose", Status(code)] += 1
            if tokens and code == Status.OK:
                self.rows[row] = self.rows[row] + tokens

    def _forget(self, _):
        chunk = int(self.rng.integers(NUM_CHUNKS))
        self.cache, status = kv.chunks.free(self.cache, [chunk])
        assert status.tolist() == [Status.OK if chunk in self.chunks else Status.BAD_CHUNK_ID]
        self.chunks.pop(chunk, None)


@pytest.mark.slow
def test_a_long_random_script():
    script = ChunkScript(0)
    for _ in range(1_200):
        script.step()
    for name, status, least in (
        ("store", Status.OK, 25),
        ("store", Status.WINDOW_LOST, 25),
        ("store", Status.OUT_OF_BLOCKS, 2),
        ("compose", Status.OK, 40),
        ("compose", Status.OUT_OF_BLOCKS, 5),
    ):
        assert script.outcomes[name, status] >= least, (name, status, script.outcomes)
    assert script.num_hits > 60 and int(kv.stats(script.cache).num_evictions) > 40
