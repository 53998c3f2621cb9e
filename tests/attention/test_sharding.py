"""Heads split over eight devices: same result, no collective on a pool, pools never gathered."""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from kvcache_jax import testing
from tests.aot.hlo import COLLECTIVE
from tests.kinds.outside_kind import SideBySide

pytestmark = pytest.mark.contract

HEADS, DIM, LAYERS = 8, 4, 2
KINDS = [
    kv.FullAttention(HEADS, DIM),
    kv.SlidingWindow(HEADS, DIM, window=5, num_sink_tokens=1, block_size=2),
]
CONFIG = kv.CacheConfig(KINDS, num_blocks=16, block_size=4, max_seqs=4, max_seq_len=32)
TEXTS = np.arange(12, dtype=np.int32).reshape(4, 3)  # of the tokens where there is an index
POOL_SPEC = P(None, "heads", None, None)
TOKEN_SPEC = P(None, None, None, "heads", None)


def make_inputs(num_q_heads=2 * HEADS):
    rng = np.random.default_rng(0)
    shapes = [(LAYERS, 4, 3, heads, DIM) for heads in (num_q_heads, HEADS, HEADS)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def forward(cache, q, k, v, num_new):
    cache, step = kv.extend(cache, num_new, max_new=3, tokens=TEXTS)
    outs = []
    for layer in range(LAYERS):
        cache, out = kv.attention(cache, layer, q[layer], k[layer], v[layer], step)
        outs.append(out)
    return cache, jnp.stack(outs), step.status


def run(step_fn, cache, put=jnp.asarray):
    """Prefill, fork, copy-on-write, decode past the window; all outputs. `put` places q, k and v."""
    inputs = make_inputs()
    cache, _ = kv.allocate(cache, [0, 1, 4], [3, 2, 0])  # there is no row 4
    cache, out, status = step_fn(cache, *map(put, inputs), np.array([3, 2, 0, 0], np.int32))
    outs = [out]
    cache, _ = kv.fork(cache, [0], [2])
    for i in range(7):
        tokens = [put(np.roll(x, -i, axis=2)) for x in inputs]
        cache, out, status = step_fn(cache, *tokens, np.array([1, 1, 1, 0], np.int32))
        assert not np.asarray(status).any()
        outs.append(out)
    assert int(kv.stats(cache).num_copies) == 2
    assert kv.check_invariants(cache) == []
    return cache, outs


@pytest.fixture(scope="module")
def expected():
    return run(kv.donate(forward), testing.poison(kv.init(CONFIG)))[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "is_set", "tile_tokens"),
    [(AxisType.Auto, True, None), (AxisType.Explicit, False, None), (AxisType.Explicit, False, 2**16)],
    ids=["auto", "explicit without set_mesh", "explicit, read row by row"],
)
def test_heads_split_over_devices(axis_type, is_set, tile_tokens, expected):
    config = dataclasses.replace(CONFIG, tile_tokens=tile_tokens)
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(axis_type,))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        cache = testing.poison(kv.init(config, sharding=NamedSharding(mesh, POOL_SPEC)))
        put = functools.partial(jax.device_put, device=NamedSharding(mesh, TOKEN_SPEC))
        step_fn = kv.donate(forward)
        program = step_fn.lower(cache, *map(put, make_inputs()), np.zeros(4, np.int32)).compile()
        assert not COLLECTIVE.findall(program.as_text())
        cache, outs = run(step_fn, cache, put)
    for pool in cache.pools:
        assert pool.k.sharding.shard_shape(pool.k.shape)[1] == 1
        assert pool.v.sharding.shard_shape(pool.v.shape)[1] == 1
    assert cache.context_len.sharding.is_fully_replicated
    for out, want in zip(outs, expected, strict=True):
        assert out.sharding.shard_shape(out.shape)[3] == 2
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize(
    "what", [{"seq_ids": [0]}, {"namespace": np.zeros(4, np.uint32)}], ids=["rows", "namespace"]
)
def test_scrub_of_sharded_pools(what):
    """On explicit axes, where a plain zero has another sharding than the pool, and no mesh is set."""

    def scrubbed(sharding):
        cache = testing.poison(kv.init(CONFIG, sharding=sharding))
        return kv.scrub(kv.allocate(cache, [0, 1, 4], [3, 9, 0])[0], **what)

    mesh = jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Explicit,))
    cache, num_blocks = scrubbed(NamedSharding(mesh, POOL_SPEC))
    alone, expected_blocks = scrubbed(None)
    assert num_blocks == expected_blocks > 0
    for pool, other in zip(cache.pools, alone.pools, strict=True):
        assert pool.k.sharding.spec == POOL_SPEC
        np.testing.assert_array_equal(pool.k, other.k)
        np.testing.assert_array_equal(pool.v, other.v)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_index", "head_type"),
    [
        pytest.param(False, AxisType.Explicit, id="beside an explicit one", marks=pytest.mark.newest),
        pytest.param(True, AxisType.Auto, id="index"),
    ],
)
def test_rows_split_over_an_automatic_axis_beside_the_heads(has_index, head_type):
    """The bookkeeping stays whole on every device: new tokens are gathered, and no pool is."""
    config, tokens = dataclasses.replace(CONFIG, enable_prefix_caching=has_index), make_inputs()

    def start(**options):
        cache, _ = kv.allocate(kv.init(config, **options), [0, 1, 3], [1, 2, 0], tokens=TEXTS[:3])
        return testing.poison(cache)

    def forked(cache, out, status):
        cache, fork_status = kv.fork(cache, [0], [2])
        return cache, (out, status, fork_status)

    num_new = np.array([3, 2, 0, 1], np.int32)
    alone, want = forked(*kv.donate(forward)(start(), *tokens, num_new))
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(AxisType.Auto, head_type))
    with jax.set_mesh(mesh):
        cache = start(sharding=NamedSharding(mesh, POOL_SPEC))
        split = NamedSharding(mesh, P(None, "data", None, "heads"))
        arguments = (
            cache,
            *jax.device_put(tokens, split),
            jax.device_put(num_new, NamedSharding(mesh, P("data"))),
        )
        program = kv.donate(forward).lower(*arguments).compile()
        cache, found = forked(*program(*arguments))
    sizes = re.findall(
        r"\[([\d,]+)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)\(", program.as_text()
    )
    smallest_pool = min(pool.k.size // 4 for pool in cache.pools)
    assert sizes and max(math.prod(map(int, size.split(","))) for size in sizes) < smallest_pool
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, want)
    assert found[0].sharding.spec[1] == "data"
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(cache.control), jax.device_get(alone.control))


