"""What is attached to an engine on a mesh: it sees whole blocks of every shard, and gives them back whole."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvcache_jax as kv
from kvcache_jax.core.attachment import ShardCache
from kvcache_jax.core.state import Cache
from kvcache_jax.engine import Attachment, EngineFailed
from tests.engine import exact_model
from tests.engine.exact_engine import SIZES, ask, linked, num_cached
from tests.engine.exact_model import DIM, make_params, random_request
from tests.processes.router import Told
from tests.support.helpers import leaf_bytes

PLAIN = kv.CacheConfig(
    [kv.FullAttention(2, DIM)],
    num_blocks=11,
    block_size=4,
    max_seqs=4,
    max_seq_len=48,
    enable_prefix_caching=True,
)
SPLIT = dataclasses.replace(PLAIN, head_axis="heads", context_axis="context")


def forward(params, tokens, cache, step, logits_at=None):
    """The exact model, whose keys tell heads apart, and 0.0 from -0.0; no query asks for them."""
    logits, cache = exact_model.forward(params, tokens, cache, step, logits_at)
    values = exact_model.values_of(tokens + params["shift"], step.positions)[..., None, :]
    head = jax.lax.axis_index("heads").astype(jnp.float32)
    keys = jnp.where(values % 2 == 0, -0.0, values * (2 + head))
    return logits, kv.write(cache, 0, keys, values, step)


class Reader(Attachment):
    """Compares what it reads of each shard with the state's arrays."""

    def __init__(self):
        self.engine: Any = None
        self.num_read = 0

    def check_shards(self, config):
        assert config.context_axis == "context"

    def look(self, cache):
        assert isinstance(cache, ShardCache) and cache.pools[0].k.shape == (11, 2, 4, DIM)
        stacked = jax.device_get(self.engine.state.cache)
        whole = jax.tree.map(lambda x: x[cache.shard], stacked)
        whole = Cache(control=whole.control, pools=whole.pools, config=PLAIN)
        cached = whole.control.block_pools[0].cached
        assert cached is not None
        is_published = np.asarray(cached.is_published)
        ids = np.flatnonzero(is_published).astype(np.int32)
        ids = np.append(ids, [11] * (11 - len(ids))).astype(np.int32)
        contents, expected = cache.export(ids), export(whole, ids)
        for got, want in zip(jax.tree.leaves(contents), jax.tree.leaves(expected), strict=True):
            want = np.asarray(want)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert got.tobytes() == want.tobytes()
        self.num_read += int(is_published.sum())


export = jax.jit(kv.tiers.export_blocks)


def engine_on(mesh, *attached):
    engine = kv.Engine(forward, make_params(), SPLIT, **SIZES, placement=kv.engine.Placement(mesh, "rows"))
    for each in attached:
        engine.attach(each)
    return engine


def hashes_held_by(engine, shard):
    """The hashes of the blocks in a shard's index."""
    cache = jax.tree.map(lambda x: x[shard], jax.device_get(engine.state.cache))
    return {each for event in kv.processes.IndexFollower().update(cache) for each in event.block_hashes}


