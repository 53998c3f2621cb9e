"""Caches that are saved and loaded: a restart costs no hit, and what was spoilt is never served."""

import dataclasses

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.tiers import load_blocks
from kvcache_jax.tiers.stored_block import config_digest, pack, unpack
from tests.support.helpers import assert_invariants, leaf_bytes
from tests.support.prefix_user import CONFIG, TENANT_A, TENANT_B, PrefixUser
from tests.tiers.lying_store import FailingStore
from tests.tiers.store_writers import RecordingStore, kill_writers

pytestmark = pytest.mark.contract

W = kv.tiers.digest({"w": np.arange(3)})
WINDOWS = dataclasses.replace(
    CONFIG,
    layers=[
        kv.SlidingWindow(1, 5, window=6, block_size=2, num_blocks=48),
        kv.FullAttention(1, 5),
        kv.FullAttention(2, 5, block_size=8),
    ],
)


def saved_user(*texts, config=CONFIG, namespace=None):
    """A user whose texts were served one after the other, the last one last."""
    user = PrefixUser(config)
    for text in texts:
        user.start(0, user.new_text(*text) if isinstance(text, tuple) else text, namespace)
        user.free(0)
    return user


def saved(user, weights=W, namespace=None):
    store = RecordingStore()
    return store, kv.tiers.save(user.cache, store, weights=weights, namespace=namespace)


def restarted(store, config=CONFIG, **options):
    """A user of a new cache, into which a store was loaded; and the report."""
    user = PrefixUser(config)
    user.cache, report = kv.tiers.load(store, user.cache, **{"weights": W} | options)
    user.check()
    return user, report


@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(WINDOWS, marks=pytest.mark.slow)], ids=["one group", "windows"]
)
def test_a_restart_costs_no_hit(config):
    """Every prompt hits what it would in the warm cache, and its rows read what was computed before."""
    warm = PrefixUser(config)
    a, b = warm.new_text(1, 23), warm.new_text(2, 17)
    for text, space in ((a, None), ([*a[:9], *b[:9]], None), (b, TENANT_A)):
        warm.start(0, text, space)
        warm.free(0)
    store, report = saved(warm)
    assert report.num_dropped == 0 and report.num_saved >= 11
    cold, loaded = restarted(store, config)
    assert loaded.num_dropped == 0 and loaded.num_loaded == report.num_saved
    total = 0
    for text, space in ((a, None), ([*a[:9], *b[:9]], None), (b, TENANT_A), (b, None), (a[:14], None)):
        hits = [user.start(1, text, space) for user in (warm, cold)]
        assert hits[0] == hits[1]
        total += hits[0]
        warm.free(1)
        cold.free(1)
    assert total >= 40
    before = len(store.items)
    again = kv.tiers.save(cold.cache, store, weights=W)
    new = [key for key, _ in store.items[before:]]
    assert again.num_saved == len(new) - 2 < report.num_saved  # lists of two namespaces


def test_only_what_is_new_is_written_and_all_is_listed():
    user = saved_user((1, 9))
    store, report = saved(user)
    assert report.num_saved == 2
    assert kv.tiers.save(user.cache, store, weights=W).num_saved == 0
    other = saved_user((1, 9), (2, 13))
    assert kv.tiers.save(other.cache, store, weights=W).num_saved == 3
    # A process without the first text does not make others forget it.
    third = saved_user((3, 5))
    assert kv.tiers.save(third.cache, store, weights=W).num_saved == 1
    cold, report = restarted(store)
    assert report.num_loaded == 6
    assert [cold.lookup(cold.new_text(*text)) for text in ((1, 9), (2, 13), (3, 5))] == [8, 12, 4]


def test_rows_may_be_at_work_and_caches_may_hold_some():
    user = PrefixUser(CONFIG)
    user.start(0, user.new_text(1, 18))
    user.admit(1, user.new_text(2, 11))
    store, report = saved(user)
    assert report.num_saved == 4
    user.check()
    other = saved_user((1, 9))
    other.admit(2, other.new_text(4, 6))
    other.cache, report = kv.tiers.load(store, other.cache, weights=W)
    assert report.num_loaded == 2  # two are there
    other.fill(2)
    assert other.lookup(user.new_text(1, 18)) == 16


