"""One kernel per operation on CPUs, scatters elsewhere: the same values, no trace of it on accelerators."""

import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.arrays.loops import is_one_kernel
from kvcache_jax.arrays.masked_updates import (
    Update,
    add_at,
    count_down,
    first_true,
    get_at,
    max_at,
    min_at,
    set_at,
    update_all,
)
from kvcache_jax.core.single_kernel import single_kernel

pytestmark = pytest.mark.contract

CONFIG = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=8, block_size=2, max_seqs=3, max_seq_len=12)
UPDATES = {
    set_at: lambda old, new: new,
    add_at: lambda old, new: old + new,
    min_at: min,
    max_at: max,
}
MARK = "xla_cpu_small_call"


def expected_update(combine, array, index, values):
    """Entry by entry, in Python."""
    array = array.copy()
    index = np.broadcast_arrays(*index)
    values = np.broadcast_to(values, index[0].shape + array.shape[len(index) :])
    for entry in np.ndindex(index[0].shape):
        place = tuple(int(axis[entry]) for axis in index)
        if all(0 <= at < size for at, size in zip(place, array.shape, strict=False)):
            for at in np.ndindex(array.shape[len(index) :]):
                array[place + at] = combine(array[place + at], values[entry + at])
    return array


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
@pytest.mark.parametrize("shape, index_shapes", [
    ((9,), [(14,)]), ((9,), [()]), ((5, 3), [(7,)]), ((5, 3), [()]), ((5, 3), [(4, 1), (1, 6)]),
    ((4, 3, 2), [(8,), (8,)]), ((6,), [(0,)]), ((90,), [(70,)]), ((30, 2), [(35,)]),
    ((40, 30), [(36,), (36,)]),
])  # fmt: skip
def test_updates_skip_what_is_outside(update, shape, index_shapes):
    rng = np.random.default_rng(0)
    array = rng.integers(-50, 50, shape, np.int32)
    index = [rng.integers(-4, size + 4, s, np.int32) for s, size in zip(index_shapes, shape, strict=False)]
    if update is set_at:  # which of equal entries stays is left open
        index = [rng.permutation(np.arange(-4, size + 4))[: np.prod(s, dtype=int)].reshape(s).astype(np.int32)
                 for s, size in zip(index_shapes, shape, strict=False)]  # fmt: skip
    entries = np.broadcast_shapes(*index_shapes)
    values = rng.integers(-90, 90, entries + shape[len(index) :], np.int32)
    expected = expected_update(UPDATES[update], array, index, values)

    def fn(array, index, values):
        return update(array, tuple(index), values)

    array, index, values = jax.tree.map(jnp.asarray, (array, index, values))
    np.testing.assert_array_equal(fn(array, index, values), expected)
    in_kernel = jax.jit(lambda *args: single_kernel(fn, *args))
    np.testing.assert_array_equal(in_kernel(array, index, values), expected)
    arrays, several = jnp.stack([array, array + 1]), jnp.stack([values, values])
    batched = jax.jit(jax.vmap(lambda *args: single_kernel(fn, *args), in_axes=(0, None, 0)))
    assert MARK not in batched.lower(arrays, index, several).as_text()
    np.testing.assert_array_equal(batched(arrays, index, several)[0], expected)


def test_updates_of_several_arrays_skip_each_their_own():
    """Many entries, of which runs are skipped in all arrays, and others in one."""
    rng = np.random.default_rng(2)
    arrays = rng.integers(0, 90, (2, 50), np.int32)
    places = np.stack([rng.permutation(100) - 25 for _ in arrays]).astype(np.int32)
    places[:, 20:60] = 50
    values = rng.integers(0, 90, 100, np.int32)
    expected = [
        expected_update(UPDATES[update], array, [at], values)
        for update, array, at in zip((set_at, add_at), arrays, places, strict=True)
    ]

    def fn(arrays, places, values):
        first, second = Update(arrays[0], places[0], values), Update(arrays[1], places[1], values, "add")
        return update_all(first, second)

    in_kernel = jax.jit(lambda *args: single_kernel(fn, *args))
    for found in (fn(arrays, places, values), in_kernel([*arrays], places, values)):
        np.testing.assert_array_equal(np.stack(found), expected)


@pytest.mark.parametrize("per_trip", [3, 4, 20])
def test_several_entries_per_trip(per_trip):
    rng = np.random.default_rng(1)
    array, values = rng.integers(0, 90, 9, np.int32), rng.integers(0, 90, 10, np.int32)
    index = rng.permutation(np.arange(-3, 12))[:10].astype(np.int32)
    expected = expected_update(UPDATES[set_at], array, [index], values)
    in_kernel = jax.jit(lambda *args: single_kernel(lambda *args: set_at(*args, per_trip=per_trip), *args))
    np.testing.assert_array_equal(in_kernel(array, index, values), expected)


