"""Gradients through the cache against a dense reference, and what they cost in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.attention.gradient_program import pools_needed
from tests.support.dense_reference import dense_attention

HEADS, GROUP, DIM, BLOCK = 2, 2, 5, 4
CHUNKS = (5, 3)
LENGTHS = ((5, 3), (4, 1), (2, 0))


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(num_layers, seed=0):
    shape = (num_layers, 3, sum(CHUNKS))
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [random(seed + i, *shape, num_heads, DIM) for i, num_heads in enumerate(heads)]


def in_chunks(x):
    """The rows' tokens `x [layers, rows, tokens, ...]` as [chunks, layers, max_seqs, width, ...], padded."""
    width, chunks, start = max(CHUNKS), [], 0
    for num_tokens in CHUNKS:
        padding = [(0, 0), (0, 1), (0, width - num_tokens), (0, 0), (0, 0)]
        chunks.append(jnp.pad(x[:, :, start : start + num_tokens], padding))
        start += num_tokens
    return jnp.stack(chunks)


def paged(cache, q, k, v, sinks, soft_cap):
    """All layers and chunks through the cache; the rows' tokens come back end to end."""

    def feed(cache, chunk):
        num_new, *new = chunk
        cache, step = kv.extend(cache, num_new, max_new=max(CHUNKS))
        outs, options = [], dict(sink_logits=sinks, soft_cap=soft_cap, return_lse=True)
        for layer in range(q.shape[0]):
            cache, out = kv.attention(cache, layer, *(x[layer] for x in new), step, **options)
            outs.append(out)
        return cache, jax.tree.map(lambda *x: jnp.stack(x), *outs)

    num_new = jnp.array([*LENGTHS, (0, 0)]).T
    cache, (outs, lses) = jax.lax.scan(feed, cache, (num_new, *map(in_chunks, (q, k, v))))

    def join(x, row):
        return jnp.concatenate([x[i, :, row, :n] for i, n in enumerate(LENGTHS[row])], axis=1)

    rows = range(len(LENGTHS))
    return [join(outs, row) for row in rows], [join(lses, row) for row in rows], cache


def end_to_end(x, row):
    """The row's tokens of `x [layers, rows, tokens, ...]` without the padding of each chunk."""
    starts = np.cumsum((0, *CHUNKS[:-1]))
    return jnp.concatenate([x[:, row, s : s + n] for s, n in zip(starts, LENGTHS[row], strict=True)], axis=1)


FULL = kv.FullAttention(HEADS, DIM)
WINDOW = kv.SlidingWindow(HEADS, DIM, window=3, num_sink_tokens=1, block_size=2)


