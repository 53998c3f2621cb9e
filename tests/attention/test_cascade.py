"""Cascade attention: two calls of a backend and a merge give what each row would read by itself."""

import dataclasses
import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu  # noqa: F401  imported later, it would make jax trace anew

import kvcache_jax as kv
from kvcache_jax.attention import xla
from kvcache_jax.attention.attention_plan import plan_rows
from kvcache_jax.attention.cascade import Cascade, cascade, find_shared_at_once
from kvcache_jax.core.backends import MAX_DECODE_QUERIES, get_backend
from tests.attention import kernel_configs
from tests.attention.prompt_rows import (
    BLOCK,
    DIM,
    FULL,
    GROUP,
    HEADS,
    SIZES,
    driver_of,
    fill,
    fill_packed,
    step_of_forks_packed,
)

NAME = "test: by parts"
CALLS = []


def plan_by_parts(plan, pool, block_table, group, *, num_queries):
    return plan.table_row, jnp.zeros(num_queries), block_table.shape[1] + 0 * plan.table_row


def decode_by_parts(q, pool, block_table, plan, group, *, layer, scale, soft_cap, sink_logits):
    """XLA's attention, which is given the work of the plan that it computes."""
    assert q.shape[1] <= MAX_DECODE_QUERIES and plan.shared is None and plan.holes is None
    if plan.work:
        table_row, queries, _ = plan.work
        assert table_row.shape == q.shape[:1] and queries.shape == q.shape[1:2]
    CALLS.append((q.shape[:2], bool(plan.work), sink_logits is not None))
    options = dict(layer=layer, scale=scale, soft_cap=soft_cap, sink_logits=sink_logits, tile_tokens=64)
    out, lse = xla.forward(q, pool, None, block_table, plan, group, **options)
    # A query that counts and is NaN has NaN, as kernels may give.
    counts = jnp.arange(q.shape[1])[None] < plan.num_queries[:, None]
    is_nan = jnp.isnan(q[..., 0]) & counts[..., None, None]
    return jnp.where(is_nan[..., None], jnp.nan, out), jnp.where(is_nan, jnp.nan, lse)


kv.backends.register_backend(
    kv.backends.Backend(NAME, lambda *_: None, decode=decode_by_parts, plan=plan_by_parts)
)
CASCADE = cascade(get_backend(NAME))
kv.backends.register_backend(CASCADE)


cascading = functools.partial(driver_of, implementation=CASCADE.name)


def companies(step):
    """By sets of rows, the tokens that these read together."""
    (work,) = step.plans[0].work
    assert isinstance(work, Cascade)
    members, columns, size = np.asarray(work.members), work.together.num_columns, work.place.size
    for place, row in enumerate(members.reshape(-1)):
        assert row == size or work.place[row] == place
    assert (np.asarray(work.place) < members.size).sum() == (members < size).sum()
    pairs = zip(members, np.asarray(columns), strict=True)
    return {frozenset(rows[rows < size].tolist()): int(n) * BLOCK for rows, n in pairs if n}


def test_rows_read_together_what_serves_the_most_of_them():
    """Samples of two prompts, more than a company has places for; a pair that shares more; rows that end."""
    driver = cascading(soft_cap=1.5)
    fill(driver, {3: 203, 0: 150, 7: 203, 5: 31})
    for row in (10, 1, 12):
        driver.fork(3, row)
    others = (*range(14, 22), 2)
    for row in others:
        driver.fork(0, row)
    every = {0, 1, 2, 3, 5, 7, 10, 12, *range(14, 22)}
    of_0 = sorted({0, *others})
    found = companies(driver.step(dict.fromkeys(every, 1)))
    # Eight have room in a company; a pair is left.
    assert found == {frozenset({1, 3, 10, 12}): 192, frozenset(of_0[:8]): 128, frozenset(of_0[8:]): 128}
    driver.free(12)
    assert driver.truncate(10, 191) == kv.Status.OK and driver.truncate(1, 100) == kv.Status.OK
    found = companies(driver.step(dict.fromkeys(every - {12, 20, 21}, 1), twice=True))
    assert found == {frozenset({3, 10}): 128, frozenset(of_0[:8]): 128}
    assert kv.check_invariants(driver.cache) == []


@pytest.mark.quick_cases("3")
@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_rows_of_several_queries(width):
    """Companies have room for eight queries in all; rows of five read their own."""
    driver = cascading(width=width)
    fill(driver, {2: 130})
    for row in (0, 1, 4, 5):
        driver.fork(2, row)
    step = driver.step({0: 1, 1: width, 2: 2, 4: width, 5: 1})
    if width == 5:
        assert len(step.plans[0].work) == 3
    else:
        expected = {2: [[0, 1, 2, 4]], 3: [[0, 1], [2, 4]], 4: [[0, 1], [2, 4]]}[width]
        assert [sorted(rows) for rows in companies(step)] == expected


