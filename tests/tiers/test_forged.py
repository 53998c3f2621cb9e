"""What a store may forge: keys of its own, and lists of them."""

import contextlib
import dataclasses

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.tiers import stored_block
from kvcache_jax.tiers.catalogue import Questions, read_entries, write_entries, write_namespaces
from kvcache_jax.tiers.save_blocks import scopes_of
from kvcache_jax.tiers.stored_block import (
    BadValueError,
    BlockName,
    Scope,
    arrays_text,
    pack_block,
    unpack,
    unpack_block,
)
from tests.support.prefix_user import CONFIG, PrefixUser

W = kv.tiers.digest(1)


@pytest.mark.parametrize("token", [-(2**31) - 1, 2**31])
def test_a_forged_key_brings_no_token_that_a_cache_cannot_hold(token):
    """A store may list keys of its own, of blocks that are as they should be but for that."""
    block = BlockName(Scope("w" * 64, "c" * 64, "0" * 32), "", (1, 2, token, 4), 0)
    value = pack_block(block, {"k": np.zeros(3)})
    end = arrays_text([["k", "float64", [3]]])
    with pytest.raises(BadValueError, match="no header"):
        unpack_block(value, block.key, block.scope, "", (0, 0), end)
    good = block._replace(tokens=(1, -(2**31), 2**31 - 1, 4))
    found, _ = unpack_block(pack_block(good, {"k": np.zeros(3)}), good.key, block.scope, "", (0, 0), end)
    assert found == good


@pytest.mark.parametrize("older", [1, -1])
def test_of_two_blocks_for_one_place_none_is_read_over_the_other(older):
    """A forged list names another text's blocks of windows for the places of a text's own, newer or older."""
    window = kv.SlidingWindow(1, 5, window=6, block_size=2, num_blocks=48)
    config = dataclasses.replace(CONFIG, layers=[window, kv.FullAttention(1, 5)])
    user, store = PrefixUser(config), kv.tiers.MemoryStore()
    texts = [user.new_text(1, 5), user.new_text(2, 5)]
    for text in texts:
        user.start(0, text)
        user.free(0)
    assert kv.tiers.save(user.cache, store, weights=W).num_saved > 2
    scope = scopes_of(user.cache, W, ["0" * 32])["0" * 32]
    entries = read_entries(Questions(store), scope)
    first, second = (entry.key for entry in entries if entry.group_id == config.indexed_group)
    forged = [
        entry._replace(anchor=first, stamp=entry.stamp + 100 * older) if entry.anchor == second else entry
        for entry in (entry._replace(stamp=entry.stamp + 200) for entry in entries)
    ]
    write_entries(Questions(store), scope, lambda _: forged)
    user = PrefixUser(config)
    user.cache, _ = kv.tiers.load(store, user.cache, weights=W)
    for text in texts:
        user.start(0, text)  # which compares all that it hits
        user.free(0)


@pytest.mark.parametrize("namespace", ["zz", "0" * 64])
def test_a_forged_list_names_namespaces_alone(namespace):
    """Another name is none, though there are blocks of it."""
    user, store, report = PrefixUser(CONFIG), kv.tiers.MemoryStore(), None
    user.start(0, user.new_text(1, 5))
    user.free(0)
    kv.tiers.save(user.cache, store, weights=W)
    scope, questions = scopes_of(user.cache, W, ["0" * 32])["0" * 32], Questions(store)
    [entry] = read_entries(questions, scope)
    header, _ = unpack(store.get([entry.key])[0] or b"")
    named = BlockName(scope._replace(namespace=namespace), "", tuple(header["tokens"]), 0)
    arrays = {name: np.zeros(shape, dtype) for name, dtype, shape in header["arrays"]}
    store.put([(named.key, pack_block(named, arrays))])
    write_entries(questions, named.scope, lambda _: [entry._replace(key=named.key)])
    write_namespaces(questions, W, scope.config, [namespace])
    with contextlib.suppress(ValueError):
        _, report = kv.tiers.load(store, kv.init(CONFIG), weights=W)
    assert report is not None and report.num_loaded == 1


def test_a_header_of_many_brackets_is_none():
    """Of a list and of a block, also beside a loop, whose thread goes on."""
    user, store, reports = PrefixUser(CONFIG), kv.tiers.MemoryStore(), []
    user.start(0, prompt := user.new_text(1, 13))
    user.free(0)
    kv.tiers.save(user.cache, store, weights=W)
    store.put([(key, stored_block._pack(b"[" * 99_999, [])) for key in [*store._values]])
    link = kv.tiers.AttachedStore(store, weights=W, timeout=60.0)
    link.save(user.cache)
    assert link.close() and dict(link.report().reasons) == {"list no header": 2}
    for prompts in (None, [prompt]):
        with contextlib.suppress(RecursionError):
            reports.append(dict(kv.tiers.load(store, kv.init(CONFIG), weights=W, prompts=prompts)[1].reasons))
    assert reports == [{"no header": 1, "the block before it is dropped": 2}, {}]


def released(value):
    view = memoryview(value)
    view.release()
    return view


ANSWERS = {
    "every second byte": ("get", lambda values: [value and memoryview(value * 2)[::2] for value in values]),
    "memory that is gone": ("get", lambda values: [value and released(value) for value in values]),
    "numbers": ("get", lambda values: [value and memoryview(value[:8]).cast("i") for value in values]),
    "nothing": ("get", lambda values: None),
    "names": ("get", lambda values: dict(zip("abcdefghijkl", values, strict=False))),
    "arrays": ("contains", lambda values: [np.ones(3)] * len(values)),
    "a number": ("contains", len),
}


class OddStore(kv.tiers.MemoryStore):
    """A store of which one call answers something that is no answer."""

    def __init__(self, name):
        super().__init__()
        self.call, self.change = ANSWERS[name]

    def get(self, keys):
        return self.change(super().get(keys)) if self.call == "get" else super().get(keys)

    def contains(self, keys):
        found = super().contains(keys)
        return self.change(found) if self.call == "contains" else found


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_no_answer_is_a_miss(name):
    """Also beside a loop, whose thread goes on."""
    user, cold, store = PrefixUser(CONFIG), PrefixUser(CONFIG), OddStore(name)
    user.start(0, prompt := user.new_text(1, 13))
    user.free(0)
    assert kv.tiers.save(user.cache, store, weights=W).num_saved == 3
    assert kv.tiers.save(user.cache, store, weights=W).num_dropped > 0
    cold.cache, report = kv.tiers.load(store, cold.cache, weights=W, prompts=[prompt])
    assert report.num_loaded == 0 and report.num_dropped > 0 and cold.start(0, prompt) == 0
    link = kv.tiers.AttachedStore(store, weights=W, timeout=60.0)
    cold.free(0)
    cold.cache, _ = kv.reset_prefix_cache(cold.cache)
    for text in ([*prompt, 1, 2, 3, 4], prompt):
        assert not link.find(cold.cache, text)[1]
    assert link.close()
    cold.cache, is_done = link.find(cold.cache, prompt)
    assert is_done and link.metrics()["vllm:external_prefix_cache_hits"] == 0
