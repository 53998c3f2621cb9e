"""The tokens of blocks split over devices: the same rows and attention, with a part of the memory each."""

import dataclasses
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
from tests.support import script_configs as configs
from tests.support import tiny_model
from tests.support.chunk_script import ChunkDriver
from tests.support.prefix_script import SCRIPT_CONFIG, PrefixDriver
from tests.support.random_script import Driver
from tests.support.window_script import WindowScript, grouped_config, partial_config

HEADS, DIM, WIDTH = 2, 4, 3
KINDS = [
    kv.FullAttention(HEADS, DIM),
    kv.SlidingWindow(HEADS, DIM, window=7, num_sink_tokens=5, block_size=4),
]
CONFIG = kv.CacheConfig(KINDS, num_blocks=16, block_size=8, max_seqs=4, max_seq_len=64)
SPLIT = dataclasses.replace(CONFIG, context_axis="context")
SAMPLED = kv.decoding.SamplingParams(temperature=1.0)
SINKS = np.array([0.5, -1, 2, 0], np.float32)


def make_mesh(**axes):
    """A mesh of automatic axes."""
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes))


def split_of(config):
    return dataclasses.replace(config, context_axis="context")


def make_numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_inputs():
    heads = enumerate((2 * HEADS, HEADS, HEADS))
    return [make_numbers(len(KINDS), 4, WIDTH, num, DIM, seed=seed) for seed, num in heads]


def forward(cache, q, k, v, num_new):
    cache, step = kv.extend(cache, num_new, max_new=WIDTH)
    outs = []
    for layer in range(len(q)):
        options = dict(sink_logits=SINKS) if layer == 0 else dict(soft_cap=3.0)
        cache, out = kv.attention(
            cache, layer, q[layer], k[layer], v[layer], step, return_lse=True, **options
        )
        outs.append(out)
    return cache, outs, step.status


def run(step_fn, cache):
    """Prefill, fork, copy-on-write and decoding past the window, of rows that end on every device."""
    inputs, found = make_inputs(), []
    cache, _ = kv.allocate(testing.poison(cache), [0, 1, 4], [3, 2, 0])  # there is no row 4
    for i, num_new in enumerate([[3, 2, 0, 0], *[[1, 3, 1, 0]] * 9]):
        tokens = [np.roll(x, -i, axis=2) for x in inputs]
        cache, outs, status = step_fn(cache, *tokens, np.array(num_new, np.int32))
        assert not np.asarray(status).any()
        found.append(outs)
        if i == 0:
            cache, _ = kv.fork(cache, [0], [2])
    assert int(kv.stats(cache).num_copies) == 2
    assert kv.check_invariants(cache) == []
    return cache, found


@pytest.fixture(scope="module")
def whole():
    return run(kv.donate(forward), kv.init(CONFIG))