@pytest.mark.slow
def test_what_was_used_last_is_loaded_where_not_all_fits():
    """Whole prefixes, the latest first; and what is loaded is evicted in the order of its last use."""
    texts = [(1, 17), (2, 17), (3, 17), (4, 17)]
    user = saved_user(*texts, texts[1])
    store, _ = saved(user)
    small = dataclasses.replace(CONFIG, num_blocks=10)
    cold, report = restarted(store, small)
    assert report.num_loaded == 10 and report.reasons == {"no room": 6}
    assert [cold.lookup(cold.new_text(*text)) for text in texts] == [0, 16, 8, 16]
    cold.cache, _ = kv.evict(cold.cache, 2)
    assert [cold.lookup(cold.new_text(*text)) for text in texts] == [0, 16, 0, 16]
    cold.cache, _ = kv.evict(cold.cache, 4)
    assert [cold.lookup(cold.new_text(*text)) for text in texts] == [0, 16, 0, 0]


@pytest.mark.slow
def test_prompts_find_what_a_store_has_of_them():
    """Cached blocks make room, and nothing else is loaded."""
    user = saved_user((1, 17), (2, 17))
    store, _ = saved(user)
    cold = saved_user((8, 21), config=dataclasses.replace(CONFIG, num_blocks=6))
    prompt = [*cold.new_text(1, 11), 7, 7]
    cold.cache, report = kv.tiers.load(store, cold.cache, weights=W, prompts=[prompt])
    assert report.num_loaded == 2 and report.num_dropped == 0
    assert cold.lookup(prompt) == 8 and cold.lookup(cold.new_text(2, 17)) == 0
    assert_invariants(cold.cache)
    cold.cache, report = kv.tiers.load(store, cold.cache, weights=W, prompts=[prompt, [1], []])
    assert report.num_loaded == 0


def test_what_a_prompt_goes_on_from_makes_no_room_for_it():
    """Though it was used longest ago: of the others as much goes as there has to."""
    text, others = PrefixUser.new_text(None, 1, 25), (PrefixUser.new_text(None, 2, 13), None)  # type: ignore
    store, _ = saved(saved_user(text))
    cold = saved_user(text[:9], others[0], config=dataclasses.replace(CONFIG, num_blocks=6))
    for length, reasons, hits in ((17, {}, (16, 8)), (25, {}, (24, 0))):
        cold.cache, report = kv.tiers.load(store, cold.cache, weights=W, prompts=[text[:length]])
        assert report.reasons == reasons
        assert (cold.lookup(text), cold.lookup(others[0])) == hits


def test_a_namespace_alone():
    user = saved_user((1, 9), config=CONFIG)
    user.start(0, user.new_text(2, 9), TENANT_A)
    user.start(1, user.new_text(3, 9), TENANT_B)
    store, report = saved(user, namespace=TENANT_B)
    assert report.num_saved == 2
    kv.tiers.save(saved_user((1, 9)).cache, store, weights=W)
    cold, _ = restarted(store)  # who does not name it does not find it
    found = [(cold.new_text(1, 9), None), (cold.new_text(2, 9), TENANT_A), (cold.new_text(3, 9), TENANT_B)]
    assert [cold.lookup(*each) for each in found] == [8, 0, 0]
    cold, _ = restarted(store, namespace=TENANT_B)
    assert [cold.lookup(*each) for each in found] == [0, 0, 8]
    assert restarted(store, namespace=TENANT_A)[1].num_loaded == 0


