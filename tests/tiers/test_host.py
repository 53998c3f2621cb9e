"""A host tier: what the device evicts is found there again, with the contents that it had."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import kvcache_jax as kv
from kvcache_jax import Status, testing
from kvcache_jax.core.config import config_from_json, config_to_json
from tests.support.few_kernels import compile_for_users
from tests.support.helpers import append_donated, append_tokens, leaf_bytes
from tests.support.prefix_user import CONFIG, TENANT_A, TENANT_B, PrefixUser

pytestmark = pytest.mark.contract

# A text of 17 tokens publishes four blocks, and holds five while it is computed.
HOSTED = dataclasses.replace(CONFIG, num_blocks=8, extras=[kv.tiers.Host(num_blocks=12)])
CHOOSY = dataclasses.replace(HOSTED, extras=[kv.tiers.Host(12, store_after=1, break_even=8)])


class HostUser(PrefixUser):
    """A `PrefixUser` on 8 blocks of the device and 12 of the host."""

    def __init__(self, config=HOSTED):
        super().__init__(config)

    def serve(self, *texts, namespace=None):
        """Each text by a row of its own, one after the other; returns the hits."""
        hits = []
        for text in texts:
            hits.append(self.start(0, text, namespace))
            self.free(0)
        return hits

    def host(self):
        return jax.device_get(kv.tiers.host_stats(self.cache))


@pytest.fixture
def user():
    return HostUser()


def texts_of(user, *starts):
    return [user.new_text(start, 17) for start in starts]


def test_prefixes_come_back_from_the_host(user):
    """Also a part of one, and one in which rows part ways; the rows' contents are compared at every call."""
    a, b, c, d = texts_of(user, 1, 2, 3, 4)
    assert user.serve(a, b, c) == [0, 0, 0]
    assert user.lookup(a) == 16 and user.host().num_cached == 5
    assert user.serve(a, b) == [16, 16]
    assert user.serve(c[:9], [*c[:10], *d[:7]]) == [8, 8]
    found = user.host()
    assert found.num_promoted >= 10 and found.num_evicted == 0
    # 20 blocks in all: what is released longest ago is forgotten, the ends of texts first.
    user.serve(*texts_of(user, 5, 6, 7))
    assert user.lookup(a) < 16 and user.host().num_evicted > 0


def test_an_admission_counts_what_was_promoted(user):
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c)
    before = user.host().num_promoted
    cache, admission = kv.allocate(
        user.cache, [0, 1, 4, 4], [17, 9, 0, 0], tokens=user.prompts([a, c[:9], [], []])
    )
    assert admission.num_cached.tolist() == [16, 8, 0, 0]
    # Of the last text the device still has all; of the first one it has lost at least its end.
    assert admission.num_promoted.tolist()[1:] == [0, 0, 0] and admission.num_promoted[0] in (4, 8, 12, 16)
    promoted = int(kv.tiers.host_stats(cache).num_promoted) - before
    assert promoted * 4 == int(admission.num_promoted.sum())


def test_contents_that_have_yet_to_move_are_read(user):
    """By `gather` and `export_blocks` straight after `allocate`, which leave the cache as it is."""
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c)
    user.admit(0, a)  # compares what the row holds
    assert not bool(user.cache.control.extras["host"].is_settled)
    k, _, length = kv.gather(user.cache, 0, 1)
    want = testing.token_codes(np.array(a[:16]), 1, 1, 5, False)
    assert int(length) == 16 and (np.asarray(k)[:16] == want).all()
    blocks = user.cache.control.block_pools[0].block_table[0, :4]
    contents = kv.tiers.export_blocks(user.cache, blocks)
    assert (contents.tokens[3, :16] == np.array(a[:16])).all()
    got = np.asarray(contents.arrays[0]["k"])[:, 0, 1, 0].reshape(16, 5)
    assert (got == want[:, 0]).all()
    user.fill(0)
    assert bool(user.cache.control.extras["host"].is_settled)


