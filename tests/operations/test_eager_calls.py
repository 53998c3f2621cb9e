"""Calls outside of any program: each is one or two programs, and lists of other lengths are no new ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_invariants, assert_same, compiled_programs

CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 4)] * 3,
    num_blocks=31,
    block_size=4,
    max_seqs=9,
    max_seq_len=24,
    enable_prefix_caching=True,
)
PROMPT = np.arange(10, dtype=np.int32)
# Idle rows, active ones, and what is none. Not row 0: what is added to a list must not be a call for it.
IDS, OTHERS, LENGTHS = [2, 6, 3, 77, 9, 3, 5], [1, 5, 8, 1, -1, 7, 9], [10, 2, 9, 3, 1, 99, -1]
NAMESPACES = np.stack([kv.namespace(tenant=tenant) for tenant in "aababab"])

ON_ROWS = {
    "allocate": lambda n: (
        (IDS[:n], LENGTHS[:n]),
        dict(
            tokens=np.tile(PROMPT, (n, 1)),
            namespace=NAMESPACES[:n],
            priority=[5, -1, 7, 0, 1, 2, 3][:n],
            reuse=[True, False, True, True, False, True, True][:n],
            items=np.array([[[1, 3], [4, 7]], [[0, 0], [1, 2]]] * 4)[:n],
        ),
    ),
    "fork": lambda n: ((OTHERS[:n], IDS[:n]), {}),
    "truncate": lambda n: ((OTHERS[:n], [9, 0, 4, 0, 9, 10, 3][:n]), {}),
    "touch": lambda n: ((OTHERS[:n],), {}),
    "set_priority": lambda n: ((OTHERS[:n], [4, 5, -6, 7, 8, 9, 2**31 - 1][:n]), {}),
    "free": lambda n: ((OTHERS[:n],), {}),
}


@pytest.fixture(scope="module")
def cache():
    return busy_cache(CONFIG)


def busy_cache(config):
    """Rows 0, 1, 7 and 8 have prompts of ten tokens; row 1's first blocks are published."""
    cache = kv.init(config)
    cache, _ = kv.allocate(
        cache,
        jnp.array([0, 1, 7, 8]),
        jnp.full(4, 10),
        tokens=jnp.tile(PROMPT, (4, 1)),
        namespace=NAMESPACES[:4],
    )
    tokens = jnp.tile(PROMPT, (9, 1))
    k = jnp.ones((3, 9, 10, 1, 4))
    cache, _ = kv.append(cache, k, k, jnp.array([10, 10, 0, 0, 0, 0, 0, 10, 10]), tokens=tokens)
    cache, _ = kv.commit(cache, jnp.array([1]))
    assert_invariants(cache)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_ROWS)
def test_lists_do_what_arrays_do(cache, name):
    """Lists of three, which are padded."""
    num_rows = 3
    operation, (columns, options) = getattr(kv, name), ON_ROWS[name](num_rows)
    expected = operation(
        cache, *map(jnp.array, columns), **jax.tree.map(jnp.array, options, is_leaf=_is_list)
    )
    got = operation(cache, *columns, **options)
    assert_same(got, expected)
    assert all(len(leaf) == num_rows for leaf in jax.tree.leaves(got[1]))
    assert_invariants(got[0])


@pytest.mark.slow
def test_lists_of_other_lengths_are_the_same_program(cache):
    for name, arguments in ON_ROWS.items():
        for num_rows, most in ((5, 2), (6, 1), (7, 1)):
            columns, options = arguments(num_rows)
            with compiled_programs() as programs:
                getattr(kv, name)(cache, *columns, **options)
            assert len(programs) <= most, (name, num_rows, programs)


@pytest.mark.slow
def test_each_call_is_one_program_or_two():
    cache = busy_cache(dataclasses.replace(CONFIG, num_blocks=32))
    q = jnp.ones((9, 1, 2, 4))
    k = jnp.ones((9, 1, 1, 4))
    stacked = jnp.ones((3, *k.shape))
    tokens, one_each = np.ones((9, 1), np.int32), [1] * 9
    calls = {
        "write": (1, lambda: kv.write(cache, 0, k, k, step)),
        "attend": (1, lambda: kv.attend(cache, 1, q, step, sink_logits=np.ones(2))),
        "attention": (2, lambda: kv.attention(cache, 2, q, k, k, step, return_lse=True)),
        "append": (1, lambda: kv.append(cache, stacked, stacked, one_each, tokens=tokens)),
        "append of a list": (1, lambda: kv.append(cache, [k] * 3, [k] * 3, one_each, tokens=tokens)),
        "allocate": (1, lambda: kv.allocate(cache, [2], [9], tokens=PROMPT[None])),
        "lookup": (1, lambda: kv.lookup(cache, PROMPT[None], [9])),
        "commit": (1, lambda: kv.commit(cache, [7, 8])),
        "reorder": (1, lambda: kv.reorder(cache, [7, 8], [8, 7])),
        "gather": (1, lambda: kv.gather(cache, 1, 1)),
        "evict": (1, lambda: kv.evict(cache, 2)),
        "num_available_blocks": (1, lambda: kv.num_available_blocks(cache)),
        "num_blocks_needed": (1, lambda: kv.num_blocks_needed(cache, one_each)),
    }
    with compiled_programs() as programs:
        _, step = kv.extend(cache, one_each, max_new=1, tokens=tokens)
    assert len(programs) == 1
    for name, (most, call) in calls.items():
        with compiled_programs() as programs:
            first = call()
        assert 0 < len(programs) <= most, (name, programs)
        with compiled_programs() as programs:
            second = call()
        assert not programs, name
        assert_same(second, first)


@pytest.mark.slow
def test_callers_may_overwrite_their_arrays_after_the_call(cache):
    """Programs may read numpy's arrays in place: those that begin at a multiple of 64 bytes."""
    ids, num_new, k, q = _aligned(9, np.int32), _aligned(9, np.int32), _aligned(36), _aligned(72)
    tokens = np.ones((9, 1), np.int32)
    k, q = k.reshape(9, 1, 1, 4), q.reshape(9, 1, 2, 4)
    ids[:], num_new[:], k[:], q[:] = np.arange(9), 1, np.arange(36).reshape(k.shape), 1
    kept = [each.copy() for each in (ids, num_new, k, q)]

    def call():
        extended, step = kv.extend(cache, num_new, max_new=1, seq_ids=ids, tokens=tokens)
        written, out = kv.attention(extended, 0, q, k, k, step, sink_logits=q[0, 0, :, 0])
        return written, step, out

    expected = jax.block_until_ready(call())
    for _ in range(100):
        got = call()
        for each in (ids, num_new, k, q):
            each[:] = 7
        assert_same(got, expected)
        for each, old in zip((ids, num_new, k, q), kept, strict=True):
            each[:] = old


def _aligned(size, dtype=np.float32):
    raw = np.zeros(4 * size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * size].view(dtype)


def _is_list(node):
    return isinstance(node, list)