@pytest.mark.parametrize(
    "change",
    [
        dict(layers=[kv.FullAttention(1, 5)] * 3),
        dict(layers=[kv.FullAttention(1, 5, dtype="bfloat16")] * 2),
        dict(layers=[kv.FullAttention(1, 5), kv.FullAttention(1, 5, block_size=8)]),
        dict(block_size=2),
        dict(dtype="float16"),
        dict(layers=[kv.SlidingWindow(1, 5, window=4)] * 2),
        dict(layers=[kv.FullAttention(2, 5)] * 2),
        dict(layers=[kv.FullAttention(1, 6)] * 2),
    ],
    ids=str,
)
def test_another_config_finds_nothing(change):
    store, _ = saved(saved_user((1, 13)))
    other = dataclasses.replace(CONFIG, **change)
    _, report = kv.tiers.load(store, kv.init(other), weights=W)
    assert report.num_loaded == report.num_dropped == 0
    assert config_digest(other) != config_digest(CONFIG)


@pytest.mark.slow
def test_two_configs_on_one_store_each_find_their_own():
    store, _ = saved(saved_user((1, 13)))
    other = dataclasses.replace(CONFIG, dtype="float16")
    second = saved_user((1, 13), config=other)
    assert kv.tiers.save(second.cache, store, weights=W).num_saved == 3
    for config in (CONFIG, other):
        user, report = restarted(store, config)
        assert user.lookup(user.new_text(1, 13)) == 12 and not report.reasons


@pytest.mark.slow
def test_sizes_of_pools_and_tables_are_no_part_of_the_contents():
    store, _ = saved(saved_user((1, 13)))
    sizes = dict(num_blocks=50, max_seqs=2, max_seq_len=64, eviction_policy="lfu")
    user, report = restarted(store, dataclasses.replace(CONFIG, **sizes))
    assert report.num_loaded == 3 and user.lookup(user.new_text(1, 13)) == 12
    _, report = restarted(store, dataclasses.replace(CONFIG, max_seq_len=8))
    assert report.num_loaded == 2 and report.num_dropped == 1


def test_other_weights_find_nothing():
    store, _ = saved(saved_user((1, 13)))
    params = {"w": np.arange(3), "b": np.ones(2, np.float32)}
    digests = {
        W,
        kv.tiers.digest({"w": np.arange(3)}, "tokenizer"),
        kv.tiers.digest({"w": np.arange(3)}, "tokenizes"),
        kv.tiers.digest({"w": np.arange(3)}, b"tokenizer"),
        kv.tiers.digest({"w": np.array([0, 1, 3])}),
        kv.tiers.digest({"v": np.arange(3)}),
        kv.tiers.digest({"w": np.arange(3).reshape(3, 1)}),
        kv.tiers.digest({"w": np.arange(3, dtype=np.uint64)}),
        kv.tiers.digest(params),
        kv.tiers.digest(params | {"b": np.nextafter(params["b"], np.float32(2))}),
        kv.tiers.digest(jax.tree.map(lambda x: x.astype("bfloat16"), params)),
    }
    assert len(digests) == 11
    with pytest.raises(TypeError, match="a value is <object.*>, expected arrays, numbers and texts"):
        kv.tiers.digest({"w": object()})
    assert kv.tiers.digest({"w": jax.numpy.arange(3, dtype=jax.numpy.int32)}) == kv.tiers.digest(
        {"w": np.arange(3, dtype=np.int32)}
    )
    for weights in digests - {W}:
        user, report = restarted(store, weights=weights)
        assert report.num_loaded == report.num_dropped == 0
    # Nor by the keys of a prompt's blocks, which no list has to name.
    _, report = restarted(store, weights=weights, prompts=[user.new_text(1, 13)])
    assert report.num_loaded == report.num_dropped == 0