def test_a_block_that_is_computed_again_takes_the_place_of_the_hosts(user):
    """Of a prompt of whole blocks the last one is computed, and is on one tier alone: see `violations`."""
    text = user.new_text(1, 16)
    user.serve(text, *texts_of(user, 2, 3))
    assert user.lookup([*text, 1]) == 16
    on_host = user.host().num_cached
    assert user.serve(text) == [12]
    assert user.host().num_cached <= on_host + 5 - 4
    assert user.lookup([*text, 1]) == 16
    # What continues it on the host is found through the new block.
    longer = user.new_text(1, 21)
    user.serve(longer, *texts_of(user, 4, 5))
    user.start(0, longer[:8])
    user.free(0)
    assert user.lookup(longer) == 20


def test_a_window_that_the_host_has_is_not_published_again():
    """Two rows compute one prompt; the window that the first published moves before the second commits."""
    window = kv.SlidingWindow(1, 5, window=4, num_blocks=12)
    user = HostUser(dataclasses.replace(HOSTED, layers=[kv.FullAttention(1, 5), window], num_blocks=24))
    text = user.new_text(1, 16)
    user.allocate({0: text, 1: text})
    user.fill(0, 1)
    user.commit(0)
    user.free(0)
    for row in (2, 3):
        user.allocate({row: user.new_text(row, 16)})
        user.fill(row)
    assert user.host().num_cached == 0 and user.cache.control.extras["host"].num_demoted == 0
    user.commit(1)
    user.free(1, 2, 3)
    assert user.serve([*text, 1]) == [16]


def test_namespaces_stay_apart(user):
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c, namespace=TENANT_A)
    assert user.lookup(a, TENANT_A) == 16
    assert user.lookup(a, TENANT_B) == user.lookup(a) == 0
    assert user.serve(a, namespace=TENANT_B) == [0]


def test_prefixes_are_fetched_ahead(user):
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c)
    cache, num_promoted = kv.tiers.prefetch(user.cache, user.prompts([a, b])[:, :17])
    assert num_promoted[0] > 0
    user.cache = cache
    user.check()
    _, admission = kv.allocate(user.cache, [0, *[4] * 3], [17, *[0] * 3], tokens=user.prompts([a, *[[]] * 3]))
    assert (int(admission.num_cached[0]), int(admission.num_promoted[0])) == (16, 0)
    assert user.serve(a) == [16]
    # Nothing is taken from rows: where they hold the device, a prompt stays where it is.
    user.serve(b, c)
    user.admit(0, user.new_text(8, 30))
    before = leaf_bytes(user.cache.control.block_pools)
    cache, num_promoted = kv.tiers.prefetch(user.cache, user.prompts([a])[:, :17])
    assert num_promoted.tolist() == [0] and leaf_bytes(cache.control.block_pools) == before


def test_blocks_are_demoted_down_to_a_limit(user):
    a, b = texts_of(user, 1, 2)
    user.serve(a, b)
    num_used = 8 - int(user.cache.control.block_pools[0].num_free)
    user.cache, num_demoted = kv.tiers.demote_to_utilization(user.cache, 0.25)
    assert int(num_demoted) == num_used - 2
    assert int(user.cache.control.block_pools[0].num_free) == 6
    assert user.lookup(a) == 0  # before contents move
    user.admit(1, user.new_text(9, 3))
    user.fill(1)
    user.free(1)
    assert [user.lookup(text) for text in (a, b)] == [16, 16]
    user.cache, num_demoted = kv.tiers.demote_to_utilization(user.cache, 1.0)
    assert int(num_demoted) == 0


def test_of_more_than_the_host_has_room_for_the_beginning_stays():
    user = HostUser(dataclasses.replace(HOSTED, extras=[kv.tiers.Host(3)]))
    a, b = user.new_text(1, 17), user.new_text(2, 3)
    user.serve(a)
    user.cache, num_demoted = kv.tiers.demote_to_utilization(user.cache, 0.0)
    user.serve(b)
    assert (int(num_demoted), int(user.host().num_cached)) == (4, 3)
    assert user.lookup(a) == 12 and user.serve(a) == [12]


def test_what_was_not_used_is_forgotten():
    user = HostUser(CHOOSY)
    a, b, c, d = texts_of(user, 1, 2, 3, 4)
    assert user.serve(a, a, b, c, d) == [0, 16, 0, 0, 0]
    assert user.host().num_demoted == user.host().num_cached == 4
    assert [user.lookup(a), user.lookup(b)] == [16, 0] and user.serve(a) == [16]