@pytest.mark.slow
def test_an_engine_on_a_mesh_and_a_store():
    """Rows, heads and tokens of blocks are split over 8 devices; a store has whole blocks."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("rows", "heads", "context"))
    store, reader, publisher = kv.tiers.MemoryStore(), Reader(), Told()
    link = linked(store)
    engine = reader.engine = engine_on(mesh, link, reader, publisher)
    # Each goes to the shard with the fewest tokens, the same one again.
    prompts = [[i, *range(1, 12)] for i in range(4)]
    requests = [ask(prompt, 5, i) for i, prompt in enumerate(prompts)]
    assert num_cached(engine, requests) == 0
    warm = num_cached(engine, requests)
    assert warm == 4 * 8 and reader.num_read > 0
    rng = np.random.default_rng(2)
    num_cached(engine, [random_request(rng, i) for i in range(20)])
    publisher.check(engine)
    assert len(publisher.routers) == 2 and publisher.num_removed > 0
    link.flush()
    assert link.close() and link.num_dropped == 0 and not link.report().reasons

    link, reader, giver = linked(store), Reader(), kv.tiers.Giver(SPLIT, weights="w")
    engine = reader.engine = engine_on(mesh, reader, link, giver)
    tickets = [giver.offer(prompt) for prompt in prompts]
    assert num_cached(engine, requests) == warm
    assert engine.metrics()["vllm:external_prefix_cache_hits"] == warm
    assert link.close() and not link.report().reasons
    one, other = (hashes_held_by(engine, shard) for shard in range(2))
    assert len(one) == len(other) and not one & other
    # One device reads what a mesh wrote.
    cache, report = kv.tiers.load(store, kv.init(PLAIN), weights="w", prompts=prompts)
    assert report.num_loaded == 4 * 2 and not report.reasons
    hits = [int(kv.lookup(cache, np.array([prompt]), [12])[0]) for prompt in prompts]
    assert hits == [8] * 4
    # And what a mesh gives it.
    other = kv.init(PLAIN)
    with giver:
        for ticket, prompt in zip(tickets, prompts, strict=True):
            giver.finish(ticket)
            other, report = kv.tiers.take(ticket, other, prompt, weights="w")
            assert report.num_loaded == 2 and not report.reasons
    contents = [export(each, kv.tiers.eviction_candidates(each, 8)) for each in (cache, other)]
    assert leaf_bytes(contents[0]) == leaf_bytes(contents[1])


def test_the_control_state_of_all_shards_is_gathered_at_once():
    """A collective of two processes takes milliseconds, for the smallest array too."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    engine = kv.Engine(
        exact_model.forward, make_params(), PLAIN, **SIZES, placement=kv.engine.Placement(mesh, "rows")
    )
    gather = engine._device._exchange._gather.lower(engine.state.cache.control)
    assert len(re.findall(r" = \S+ all-(?:gather|reduce)", gather.compile().as_text())) == 1
    stacked = jax.device_get(engine.state.cache.control)
    controls = []
    with jax.set_mesh(Mesh(np.array(jax.devices()[2:4]), ("data",))), contextlib.suppress(EngineFailed):
        controls = engine._device.controls()  # as a caller may have another mesh
    assert len(controls) == 2
    for shard, control in enumerate(controls):
        assert leaf_bytes(control) == leaf_bytes(jax.tree.map(lambda x, shard=shard: x[shard], stacked))


def test_a_store_or_a_giver_beside_a_host_tier_sees_no_mesh():
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    hosted = dataclasses.replace(PLAIN, extras=[kv.tiers.Host(4)])
    engine = kv.Engine(
        exact_model.forward, make_params(), hosted, **SIZES, placement=kv.engine.Placement(mesh, "rows")
    )
    with kv.tiers.Giver(hosted, weights="w") as giver:
        for each in (linked(kv.tiers.MemoryStore()), giver):
            with pytest.raises(NotImplementedError, match="has a placement and extras has a Host, expected"):
                engine.attach(each)


def test_a_store_goes_from_one_engine_to_another():
    """Of another config; one that finds no prefixes is refused, before its first request."""
    link, other = linked(kv.tiers.MemoryStore()), dataclasses.replace(PLAIN, num_blocks=13)
    errors = []
    for config in (PLAIN, other):
        link.begin(config)
        try:
            link.look(kv.init(config))
        except ValueError as error:
            errors.append(error)
    assert errors == []
    engine = kv.Engine(
        exact_model.forward, make_params(), dataclasses.replace(PLAIN, enable_prefix_caching=False), **SIZES
    )
    with pytest.raises(ValueError, match="an AttachedStore is attached to an engine without prefix caching"):
        engine.attach(link)
    assert link.close()
