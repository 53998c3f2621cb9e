"""The property "compress" of a layer kind."""

import dataclasses

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.kinds.kind_rows import (
    MAX_LEN,
    NUM_ROWS,
    OK,
    Rows,
    config_of,
    dropping_config,
    empty,
    entries,
    random_text,
    run_step,
)
from tests.support.helpers import assert_invariants, assert_same, statuses

compress_rows = jax.jit(kv.compression.compress)


def compress(kind):
    """What rows keep stays what it was, in fewer blocks, and at the positions it had; forks keep all."""
    if kind.spans_as:  # in the caches of "drop"; what the index makes of it, another line tells
        config = dropping_config(kind)
    else:
        config = dataclasses.replace(config_of(kind), extras=[kv.compression.Dropping()])
    rows, num_keep = Rows(kind, empty(config)), {2: 7, 0: 3}
    ids, counts = map(np.array, entries(list(num_keep), list(num_keep.values())))
    scores = np.float32(np.random.default_rng(4).permutation(NUM_ROWS * MAX_LEN)).reshape(NUM_ROWS, MAX_LEN)
    assert statuses(compress_rows(rows.cache, ids, scores, counts)[1])[0] == kv.Status.SEQ_NOT_ACTIVE
    rows.start({2: random_text(19), 0: random_text(6)})
    if config.enable_prefix_caching:
        rows.cache, _ = kv.commit(rows.cache, *entries([2]))
    rows.fork(0, 1)
    before, num_free = testing.poison(rows.cache), rows.num_available()
    refused, status = compress_rows(before, ids, scores, np.array([20, 0, 1, 1]))
    assert statuses(status)[:2] == [kv.Status.BAD_LENGTH] * 2
    assert_same(before, refused)
    rows.cache, status = compress_rows(before, ids, scores, counts)
    assert statuses(status)[:2] == [OK, OK]
    assert_invariants(rows.cache)
    # Row 2 goes from five blocks to two, and row 0, which shared two, takes one.
    num_back = [0 if group.holds_sources else 2 for group in rows.groups]
    assert [now - then for then, now in zip(num_free, rows.num_available(), strict=True)] == num_back
    kept = {1: np.arange(6)}
    for i, (row, num) in enumerate(num_keep.items()):
        kept[row] = np.sort(np.argsort(-scores[i, : len(rows.texts[row])])[:num])
    new = {2: [1, 2, 3], 0: [4], 1: [5, 6, 7, 8]}
    rows.cache, logits, status = run_step(rows.params, testing.poison(rows.cache), *rows.arguments(new))
    assert set(statuses(status)) == {OK}
    for row, text in new.items():
        at = np.concatenate([kept[row], len(rows.texts[row]) + np.arange(len(text))])
        whole = np.array([*rows.texts[row], *text])
        want = rows.expected(whole[at], rows.sources[row], at)[len(kept[row]) :]
        np.testing.assert_allclose(logits[row, : len(text)], want, rtol=2e-5, atol=2e-5)
    if config.enable_prefix_caching:  # what row 2 published is whole, and right
        text = rows.texts[2]
        rows.free(0, 1, 2)
        assert rows.start({3: [*text, 9]}) == [16]