@pytest.mark.parametrize("end", range(11))
def test_entries_up_to_an_end(end):
    rng = np.random.default_rng(end)
    array, values = rng.integers(0, 90, 9, np.int32), rng.integers(0, 90, 10, np.int32)
    index = np.where(np.arange(10) < end, rng.permutation(10), 9).astype(np.int32)
    expected = expected_update(UPDATES[set_at], array, [index], values)

    def update(array, index, values, end):
        return update_all(Update(array, index, values), per_trip=3, end=end)[0]

    in_kernel = jax.jit(lambda *args: single_kernel(update, *args))
    for found in (update(array, index, values, end), in_kernel(array, index, values, jnp.int32(end))):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "index",
    [
        [],
        [2],
        [1],
        [5],
        [-1],
        [3, 0, 3, 9, 2, 0, 3, -4],
        [0, 0, 0],
        [3, 2, 1, 0],
        [9] * 40 + [2, 1, -1, 3, 2, 3, 3],
    ],
)
def test_the_last_owner(index):
    """Of entries that take one each, those that take the last; the same in all three forms."""
    counts, left, expected = [3, 1, 2, 3], [3, 1, 2, 3], []
    for place in index:
        is_inside = 0 <= place < len(left)
        if is_inside:
            left[place] -= 1
        expected.append(is_inside and left[place] == 0)
    counts, index = jnp.array(counts, jnp.int32), jnp.array(index, jnp.int32)

    def in_kernel(counts, index):
        return single_kernel(count_down, counts, index)

    batched = jax.vmap(in_kernel, in_axes=(0, None))(jnp.stack([counts, counts + 1]), index)
    for found, is_last in (
        count_down(counts, index), jax.jit(in_kernel)(counts, index), jax.tree.map(lambda x: x[0], batched),
    ):  # fmt: skip
        assert found.tolist() == left and is_last.tolist() == expected


@pytest.mark.parametrize("is_compiled", [False, True])
def test_reads_outside_give_the_fill(is_compiled):
    array, indices = jnp.arange(1, 7).reshape(3, 2), jnp.array([-4, -1, 0, 2, 3, 2**31 - 1, -(2**31)])
    read = jax.jit(get_at, static_argnums=2) if is_compiled else get_at
    assert read(array[:, 0], indices, 9).tolist() == [9, 9, 1, 5, 9, 9, 9]
    assert read(array, indices, 9)[:, 1].tolist() == [9, 9, 2, 6, 9, 9, 9]
    assert read(array, (indices, 1 - indices), 9).tolist() == [9, 9, 2, 9, 9, 9, 9]
    # Without a fill: of a row that exists.
    assert set(read(array[:, 0], indices, None).tolist()) <= {1, 3, 5}


def test_the_first_true_entry_of_a_row_or_its_end():
    mask = np.array([[False, True, True], [False, False, False], [True, False, True]])
    found = first_true(jnp.asarray(mask))
    assert found.dtype == jnp.int32 and found.tolist() == [1, 3, 0]
    assert first_true(jnp.asarray(mask[None, 0])).tolist() == [1]


def test_one_value_for_all_entries():
    in_kernel = jax.jit(lambda array, index: single_kernel(lambda a, i: set_at(a, i, True), array, index))
    found = in_kernel(jnp.zeros(5, bool), jnp.array([3, 7, 1], jnp.int32))
    assert found.tolist() == [False, True, False, True, False]


UNREAD = """
import jax, jax.numpy as jnp
from kvcache_jax.single_kernel import single_kernel

def fn(state, empty, unread):
    changed, replaced, *_ = state
    big = jax.lax.fori_loop(0, changed[1], lambda i, big: big, state[2])
    # Carried along by the loop, which jax says does not change it.
    return (changed + 1, jnp.zeros_like(replaced), big, state[3]), empty.sum(dtype=jnp.int32)

big = jnp.arange(9000, dtype=jnp.int32)
state = jnp.arange(3, dtype=jnp.int32), jnp.arange(300, dtype=jnp.int32), big, big[::-1]
args = state, jnp.zeros((2, 0), jnp.int32), jnp.ones(4, bool)
(changed, replaced, *kept), total = jax.jit(lambda *args: single_kernel(fn, *args))(*args)
assert not replaced.any() and (kept[0] == big).all() and (kept[1] == big[::-1]).all()
print(changed.tolist(), int(total))
"""

CONSTANT = """
import jax, jax.numpy as jnp
import kvcache_jax as kv

@jax.jit
def program(num_new):
    config = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=4, block_size=4, max_seqs=1, max_seq_len=16)
    cache, _ = kv.allocate(kv.init(config), [0], [16])
    cache, step = kv.extend(cache, num_new, max_new=16)
    x = jnp.ones((1, 16, 1, 4))
    cache, out = kv.attention(cache, 0, x, x, x, step)
    return cache.context_len, out[0, :3].sum()

length, total = program(jnp.array([3]))
print(length.tolist(), int(total))
"""

