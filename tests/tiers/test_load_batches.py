"""Batches in which blocks of a store are read, verified and published."""

import pytest

import kvcache_jax as kv
from kvcache_jax.tiers import load_blocks
from tests.support.helpers import leaf_bytes
from tests.support.prefix_user import CONFIG, PrefixUser

pytestmark = pytest.mark.contract


def test_what_the_device_reads_is_not_filled_anew(monkeypatch):
    """A program may read its contents in place until the next one is imported."""
    importing, given = load_blocks._import, []

    def import_and_look_back(cache, contents):
        if given:
            contents_before, copy = given[-1]
            assert leaf_bytes(contents_before) == copy
        given.append((contents, leaf_bytes(contents)))
        return importing(cache, contents)

    monkeypatch.setattr(load_blocks, "_import", import_and_look_back)
    monkeypatch.setattr(load_blocks, "batch_size", lambda cache: 2)
    user, cold, store = PrefixUser(CONFIG), PrefixUser(CONFIG), kv.tiers.MemoryStore()
    texts = [user.new_text(start, length) for start, length in ((1, 21), (2, 9), (3, 13))]
    for text in texts:
        user.start(0, text)
        user.free(0)
    kv.tiers.save(user.cache, store, weights="w")
    cold.cache, report = kv.tiers.load(store, cold.cache, weights="w")
    cold.check()
    assert report.num_loaded == 10 and len(given) == 5
    assert [cold.start(row, text) for row, text in enumerate(texts)] == [20, 8, 12]
