"""Derivatives through what moves, copies and reads stored tokens: the right ones, or refused by name.

All that moves tokens is linear in the pools, so that it has a reference: itself, applied to the tangents.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv

SIZES = dict(num_blocks=24, block_size=4, max_seqs=4, max_seq_len=32)
FULL = kv.FullAttention(2, 4)
KINDS = {
    "full": FULL,
    "window": kv.SlidingWindow(2, 4, window=16, num_sink_tokens=1),
    "latent": kv.LatentAttention(latent_dim=4, rope_dim=2),
}
QUANTISED = kv.Quantised(FULL, "int8")
ROTATE = kv.chunks.key_rotation([0.7], max_distance=20)
LENGTHS = (13, 6, 0, 5)


def filled(*kinds, **options):
    """Rows of `LENGTHS` tokens in two layers, and statuses."""
    cache = kv.init(kv.CacheConfig([*kinds, kinds[0]], **SIZES, **options))
    tokens = np.arange(52).reshape(4, 13) if cache.config.enable_prefix_caching else None
    prompts = None if tokens is None else tokens[:3]
    cache, admission = kv.allocate(cache, [0, 1, 3], [13, 6, 5], tokens=prompts)
    cache, step = kv.extend(cache, LENGTHS, max_new=13, tokens=tokens)
    return cache, jnp.concatenate([admission.status, step.status])


def started(*kinds, **options):
    """Rows as `filled` makes them; what their pools hold is left to the caller."""
    cache, status = filled(*kinds, **options)
    assert not status.any()
    return cache


def compress(cache):
    """Whole blocks, for what is after the last token may be anything."""
    scores = np.random.default_rng(3).standard_normal((1, 32)).astype(np.float32)
    return kv.compression.compress(cache, [0], scores, [8])


def drop(cache):
    return kv.compression.drop(cache, [0], [3], [6], positions="cache", rotate=ROTATE)


def store_chunk(cache):
    cache, stored = kv.chunks.store(cache, [0], [2], [7], [range(7)])
    return cache, stored.status


def compose(cache):
    """The chunk twice in a row, and in one that fails, with angles beyond the table."""
    cache, _ = store_chunk(cache)
    cache, status = kv.chunks.compose(cache, [1, 2], [[0, 0], [0, 2]], [[7, 14], [30, 0]], rotate=ROTATE)
    return cache, status[:1]


def rewrite(cache):
    """A row whose first block another one shares."""
    cache, _ = kv.fork(cache, [0], [2])
    cache, step = kv.rewrite(cache, [2], [[1]])
    return cache, step.status


def scrub_rows(cache):
    return kv.scrub(cache, [1])[0], jnp.int32(0)


def scrub_namespace(cache):
    """The namespace is that of all rows but one, which has written a part of its last block."""
    words = cache.control.namespace.at[0].add(1)
    control = dataclasses.replace(cache.control, namespace=words)
    return kv.scrub(dataclasses.replace(cache, control=control), namespace=words[1])[0], jnp.int32(0)


def gather(cache):
    return kv.gather(cache, 0, 1)[:2], jnp.int32(0)


def write_source(cache):
    """A source that was read from the row's own keys."""
    k = kv.gather(cache, 0, 0)[0][None, None, :5]
    return kv.write_source(cache, [1], k, 2 * k, [5])


def export_and_import(cache):
    """Blocks of one cache are published in another one, whose pools have a gradient too."""
    contents = kv.tiers.export_blocks(cache, cache.control.block_pools[0].block_table[0, :3])
    pools = jax.tree.map(lambda x: 2 * x, cache.pools)
    empty, status = kv.tiers.import_blocks(dataclasses.replace(kv.init(cache.config), pools=pools), contents)
    return empty, status


