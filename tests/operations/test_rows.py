"""What belongs to a row goes where the row goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core.status import first_failure
from kvcache_jax.operations.rows import check_ids
from tests.support.helpers import assert_invariants, num_free, statuses

FULL = kv.FullAttention(2, 5)


def test_priority_namespace_and_recency_follow_the_rows():
    config = kv.CacheConfig([FULL], num_blocks=9, block_size=4, max_seqs=5, max_seq_len=16)
    words = np.arange(8, dtype=np.uint32).reshape(2, 4) + 1

    def fields(cache):
        control = cache.control
        return control.priority.tolist(), control.namespace[:, 0].tolist()

    def order(cache):
        """Rows from the least to the most recently used; those of one call in the order of their ids."""
        age = np.asarray(cache.control.clock - cache.control.last_used).astype(int)
        return sorted(np.flatnonzero(np.asarray(cache.is_active)).tolist(), key=lambda row: -age[row])

    cache, _ = kv.allocate(kv.init(config), [3, 1], [2, 5], namespace=words, priority=[7, -2])
    assert fields(cache) == ([0, -2, 0, 7, 0], [0, 5, 0, 1, 0]) and order(cache) == [1, 3]
    cache, _ = kv.fork(cache, [3, 1], [0, 4])
    assert fields(cache) == ([7, -2, 0, 7, -2], [1, 5, 0, 1, 5]) and order(cache) == [1, 3, 0, 4]
    assert cache.control.last_used.tolist() == [2, 1, 0, 1, 2] and cache.control.clock == 2  # one tick a call
    cache, _ = kv.touch(cache, [1, 3])
    assert order(cache) == [0, 4, 1, 3]
    with pytest.raises(ValueError, match="priority is 2147483648, expected -2147483648 to 2147483647"):
        kv.set_priority(cache, [4, 2], [9, 2**31])
    cache, _ = kv.set_priority(cache, [4, 2], [9, 9])
    assert fields(cache)[0] == [7, -2, 0, 7, 9] and order(cache) == [0, 4, 1, 3]
    cache, _ = kv.extend(cache, [1, 0, 0, 0, 0], max_new=1)
    assert order(cache) == [4, 1, 3, 0]
    cache, _ = kv.reorder(cache, [1], [4])
    cache, _ = kv.reorder(cache, [3], [0])
    assert fields(cache) == ([7, 9, 0, 7, 9], [1, 5, 0, 1, 5]) and order(cache) == [4, 0, 1, 3]
    cache, _ = kv.free(cache, [4, 3, 1, 0])
    assert fields(cache) == ([0] * 5, [0] * 5)


@pytest.mark.slow
def test_reorder_gives_back_what_several_rows_dropped():
    config = kv.CacheConfig([FULL], num_blocks=9, block_size=4, max_seqs=4, max_seq_len=16)
    cache, _ = kv.allocate(kv.init(config), [0, 3], [6, 5])
    cache, _ = kv.extend(cache, [6, 0, 0, 5], max_new=6)
    cache, _ = kv.fork(cache, [0, 0], [2, 1])
    cache, status = kv.reorder(cache, [2, 0, 1], [3, 3, 3])
    assert statuses(status) == [kv.Status.OK] * 3
    assert num_free(cache) == 7
    assert_invariants(cache)


def test_repeated_ids_in_any_order():
    """Ascending lists and others; entries that ask for nothing, are skipped or out of range between them."""
    control = kv.init(kv.CacheConfig([FULL], num_blocks=4, block_size=4, max_seqs=4, max_seq_len=16)).control
    find = jax.jit(lambda ids, mask: first_failure(*check_ids(control, ids, mask=mask)))
    rng = np.random.default_rng(0)
    for n in range(60):
        ids, mask = rng.integers(-1, 6, 7), rng.random(7) < 0.8
        if n % 2:
            ids = np.sort(ids)
        expected, named = [], set()
        for i in range(7):
            if not 0 <= ids[i] <= 4:
                expected.append(kv.Status.BAD_SEQ_ID)
            elif ids[i] == 4:
                expected.append(kv.Status.SKIPPED)
            elif mask[i] and ids[i] in named:
                expected.append(kv.Status.DUPLICATE_SEQ_ID)
            else:
                expected.append(kv.Status.OK)
                named |= {ids[i]} if mask[i] else set()
        assert statuses(find(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))) == expected, (ids, mask)
