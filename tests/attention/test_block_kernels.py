"""Blocks that leave a cache and come back by kernels, interpreted: the bits that XLA moves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu  # noqa: F401  imported later, it would make jax trace anew
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.blocks import whole_blocks
from kvcache_jax.blocks.storage import rows_of_all_layers
from kvcache_jax.core.state import KVPool
from pallas_kernels import mosaic_gpu, mosaic_tpu
from tests.attention.kernel_configs import IMPLEMENTATIONS, config_of, run_interpreted

pytestmark = pytest.mark.contract


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that were traced."""
    names = set()

    def note(module, name):
        function = getattr(module, name)

        def noted(*arguments, **keywords):
            names.add(name)
            return function(*arguments, **keywords)

        monkeypatch.setattr(module, name, noted)

    for module in (mosaic_gpu, mosaic_tpu):
        for name in ("gather_blocks", "scatter_blocks"):
            note(module, name)
    return names


def published(config):
    """A cache with two published prompts and random numbers in all its blocks, and an empty one of NaN."""
    config = dataclasses.replace(config, implementation="xla")
    tokens = np.arange(44, dtype=np.int32).reshape(4, 11)

    @jax.jit
    def publish(cache):
        cache, _ = kv.allocate(cache, [0, 2], [11, 9], tokens=tokens[::2])
        cache, _ = kv.extend(cache, [11, 0, 9, 0], max_new=11, tokens=tokens)
        cache, _ = kv.commit(cache)
        return kv.free(cache, [0, 2])[0]

    rng = np.random.default_rng(0)
    cache = publish(kv.init(config))
    pools = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), cache.pools)
    return dataclasses.replace(cache, pools=pools), testing.poison(kv.init(config))


def assert_same_bits(trees):
    got, wanted = map(jax.tree.leaves, trees)
    for each, want in zip(got, wanted, strict=True):
        assert each.dtype == want.dtype
        np.testing.assert_array_equal(*(np.atleast_1d(np.asarray(x)).view(np.uint8) for x in (each, want)))


def export_and_import(config, cache, empty, ids):
    cache, empty = (dataclasses.replace(each, config=config) for each in (cache, empty))
    contents = kv.tiers.export_blocks(cache, ids)
    imported, status = kv.tiers.import_blocks(empty, contents)
    return contents.arrays, imported.pools, status


@pytest.mark.quick_cases("mosaic_gpu")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_leave_and_come_back(implementation, called):
    """With the bits that XLA moves: zeros of what is no block, and in the pool only what is imported."""
    config = config_of(implementation, enable_prefix_caching=True)
    cache, empty = published(config)
    (found,) = np.nonzero(np.asarray(cache.control.block_pools[0].cached.is_published))
    ids = np.array([found[1], 7, found[0], 16, -1], np.int32)
    by_xla = dataclasses.replace(config, implementation="xla")
    wanted = jax.jit(functools.partial(export_and_import, by_xla))(cache, empty, ids)
    got = run_interpreted(lambda: jax.jit(functools.partial(export_and_import, config))(cache, empty, ids))
    assert_same_bits((got, wanted))
    assert wanted[2].tolist()[:3:2] == [kv.Status.OK] * 2
    assert called == {"gather_blocks", "scatter_blocks"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_no_kernel_moves_is_xlas(implementation):
    """The index of windows has no arrays; outside of a mesh no kernel is mapped over heads."""
    ids = np.array([0, 16], np.int32)
    config = config_of(implementation, enable_prefix_caching=True, windows=[(9, 3)])
    groups = kv.init(dataclasses.replace(config, implementation="xla")).config.groups
    assert not all(group.arrays for group in groups)
    for each in (
        config,
        config_of(implementation, enable_prefix_caching=True, head_axis="heads", windows=[None]),
    ):
        cache = dataclasses.replace(
            kv.init(dataclasses.replace(each, implementation="xla", head_axis=None)), config=each
        )
        with testing.interpreted():
            shapes = jax.eval_shape(kv.tiers.export_blocks, cache, ids).arrays
        assert all(x.shape[0] == 2 for x in jax.tree.leaves(shapes)), shapes


@pytest.mark.slow
def test_the_gradient_of_blocks_that_leave_and_come_back_is_xlas(called):
    config = config_of("mosaic_tpu", enable_prefix_caching=True)
    cache, empty = published(config)
    empty = dataclasses.replace(empty, pools=jax.tree.map(jnp.zeros_like, empty.pools))
    (found,) = np.nonzero(np.asarray(cache.control.block_pools[0].cached.is_published))

    def loss(config, pools):
        own, others = (dataclasses.replace(x, pools=y) for x, y in zip((cache, empty), pools, strict=True))
        moved = export_and_import(config, own, others, found[::-1])[:2]
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(moved))

    def gradient(config):
        return jax.jit(jax.grad(functools.partial(loss, config)))((cache.pools, empty.pools))

    wanted = gradient(dataclasses.replace(config, implementation="xla"))
    got = run_interpreted(lambda: gradient(config))
    assert_same_bits((got, wanted))
    assert called == {"gather_blocks", "scatter_blocks"}