def test_what_does_not_pay_the_way_stays_on_the_host():
    user = HostUser(CHOOSY)
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, a, b, b, c, c)
    # Of the first text all is on the host, of the second one its end.
    assert [user.lookup(a[:length]) for length in (5, 9, 17)] == [0, 8, 16]
    assert user.lookup(b) == 12 and user.host().num_cached == 5
    assert user.serve(b) == [12]


def test_a_donated_step_copies_neither_the_pools_nor_what_the_host_has():
    """One that demotes and promotes blocks; compilations for GPUs and TPUs have gates of their own."""

    def step(cache, tokens, lengths):
        cache, admission = kv.allocate(cache, np.arange(4), lengths, tokens=tokens)
        cache, _ = append_tokens(cache, tokens, lengths - admission.num_cached)
        cache, _ = kv.commit(cache)
        return kv.free(cache, np.arange(4))[0]

    layers, extras = [kv.FullAttention(2, 64)] * 2, [kv.tiers.Host(num_blocks=4096)]
    config = dataclasses.replace(HOSTED, layers=layers, num_blocks=2048, extras=extras)
    cache = kv.init(config)  # whose arrays say in which memory they are
    lowered = kv.donate(step).lower(cache, np.zeros((4, 17), np.int32), np.zeros(4, np.int32))
    program = compile_for_users(lowered)
    memory = program.memory_analysis()
    used = memory.temp_size_in_bytes + memory.host_temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert used < min(x.nbytes for x in jax.tree.leaves((cache.pools, cache.kept))) / 16, used


def test_a_row_that_fails_changes_nothing(user):
    """And holds nothing of the host's."""
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c)
    user.start(1, user.new_text(5, 15))
    before = leaf_bytes(dataclasses.replace(user.cache, pools=(), kept=None))
    found, hits = user.allocate({2: [*a, *user.new_text(6, 20)]})
    assert (found, hits) == ([Status.OUT_OF_BLOCKS], [0])
    assert leaf_bytes(dataclasses.replace(user.cache, pools=(), kept=None)) == before


def test_old_states_stay_valid(user):
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b)
    kept, texts = user.cache, dict(user.texts)
    tokens = np.full((4, 16), 7, np.int32)
    cache, _ = kv.allocate(kept, [0, *[4] * 3], [17, *[0] * 3], tokens=user.prompts([c, *[[]] * 3]))
    cache, _ = append_tokens(cache, tokens, np.array([16, 0, 0, 0], np.int32))  # not donated
    user.cache, user.texts = kept, texts
    user.check()
    assert user.serve(a, b) == [16, 16]


def test_forgotten_contents_are_forgotten_on_the_host(user):
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c)
    user.cache, _ = kv.reset_prefix_cache(user.cache)
    user.check()
    assert user.host().num_cached == 0
    assert [user.lookup(text) for text in (a, b, c)] == [0, 0, 0]
    assert user.serve(a, b, c, a) == [0, 0, 0, 16]
    assert kv.check_invariants(kv.reset(user.cache)) == []
    assert int(kv.tiers.host_stats(kv.reset(user.cache)).num_cached) == 0


COPIES = {
    "fetched": jax.device_get,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
    "on another device": lambda cache: jax.device_put(cache, SingleDeviceSharding(jax.devices()[1])),
    "stacked": lambda cache: jax.tree.map(lambda x: np.stack([x]), cache),
}


@pytest.mark.parametrize("how", ["fetched", "stacked"])
def test_a_copy_of_a_cache_keeps_its_contents_where_they_were_put(how):
    """Which is no host memory; of an operation each array has the type that it had before."""
    cache = COPIES[how](kv.init(HOSTED))

    def change(cache):
        cache, _ = append_tokens(cache, np.zeros((4, 16), np.int32), np.zeros(4, np.int32))
        return kv.scrub(cache, [0])[0]

    program = jax.jit(jax.vmap(change) if how == "stacked" else change)
    types, refused = [jax.typeof(leaf) for leaf in jax.tree.leaves(cache)], None
    try:
        shapes = jax.tree.leaves(program.eval_shape(cache))
    except ValueError as error:
        refused = error
    assert refused is None and [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in types]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fetched", "pickled", "on another device"])