@pytest.mark.slow
def test_gradients_equal_a_dense_reference():
    kinds, soft_cap = [FULL, WINDOW], 1.5
    config = kv.CacheConfig(
        kinds, num_blocks=16, block_size=BLOCK, max_seqs=4, max_seq_len=16, max_query_len=5
    )
    q, k, v = inputs(len(kinds))
    sinks = jnp.linspace(-1.0, 1.0, HEADS * GROUP)
    targets = random(7, *q.shape)

    def score(outs, lses):
        total = 0.0
        for row in range(3):
            total += (outs[row] * end_to_end(targets, row)).sum() + (jnp.sin(3 * lses[row])).sum()
        return total

    def paged_score(q, k, v, sinks):
        cache, _ = kv.allocate(kv.init(config), [0, 1, 2], [8, 5, 2])
        outs, lses, _ = paged(testing.poison(cache), q, k, v, sinks, soft_cap)
        return score(outs, lses)

    def dense_score(q, k, v, sinks):
        outs, lses = [], []
        for row in range(3):
            layers = []
            for layer, kind in enumerate(kinds):
                window = {} if kind == FULL else dict(window=3, num_sink_tokens=1)
                tokens = [end_to_end(x, row)[layer] for x in (q, k, v)]
                layers.append(dense_attention(*tokens, sink_logits=sinks, soft_cap=soft_cap, **window))
            outs.append(jnp.stack([out for out, _ in layers]))
            lses.append(jnp.stack([lse for _, lse in layers]))
        return score(outs, lses)

    def gradient(score):
        return jax.jit(jax.value_and_grad(score, argnums=(0, 1, 2, 3)))(q, k, v, sinks)

    (value, grads), (expected_value, expected) = gradient(paged_score), gradient(dense_score)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, got, want in zip("qkvs", grads, expected, strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_gradients_flow_into_the_pools_through_forks_and_copies():
    """A learned prefix: two rows share it by fork, one of them copies its last block on write."""
    config = kv.CacheConfig([FULL] * 2, num_blocks=8, block_size=BLOCK, max_seqs=3, max_seq_len=16)
    new = random(1, 2, 3, 1, HEADS, DIM)
    queries = random(2, 2, 3, 1, HEADS * GROUP, DIM)

    def branches(prefix):
        cache, _ = kv.allocate(kv.init(config), [0], [6])
        tokens = jnp.zeros((2, 3, 6, HEADS, DIM)).at[:, 0].set(prefix)
        filled, _ = kv.append(testing.poison(cache), tokens, 2 * tokens, [6, 0, 0])
        filled, _ = kv.fork(filled, [0, 0], [1, 2])
        filled, step = kv.extend(filled, [1, 0, 1], max_new=1)
        outs = []
        for layer in range(2):
            filled, out = kv.attention(filled, layer, queries[layer], new[layer], new[layer], step)
            outs.append(out)
        assert filled.pools[0].k.shape[0] == 16
        return jnp.stack(outs)

    def dense_branches(prefix):
        outs = []
        for row in (0, 2):
            layers = []
            for layer in range(2):
                k = jnp.concatenate([prefix[layer], new[layer, row]])
                v = jnp.concatenate([2 * prefix[layer], new[layer, row]])
                layers.append(dense_attention(queries[layer, row], k, v)[0][0])
            outs.append(jnp.stack(layers))
        return jnp.stack(outs)

    prefix = random(3, 2, 6, HEADS, DIM)
    weights = random(4, 2, 2, HEADS * GROUP, DIM)
    got = jax.jit(jax.grad(lambda p: (branches(p)[:, (0, 2), 0].swapaxes(0, 1) * weights).sum()))(prefix)
    want = jax.jit(jax.grad(lambda p: (dense_branches(p) * weights).sum()))(prefix)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_gradients_of_rows_that_share_a_block_add_up_in_float32():
    """Also where the pools are of 16 bits: the sum of equal ones is rounded once, and not at every row."""
    num_rows, dtype = 32, jnp.bfloat16
    config = kv.CacheConfig(
        [FULL], num_blocks=40, block_size=BLOCK, max_seqs=num_rows, max_seq_len=8, dtype=dtype
    )
    prefix, queries, new = random(1, BLOCK, HEADS, DIM), random(2, HEADS * GROUP, DIM), random(3, HEADS, DIM)
    # As wide as the prefix, so that both steps are one program.
    queries, new = (np.stack([np.stack([x] * BLOCK)] * num_rows).astype(dtype) for x in (queries, new))
    cache, _ = kv.allocate(kv.init(config), [0], [BLOCK])
    tokens = np.stack([[prefix] * num_rows]).astype(dtype)
    cache, _ = kv.append(cache, tokens, tokens, [BLOCK] + [0] * (num_rows - 1))
    cache, _ = kv.fork(cache, [0] * (num_rows - 1), range(1, num_rows))
    cache, step = kv.extend(cache, [1] * num_rows, max_new=BLOCK)

    @jax.jit
    def gradient(weights):
        def total(pools):
            filled = dataclasses.replace(cache, pools=pools)
            _, out = kv.attention(filled, 0, queries, new, new, step)
            return (out.astype(jnp.float32).sum(axis=(1, 2, 3)) * weights).sum()

        return jax.grad(total)(cache.pools)[0]

    block = int(cache.control.block_pools[0].block_table[0, 0])
    all_rows, one = gradient(np.ones(num_rows, np.float32)), gradient(np.eye(num_rows, dtype=np.float32)[0])
    for name in ("k", "v"):
        got, want = (np.asarray(getattr(pool, name)[block], np.float32) for pool in (all_rows, one))
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, num_rows * want, rtol=2**-8, err_msg=name)


