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


def placed(cache, devices):
    """The cache with its heads split over devices."""
    mesh = Mesh(np.array(jax.devices())[devices], ("heads",))

    def put(spec, tree):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    return dataclasses.replace(put(P(), cache), pools=put(P(None, "heads"), cache.pools))


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


@pytest.mark.quick_cases("[0, 1, 2, 3]-[4, 5]-one group")
@pytest.mark.parametrize("config", [HEADS, WINDOWS], ids=["one group", "windows"])
@pytest.mark.parametrize("there, here", [([0], [1]), ([0, 1, 2, 3], [4, 5]), ([6, 7], [6])], ids=str)
def test_heads_may_be_split_otherwise(config, there, here):
    """From a device to another one, from four devices to two others, and from two to one of them."""
    user, text = PrefixUser(config), PrefixUser.new_text(None, 1, 22)  # type: ignore
    source = placed(served(text, config=config).cache, there)
    user.cache = placed(user.cache, here)
    before = leaf_bytes(source)
    shardings = [x.sharding for x in jax.tree.leaves(user.cache.pools)]
    user.cache, report = kv.tiers.copy_prompts(source, user.cache, [text])
    for x, sharding in zip(jax.tree.leaves(user.cache.pools), shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    user.cache = jax.device_put(user.cache, jax.devices()[0])
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