# The cache is not returned.
DROPPED = """
import jax, jax.numpy as jnp
import kvcache_jax as kv

config = kv.CacheConfig([kv.FullAttention(1, 4)], num_blocks=4, block_size=4, max_seqs=2, max_seq_len=16)
cache, _ = kv.allocate(kv.init(config), [0], [16])

def loss(x):
    later, step = kv.extend(cache, jnp.array([3, 0]), num_tokens=5)
    return kv.attention(later, 0, x, x, x, step)[1].sum()

print(round(float(jax.jit(jax.grad(loss))(jnp.ones((5, 1, 4))).sum())))
print(jax.jit(lambda cache, n: kv.extend(cache, n, num_tokens=12)[1].status)(cache, jnp.array([1, 1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, printed",
    [(UNREAD, "[1, 2, 3] 0\n"), (CONSTANT, "[3] 12\n"), (DROPPED, "12\n[0 5]\n")],
    ids=["unread", "constant", "dropped"],
)
def test_parameters_that_nothing_reads(program, printed):
    """XLA ends the process over one: empty, not looked at, constant, or read for what is not looked at."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout) == (0, printed), result.stderr[-1000:]


OPERATIONS = {
    "extend": lambda cache: kv.extend(cache, jnp.ones(3, jnp.int32), max_new=1),
    "allocate": lambda cache: kv.allocate(cache, [0, 1], [3, 4]),
    "free": lambda cache: kv.free(cache, [0, 1]),
    "reorder": lambda cache: kv.reorder(cache, [0, 1], [1, 0]),
}
INDEXED = dataclasses.replace(CONFIG, enable_prefix_caching=True)
IN_KERNELS = {name: (operation, CONFIG) for name, operation in OPERATIONS.items()}
IN_KERNELS["commit"] = (lambda cache: kv.commit(cache, [0, 1]), INDEXED)
IN_KERNELS["evict"] = (lambda cache: kv.evict(cache, 1), INDEXED)


@pytest.mark.parametrize("operation, config", IN_KERNELS.values(), ids=IN_KERNELS)
def test_an_operation_is_one_kernel(operation, config):
    compiled = jax.jit(operation).lower(kv.init(config, storage=False)).compile().as_text()
    entry = compiled[compiled.index("\nENTRY") :]
    # What else is left: copies of what is not donated, views, and what goes before and behind it.
    work = re.findall(r"[\])}] ([a-z-]+)\(", entry)
    assert work.count("call") == 1 and MARK in entry
    assert work.count("fusion") <= 4
    assert {*work} <= {
        "call",
        "fusion",
        "copy",
        "constant",
        "parameter",
        "get-tuple-element",
        "bitcast",
        "tuple",
    }


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_accelerators_get_scatters_and_no_mark(platform, operation):
    traced = jax.jit(operation).trace(kv.init(CONFIG, storage=False))
    assert MARK in traced.lower(lowering_platforms=("cpu",)).as_text()
    lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    assert MARK not in lowered and "stablehlo.scatter" in lowered


def test_what_accelerators_run_is_traced_for_them_alone():
    traced_in_kernel = []

    def fn(array, index):
        traced_in_kernel.append(is_one_kernel.value)
        return set_at(array, index, 7)

    args = jnp.arange(5), jnp.array([3, 9])
    traced = jax.jit(lambda *args: single_kernel(fn, *args)).trace(*args)
    traced.lower(lowering_platforms=("cpu",))
    assert traced_in_kernel == [True]
    both = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert MARK in both and "stablehlo.scatter" in both
    assert traced_in_kernel == [True, False]


def test_without_jit_there_is_no_kernel():
    """So that what is computed can be looked at step by step."""

    def fn(array, index):
        assert not isinstance(array, jax.core.Tracer)
        return set_at(array, index, 7)

    with jax.disable_jit():
        assert single_kernel(fn, jnp.arange(5), jnp.array([3, 9])).tolist() == [0, 1, 2, 7, 4]


def test_other_policies_are_not_in_a_kernel():
    """A policy may hold what a kernel cannot, such as a sort."""
    traced_in_kernel = []

    @kv.eviction_policy("sorted")
    def by_rank(blocks):
        traced_in_kernel.append(is_one_kernel.value)
        order = jnp.argsort(blocks.recency)
        return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))

    config = kv.CacheConfig(
        CONFIG.layers, num_blocks=4, block_size=2, max_seqs=3, max_seq_len=8,
        enable_prefix_caching=True, eviction_policy="sorted",
    )  # fmt: skip
    cache = kv.init(config, storage=False)
    tokens = jnp.zeros((1, 6), jnp.int32)
    jax.eval_shape(lambda cache: kv.allocate(cache, [0], [6], tokens=tokens), cache)
    assert set(traced_in_kernel) == {False}
    for i in range(3):
        tokens = jnp.full((1, 6), i, jnp.int32)
        cache, admission = kv.allocate(cache, [0], [6], tokens=tokens)
        cache, _ = kv.extend(cache, [6], max_new=6, seq_ids=[0], tokens=tokens)
        cache, _ = kv.commit(cache, [0])
        cache, _ = kv.free(cache, [0])
        assert admission.status.tolist() == [kv.Status.OK] and not kv.check_invariants(cache)
    assert int(kv.stats(cache).num_evictions) > 0