def test_a_copied_block_passes_no_gradient_to_what_stood_there():
    config = kv.CacheConfig([FULL] * 2, num_blocks=4, block_size=BLOCK, max_seqs=2, max_seq_len=8)

    def read(pools, k):
        cache, _ = kv.allocate(kv.init(config), [0], [3])
        filled, _ = kv.append(dataclasses.replace(cache, pools=pools), k, k, [3, 0])
        filled, _ = kv.fork(filled, [0], [1])
        filled, _ = kv.extend(filled, [0, 1], max_new=1)
        return kv.gather(filled, 1, 1)[0][:3].sum(), kv.stats(filled).num_copies

    gradient = jax.jit(jax.grad(read, argnums=(0, 1), has_aux=True))
    k = np.ones((2, 2, 3, HEADS, DIM), np.float32)
    (grad_pools, grad_k), num_copies = jax.device_get(gradient(kv.init(config).pools, k))
    assert num_copies == 1
    np.testing.assert_array_equal(grad_k[1, 0], 1.0)
    assert grad_k.sum() == 3 * HEADS * DIM
    np.testing.assert_array_equal(grad_pools[0].k, 0.0)


def test_a_slot_that_is_overwritten_passes_no_gradient_to_what_it_held():
    config = kv.CacheConfig([FULL], num_blocks=4, block_size=BLOCK, max_seqs=1, max_seq_len=16)

    def read(old, new):
        cache, _ = kv.allocate(kv.init(config), [0], [2])
        first, _ = kv.append(cache, old[None, None], old[None, None], [2])
        first, _ = kv.truncate(first, [0], [1])
        second, _ = kv.append(first, new[None, None], new[None, None], [1])
        k, _, _ = kv.gather(second, 0, 0)
        return k[:3].sum()

    old, new = np.ones((2, HEADS, DIM), np.float32), np.ones((1, HEADS, DIM), np.float32)
    grad_old, grad_new = jax.device_get(jax.jit(jax.grad(read, argnums=(0, 1)))(old, new))
    np.testing.assert_array_equal(grad_old[0], 1.0)
    np.testing.assert_array_equal(grad_old[1], 0.0)
    np.testing.assert_array_equal(grad_new, 1.0)


@pytest.mark.contract
def test_the_gradient_needs_at_most_three_pools():
    pools = pools_needed(4, num_blocks=2048, max_seqs=2)
    assert pools <= 3, f"{pools:.2f} pools of temporary memory"


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.parametrize(
    "num_layers, is_scanned, returns_cache, scheduler",
    [(4, False, False, "DEFAULT"), (4, True, True, "DEFAULT"), (16, True, False, "MEMORY_OPTIMIZED")],
)
def test_the_gradient_needs_at_most_three_pools_that_the_rows_fill(
    num_layers, is_scanned, returns_cache, scheduler
):
    """Activations included, which take a quarter of a pool at 4 layers.

    A cache that a scan throws away would take another pool on CPUs by default: XLA's scheduler makes the
    scan's zero gradients first of all. For H200, the same gradient is compiled by `make aot`.
    """
    pools = pools_needed(num_layers, is_scanned=is_scanned, returns_cache=returns_cache, scheduler=scheduler)
    assert pools <= 3, f"{pools:.2f} pools of temporary memory"


@pytest.mark.slow
def test_the_gradient_of_a_decoder_needs_at_most_four_pools():
    """Its layers are always under `lax.scan`: on CPUs a cache that is thrown away takes the fourth."""
    pools = pools_needed(4, is_decoder=True)
    assert pools <= 4, f"{pools:.2f} pools of temporary memory"


def test_forward_mode_is_refused_by_name():
    config = kv.CacheConfig([FULL], num_blocks=4, block_size=BLOCK, max_seqs=1, max_seq_len=16)

    def read(q):
        cache, _ = kv.allocate(kv.init(config), [0], [1])
        _, step = kv.extend(cache, [1], max_new=1)
        return kv.attend(cache, 0, q, step)[1]

    q = np.ones((1, 1, HEADS * GROUP, DIM), np.float32)
    with pytest.raises(NotImplementedError, match="^got a derivative of attention .*, expected reverse mode"):
        jax.jit(lambda q: jax.jvp(read, (q,), (q,)))(q)