def gather_all(pool, block_ids, group):
    """Reads blocks as a backend does, by no kernel."""
    rows = rows_of_all_layers(pool, group, block_ids)
    return {name: x.at[rows].get(mode="fill", fill_value=0) for name, x in pool.arrays.items()}


def scatter_all(pool, arrays, block_ids, group):
    rows = rows_of_all_layers(pool, group, block_ids)
    return KVPool(arrays={name: x.at[rows].set(arrays[name], mode="drop") for name, x in pool.arrays.items()})


PLAIN = kv.backends.Backend("test: blocks", lambda *_: None, read_blocks=gather_all, write_blocks=scatter_all)
kv.backends.register_backend(PLAIN)


@pytest.mark.parametrize(
    "implementation", ["xla", PLAIN.name, pytest.param("mosaic_tpu", marks=pytest.mark.slow)]
)
def test_blocks_of_heads_split_over_explicit_axes_have_gradients(implementation):
    """Those without a mesh, split as the pool's heads."""
    config = config_of("mosaic_tpu", windows=[None] * 2, num_blocks=4)
    config = dataclasses.replace(config, implementation=implementation)
    group = config.groups[0]
    read_ids, write_ids = np.array([[2, 9], [-1, 2]], np.int32), np.array([3, 1, 4], np.int32)
    rng = np.random.default_rng(0)
    shape = (2 * 4, *dict(group.arrays)["k"].shape)
    pool = {name: rng.standard_normal(shape).astype(np.float32) for name in "kv"}
    new = {name: rng.standard_normal((3, 2, *shape[1:])).astype(np.float32) for name in "kv"}

    def loss(pool, new):
        written = whole_blocks.write_blocks(config, group, KVPool(arrays=pool), write_ids, new)
        read = whole_blocks.read_blocks(config, group, written, read_ids)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves((read, written)))

    def gradient(*operands):
        return run_interpreted(lambda: jax.jit(jax.grad(loss, argnums=(0, 1)))(*operands))

    wanted = gradient(pool, new)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,))
    in_pool, in_new = (NamedSharding(mesh, PartitionSpec(*[None] * at, "heads")) for at in (1, 2))
    # Contents that came from a store are whole.
    places = {"k": in_pool, "v": in_pool}, {"k": in_new, "v": NamedSharding(mesh, PartitionSpec())}
    with jax.set_mesh(mesh):
        try:
            got = gradient(*jax.device_put((pool, new), places))
        except Exception as error:  # of jax's own types
            got = error
    assert not isinstance(got, Exception), got
    for place, one, other in zip(*map(jax.tree.leaves, (places, got, wanted)), strict=True):
        assert one.sharding.is_equivalent_to(place, one.ndim)
        np.testing.assert_allclose(one, other, rtol=1e-6)