def assert_is(whole, cache, found):
    """Attention to 1e-6, and bit for bit the state and what rows hold."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6, rtol=1e-6), found, whole[1])
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (cache.control, whole[0].control)))


@pytest.mark.parametrize("num_devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_over_several_devices(num_devices, whole):
    with jax.set_mesh(make_mesh(context=num_devices)):
        cache, found = run(kv.donate(forward), kv.init(SPLIT))
        assert_is(whole, cache, found)
        for row in range(3):
            for layer in range(len(KINDS)):
                rows = (kv.gather(each, row, layer) for each in (cache, whole[0]))
                jax.tree.map(np.testing.assert_array_equal, *rows)
    num_bytes = dict.fromkeys(jax.devices()[:num_devices], 0)
    for array in jax.tree.leaves(cache.pools):
        for shard in array.addressable_shards:
            num_bytes[shard.device] += shard.data.nbytes
    assert {*num_bytes.values()} == {kv.memory_bytes(CONFIG) // num_devices}


def test_each_device_has_a_run_of_every_block():
    """Run c of a row lives on device c modulo n, and no other device writes it."""
    layer = kv.FullAttention(1, 1)
    config = kv.CacheConfig([layer], num_blocks=6, block_size=4, max_seqs=1, max_seq_len=16, context_axis="x")
    with jax.set_mesh(make_mesh(x=2)):
        cache, _ = kv.allocate(kv.init(config), [0], [10])
        new = np.arange(1, 11, dtype=np.float32).reshape(1, 1, 10, 1, 1)
        cache, _ = kv.donate(kv.append)(cache, new, new, [10])
    table = np.asarray(cache.control.block_pools[0].block_table)[0]
    for shard in cache.pools[0].k.addressable_shards:
        device, found = shard.device.id, np.asarray(shard.data)[:, 0, :, 0]
        runs = [[token + 1 if token < 10 else 0 for token in (run, run + 1)] for run in range(0, 12, 2)]
        np.testing.assert_array_equal(found[table[:3]], runs[device::2])
        assert not found[np.setdiff1d(np.arange(6), table[:3])].any()


def test_a_donated_step_copies_no_pool_and_sends_results_alone():
    kinds = [dataclasses.replace(kind, num_blocks=2**13) for kind in KINDS]
    config = dataclasses.replace(SPLIT, layers=kinds)
    with jax.set_mesh(make_mesh(context=2)):
        program = kv.donate(forward).lower(kv.init(config), *make_inputs(), np.zeros(4, np.int32)).compile()
    memory = program.memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert beside < 4 * 2**13 < 0.01 * kv.memory_bytes(config), beside
    sent = re.findall(r"= (.*) (all-[\w-]+|reduce-scatter|collective-[\w-]+)\(", program.as_text())
    assert sent and {kind for _, kind in sent} == {"all-reduce"}
    shapes = re.findall(r"\[([\d,]+)\]", " ".join(results for results, _ in sent))
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) <= make_inputs()[0][0].size


@pytest.mark.slow
@pytest.mark.parametrize("head_type", [AxisType.Auto, AxisType.Explicit])
def test_heads_over_another_axis(head_type, whole):
    mesh = jax.make_mesh((2, 2), ("heads", "context"), axis_types=(head_type, AxisType.Auto))
    split = NamedSharding(mesh, P(None, None, None, "heads", None))

    def step_fn(cache, q, k, v, num_new):
        return program(cache, *(jax.device_put(x, split) for x in (q, k, v)), num_new)

    program = kv.donate(forward)
    with jax.set_mesh(mesh):
        cache, found = run(step_fn, kv.init(dataclasses.replace(SPLIT, head_axis="heads")))
        assert_is(whole, cache, found)
    for pool, block_size in zip(cache.pools, (8, 4), strict=True):
        assert pool.k.sharding.shard_shape(pool.k.shape)[1:3] == (1, block_size // 2)


@pytest.mark.slow
def test_gradients():
    """Through attention, copies and writes, of inputs, sinks and the pools themselves."""

    def loss(pools, q, k, v, cache):
        cache = dataclasses.replace(cache, pools=pools)
        cache, _ = kv.allocate(cache, [0, 1], [3, 2])
        cache, outs, _ = forward(cache, q, k, v, jnp.array([3, 2, 0, 0], jnp.int32))
        cache, _ = kv.fork(cache, [0], [2])
        cache, more, _ = forward(cache, q[::-1], k + 1, v - 1, jnp.array([2, 3, 1, 0], jnp.int32))
        sums = [(out**2).sum() + jnp.where(lse > -9, lse, 0).sum() for out, lse in outs + more]
        return sum(sums) + sum((x**3).sum() for x in jax.tree.leaves(cache.pools))

    grad = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    cache = kv.init(CONFIG)
    pools = jax.tree.map(lambda x: np.sin(np.arange(x.size, dtype=np.float32)).reshape(x.shape), cache.pools)
    want = grad(pools, *make_inputs(), cache)
    with jax.set_mesh(make_mesh(context=2)):
        split = kv.init(SPLIT)
        found = grad(jax.device_put(pools, split.pools[0].k.sharding), *make_inputs(), split)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, want)
    assert all(abs(x).max() > 0 for x in jax.tree.leaves(want))


def on_parts(function, config, results, num_more=0, **options):
    """Maps `function` over the devices: of the pools each has its part, of all else the whole."""
    mesh = make_mesh(context=2)
    with jax.set_mesh(mesh):
        cache = kv.init(config)
    specs = jax.tree.map(lambda _: P(), cache)
    specs = dataclasses.replace(specs, pools=jax.tree.map(lambda _: P(None, None, "context"), cache.pools))
    in_specs, out_specs = (specs, *[P()] * num_more), (specs, *[P()] * results) if results else P()
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options), cache


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_inside_shard_map_over_the_axis(check_vma, whole):
    step_fn, cache = on_parts(forward, SPLIT, 2, 4, check_vma=check_vma)
    assert_is(whole, *run(kv.donate(step_fn), cache))


Q = make_inputs()[0][0]


SCORES = np.zeros((1, CONFIG.max_seq_len), np.float32)


def attend(cache, q, function=kv.attend):
    cache, step = kv.extend(cache, np.zeros(4, np.int32), max_new=WIDTH)
    return function(cache, 0, q, step)


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("a gradient", lambda cache: jax.grad(lambda q: attend(cache, q)[1].sum())(Q)),
        ("gather", lambda cache: kv.gather(cache, 0, 0)[0]),
        ("scrub", lambda cache: kv.scrub(cache, [0])[1]),
        ("attention_scores", lambda cache: attend(cache, Q, kv.attention_scores)),
        ("an operation that moves tokens", lambda cache: kv.compression.compress(cache, [0], SCORES, [1])[1]),
    ],
    ids=lambda what: what if isinstance(what, str) else "",
)  # fmt: skip
def test_places_within_blocks_have_no_meaning_on_one_device(what, function):
    layers, extras = [kv.FullAttention(HEADS, DIM)], [kv.compression.Dropping()]
    config = dataclasses.replace(SPLIT, layers=layers, extras=extras)
    mapped, cache = on_parts(function, config, 0, check_vma=False)
    with pytest.raises(
        NotImplementedError, match=f"^{what} got 4 of the 8 tokens of a block, one device's run"
    ):
        jax.eval_shape(mapped, cache)


@pytest.mark.slow
def test_generate():
    """The same tokens, of prompts that wait, share a prefix and are sampled."""
    params, prompts = tiny_model.make_params(), [[1, 2, 3, 4, 5, 6], [7], [1, 2, 3, 4, 5, 9, 9], [2, 8]]
    config = tiny_model.config(max_seqs=2, block_size=4, enable_prefix_caching=True)
    options = dict(max_new_tokens=9, prefill_len=tiny_model.PREFILL_LEN, sampling=SAMPLED)
    want = kv.generate(tiny_model.forward, params, prompts, config, **options)
    with jax.set_mesh(make_mesh(context=2)):
        found = kv.generate(tiny_model.forward, params, prompts, split_of(config), **options)
    assert [each.tokens for each in found.generations] == [each.tokens for each in want.generations]


# By name: devices, what makes the driver, its config and options, how many operations, and what must occur.
SCRIPTS = {
    "rows": (4, Driver, configs.full_config(num_blocks=12), {}, 200, "copies"),
    "prefixes": (4, PrefixDriver, SCRIPT_CONFIG, {}, 300, "hits"),
    "prefixes of windows": (2, WindowScript, grouped_config(), {}, 200, "evictions"),
    "partial hits": (2, WindowScript, partial_config(configs.FULL), {"num_namespaces": 2}, 150, "partial"),
    "dropping": (
        2,
        Driver,
        configs.config_of(configs.WINDOW, configs.FULL, max_query_len=9, extras=configs.DROPPING),
        {},
        200,
        "drop OK",
    ),
    "chunks": (2, ChunkDriver, configs.chunk_config(num_blocks=12), {}, 200, "compose OK"),
}


@pytest.mark.quick_cases("rows")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_random_script(name):
    """Every operation, on tokens that the oracle knows; blocks run out as on one device."""
    num_devices, make, config, options, num_steps, what = SCRIPTS[name]
    with jax.set_mesh(make_mesh(context=num_devices)):
        script = make(config=split_of(config), seed=1, **options)
        for _ in range(num_steps):
            script.step()
    assert script.totals()[what] > 0
    for pool, group in zip(script.cache.pools, config.groups, strict=True):
        assert pool.k.sharding.shard_shape(pool.k.shape)[2] == group.block_size // num_devices


@pytest.mark.slow
def test_blocks_go_to_stores_and_other_caches_and_back():
    """Whole, whichever device wrote them."""
    config = dataclasses.replace(CONFIG, enable_prefix_caching=True, max_seqs=1)
    texts, new = np.arange(20, dtype=np.int32)[None], make_numbers(len(KINDS), 1, 20, HEADS, DIM)

    def rows(cache):
        cache, admission = kv.allocate(cache, [0], [20], tokens=texts)
        return admission.num_cached.tolist(), [kv.gather(cache, 0, layer)[:2] for layer in range(len(KINDS))]

    def filled(config):
        cache, _ = kv.allocate(kv.init(config), [0], [20], tokens=texts)
        cache, _ = kv.append(cache, new, 2 * new, [20], tokens=texts)
        return kv.free(kv.commit(cache)[0], [0])[0]

    want = rows(filled(config))
    assert want[0] == [16]
    with jax.set_mesh(make_mesh(context=2)):
        for source, target in ((config, split_of(config)), (split_of(config), config)):
            store = kv.tiers.MemoryStore()
            kv.tiers.save(filled(source), store, weights="w")
            loaded, _ = kv.tiers.load(store, kv.init(target), weights="w")
            contents = kv.tiers.export_blocks(filled(source), np.arange(CONFIG.num_blocks))
            imported, _ = kv.tiers.import_blocks(kv.init(target), jax.device_get(contents))
            for cache in (loaded, imported):
                jax.tree.map(np.testing.assert_array_equal, rows(cache), want)


STATE = kv.GatedDeltaNet(1, 4, key_dim=4)


@pytest.mark.parametrize(
    ("layers", "options", "error", "message"),
    [
        (
            KINDS,
            {"context_axis": 2},
            TypeError,
            "context_axis is 2, expected the name of a mesh axis, or None",
        ),
        (KINDS, {"head_axis": "context"}, ValueError, "context_axis and head_axis are both 'context', expec"),
        (
            [*KINDS, STATE],
            {},
            NotImplementedError,
            r"context_axis is 'context' and layers\[2\] is GatedDeltaNet.*, expected layers of keys",
        ),
        (
            KINDS,
            {"extras": [kv.tiers.Host(num_blocks=4)], "enable_prefix_caching": True},
            NotImplementedError,
            "context_axis is 'context' and extras has a Host, expected one of the two",
        ),
    ],
    ids=["no name", "axis of heads", "states", "host"],
)
def test_what_has_no_split_context_is_refused(layers, options, error, message):
    options = {"context_axis": "context"} | options
    with pytest.raises(error, match=message):
        kv.CacheConfig(layers, num_blocks=16, block_size=8, max_seqs=4, max_seq_len=64, **options)


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"context_axis is 'context' and the current mesh has the axes \(\)"):
        kv.init(SPLIT)
    with jax.set_mesh(make_mesh(context=8)):
        message = (
            "SlidingWindow.* layers have blocks of 4 tokens, and the mesh axis 'context' splits them over 8"
        )
        with pytest.raises(ValueError, match=message):
            kv.init(SPLIT)
        message = (
            "sharding splits the tokens over 'context' and config.context_axis is None, expected the same"
        )
        with pytest.raises(ValueError, match=message):
            kv.init(CONFIG, sharding=P(None, None, "context"))
        with pytest.raises(
            ValueError, match="sharding splits the tokens over None and config.context_axis is"
        ):
            kv.init(SPLIT, sharding=P())
        message = "the mesh has the axes .'context',., expected each of them once at most: a PartitionSpec is"
        for axis in ("context", "heads"):
            with pytest.raises(ValueError, match=message):
                kv.init(SPLIT, sharding=P(None, axis, "context"))
        with pytest.raises(
            TypeError, match="sharding is 'context', expected a jax.sharding.Sharding or a Part"
        ):
            kv.init(SPLIT, sharding="context")  # type: ignore
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Explicit,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(NotImplementedError, match="axis 'context' of context_axis is expl"),
    ):
        kv.init(SPLIT)


def test_describe_says_what_a_device_takes():
    line = "the tokens of each block are split over the mesh axis 'context'"
    assert kv.describe(SPLIT).splitlines()[-1] == line
    assert kv.memory_bytes(SPLIT) == kv.memory_bytes(CONFIG) == 12 * 2**10
    with jax.set_mesh(make_mesh(context=2)):
        line += ": 6.0 KiB of keys and values on each of 2 devices"
        assert kv.describe(SPLIT).splitlines()[-1] == line


def test_kernels_are_refused():
    named = dataclasses.replace(SPLIT, implementation="mosaic_gpu")
    with jax.set_mesh(make_mesh(context=2)):
        cache = kv.init(named)
        with pytest.raises(
            NotImplementedError, match="implementation 'mosaic_gpu' is asked for and context_axis"
        ):
            kv.extend(cache, [0] * 4, max_new=1)