class ExchangedStore(kv.tiers.MemoryStore):
    """A store that answers each key with a value of another store, by the order in which they were put."""

    def __init__(self, asked, given):
        super().__init__()
        pairs = zip(asked.items, given.items, strict=True)
        self.put([(key, value) for (key, _), (_, value) in pairs])


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("of other weights", dict(weights="other")),
        ("of another config", dict(config=dataclasses.replace(CONFIG, dtype="float16"))),
        ("of another namespace", dict(namespace=TENANT_B)),
        ("of other tokens", dict(texts=[(2, 13)])),
    ],
)
def test_a_block_of_something_else_is_dropped_by_name(reason, options):
    """The store gives whole values, of as many blocks, that were saved otherwise."""

    def store_of(weights=W, config=CONFIG, namespace=TENANT_A, texts=((1, 13),)):
        user = saved_user(*texts, config=config, namespace=namespace)
        return saved(user, weights, namespace)[0]

    asked, given = store_of(), store_of(**options)
    exchanged = ExchangedStore(asked, given)
    exchanged.put(asked.items[-1:])  # the list alone is right
    user, report = restarted(exchanged, namespace=TENANT_A)
    assert report.num_loaded == 0
    assert report.reasons == {reason: 1, "the block before it is dropped": 2}
    assert user.lookup(user.new_text(1, 13), TENANT_A) == 0
    again, report = restarted(exchanged, namespace=TENANT_A)
    assert report.reasons == {"missing": 1, "the block before it is dropped": 2}  # it was removed


def flipped(value, place):
    return value[:place] + bytes([value[place] ^ 0x10]) + value[place + 1 :]


@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(WINDOWS, marks=pytest.mark.slow)], ids=["", "windows"]
)
def test_every_97th_byte_flipped(config):
    """A bad block and what hangs on it is dropped, counted and named; other texts are found as before."""
    store, report = saved(saved_user((1, 13), (2, 9), config=config))
    items, whole = dict(store.items), report.num_saved
    # One load into a cache that is used again: what was found is forgotten between.
    user, _ = restarted(store, config)
    for key, value in items.items():
        for place in range(0, len(value), 97):
            spoilt = kv.tiers.MemoryStore()
            spoilt.put([*(items | {key: flipped(value, place)}).items()])
            user.cache, _ = kv.reset_prefix_cache(user.cache)
            user.cache, report = kv.tiers.load(spoilt, user.cache, weights=W)
            assert report.num_loaded < whole and report.num_dropped > 0
            assert report.num_loaded + report.num_dropped == whole or any(
                "list" in why for why in report.reasons
            )
            assert not spoilt.contains([key])[0]
            hits = [user.start(row, user.new_text(*text)) for row, text in enumerate(((1, 13), (2, 9)))]
            assert hits != [12, 8] and sum(hits) <= 16
            user.free(0, 1)


def test_large_blocks_are_verified_in_threads(monkeypatch):
    """As others are; here all are large."""
    monkeypatch.setattr(load_blocks, "_LEAST_BYTES", 1)
    store, report = saved(saved_user((1, 21), (2, 9)))
    cold, loaded = restarted(store)
    assert loaded.num_loaded == report.num_saved == 7 and not loaded.reasons
    assert [cold.start(row, cold.new_text(*text)) for row, text in enumerate(((1, 21), (2, 9)))] == [20, 8]
    key, value = next(item for item in store.items if unpack(item[1])[0]["parent"] != "")
    store.put([(key, flipped(value, len(value) - 1))])
    _, loaded = restarted(store)
    assert loaded.reasons["wrong checksum"] == 1 and loaded.num_loaded + loaded.num_dropped == 7


@pytest.mark.parametrize("more", [b"", b"x"])
def test_a_value_of_another_length_than_its_header_says(more):
    store, _ = saved(saved_user((1, 5)))
    for key, value in store.items:
        spoilt = kv.tiers.MemoryStore()
        spoilt.put([*store.items, (key, value + more if more else value[:-1])])
        _, report = restarted(spoilt)
        assert report.num_loaded == 0
        assert [why.removeprefix("list ") for why in report.reasons] == [
            "another length than its header says"
        ]