def second_derivative(attend):
    """Of a sum over `attend(cache, step, x)`; a function of x [1, 6, 1, DIM]."""
    kind = kv.FullAttention(1, DIM)
    config = kv.CacheConfig([kind], num_blocks=4, block_size=BLOCK, max_seqs=1, max_seq_len=8)

    def of(x):
        cache, _ = kv.allocate(kv.init(config), [0], [6])
        cache, step = kv.extend(cache, [6], max_new=6)

        def slope(x):
            return (jax.grad(lambda x: (attend(cache, step, x) ** 2).sum())(x) * random(1, *x.shape)).sum()

        return jax.grad(slope)(x)

    return of


@pytest.mark.quick_cases("jit-plain", "jit-checkpoint")
@pytest.mark.parametrize(
    ("compiled", "transform"),
    [
        pytest.param(jax.jit, lambda fn: fn, id="jit-plain"),
        pytest.param(jax.jit, jax.checkpoint, id="jit-checkpoint"),
        pytest.param(lambda fn: fn, lambda fn: fn, id="eager-plain"),
    ],
)
def test_a_second_derivative_is_refused(compiled, transform):
    attend = transform(lambda cache, step, x: kv.attention(cache, 0, x, x / 2, jnp.sin(x), step)[1])
    with pytest.raises(NotImplementedError, match="^got a second derivative .*, expected .* gather"):
        compiled(second_derivative(attend))(random(0, 1, 6, 1, DIM))


@pytest.mark.slow
def test_what_gather_reads_has_a_second_derivative():
    def dense(cache, step, x):
        return dense_attention(x[0], x[0] / 2, jnp.sin(x[0]))[0]

    def gathered(cache, step, x):
        k, v, _ = kv.gather(kv.write(cache, 0, x / 2, jnp.sin(x), step), 0, 0)
        return dense_attention(x[0], k[:6], v[:6])[0]

    x = random(0, 1, 6, 1, DIM)
    found, expected = (jax.jit(second_derivative(attend))(x) for attend in (gathered, dense))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_config_is_not_differentiated():
    """Integers of the control state have no gradient, and none is asked for."""
    config = kv.CacheConfig([FULL], num_blocks=4, block_size=BLOCK, max_seqs=1, max_seq_len=16)

    def read(pools, k):
        cache, _ = kv.allocate(kv.init(config), [0], [1])
        filled, _ = kv.append(dataclasses.replace(cache, pools=pools), k, k, [1])
        return kv.gather(filled, 0, 0)[0].sum()

    k = np.ones((1, 1, 1, HEADS, DIM), np.float32)
    grad_pools, grad_k = jax.jit(jax.grad(read, argnums=(0, 1)))(kv.init(config).pools, k)
    np.testing.assert_array_equal(grad_k, 1.0)
    np.testing.assert_array_equal(grad_pools[0].k, 0.0)


@pytest.mark.slow
def test_padding_of_the_queries_changes_no_gradient():
    config = kv.CacheConfig(
        [kv.FullAttention(num_kv_heads=2, head_dim=4)], num_blocks=8, block_size=4, max_seqs=2, max_seq_len=16
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)
    cache, _ = kv.allocate(kv.init(config), [0, 1], [5, 6])
    cache, _ = kv.append(cache, np.stack([x]), np.stack([x]), [2, 3])
    cache, step = kv.extend(cache, [3, 1], max_new=3)

    @jax.jit
    def gradients(q, k, pools):
        def loss(q, k, pools):
            _, out = kv.attention(dataclasses.replace(cache, pools=pools), 0, q, k, k, step)
            return jnp.sum(out * out)

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, pools)

    q = rng.normal(size=x.shape).astype(np.float32)
    q[1, 1:] = 0
    wanted = gradients(q, x, cache.pools)
    for value in (np.nan, np.inf):
        q[1, 1:] = value
        for grad, want in zip(
            jax.tree.leaves(gradients(q, x, cache.pools)), jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_array_equal(grad, want)
            assert np.abs(want).max() > 0