def test_tokens_of_a_packed_step():
    driver = cascading(width=70, packed=True)
    assert max(companies(fill_packed(driver)).values()) == 128
    step_of_forks_packed(driver)


def test_rows_that_read_their_own():
    """Windows, wide steps, and calls that name another backend than the cache; by two calls or one."""
    layers = [FULL, kv.SlidingWindow(HEADS, DIM, window=140, num_sink_tokens=20)]
    config = kv.CacheConfig(layers, **SIZES, implementation=CASCADE.name)

    def attend(config, of_call, width=1):
        def step(cache, q):
            cache, step = kv.extend(cache, [width] * 24, max_new=width)
            for layer in range(2):
                cache, _ = kv.attend(cache, layer, q, step, implementation=of_call, sink_logits=jnp.ones(2))

        CALLS.clear()
        q = jax.ShapeDtypeStruct((24, width, GROUP, DIM), jnp.float32)
        jax.eval_shape(step, jax.eval_shape(functools.partial(kv.init, config)), q)
        return list(CALLS)

    own = (24, 1), True, True
    assert attend(config, None) == [((12, 8), True, False), own, own]
    assert attend(config, "xla") == attend(config, None, 9) == []
    assert attend(config, NAME) == [((24, 1), False, True)] * 2
    assert (
        attend(dataclasses.replace(config, implementation=NAME), CASCADE.name) == [((24, 1), False, True)] * 2
    )
    many = dataclasses.replace(config, max_seqs=300)
    plans = jax.eval_shape(
        lambda cache: kv.extend(cache, [1] * 300, max_new=1)[1].plans,
        jax.eval_shape(functools.partial(kv.init, many)),
    )
    assert [len(plan.work) for plan in plans] == [3, 3]


