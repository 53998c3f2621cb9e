"""Blocks that go from one cache of a process to another, whatever devices have them."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from tests.support.helpers import leaf_bytes
from tests.support.prefix_user import CONFIG, TENANT_A, TENANT_B, PrefixUser

pytestmark = pytest.mark.contract

HEADS = dataclasses.replace(CONFIG, layers=[kv.FullAttention(4, 5)] * 2)
WINDOWS = dataclasses.replace(
    HEADS, layers=[kv.SlidingWindow(4, 5, window=6, block_size=2, num_blocks=48), kv.FullAttention(4, 5)]
)


def placed(cache, devices, axes=("heads",)):
    """The cache with its heads, the tokens of its blocks, or both, split over devices."""
    mesh = Mesh(np.array(jax.devices())[np.array(devices)], axes)

    def put(spec, tree):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    pools = put(P(None, *(axis if axis in axes else None for axis in ("heads", "context"))), cache.pools)
    config = dataclasses.replace(cache.config, **{f"{axis.rstrip('s')}_axis": axis for axis in axes})
    return dataclasses.replace(put(P(), cache), pools=pools, config=config)


def served(*texts, config=HEADS, namespace=None):
    user = PrefixUser(config)
    for text in texts:
        user.start(0, text, namespace)
        user.free(0)
    return user


def copied(source, user, *texts, **options):
    """Copies into a user's cache, and has all that its rows hold compared with their texts."""
    user.cache, report = kv.tiers.copy_prompts(source, user.cache, texts, **options)
    user.cache = jax.device_put(user.cache, jax.devices()[0])
    user.check()
    return report


def given(source, cache, text):
    with kv.tiers.Giver(source.config, weights="w") as giver:
        ticket = giver.offer(text)
        giver.finish(ticket, source)
        return kv.tiers.take(ticket, cache, text, weights="w")


def stored(source, cache, text):
    store = kv.tiers.MemoryStore()
    kv.tiers.save(source, store, weights="w")
    return kv.tiers.load(store, cache, weights="w")


WAYS = {
    "copied": lambda source, cache, text: kv.tiers.copy_prompts(source, cache, [text]),
    "given": given,
    "stored": stored,
}
BOTH, CONTEXT = ("heads", "context"), ("context",)
PLACES = {
    "[0, 1, 2, 3]-[4, 5]": (([0, 1, 2, 3],), ([4, 5],)),
    "[0]-[1]": (([0],), ([1],)),
    "[6, 7]-[6]": (([6, 7],), ([6],)),
    "[6]-[7, 6]": (([6],), ([7, 6],)),
    "[0, 1]-[1, 0]": (([0, 1],), ([1, 0],)),
    "context-heads": (([0, 1], CONTEXT), ([3, 2, 1, 0],)),
    "both-context": (([[0, 1], [2, 3]], BOTH), ([5, 4], CONTEXT)),
    "both-both": (([[0, 1], [2, 3]], BOTH), ([[4, 6], [5, 7]], BOTH)),
}


@pytest.mark.quick_cases("[0, 1, 2, 3]-[4, 5]-one group-copied", "[0, 1, 2, 3]-[4, 5]-one group-given")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", [HEADS, WINDOWS], ids=["one group", "windows"])
@pytest.mark.parametrize("places", PLACES)
def test_heads_and_contexts_may_be_split_otherwise(config, places, way):
    """Whatever devices have the caches: what is found, and its contents, are as on one device."""
    user, text = PrefixUser(config), PrefixUser.new_text(None, 1, 22)  # type: ignore
    caches = served(text, config=config).cache, user.cache
    source, cache = (placed(each, *place) for each, place in zip(caches, PLACES[places], strict=True))
    before = leaf_bytes(source)
    shardings = [x.sharding for x in jax.tree.leaves(cache.pools)]
    cache, report = WAYS[way](source, cache, text)
    for x, sharding in zip(jax.tree.leaves(cache.pools), shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    user.cache = dataclasses.replace(jax.device_put(cache, jax.devices()[0]), config=config)
    assert report.num_loaded >= 5 and not report.reasons
    assert user.start(0, text) == 20
    assert leaf_bytes(source) == before


def test_what_the_cache_has_does_not_travel_and_other_texts_stay():
    user = PrefixUser(HEADS)
    a, b = user.new_text(1, 17), user.new_text(2, 17)
    source, mixed = served(a, b).cache, [*a[:8], *b[8:]]
    user.start(0, a[:9])
    assert copied(source, user, a, mixed, []).num_loaded == 2
    assert user.start(1, a) == 16 and user.lookup(b) == 0 and user.lookup(mixed) == 8
    assert copied(source, user, a).num_loaded == 0


def test_a_namespace_is_compared():
    text, user = PrefixUser.new_text(None, 1, 9), PrefixUser(HEADS)  # type: ignore
    source = served(text, namespace=TENANT_A).cache
    assert copied(source, user, text).num_loaded == 0
    assert copied(source, user, text, namespace=TENANT_B).num_loaded == 0
    assert copied(source, user, text, namespace=TENANT_A).num_loaded == 2
    assert user.start(0, text, TENANT_A) == 8


def test_pools_and_tables_may_have_other_sizes():
    """Cached blocks make room; what is too long for the cache is left and named."""
    text = PrefixUser.new_text(None, 1, 22)  # type: ignore
    source = served(text).cache
    small = dataclasses.replace(HEADS, num_blocks=6, max_seq_len=16)
    user = served(PrefixUser.new_text(None, 2, 16), config=small)  # type: ignore
    report = copied(source, user, text)
    assert report.num_loaded == 4 and report.reasons == {"BAD_LENGTH": 1}
    assert user.start(0, text[:16]) == 12


def test_what_is_refused():
    source, cache = kv.init(HEADS), kv.init(dataclasses.replace(HEADS, dtype="float16"))
    with pytest.raises(
        ValueError, match="source is of config .*, expected .* as the cache: caches of the same"
    ):
        kv.tiers.copy_prompts(source, cache, [[1]])
    with pytest.raises((TypeError, ValueError), match="prompts"):
        kv.tiers.copy_prompts(source, source, [["a"]])  # type: ignore
    plain = kv.init(dataclasses.replace(HEADS, enable_prefix_caching=False))
    with pytest.raises(ValueError, match="copy_prompts .*without prefix caching"):
        kv.tiers.copy_prompts(plain, source, [[1]])