def test_values_whose_headers_lie():
    """Their checksums are right: a store's owner can forge what he likes, and gets a miss."""
    store, _ = saved(saved_user((1, 5)))
    key, value = store.items[0]
    header, rest = unpack(value)
    for fields, data, reason in (
        ({"arrays": header["arrays"][:1]}, rest, "of other arrays"),
        ({"arrays": [["k", "float32", [10**9] * 4]]}, rest, "of other arrays"),
        ({"tokens": "abcd"}, rest, "no header"),
        ({"tokens": header["tokens"][:-1]}, rest, "of other tokens"),
        ({"slot": 1}, rest, "of another slot"),
        ({"group": 7}, rest, "of another group"),
        ({"parent": key}, rest, "of another parent"),
        ({"weights": None}, rest, "of other weights"),
        ({}, bytes(rest) * 2, "another length than its arrays"),
        ({}, bytes(rest)[:-4], "another length than its arrays"),
    ):
        store.put([(key, pack(header | fields, [data]))])
        _, report = restarted(store)
        assert report.num_loaded == 0 and report.reasons == {reason: 1}
    for data, reason in (
        (b"", "cut short"),
        (b"x" * 100, "no block"),
        (value[:8] + b"\x01" + value[9:], "another format"),
        (pack([1, 2], [rest]), "no header"),
    ):
        store.put([(key, data)])
        assert restarted(store)[1].reasons == {reason: 1}


def test_a_store_that_fails_costs_hits_alone():
    user = saved_user((1, 13))
    report = kv.tiers.save(user.cache, FailingStore("put"), weights=W)
    assert report.num_saved == 0 and report.reasons == {"OSError": 5}  # and two lists
    store = FailingStore("contains")
    report = kv.tiers.save(user.cache, store, weights=W)
    assert report.num_saved == 3 and report.reasons == {"TimeoutError": 3}
    assert restarted(store)[1].num_loaded == 3
    store.calls = ("get",)
    cold, report = restarted(store)
    assert report.num_loaded == 0 and report.reasons == {"ConnectionError": 1}
    cold.cache, report = kv.tiers.load(store, cold.cache, weights=W, prompts=[cold.new_text(1, 13)])
    assert report.num_loaded == 0 and report.reasons == {"ConnectionError": 3}
    store.calls = ("no bytes",)
    cold.cache, report = kv.tiers.load(store, cold.cache, weights=W, prompts=[cold.new_text(1, 13)])
    assert report.num_loaded == 0 and report.reasons == {"no bytes": 3}


def test_a_process_that_is_killed_while_it_saves(tmp_path):
    """The puts of a `save`, in their order, by a process that ends at a random moment; 5 kills."""
    kill_savers(kv.tiers.DirectoryStore, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [kv.tiers.DirectoryStore, kv.tiers.TensorStore], ids=lambda make: make.__name__
)
def test_a_process_that_is_killed_at_50_moments(tmp_path, make):
    kill_savers(make, tmp_path, 50)


def kill_savers(make, folder, times):
    texts = [(1, 21), (2, 21), (3, 21)]
    user = saved_user(*texts)
    store, report = saved(user)
    cold, outcomes = PrefixUser(CONFIG), set()

    def check(found):
        cold.cache, _ = kv.reset_prefix_cache(cold.cache)
        prompts = [cold.new_text(*text) for text in texts]
        cold.cache, everything = kv.tiers.load(found, cold.cache, weights=W)
        assert everything.num_loaded in (0, report.num_saved) and not everything.reasons  # listed last
        cold.cache, of_prompts = kv.tiers.load(found, cold.cache, weights=W, prompts=prompts)
        assert not of_prompts.reasons
        hits = [cold.start(row, prompt) for row, prompt in enumerate(prompts)]
        assert sum(hits) == 4 * (everything.num_loaded + of_prompts.num_loaded)
        cold.free(0, 1, 2)
        outcomes.add(sum(hits))

    assert kill_writers(make, folder, store.items, times, check) > 0
    assert len(outcomes) > 1