def tangents_of(tree, seed):
    """Random numbers like the floats, in one array each."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def total(found):
    """A sum of floats, of cosines as weights."""
    pools = found.pools if isinstance(found, kv.Cache) else found
    leaves = [x for x in jax.tree.leaves(pools) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((x * np.cos(7.0 * np.arange(x.size, dtype=np.float32)).reshape(x.shape)).sum() for x in leaves)


@functools.partial(jax.jit, static_argnames="operations")
def compared(cache, tangents, operations):
    """Of each operation its gradient times the tangents, what it makes of these, and its status."""
    found = {}
    for operation in operations:

        def of_pools(pools, operation=operation):
            after, status = operation(dataclasses.replace(cache, pools=pools))
            return total(after), status

        wanted, status = of_pools(tangents)
        grads, _ = jax.grad(of_pools, has_aux=True)(cache.pools)
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(tangents), strict=True)
        found[operation.__name__] = sum((x * y).sum() for x, y in pairs), wanted, status
    return total(tangents), found


def check_gradients(cache, operations):
    """An operation that is linear in the pools has itself as derivative."""
    cache = dataclasses.replace(cache, pools=tangents_of(cache.pools, 0))
    unchanged, found = jax.device_get(compared(cache, tangents_of(cache.pools, 1), operations))
    for name, (got, want, status) in found.items():
        assert not status.any(), (name, status)
        assert abs(want - unchanged) > 1e-3, f"{name} does nothing here"
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=name)


MOVES = (compress, drop, store_chunk, compose, rewrite, scrub_rows, scrub_namespace, gather)


STREAMING = dict(extras=[kv.compression.Dropping(8), kv.chunks.Store(2, 8)])


def streaming(kind):
    return started(kind, **STREAMING)


@pytest.mark.quick_cases("full")
@pytest.mark.parametrize("kind", [*KINDS])
def test_what_moves_tokens_has_its_gradient(kind):
    """Compressing is refused in layers of windows, as an operation."""
    moves = tuple(move for move in MOVES if (kind, move) != ("window", compress))
    check_gradients(streaming(KINDS[kind]), moves)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_moves_tokens_has_its_gradient_with_heads_on_two_devices(axis_type):
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(axis_type,))
    cache = streaming(FULL)
    sharding = NamedSharding(mesh, P(None, "heads", None, None))
    with jax.set_mesh(mesh):
        pools, tangents = (jax.device_put(tangents_of(cache.pools, seed), sharding) for seed in (0, 1))
        cache = jax.device_put(dataclasses.replace(cache, pools=()), NamedSharding(mesh, P()))
        cache = dataclasses.replace(cache, pools=pools)
        found = jax.device_get(compared(cache, tangents, (compress, scrub_rows, store_chunk, compose))[1])
    for name, (got, want, _) in found.items():
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=name)


def test_what_leaves_and_enters_a_cache_has_its_gradient():
    published, _ = kv.commit(started(FULL, enable_prefix_caching=True), [0])
    check_gradients(published, (export_and_import,))
    check_gradients(started(FULL, kv.CrossAttention(2, 4, max_source_len=8)), (write_source,))


def refused(operation, transform, kind=FULL, **options):
    """A derivative by the floats of the pools, of what the operation returns in floats; nothing is run."""

    def derivative(cache):
        leaves, treedef = jax.tree.flatten(cache.pools)
        floats = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)}

        def loss(floats):
            pools = jax.tree.unflatten(treedef, [floats.get(i, x) for i, x in enumerate(leaves)])
            return total(operation(dataclasses.replace(cache, pools=pools))[0])

        return transform(loss)(floats)

    jax.jit(derivative).lower(jax.eval_shape(lambda: filled(kind, **options or STREAMING)[0]))


def forwards(loss):
    return lambda x: jax.jvp(loss, (x,), (x,))


def write(cache):
    cache, step = kv.extend(cache, [1, 0, 0, 0], max_new=1)
    stored = next(x for x in jax.tree.leaves(cache.pools) if jnp.issubdtype(x.dtype, jnp.floating))
    new = jnp.ones((4, 1, 2, 4)) * stored.sum()
    return kv.write(cache, 0, new, new, step), step.status


@pytest.mark.parametrize("transform", [jax.grad, forwards])
def test_quantised_layers_are_refused_by_their_name(transform):
    """Chunks, and sinks that move, are refused in them as operations."""
    operations = (compress, rewrite, scrub_rows, scrub_namespace, gather, write)
    names = "Quantised.FullAttention, int8. layers" if transform is jax.grad else "Quantised|in forward mode"
    for operation in operations:
        with pytest.raises(NotImplementedError, match=f"^got a .*({names}).*expected"):
            refused(operation, transform, QUANTISED, extras=[kv.compression.Dropping()])


@pytest.mark.parametrize("operation", [compress, store_chunk, rewrite, scrub_rows, write])
def test_forward_mode_is_refused_by_what_is_asked(operation):
    with pytest.raises(
        NotImplementedError, match="^got a derivative of .* in forward mode .*, expected reverse"
    ):
        refused(operation, forwards)


def test_a_rotation_that_is_not_linear_is_refused():
    def compose_bent(cache):
        cache, _ = store_chunk(cache)
        return kv.chunks.compose(cache, [1], [[0]], [[7]], rotate=lambda keys, distance: jnp.tanh(keys))

    with pytest.raises(NotImplementedError, match="^got a gradient through rotate=.*, expected .* linear"):
        refused(compose_bent, jax.grad)


def scores(cache):
    _, step = kv.extend(cache, [2, 0, 0, 0], max_new=2)
    q = jnp.cos(jnp.arange(32, dtype=jnp.float32)).reshape(4, 2, 1, 4).repeat(2, axis=2)
    return kv.attention_scores(cache, 0, q, step, num_last=1), step.status


def test_a_gradient_of_attention_scores_is_refused_where_it_is_used():
    with pytest.raises(NotImplementedError, match="^got a gradient of attention_scores, .*expected lax.stop"):
        refused(scores, jax.grad)

    def compress_by_scores(cache):
        by_token = scores(cache)[0][:1].sum(axis=(1, 2))
        return kv.compression.compress(cache, [0], by_token, [8])

    refused(compress_by_scores, jax.grad)  # it is not: what is kept has no derivative


def test_attention_scores_have_a_derivative_in_forward_mode():
    cache = streaming(FULL)
    pools, tangents = tangents_of(cache.pools, 0), tangents_of(cache.pools, 1)

    def loss(step_size):
        moved = jax.tree.map(lambda x, t: x + step_size * t, pools, tangents)
        return total(scores(dataclasses.replace(cache, pools=moved))[0])

    both_sides, found = jax.jit(lambda h: (loss(h) - loss(-h), jax.jvp(loss, (0 * h,), (h / h,))[1]))(
        jnp.float32(1e-2)
    )
    assert abs(found) > 1e-2
    np.testing.assert_allclose(both_sides / 2e-2, found, rtol=1e-2)