def test_results_and_gradients_are_xlas():
    """Of rows that are not full too, whose last query is a number like any other."""

    def loss(q, v, implementation):
        config = kv.CacheConfig([FULL], **SIZES | {"max_seqs": 3}, implementation=implementation)
        cache, _ = kv.allocate(kv.init(config), [0], [140])
        cache, step = kv.extend(cache, [140], max_new=140, seq_ids=[0])
        cache = kv.write(cache, 0, jnp.cos(v[:1]), v[:1], step)
        cache, _ = kv.fork(cache, [0, 0], [1, 2])
        cache, step = kv.extend(cache, [1, 2, 1], max_new=2)
        out, lse = kv.attention(cache, 0, q, jnp.sin(v[:, :2]), v[:, :2], step, return_lse=True)[1]
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.exp(lse)), (out, lse, step.plans[0].work)

    rng = np.random.default_rng(0)
    q, v = (jnp.asarray(rng.standard_normal(n), jnp.float32) for n in ((3, 2, 2, DIM), (3, 140, 1, DIM)))
    take = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
    ((_, (out, lse, work)), grads), ((_, by_xla), expected) = take(q, v, CASCADE.name), take(q, v, "xla")
    assert int(work[0].together.num_columns.max()) == 8
    assert (out[0, 1] == 0).all() and np.isneginf(lse[0, 1]).all()
    pairs = zip((out, lse, *grads), (*by_xla[:2], *expected), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


NUM_ROWS, NUM_COLUMNS, STRIDE = 11, 23, 4


def drawn_tables(rng):
    """Rows that leave one another at drawn columns, and now and then come back to what others have."""
    table = np.arange(NUM_ROWS * NUM_COLUMNS, dtype=np.int32).reshape(NUM_ROWS, NUM_COLUMNS)
    for row in range(1, NUM_ROWS):
        source, depth = rng.integers(row), rng.integers(NUM_COLUMNS + 1)
        table[row, :depth] = table[source, :depth]
        if rng.random() < 0.2:
            table[row, rng.integers(NUM_COLUMNS)] = 999
    lengths = rng.integers(0, NUM_COLUMNS * BLOCK, NUM_ROWS, dtype=np.int32)
    lengths[rng.random(NUM_ROWS) < 0.5] = NUM_COLUMNS * BLOCK - 1
    return table, lengths, (rng.random(NUM_ROWS) < 0.9).astype(np.int32)


def expected_companies(table, lengths, num_queries, num_places):
    """Row by row the rows that begin alike for n strides, the best n, and groups of rows that chose alike."""

    def begins(row, n):
        is_full = num_queries[row] > 0 and n * STRIDE * BLOCK <= lengths[row]
        return tuple(table[row, : n * STRIDE]) if is_full else None

    chosen = {}
    for row in range(NUM_ROWS):
        best = (0, 0)
        for n in range(1, NUM_COLUMNS // STRIDE + 1):
            if (mine := begins(row, n)) is not None:
                count = sum(begins(other, n) == mine for other in range(NUM_ROWS))
                best = max(best, (n - fractions.Fraction(n, min(count, num_places)), n))
        if best[1] >= 2 and best[0] > 0:
            chosen.setdefault(begins(row, best[1]), []).append(row)
    found = {}
    for start, rows in chosen.items():
        for i in range(0, len(rows), num_places):
            if len(members := rows[i : i + num_places]) >= 2:
                found[frozenset(members)] = len(start)
    return found


def test_companies_are_those_that_a_search_row_by_row_finds():
    group, rng = kv.CacheConfig([FULL], **SIZES).groups[0], np.random.default_rng(0)
    order, sizes = jnp.arange(NUM_ROWS, dtype=jnp.int32), set()
    find = jax.jit(
        lambda table, lengths, num_queries: find_shared_at_once(
            plan_rows(group, order, lengths, num_queries), table, group, 3
        )
    )
    for _ in range(200):
        drawn = drawn_tables(rng)
        shared = find(*map(jnp.asarray, drawn))
        found, of_row = {}, np.zeros(NUM_ROWS, np.int32)
        for rows, n in zip(np.asarray(shared.members), np.asarray(shared.num_columns), strict=True):
            rows = rows[rows < NUM_ROWS].tolist()
            assert bool(rows) == bool(n)
            if rows:
                found[frozenset(rows)], of_row[rows] = int(n), n
        assert found == expected_companies(*drawn, 3)
        np.testing.assert_array_equal(shared.num_of_row, of_row)
        sizes |= {(len(rows), n) for rows, n in found.items()}
    assert {2, 3} == {size for size, _ in sizes} and len({n for _, n in sizes}) == 4


@functools.partial(jax.jit, static_argnums=0)
def step_of_forks(config, first, q, k, v):
    """Three rows of one prompt, a row of its own and an idle one, in blocks that held NaN."""
    cache, _ = kv.allocate(kv.testing.poison(kv.init(config)), [0, 2], [139, 20])
    cache, step = kv.extend(cache, [139, 20], max_new=139, seq_ids=[0, 2])
    cache = kv.write(cache, 0, first, first + 1, step)
    cache, _ = kv.fork(cache, [0, 0], [1, 3])
    cache, step = kv.extend(cache, [2, 1, 1, 2, 0], max_new=2)
    sinks = jnp.linspace(-1, 1, q.shape[2])
    return kv.attention(cache, 0, q, k, v, step, sink_logits=sinks, return_lse=True)[1], step.plans[0].work


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "format"),
    [("mosaic_gpu", None), ("mosaic_gpu", "int8"), ("mosaic_tpu", None)],
    ids=["gpu", "gpu-int8", "tpu"],
)
def test_kernels_read_common_columns_once(implementation, format):
    num_heads, head_dim, dtype = kernel_configs.SIZES[implementation].values()
    layer = kv.FullAttention(num_heads, head_dim)
    layer = kv.Quantised(layer, format) if format else layer
    sizes = dict(num_blocks=40, block_size=8, max_seqs=5, max_seq_len=160, max_query_len=139, dtype=dtype)
    rng = np.random.default_rng(0)
    shapes = [(2, 139, num_heads), (5, 2, 2 * num_heads), (5, 2, num_heads), (5, 2, num_heads)]
    arrays = [jnp.asarray(rng.standard_normal((*shape, head_dim)), dtype) for shape in shapes]
    by_xla, by_kernels = (
        functools.partial(step_of_forks, kv.CacheConfig([layer], implementation=name, **sizes), *arrays)
        for name in ("xla", f"{implementation}_cascade")
    )
    (out, lse), (work,) = kernel_configs.run_interpreted(by_kernels)
    assert work.together.num_columns.tolist() == [16, 0] and work.place.tolist() == [0, 1, 8, 2, 8]
    (expected_out, expected_lse), _ = by_xla()
    assert (
        np.isneginf(lse[4]).all() and np.isneginf(lse[1, 1]).all() and np.abs(expected_out[3, 1]).max() > 0.1
    )
    for one, other in ((out, expected_out), (lse, expected_lse)):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=1e-4 if dtype == "float32" else 1e-2)