@pytest.mark.slow
def test_inside_shard_map(expected):
    """The local pool has one head, though the config says eight: sizes come from the arrays."""
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Auto,))
    cache = testing.poison(kv.init(CONFIG, sharding=NamedSharding(mesh, POOL_SPEC)))
    specs = jax.tree.map(lambda _: P(), cache.control), jax.tree.map(lambda _: POOL_SPEC, cache.pools)
    cache_spec = kv.Cache(control=specs[0], pools=specs[1], config=CONFIG)
    local = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=(cache_spec, TOKEN_SPEC, TOKEN_SPEC, TOKEN_SPEC, P()),
        out_specs=(cache_spec, TOKEN_SPEC, P()),
    )
    _, outs = run(kv.donate(local), cache)
    for out, want in zip(outs, expected, strict=True):
        np.testing.assert_allclose(out, want, atol=1e-5)


def test_one_cache_per_device():
    """Data parallel: a stack of independent caches, one on each device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    caches = jax.tree.map(lambda x: np.stack([x] * 8), kv.init(CONFIG))
    caches = jax.device_put(caches, NamedSharding(mesh, P("data")))
    lengths = np.arange(1, 25, dtype=np.int32).reshape(8, 3)

    @jax.jit
    def fill(caches, lengths):
        return jax.vmap(lambda c, n: kv.allocate(c, jnp.arange(3), n)[0])(caches, lengths)

    filled = jax.device_get(fill(caches, lengths).control)
    for i in range(8):
        alone, _ = kv.allocate(kv.init(CONFIG), np.arange(3), lengths[i])
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), filled, alone.control)


def test_only_the_heads_may_be_split():
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="only the heads split"):
        kv.init(CONFIG, sharding=NamedSharding(mesh, P("heads")))


BY_HEAD = P(None, None, "heads")


@pytest.mark.parametrize("is_set", [True, False], ids=["mesh set", "no mesh"])
@pytest.mark.parametrize(
    ("pool_spec", "q_spec", "kv_spec", "message"),
    [
        (P(), BY_HEAD, BY_HEAD, "k's heads are split over 'heads' and the cache's over None, expected"),
        (P(), P(), P("data"), r"k has the sharding .*'data'.*, expected explicit mesh axes to split"),
        (POOL_SPEC, P(), BY_HEAD, "q's heads are split over None and the cache's over 'heads'"),
        (POOL_SPEC, P("data", None, "heads"), P(), "q has the sharding .*'data'"),
    ],
    ids=["heads", "rows", "whole queries", "rows of queries"],
)
def test_what_types_tell_must_fit(is_set, pool_spec, q_spec, kv_spec, message):
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
    config = dataclasses.replace(CONFIG, max_seqs=2)

    def put(spec, num_heads):
        return jax.device_put(np.zeros((2, 3, num_heads, DIM), np.float32), NamedSharding(mesh, spec))

    def append(cache, q, k):
        cache, step = kv.extend(cache, np.zeros(2, np.int32), max_new=3)
        return kv.attention(cache, 0, q, k, k, step)

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        cache = kv.init(config, sharding=NamedSharding(mesh, pool_spec))
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(append, cache, put(q_spec, 2 * HEADS), put(kv_spec, HEADS))


def test_head_axis_must_be_in_the_current_mesh():
    config = dataclasses.replace(CONFIG, head_axis="heads")
    with pytest.raises(ValueError, match=r"current mesh has the axes \(\)"):
        kv.init(config)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))), pytest.raises(ValueError, match=r"the axes \('data',"):
        kv.init(config)


@pytest.mark.parametrize("how", ["named", "spec", "head_axis"])
@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        ([kv.FullAttention(3, DIM)], "k"),
        ([kv.FullAttention(4, DIM), kv.Quantised(kv.FullAttention(3, DIM), "int4")], "k"),
        ([SideBySide(3, DIM)], "both"),
    ],
)
def test_heads_that_the_mesh_axis_does_not_divide_are_refused(kinds, name, how):
    config = kv.CacheConfig(kinds, num_blocks=4, block_size=4, max_seqs=2, max_seq_len=8)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec, options = P(None, "heads"), {}
    if how == "head_axis":
        config = dataclasses.replace(config, head_axis="heads")
    else:
        options = dict(sharding=NamedSharding(mesh, spec) if how == "named" else spec)
    message = f"the array '{name}' of .* layers has 3 heads, and the mesh axis 'heads' splits them over 2 dev"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        kv.init(config, **options)


@pytest.mark.slow
def test_gradients_of_what_all_devices_share_inside_shard_map():
    """Each device reads the same cache, or makes one of its own, and forks it."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    layer = kv.FullAttention(1, DIM)
    config = kv.CacheConfig([layer], num_blocks=4, block_size=4, max_seqs=2, max_seq_len=8)

    def loss_of_one(pools, q, sink_logits, k, num_new):
        cache, _ = kv.allocate(dataclasses.replace(kv.init(config), pools=pools), [0], [3])
        cache, step = kv.extend(cache, jnp.array([3, 0]), max_new=3)
        cache, _ = kv.attention(cache, 0, q, q, q, step)
        cache, _ = kv.fork(cache, [0], [1])
        cache, step = kv.extend(cache, num_new, max_new=3)
        cache, out = kv.attention(cache, 0, q, k[::-1], k, step, sink_logits=sink_logits)
        return (out**2).sum() + sum((x**3).sum() for x in jax.tree.leaves(cache.pools))

    def loss(pools, q, sink_logits, k, num_new):
        def on_device(pools, q, sink_logits, k, num_new):
            return loss_of_one(pools, q, sink_logits, k[0], num_new[0])[None]

        per_device = jax.shard_map(
            on_device, mesh=mesh, in_specs=(P(), P(), P(), P("data"), P("data")), out_specs=P("data")
        )
        return per_device(pools, q, sink_logits, k, num_new).sum()

    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((*n, 2, 3, 1, DIM)).astype(np.float32) for n in ((), (2,)))
    num_new = np.array([[1, 2], [2, 0]], np.int32)
    shared = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), kv.init(config).pools)
    arguments = shared, q, np.ones(1, np.float32)
    grads = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arguments, k, num_new)
    alone = jax.jit(jax.grad(loss_of_one, (0, 1, 2, 3)))
    per_device = [alone(*arguments, k[i], num_new[i]) for i in range(2)]
    want = jax.tree.map(lambda x, y: x + y, *(grads[:3] for grads in per_device))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), grads[:3], want)
    np.testing.assert_allclose(grads[3], np.stack([grads[3] for grads in per_device]), rtol=1e-5, atol=1e-5)
    assert all(abs(x).max() > 0 for x in jax.tree.leaves(want))