def test_prefixes_come_back_from_the_host_of_a_copy(user, how):
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c)
    user.cache = COPIES[how](user.cache)
    assert user.serve(a, b) == [16, 16]
    assert user.host().num_promoted >= 8


def hosted_numbers(cache):
    """All numbers in host memory, with how many of its blocks are findable there."""
    [arrays] = cache.kept
    numbers = np.concatenate([np.asarray(x).reshape(x.shape[0], -1) for x in arrays.values()], axis=1)
    cached = cache.control.extras["host"].control.block_pools[0].cached
    return numbers, np.asarray(cached.is_published)[: len(numbers)]


def test_scrubbing_reaches_the_host(user):
    """A row's blocks and what continues them there; of a namespace all, and all that holds nothing."""
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, namespace=TENANT_A)
    user.serve(b, c, namespace=TENANT_B)
    user.cache, _ = kv.tiers.demote_to_utilization(user.cache, 0.0)
    assert user.start(0, a[:9], TENANT_A) == 8  # its end is on the host
    user.cache, _ = kv.scrub(user.cache, [0])
    del user.texts[0]
    user.check()
    assert user.lookup(a, TENANT_A) == 0
    assert [user.lookup(text, TENANT_B) for text in (b, c)] == [16, 16]
    user.serve(a, namespace=TENANT_A)
    user.cache, _ = kv.tiers.demote_to_utilization(user.cache, 0.0)
    user.cache, _ = kv.scrub(user.cache, namespace=TENANT_B)
    user.check()
    assert [user.lookup(text, TENANT_B) for text in (b, c)] == [0, 0]
    assert user.lookup(a, TENANT_A) == 16
    numbers, is_published = hosted_numbers(user.cache)
    assert is_published.sum() == 4 and not numbers[~is_published].any() and numbers[is_published].any()


def test_what_a_cache_must_have(user):
    plain = kv.init(CONFIG)
    for call in (
        lambda: kv.tiers.prefetch(plain, np.ones((1, 8), np.int32)),
        lambda: kv.tiers.demote_to_utilization(plain, 0.5),
        lambda: kv.tiers.host_stats(plain),
    ):
        with pytest.raises(
            ValueError, match=r"a cache without blocks in host memory, expected .*tiers\.Host"
        ):
            call()
    with pytest.raises(ValueError, match="expected enable_prefix_caching=True with it"):
        dataclasses.replace(HOSTED, enable_prefix_caching=False)
    for options, said in (
        (dict(num_blocks=0), "num_blocks is 0, expected at least 1"),
        (dict(num_blocks=4, store_after=-1), "store_after is -1, expected at least 0"),
        (dict(num_blocks=4, break_even=-1), "break_even is -1"),
    ):
        with pytest.raises(ValueError, match=said):
            kv.tiers.Host(**options)
    with pytest.raises(TypeError, match="num_blocks is 1.5, expected an integer"):
        kv.tiers.Host(num_blocks=1.5)  # pyright: ignore
    with pytest.raises(ValueError, match=r"tokens has shape \(3,\), expected \(any, any\)"):
        kv.tiers.prefetch(user.cache, [1, 2, 3])
    with pytest.raises(ValueError, match="target is 2"):
        kv.tiers.demote_to_utilization(user.cache, 2.0)
    user.serve(*texts_of(user, 1, 2, 3))
    user.admit(0, user.new_text(1, 17))
    with pytest.raises(ValueError, match="lacks what it keeps on the host, expected Cache.kept with them"):
        append_donated(
            dataclasses.replace(user.cache, kept=None), np.ones((4, 16), np.int32), np.array([1, 0, 0, 0])
        )


def test_the_tokens_that_pay_the_way():
    config = dataclasses.replace(HOSTED, max_seq_len=4096, dtype="float32")
    speed = dict(bytes_per_second=25.6e6, tokens_per_second=1000)
    # Keys, and values, of a block of four tokens are a tile of 4,096 bytes: so 0.08 ms a token on the way,
    # and 1 ms to compute.
    assert kv.tiers.break_even(config, **speed, latency=0.92) == 1000
    assert kv.tiers.break_even(config, **speed, latency=100) == 4097
    assert kv.tiers.break_even(config, bytes_per_second=1e4, tokens_per_second=1000) == 4097
    with pytest.raises(ValueError, match="bytes_per_second is 0, expected more than 0"):
        kv.tiers.break_even(config, bytes_per_second=0, tokens_per_second=1)


