"""Requests through a `CacheManager`: what its tests share."""

import dataclasses

import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import leaf_bytes

CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 5)] * 2,
    num_blocks=12,
    block_size=4,
    max_seqs=4,
    max_seq_len=40,
    enable_prefix_caching=True,
)
PLAIN = dataclasses.replace(CONFIG, enable_prefix_caching=False)
WIDTHS = [CONFIG.max_seq_len]  # to which tokens are padded: one is few programs
BOTH = pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["prefix caching", "plain"])


def new_manager(cache=CONFIG):
    return kv.CacheManager(cache, widths=WIDTHS)


def write_step(cache, batch):
    """Stands for a model: the tokens are their own keys and values."""
    return testing.write_tokens(cache, batch.tokens, batch.step), batch.step.query_len


def fill(manager, new):
    """Appends and writes the tokens of some requests."""
    return manager.run(write_step, manager.append_tokens(new))


def start(manager, request_id, text, **options):
    """A request with its whole prompt written and, where that is possible, committed. Returns its hit."""
    num_cached = manager.allocate_request(request_id, text, **options)
    fill(manager, {request_id: text[num_cached:]})
    if manager.query(lambda cache: cache.config.enable_prefix_caching):
        manager.commit_tokens(request_id)
    return num_cached


def check(manager, texts):
    """The manager holds exactly these texts."""
    assert sorted(manager.request_ids(), key=repr) == sorted(texts, key=repr)
    rows = {manager.request(name).seq_id: text for name, text in texts.items()}
    assert manager.query(kv.check_invariants) == []
    assert manager.query(testing.check_tokens, rows) == []
    for name, text in texts.items():
        assert manager.num_computed_tokens(name) == len(text)


def state_of(manager):
    """All that a failed call must leave alone."""
    return manager.query(leaf_bytes), manager.request_ids(), manager.hit_rate()


def unchanged(manager, error, call, match=None):
    """The call raises the error, which is returned, and nothing is different."""
    before = state_of(manager)
    with pytest.raises(error, match=match) as caught:
        call()
    assert state_of(manager) == before
    return caught.value
