"""Events of the index: a router that applies them has the prefixes that prompts find, and no others."""

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.processes import AllBlocksCleared, BlockRemoved, BlockStored, IndexFollower
from tests.processes.router import Router, texts_of
from tests.support.window_script import WindowScript, grouped_config
from tests.tiers.host_script import HostScript, host_config

FULL = kv.FullAttention(1, 5)


SCRIPTS = {
    "one group": lambda: WindowScript(7, 2, grouped_config(layers=[FULL], num_blocks=14)),
    "groups": lambda: WindowScript(7, 2, grouped_config()),
    "host": lambda: HostScript(7, host_config(layers=[FULL])),
}


@pytest.mark.quick_cases("one group")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_router_knows_what_prompts_find(name):
    script = SCRIPTS[name]()
    follower, router, counts, num_hosted = IndexFollower(), Router(), collections.Counter(), 0
    for nth in range(260):
        script.step()
        if nth % 3 != 1:
            continue  # several operations between two looks
        events = follower.update(script.cache)
        router.apply(events)
        for event in events:
            counts[type(event)] += len(getattr(event, "block_hashes", ""))
        assert router.texts() == texts_of(script.cache), nth
        # A subscriber that comes later is told everything by a follower of its own.
        late = Router()
        late.apply(IndexFollower().update(script.cache))
        assert late.texts() == router.texts()
        num_hosted = max(num_hosted, len(router.blocks["CPU"]))
    assert follower.update(script.cache) == follower.update(script.cache) == []
    cache, _ = kv.reset_prefix_cache(script.cache)
    assert follower.update(cache) == [AllBlocksCleared()]
    assert min(counts[BlockStored], counts[BlockRemoved]) > 10 and kv.check_invariants(cache) == [], counts
    assert (num_hosted > 3) == (name == "host")


def test_a_name_follows_what_is_before_a_block():
    """Between two looks blocks are evicted, and their ids hold another text with the same end."""
    config = kv.CacheConfig(
        [FULL], num_blocks=2, block_size=2, max_seqs=1, max_seq_len=4, enable_prefix_caching=True
    )
    cache, follower, router = kv.init(config), IndexFollower(), Router()
    for nth, first in enumerate((5, 6, 7, 8, 9, 5, 6, 7)):
        text = np.array([[first, 6, 7, 8]])
        cache, _ = kv.reset_prefix_cache(cache)
        cache, _ = kv.allocate(cache, [0], [4], tokens=text)
        cache, _ = kv.extend(cache, [4], max_new=4, tokens=text)
        cache, _ = kv.free(kv.commit(cache)[0], [0])
        if nth % 2 == 0:
            router.apply(follower.update(cache))
            assert router.texts() == texts_of(cache) and len(router.blocks["GPU"]) == 2


def test_names_are_the_same_in_every_process_and_differ_by_namespace():
    config = kv.CacheConfig(
        [FULL], num_blocks=8, block_size=2, max_seqs=2, max_seq_len=8, enable_prefix_caching=True
    )
    text, namespaces = np.array([[5, 6, 7, 8, 9]] * 2), np.array([[0, 0, 0, 0], [1, 2, 3, 4]], np.uint32)
    names = []
    for seed in (0, 1):
        cache = kv.init(config)
        control = dataclasses.replace(cache.control, hash_key=jnp.array([seed, 7], jnp.uint32))
        cache = dataclasses.replace(cache, control=control)
        cache, _ = kv.allocate(cache, [0, 1], [5, 5], tokens=text, namespace=namespaces)
        cache, _ = kv.extend(cache, [5, 5], max_new=5, tokens=text)
        events = IndexFollower().update(kv.commit(cache)[0])
        assert [event.namespace for event in events] == ["", "01000000020000000300000004000000"]
        names.append([event.block_hashes for event in events])
    assert names[0] == names[1] and len({*names[0][0], *names[0][1]}) == 4
    assert names[0][0] == (8667545319388385454, 7250618643434716976)


def test_what_has_no_index_is_refused():
    sizes = dict(max_seqs=1, max_seq_len=8)
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        IndexFollower().update(kv.init(kv.CacheConfig([FULL], **sizes)))
    follower = IndexFollower()
    for num_blocks in (4, 5):
        cache = kv.init(kv.CacheConfig([FULL], num_blocks=num_blocks, enable_prefix_caching=True, **sizes))
        if num_blocks == 4:
            assert follower.update(cache) == []
    with pytest.raises(ValueError, match="expected the same config: make an IndexFollower for each"):
        follower.update(cache)
