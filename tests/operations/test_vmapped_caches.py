"""`vmap` over caches: each does its own, as in a Python loop, and no compiled step copies a pool."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from tests.support.few_kernels import compile_for_users

NUM_ROWS, DIM = 20, 4
CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, DIM)], num_blocks=64, block_size=4, max_seqs=NUM_ROWS, max_seq_len=16
)
NUM_FORKS = 0, 1, NUM_ROWS - 1, 3  # more copies than one trip makes, in one of the caches


def assert_equal_bits(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def attend_to(cache, step, x):
    outputs = []
    for layer in range(cache.config.num_layers):
        cache, out = kv.attention(cache, layer, x, x, 2 * x, step)
        outputs.append(out)
    return cache, jnp.stack(outputs)


def prompt_and_forks(num_forks):
    """A cache whose row 0 has 6 tokens, of any values, and so many forks."""
    rng = np.random.default_rng(num_forks)
    cache, _ = kv.allocate(kv.init(CONFIG), [0], [6])
    cache, step = kv.extend(cache, [6] + [0] * (NUM_ROWS - 1), max_new=6)
    cache, _ = attend_to(cache, step, rng.standard_normal((NUM_ROWS, 6, 1, DIM)).astype(np.float32))
    ids = np.arange(NUM_ROWS, dtype=np.int32)
    return kv.fork(cache, ids * 0, np.where((ids > 0) & (ids <= num_forks), ids, NUM_ROWS))[0]


def write_all(cache, x):
    """Every row gets one token: of those that share a block all but one copy it."""
    cache, step = kv.extend(cache, cache.is_active.astype(jnp.int32), max_new=1)
    cache, out = attend_to(cache, step, x)
    return cache, out, step.status


def scrub_all(cache, x):
    return kv.scrub(cache, jnp.where(cache.is_active, jnp.arange(NUM_ROWS, dtype=jnp.int32), NUM_ROWS))


@functools.cache
def stacked():
    caches = [jax.device_get(prompt_and_forks(num_forks)) for num_forks in NUM_FORKS]
    x = np.random.default_rng(1).standard_normal((len(caches), NUM_ROWS, 1, 1, DIM)).astype(np.float32)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *caches), x


def each_alone(function, *arguments):
    """A Python loop over what `vmap` maps over."""
    results = [function(*jax.tree.map(lambda x, i=i: x[i], arguments)) for i in range(len(NUM_FORKS))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(results))


def nested(function):
    def in_pairs(*arguments):
        pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), arguments)
        found = jax.vmap(jax.vmap(function))(*pairs)
        return jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), found)

    return jax.jit(in_pairs)


def exported(function):
    def call(*arguments):
        program = jax.export.export(
            jax.jit(lambda *arguments: jax.tree.leaves(jax.vmap(function)(*arguments)))
        )
        found = jax.export.deserialize(program(*arguments).serialize()).call(*arguments)
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(jax.vmap(function), *arguments)), found)

    return call


def on_two_devices(function):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def call(*arguments):
        with jax.set_mesh(mesh):
            spread = jax.shard_map(jax.vmap(function), in_specs=P("data"), out_specs=P("data"))
            return jax.jit(spread)(*jax.device_put(arguments, jax.NamedSharding(mesh, P("data"))))

    return call


TRANSFORMS = {
    "jit": lambda function: jax.jit(jax.vmap(function)),
    "nested": nested,
    "export": exported,
    "shard_map": on_two_devices,
}


@pytest.mark.quick_cases("copies-nested")
@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("function", [write_all, scrub_all], ids=["copies", "scrub"])
def test_each_cache_is_what_it_is_alone(function, how):
    found = jax.device_get(TRANSFORMS[how](function)(*stacked()))
    expected = each_alone(jax.jit(function), *stacked())
    if function is write_all:
        num_copies = [kv.stats(jax.tree.map(lambda x, i=i: x[i], expected[0])).num_copies for i in range(4)]
        assert num_copies == [*NUM_FORKS]
    assert_equal_bits(found, expected)


def test_gradients_of_each_cache_are_those_that_it_has_alone():
    """Also where one cache copies more often than another."""
    cache, x = stacked()

    def loss(pools, x, control):
        cache, out, _ = write_all(kv.Cache(control=control, pools=pools, config=CONFIG), x)
        return (out**2).sum() + sum((pool**3).sum() for pool in jax.tree.leaves(cache.pools))

    gradients = jax.grad(loss, (0, 1))
    arguments = cache.pools, x, cache.control
    found, expected = jax.jit(jax.vmap(gradients))(*arguments), each_alone(jax.jit(gradients), *arguments)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, jax.device_get(found), expected)


def grow(cache, n, texts):
    cache, step = kv.extend(cache, n, max_new=3, tokens=texts[:, :3])
    cache, out = attend_to(cache, step, jnp.full((4, 3, 1, 128), 2.0))
    return cache, out, step.status


def serve(cache, n, texts):
    cache, admission = kv.allocate(cache, jnp.arange(4, dtype=jnp.int32), n, tokens=texts)
    cache, out, status = grow(cache, n, texts)
    cache, _ = kv.commit(cache)
    cache, _ = kv.evict(cache, n[0])
    cache, _ = kv.fork(cache, [0], n[3:])
    return kv.free(cache, n[:2])[0], admission, out, status


ROTATE = kv.chunks.key_rotation(np.ones(64), 64)
CHUNKS = dict(extras=[kv.chunks.Store(3, 8)])
OPERATIONS = {
    "copy on write": (grow, {}),
    "evictions": (serve, dict(enable_prefix_caching=True)),
    "evictions by key": (serve, dict(enable_prefix_caching=True, eviction_policy="lfu")),
    "drop": (
        lambda c, n, texts: kv.compression.drop(c, [0, 1], [0, 0], n[2:], positions="cache", rotate=ROTATE),
        dict(extras=[kv.compression.Dropping(4)]),
    ),
    "compress": (
        lambda c, n, texts: kv.compression.compress(c, [0, 1], jnp.ones((2, 64)), n[:2]),
        dict(extras=[kv.compression.Dropping()]),
    ),
    "rewrite": (lambda c, n, texts: kv.rewrite(c, jnp.arange(2, dtype=jnp.int32), texts[:2, :3]), {}),
    "store": (lambda c, n, texts: kv.chunks.store(c, [0], n[:1], n[1:2], texts[:1, :8]), CHUNKS),
    "compose": (
        lambda c, n, texts: kv.chunks.compose(c, [0], n[None, :1], n[None, 1:2], rotate=ROTATE),
        CHUNKS,
    ),
    "scrub rows": (lambda c, n, texts: kv.scrub(c, n), dict(enable_prefix_caching=True)),
    "scrub a namespace": (
        lambda c, n, texts: kv.scrub(c, namespace=n.astype(jnp.uint32)),
        dict(enable_prefix_caching=True),
    ),
}


def bytes_beside(operation, num_blocks, **options):
    """Bytes that three caches need beside what is donated, and bytes of their pools."""
    config = kv.CacheConfig(
        [kv.FullAttention(1, 128)] * 6,
        num_blocks=num_blocks,
        block_size=4,
        max_seqs=4,
        max_seq_len=64,
        **options,
    )
    one = jax.eval_shape(functools.partial(kv.init, config))
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), one)
    arguments = [jax.ShapeDtypeStruct((3, *shape), jnp.int32) for shape in ((4,), (4, 16))]
    lowered = jax.jit(jax.vmap(operation), donate_argnums=0).lower(cache, *arguments)
    memory = compile_for_users(lowered).memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return np.array([beside, 3 * kv.memory_bytes(config)])


@pytest.mark.quick_cases("copy on write")
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_step_over_several_caches_copies_their_pools(name):
    """Bytes beside the donated caches grow by less than 1% of those of more blocks."""
    operation, options = OPERATIONS[name]
    beside, pools = bytes_beside(operation, 2**13, **options) - bytes_beside(operation, 2**10, **options)
    assert beside < 0.01 * pools
