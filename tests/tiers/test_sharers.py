"""Processes that save and load in one store at once: what they load is valid, and the store has all of it."""

import dataclasses
import json
import subprocess
import sys

import pytest

import kvcache_jax as kv
from kvcache_jax.tiers.stored_block import pack
from tests.support.prefix_user import CONFIG, TENANT_A, PrefixUser
from tests.tiers.store_sharers import num_whole, open_store


class RacedStore(kv.tiers.MemoryStore):
    """A store to which another process saves as soon as so many lists have been read."""

    def __init__(self, num_reads, other):
        super().__init__()
        self.num_reads, self.other = num_reads, other

    def get(self, keys):
        found = super().get(keys)
        self.num_reads -= 1
        if self.num_reads == 0:
            kv.tiers.save(self.other.cache, self, weights="w")
        return found


@pytest.mark.parametrize("num_reads", [1, 2])
def test_what_two_processes_save_at_the_same_moment_is_listed(num_reads):
    """The second list is of namespaces."""
    user, other, cold = (PrefixUser(CONFIG) for _ in range(3))
    user.start(0, user.new_text(1, 9))
    other.start(0, other.new_text(1, 13))
    other.start(1, other.new_text(3, 9), TENANT_A)
    store = RacedStore(num_reads, other)
    assert kv.tiers.save(user.cache, store, weights="w").num_dropped == 0 and store.num_reads < 0
    cold.cache, report = kv.tiers.load(store, cold.cache, weights="w")
    assert report.num_loaded == 5 and not report.reasons
    assert [cold.lookup(cold.new_text(1, 13)), cold.lookup(cold.new_text(3, 9), TENANT_A)] == [12, 8]


class BusyStore(kv.tiers.MemoryStore):
    """A store in which another process always writes a list anew, or one that says so."""

    def __init__(self, is_honest):
        super().__init__()
        self.is_honest, self.num_asked = is_honest, 0

    def replace(self, key, before, after):
        self.num_asked += 1
        if self.is_honest:
            self.put([(key, pack({"nth": self.num_asked}, []))])
        return False


@pytest.mark.parametrize("is_honest", [True, False])
def test_a_list_is_written_though_others_never_cease_to_write_it(is_honest):
    user, cold, store = PrefixUser(CONFIG), PrefixUser(CONFIG), BusyStore(is_honest)
    user.start(0, user.new_text(1, 9))
    assert kv.tiers.save(user.cache, store, weights="w").num_dropped == 0
    assert kv.tiers.load(store, cold.cache, weights="w")[1].num_loaded == 2
    assert store.num_asked == 2 * (15 if is_honest else 1)


LIMITS = {"DirectoryStore": 20_000, "TensorStore": 60_000}  # less than half of the values
OF_LIMITS = {"missing", "the block before it is missing", "the block before it is dropped"}


@pytest.mark.slow
@pytest.mark.parametrize("name, limit", [(name, limit) for name in LIMITS for limit in (0, LIMITS[name])])
def test_two_processes_at_once(tmp_path, name, limit):
    """Each saves 60 times; rows compare what they find with their texts."""
    words = [sys.executable, "-m", "tests.tiers.store_sharers", name, str(tmp_path / "store"), str(limit)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    sharers = [subprocess.Popen([*words, str(seed), "60"], **pipes) for seed in (1, 2)]  # type: ignore
    try:
        assert [each.stdout and each.stdout.readline() for each in sharers] == ["up\n"] * 2
        for each in sharers:
            assert each.stdin
            each.stdin.write("\n")
            each.stdin.flush()
        said = [json.loads(each.communicate(timeout=300)[0]) for each in sharers]
    finally:
        for each in sharers:
            each.kill()
            each.wait()
    known = {"no room"} | (OF_LIMITS if limit else set())
    assert {reason for each in said for reason in each["reasons"]} <= known
    assert all(each["num_loaded"] > 0 for each in said)
    user = PrefixUser(dataclasses.replace(CONFIG, num_blocks=300))
    user.cache, report = kv.tiers.load(open_store(name, tmp_path / "store", limit), user.cache, weights="w")
    texts = [text for each in said for text in each["saved"]]
    hits = [user.lookup(text) for text in texts]
    if limit:
        assert 0 < sum(hits) < sum(map(num_whole, texts))
    else:
        assert not report.reasons and hits == [*map(num_whole, texts)]
    for text in texts[-20:]:
        user.start(0, text)
        user.free(0)