def test_broken_invariants_are_found(user):
    a, b, c = texts_of(user, 1, 2, 3)
    user.serve(a, b, c)
    user.admit(0, a)
    cache = user.cache
    tier = cache.control.extras["host"]

    def said(**fields):
        changed = dataclasses.replace(tier, **fields)
        control = dataclasses.replace(cache.control, extras={"host": changed})
        return " ".join(kv.check_invariants(dataclasses.replace(cache, control=control)))

    def in_control(**fields):
        return dict(control=dataclasses.replace(tier.control, **fields))

    index, [pool] = tier.index, tier.control.block_pools
    assert said() == ""
    assert "table or other entries" in said(sources=(jnp.full_like(tier.sources[0], tier.nowhere),))
    assert "wait for contents in a settled cache" in said(is_settled=jnp.bool_(True))
    assert "is a source and awaits contents" in said(
        awaits=(jnp.zeros_like(tier.awaits[0]),),
        **in_control(
            block_pools=(
                dataclasses.replace(
                    pool,
                    cached=dataclasses.replace(
                        pool.cached, is_published=jnp.ones_like(pool.cached.is_published)
                    ),
                ),
            )
        ),
    )
    emptied = dataclasses.replace(index, buckets=jnp.full_like(index.buckets, tier.nowhere))
    assert "the host's index lists []" in said(**in_control(prefix_index=emptied))
    other = dataclasses.replace(index, block_hash=index.block_hash + jnp.uint32(1))
    assert "is in the wrong bucket" in said(**in_control(prefix_index=other))
    assert "the same serial number" in said(serial=jnp.full_like(tier.serial, 3))
    spaces = dataclasses.replace(index, namespace=index.namespace + jnp.uint32(1))
    assert "follows one of another namespace" in said(**in_control(prefix_index=spaces))
    for tokens in (index.block_tokens.at[:, 1].add(1), index.block_tokens[:, ::-1]):
        others = dataclasses.replace(index, block_tokens=tokens)
        assert "has another hash than its tokens" in said(**in_control(prefix_index=others))
    is_root = pool.cached.is_published[: tier.num_blocks] & (index.parent[: tier.num_blocks] == 0)
    [root, *_] = np.flatnonzero(is_root)
    device = cache.control.prefix_index
    [twin, *_] = np.flatnonzero(np.asarray(device.parent) == len(device.parent))
    tokens = index.block_tokens.at[root].set(device.block_tokens[twin])
    others = dataclasses.replace(index, block_tokens=tokens)
    assert f"block {root} has the contents of the device's block" in said(**in_control(prefix_index=others))


def test_ids_of_the_host_that_are_none_are_found():
    layers = [kv.FullAttention(1, 4), kv.SlidingWindow(1, 4, window=4)]
    sizes = dict(num_blocks=4, block_size=4, max_seqs=2, max_seq_len=16, enable_prefix_caching=True)
    cache = kv.init(kv.CacheConfig(layers, **sizes, extras=[kv.tiers.Host(num_blocks=8)]), storage=False)
    tier = cache.control.extras["host"]
    lists = {"the host's index": tier.index.buckets}
    for g, pool in enumerate(tier.control.block_pools):
        lists[f"host, group {g}: the block table"] = pool.block_table
        lists[f"host, group {g}: the queue"] = pool.cached.queue
        lists[f"host, group {g}: the list of sources"] = tier.sources[g]
        lists[f"host, group {g}: the list of awaited blocks"] = tier.awaits[g]
    lists["host, group 1: the list of linked blocks"] = tier.index.group_links[1].block_ids
    lists["host, group 1: the list of indexed blocks"] = tier.index.group_links[1].indexed_ids

    def found(ids, stray):
        changed = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(stray) if x is ids else x, tier)
        control = dataclasses.replace(cache.control, extras={"host": changed})
        return kv.check_invariants(dataclasses.replace(cache, control=control))

    for name, ids in lists.items():
        for stray in (-2, 99):
            said = found(ids, stray)
            assert len(said) == 1 and said[0].startswith(f"{name} holds {stray}, which is neither a block")


def test_a_config_with_a_host_is_exported():
    assert config_from_json(config_to_json(HOSTED)) == HOSTED
