"""The property "compose" of a layer kind."""

import dataclasses

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.kinds.kind_rows import MAX_LEN, NUM_ROWS, OK, Rows, config_of, empty, random_text, run_step
from tests.support.helpers import assert_invariants, assert_same, statuses

MAX_CHUNK, NUM_CHUNKS = 9, 3
store_rows = jax.jit(kv.chunks.store)


@jax.jit
def compose_rows(cache, rows, chunk_ids, starts):
    """Keys that keep their positions, which the texts of these rows say."""
    return kv.chunks.compose(cache, rows, chunk_ids, starts, rotate=None)


def compose(kind):
    """Chunks stand after what a row holds, their source stays as it was, and windows have what they read."""
    sizes = dict(num_blocks=30, extras=[kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK)])
    config = dataclasses.replace(config_of(kind), **sizes)
    rows = Rows(kind, empty(config))
    rows.start({2: random_text(14), 1: random_text(3), 0: random_text(6)})
    rows.fork(1, 3)
    ids = store(
        rows, [(2, 5, 9), (0, 1, 4), (2, 0, 2)], is_lost=[False, False, any(map(loses_first, rows.groups))]
    )
    before = testing.poison(rows.cache)
    refused, status = composed(before, {1: [(ids[0], 2)], 3: [(ids[0], 3), (ids[1], 30)]})
    assert statuses(status)[:2] == [kv.Status.BAD_LENGTH, kv.Status.TOO_LONG]
    assert_same(before, refused)
    num_available = rows.num_available()
    rows.cache, status = composed(before, {1: [(ids[0], 3), (ids[1], 12)], 3: [(ids[1], 3)]})
    assert statuses(status)[:2] == [OK, OK]
    assert_invariants(rows.cache)
    # Rows 1 and 3 let go of the block that they shared, and take 4 and 2.
    for group, then, now in zip(rows.groups, num_available, rows.num_available(), strict=True):
        assert then - now == 4 + 2 - 1 - loses_first(group)

    texts = {
        1: rows.texts[1] + rows.texts[2][5:14] + rows.texts[0][1:5],
        3: rows.texts[3] + rows.texts[0][1:5],
    }
    stand = {1: [*range(3), *range(5, 14), *range(1, 5)], 3: [*range(3), *range(1, 5)]}
    for new in ({1: [1, 2, 3], 3: [4], 2: [5, 6], 0: [7]}, {1: [8], 3: [9, 1, 2, 3, 4]}):
        rows.cache, logits, status = run_step(rows.params, testing.poison(rows.cache), *rows.arguments(new))
        assert set(statuses(status)) == {OK}
        assert_invariants(rows.cache)
        for row, text in new.items():
            if row not in texts:
                rows.texts[row] = rows.texts[row] + text
                want = rows.expected(rows.texts[row], rows.sources[row])
            else:
                stand[row] += range(len(texts[row]), len(texts[row]) + len(text))
                texts[row] = texts[row] + text
                want = rows.expected(np.array(texts[row]), rows.sources[row], np.array(stand[row]))
            np.testing.assert_allclose(logits[row, : len(text)], want[-len(text) :], rtol=2e-5, atol=2e-5)


def loses_first(group):
    """Whether rows of more than 12 tokens let go of their first block."""
    return group.window is not None and not group.num_sink_tokens and not group.max_rollback


def store(rows, spans, is_lost):
    """Stores spans (row, start, length) of texts; returns the ids of the chunks."""
    columns, names = np.full((3, NUM_ROWS), NUM_ROWS), np.zeros((NUM_ROWS, MAX_CHUNK), int)
    for i, (row, start, length) in enumerate(spans):
        columns[:, i], names[i, :length] = (row, start, length), rows.texts[row][start : start + length]
    before = testing.poison(rows.cache)
    rows.cache, stored = store_rows(before, *columns, names)
    expected = [kv.Status.WINDOW_LOST if lost else OK for lost in is_lost]
    assert statuses(stored.status)[: len(spans)] == expected
    assert_invariants(rows.cache)
    return stored.chunk_ids.tolist()


def composed(cache, placed):
    """Composes rows {row: [(chunk, start), ...]}."""
    rows, ids, starts = (
        np.full(NUM_ROWS, NUM_ROWS),
        np.full((NUM_ROWS, 2), NUM_CHUNKS),
        np.zeros((NUM_ROWS, 2), int),
    )
    for i, (row, chunks) in enumerate(placed.items()):
        rows[i] = row
        for j, (chunk, start) in enumerate(chunks):
            ids[i, j], starts[i, j] = chunk, start
    assert starts.max() < MAX_LEN
    return compose_rows(cache, rows, ids, starts)