@pytest.mark.slow
@pytest.mark.parametrize("num_groups, policy", [(1, "lfu"), (2, "hyperbolic")])
def test_operations_on_a_shared_cache_take_what_each_device_asks(num_groups, policy):
    """JAX follows what differs between devices when it traces a loop."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    layers = [kv.FullAttention(1, DIM), kv.SlidingWindow(1, DIM, window=4, block_size=2)][:num_groups]
    config = kv.CacheConfig(
        layers, num_blocks=8, block_size=2, max_seqs=3, max_seq_len=12,
        enable_prefix_caching=True, eviction_policy=policy,
    )  # fmt: skip

    def ask(cache, ids, lengths, texts, share):
        return (
            kv.allocate(cache, ids, lengths, tokens=texts),
            kv.extend(cache, lengths, max_new=4, tokens=texts, seq_ids=ids),
            kv.fork(cache, ids, ids[::-1]),
            kv.reorder(cache, ids, ids[::-1]),
            kv.truncate(cache, ids, lengths),
            kv.free(cache, ids),
            kv.touch(cache, ids),
            kv.set_priority(cache, ids, lengths),
            kv.commit(cache, ids, final_len=lengths),
            kv.lookup(cache, texts, lengths),
            kv.gather(cache, ids[0], 0),
            kv.evict(cache, lengths[0]),
            kv.preempt_to_utilization(cache, share),
            kv.num_blocks_needed(cache, lengths, seq_ids=ids),
            kv.scrub(cache, ids),
            kv.scrub(cache, namespace=jnp.broadcast_to(ids[:1], 4).astype(jnp.uint32)),
        )

    def on_device(cache, *arguments):
        results = ask(cache, *(x[0] for x in arguments))
        return jax.tree.map(lambda x: x[None], results)

    arguments = [np.array(x, np.int32) for x in ([[0, 1], [2, 0]], [[3, 1], [0, 2]])]
    arguments += [np.arange(16, dtype=np.int32).reshape(2, 2, 4), np.array([0.5, 0.1], np.float32)]
    spread = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), *[P("data")] * 4), out_specs=P("data"))
    found = jax.eval_shape(spread, kv.init(config), *arguments)
    alone = jax.eval_shape(ask, kv.init(config), *(x[0] for x in arguments))
    assert [x.shape for x in jax.tree.leaves(found)] == [(2, *x.shape) for x in jax.tree.leaves(alone)]


@pytest.mark.slow
def test_one_cache_read_with_each_devices_query_heads_inside_shard_map():
    """One key/value head, which all devices hold, and whose cache comes out as one."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    config = kv.CacheConfig([kv.FullAttention(1, DIM)], num_blocks=4, block_size=2, max_seqs=1, max_seq_len=8)

    def decode(q, k, sink_logits):
        cache, _ = kv.allocate(kv.init(config), [0], [2])
        outs = []
        for new in (k, 2 * k):
            cache, step = kv.extend(cache, [2], max_new=2)
            cache, out = kv.attention(cache, 0, q, new, k, step, sink_logits=sink_logits)
            cache, other = kv.attend(cache, 0, q[:, ::-1], step)
            outs += [out, other]
        return cache, jnp.stack(outs)

    split = P(None, None, "heads")
    spread = jax.shard_map(
        decode, mesh=mesh, in_specs=(split, P(), P("heads")), out_specs=(P(), P(None, None, None, "heads"))
    )
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal((1, 2, heads, DIM)).astype(np.float32) for heads in (4, 1))
    arguments = q, k, np.arange(4, dtype=np.float32)

    def loss(decode, *arguments):
        cache, outs = decode(*arguments)
        return (outs**2).sum() + sum((x**3).sum() for x in jax.tree.leaves(cache.pools)), (cache, outs)

    found, want = (
        jax.jit(jax.grad(functools.partial(loss, fn), (0, 1, 2), has_aux=True))(*arguments)
        for fn in (spread, decode)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, want)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6), jax.jit(spread)(*arguments), want[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_groups, policy, is_run", [(1, "lru", True), (2, "lfu", False)])
def test_one_cache_per_device_inside_shard_map(num_groups, policy, is_run):
    """Data parallel, every operation. JAX follows what differs between devices when it traces a loop."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    layers = [kv.FullAttention(1, DIM), kv.SlidingWindow(1, DIM, window=4, block_size=2)][:num_groups]
    config = kv.CacheConfig(
        layers, num_blocks=8, block_size=2, max_seqs=2, max_seq_len=12,
        enable_prefix_caching=True, eviction_policy=kv.policies.InBatches(policy, 2),
    )  # fmt: skip

    def script(cache, num_tokens):
        text = jnp.arange(6, dtype=jnp.int32) % num_tokens
        texts = jnp.stack([text, text])
        rows = jnp.arange(2, dtype=jnp.int32) * jnp.minimum(num_tokens, 1)
        cache, admission = kv.allocate(cache, [0, 1], [5, 3], tokens=texts)

        def go_on(cache, num_new):
            cache, step = kv.extend(cache, num_new, max_new=5, tokens=texts[:, :5])
            x = jnp.full((2, 5, 1, DIM), num_tokens, jnp.float32)
            for layer in range(num_groups):
                cache, out = kv.attention(cache, layer, x, x, x, step)
            # The same query on all devices.
            cache, shared = kv.attend(cache, 0, jnp.ones((2, 5, 1, DIM)), step, sink_logits=jnp.ones(1))
            cache, _ = kv.commit(cache, rows)
            cache, _ = kv.free(cache, [1])
            cache, _ = kv.fork(cache, [0], [1])
            return cache, (out, shared)

        cache, outs = jax.lax.scan(go_on, cache, jnp.array([[5, 3], [1, 1]], jnp.int32))
        cache, _ = kv.reorder(cache, [0, 1], [1, 0])
        cache, _ = kv.truncate(cache, [0], [1])
        cache, _ = kv.touch(cache, [0])
        scrubbed, num_scrubbed = kv.scrub(cache, rows[:1])
        emptied, dropped = kv.preempt_to_utilization(cache, 0.0)
        found = kv.lookup(cache, texts, jnp.stack([num_tokens, num_tokens]))
        others = scrubbed.control, emptied.control, num_scrubbed, dropped, found, kv.stats(cache)
        cache, _ = kv.free(cache, [0, 1])
        cache, num_evicted = kv.evict(cache, 1)
        fresh = jax.lax.fori_loop(0, 2, lambda _, c: kv.reset(kv.reset_prefix_cache(c)[0]), cache)
        return cache.control, fresh.control, others, admission.status, outs, num_evicted

    def on_device(caches, num_tokens):
        mine = jax.tree.map(lambda x: x[0], caches)
        return jax.tree.map(lambda x: x[None], script(mine, num_tokens[0]))

    caches = jax.tree.map(lambda x: np.stack([x, x]), kv.init(config))
    num_tokens = np.array([1, 5], np.int32)
    spread = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    jax.eval_shape(spread, caches, num_tokens)
    if not is_run:
        return
    found = jax.device_get(spread(caches, num_tokens))
    alone = jax.jit(script)
    for i in range(2):
        want = alone(kv.init(config), num_tokens[i])
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, atol=1e-6), found, want)
    assert int(found[-1].sum()) > 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_no_array_without_elements_is_a_constant(prefix_caching):
    """An input of `shard_map` to XLA, which nothing reads: jax 0.11.2 ends the process over one."""
    config = kv.CacheConfig(
        [kv.FullAttention(1, DIM)],
        num_blocks=8,
        block_size=2,
        max_seqs=2,
        max_seq_len=12,
        enable_prefix_caching=prefix_caching,
    )
    tokens = [[1, 2, 3]] if prefix_caching else None
    admitted = jax.make_jaxpr(lambda cache: kv.allocate(cache, [0], [3], tokens=tokens))(kv.init(config))
    found = jax.make_jaxpr(lambda cache: kv.lookup(cache, [[1, 2, 3]], [3]))(kv.init(config))
    assert admitted.consts
    assert 0 not in [np.size(const) for const in (*admitted.consts, *found.consts)]