@pytest.mark.slow
def test_host_memory_is_saved_and_filled():
    """What is on the host is saved too, and what the device has no room for is loaded there."""
    hosted = dataclasses.replace(CONFIG, num_blocks=8, extras=[kv.tiers.Host(num_blocks=12)])
    texts = [(1, 17), (2, 17), (3, 17), (4, 17)]
    user = saved_user(*texts, config=hosted)
    assert int(kv.tiers.host_stats(user.cache).num_cached) >= 8
    store, report = saved(user)
    assert report.num_saved == 16
    cold, report = restarted(store, hosted)
    assert report.num_loaded == 16 and not report.reasons
    assert [cold.start(0, cold.new_text(*text)) or cold.free(0) for text in texts[:1]] == [16]
    cold.free(0)
    assert [cold.lookup(cold.new_text(*text)) for text in texts] == [16] * 4
    # A store goes on where the host ends.
    other = saved_user((1, 9), config=hosted)
    other.cache, _ = kv.tiers.demote_to_utilization(other.cache, 0.0)
    prompt = other.new_text(1, 17)
    other.cache, report = kv.tiers.load(store, other.cache, weights=W, prompts=[prompt])
    assert report.num_loaded == 2 and not report.reasons and other.lookup(prompt) == 16
    # A cache without a host takes what it has room for.
    plain, report = restarted(store)
    assert report.num_loaded == 16 and plain.lookup(plain.new_text(1, 17)) == 16


KINDS = {
    "int8": kv.Quantised(kv.FullAttention(2, 8), "int8"),
    "int4": kv.Quantised(kv.FullAttention(2, 8), "int4", rotate=True),
    "fp8": kv.Quantised(kv.FullAttention(2, 8), "fp8"),
    "bfloat16": kv.FullAttention(1, 5, dtype="bfloat16"),
    "latent": kv.LatentAttention(8, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_arrays_of_every_kind_come_back_bit_for_bit(name):
    """Pools of random bits, whatever they mean."""
    config = dataclasses.replace(CONFIG, layers=[KINDS[name]] * 2)
    cache, tokens, rng = kv.init(config), np.arange(17)[None], np.random.default_rng(0)
    cache, _ = kv.allocate(cache, [0], [17], tokens=tokens)
    cache, step = kv.extend(cache, [17], max_new=17, seq_ids=[0], tokens=tokens)
    assert int(step.status[0]) == 0
    random = jax.tree.map(lambda x: np.frombuffer(rng.bytes(x.nbytes), x.dtype).reshape(x.shape), cache.pools)
    cache = dataclasses.replace(cache, pools=jax.device_put(random))
    cache, _ = kv.free(kv.commit(cache)[0], [0])
    store = kv.tiers.MemoryStore()
    assert kv.tiers.save(cache, store, weights=W).num_saved == 4
    loaded, report = kv.tiers.load(store, kv.init(config), weights=W)
    assert report.num_loaded == 4 and not report.reasons
    contents = [kv.tiers.export_blocks(c, kv.tiers.eviction_candidates(c, 4)) for c in (cache, loaded)]
    assert leaf_bytes(contents[0]) == leaf_bytes(contents[1])


def test_arguments_that_are_refused():
    store, cache = kv.tiers.MemoryStore(), kv.init(CONFIG)
    plain = kv.init(dataclasses.replace(CONFIG, enable_prefix_caching=False))
    for calls in (
        lambda cache=cache, store=store, weights=W, **more: kv.tiers.save(
            cache, store, weights=weights, **more
        ),
        lambda cache=cache, store=store, weights=W, **more: kv.tiers.load(
            store, cache, weights=weights, **more
        ),
    ):
        for error, match, options in (
            (TypeError, "weights is None, expected a digest: kv.tiers.digest", dict(weights=None)),
            (TypeError, "weights is '', expected a digest", dict(weights="")),
            (TypeError, "store is a dict, expected one with contains, get, put", dict(store={})),
            (TypeError, "got a CacheConfig, expected a Cache", dict(cache=CONFIG)),
            (ValueError, "without prefix caching", dict(cache=plain)),
            (ValueError, "storage=False, expected one with keys", dict(cache=kv.init(CONFIG, storage=False))),
            (ValueError, "namespace is float64", dict(namespace=np.ones(4))),
        ):
            with pytest.raises(error, match=match):
                calls(**options)
    with pytest.raises((TypeError, ValueError), match="prompts"):
        kv.tiers.load(store, cache, weights=W, prompts=[["a"]])
    with pytest.raises(TypeError, match="save got a .* in the cache, expected arrays with values"):
        jax.jit(lambda cache: kv.tiers.save(cache, store, weights=W))(cache)
