"""What a mutant showed that no other test noticed (`mutants.py`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import attention_xla
from tests.attention_driver import AttentionDriver
from tests.helpers import append, assert_invariants, assert_same, leaf_bytes, num_free, poison, statuses

HEADS, GROUP, DIM = 2, 2, 5
FULL = kv.FullAttention(HEADS, DIM)


# --- contexts longer than a tile ---


@pytest.fixture
def small_tiles(monkeypatch):
    """Of 128 tokens, whatever the sizes."""
    monkeypatch.setattr(attention_xla, "_TILE_BYTES", 1)


@pytest.mark.parametrize("kind", [FULL, kv.SlidingWindow(HEADS, DIM, window=300, num_sink_tokens=20)])
def test_attention_over_several_tiles(kind, small_tiles):
    config = kv.CacheConfig(
        [kind], num_blocks=90, block_size=16, max_seqs=4, max_seq_len=640, max_query_len=110
    )
    driver = AttentionDriver(config, num_q_heads=HEADS * GROUP, width=110, sink_logits=[0.5, -1, 2, 0])
    driver.start(2, 600)
    driver.start(0, 40)
    for new_lens in ({2: 110, 0: 31}, {2: 109}, {2: 110, 0: 1}, {2: 110}, {2: 110, 0: 3}, {2: 1, 0: 1}):
        driver.step(new_lens)


def test_gradients_over_several_tiles(small_tiles):
    num_tokens = 520
    config = kv.CacheConfig([FULL], num_blocks=40, block_size=16, max_seqs=2, max_seq_len=600)
    rng = np.random.default_rng(0)
    shapes = [(3, HEADS * GROUP, DIM)] * 2 + [(num_tokens, HEADS, DIM)] * 2
    q, weights, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    sinks = np.linspace(1, 4, HEADS * GROUP, dtype=np.float32)

    def paged(q, k, v, sinks):
        cache, _ = kv.allocate(kv.init(config), [1], [num_tokens])
        q, k, v = (jnp.stack([jnp.zeros_like(x), x]) for x in (q, k, v))
        cache, _ = kv.append(cache, k[None, :, :-3], v[None, :, :-3], [0, num_tokens - 3])
        cache, step = kv.extend(cache, [0, 3], max_new=3)
        new = q, k[:, -3:], v[:, -3:]
        _, (out, lse) = kv.attention(
            cache, 0, *new, step, scale=0.4, soft_cap=1.5, sink_logits=sinks, return_lse=True
        )
        return (out[1] * weights).sum() + jnp.sin(lse[1]).sum()

    def dense(q, k, v, sinks):
        k, v = (jnp.repeat(x, GROUP, axis=1) for x in (k, v))
        logits = 1.5 * jnp.tanh(jnp.einsum("thd,shd->hts", q, k) * (0.4 / 1.5))
        is_seen = jnp.arange(num_tokens) <= num_tokens - 3 + jnp.arange(3)[:, None]
        logits = jnp.where(is_seen, logits, -jnp.inf)
        sinks = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))
        lse = jax.nn.logsumexp(jnp.concatenate([logits, sinks], axis=-1), axis=-1)
        out = jnp.einsum("hts,shd->thd", jnp.exp(logits - lse[..., None]), v)
        return (out * weights).sum() + jnp.sin(lse).sum()

    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(q, k, v, sinks) for f in (paged, dense))
    for name, one, other in zip("qkvs", got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6, err_msg=name)


# --- contents ---


def test_gather_is_zero_where_no_token_is():
    window = kv.SlidingWindow(HEADS, DIM, window=3, num_sink_tokens=2, block_size=2)
    config = kv.CacheConfig(
        [FULL, window], num_blocks=12, block_size=4, max_seqs=3, max_seq_len=18, max_query_len=7
    )
    cache, _ = kv.allocate(poison(kv.init(config)), [1], [17])
    for count in (7, 4):
        ones = [np.ones((3, 7, HEADS, DIM), np.float32)] * 2
        cache, _ = append(cache, ones, ones, np.array([0, count, 0], np.int32))
    cache = poison(cache)
    for layer, held in ((0, [*range(11)]), (1, [0, 1, *range(4, 11)])):
        expected = np.zeros(18)
        expected[held] = 1
        k, v, length = jax.device_get(kv.gather(cache, 1, layer))
        assert length == 11
        for half in (k, v):
            assert half.shape == (18, HEADS, DIM)
            np.testing.assert_array_equal(half, np.broadcast_to(expected[:, None, None], half.shape))
        for row in (0, 2, 3, -1, -2, 2**31 - 1, np.int64(2**32 + 1), 2**40 + 1):
            k, v, length = kv.gather(cache, row, layer)
            assert int(length) == 0 and not np.asarray(k).any() and not np.asarray(v).any(), row


def test_a_copied_block_passes_no_gradient_to_what_stood_there():
    config = kv.CacheConfig([FULL] * 2, num_blocks=4, block_size=4, max_seqs=2, max_seq_len=8)

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


# --- rows ---


def test_priority_namespace_and_recency_follow_the_rows():
    config = kv.CacheConfig([FULL], num_blocks=9, block_size=4, max_seqs=5, max_seq_len=16)
    words = np.arange(8, dtype=np.uint32).reshape(2, 4) + 1

    def fields(cache):
        control = cache.control
        return control.priority.tolist(), control.namespace[:, 0].tolist()

    def order(cache):
        """Rows from the least to the most recently used."""
        age = np.asarray(cache.control.clock - cache.control.last_used).astype(int)
        return sorted(np.flatnonzero(np.asarray(cache.is_active)).tolist(), key=lambda row: -age[row])

    cache, _ = kv.allocate(kv.init(config), [3, 1], [2, 5], namespace=words, priority=[7, -2])
    assert fields(cache) == ([0, -2, 0, 7, 0], [0, 5, 0, 1, 0]) and order(cache) == [3, 1]
    cache, _ = kv.fork(cache, [3, 1], [0, 4])
    assert fields(cache) == ([7, -2, 0, 7, -2], [1, 5, 0, 1, 5]) and order(cache) == [3, 1, 0, 4]
    cache, _ = kv.touch(cache, [1, 3])
    assert order(cache) == [0, 4, 1, 3]
    cache, _ = kv.set_priority(cache, [4, 2], [9, 9])
    assert fields(cache)[0] == [7, -2, 0, 7, 9] and order(cache) == [0, 4, 1, 3]
    cache, _ = kv.extend(cache, [1, 0, 0, 0, 0], max_new=1)
    assert order(cache) == [4, 1, 3, 0]
    cache, _ = kv.reorder(cache, [1], [4])
    cache, _ = kv.reorder(cache, [3], [0])
    assert fields(cache) == ([7, 9, 0, 7, 9], [1, 5, 0, 1, 5]) and order(cache) == [4, 0, 1, 3]
    cache, _ = kv.free(cache, [4, 3, 1, 0])
    assert fields(cache) == ([0] * 5, [0] * 5)


def test_reorder_gives_back_what_several_rows_dropped():
    config = kv.CacheConfig([FULL], num_blocks=9, block_size=4, max_seqs=4, max_seq_len=16)
    cache, _ = kv.allocate(kv.init(config), [0, 3], [6, 5])
    cache, _ = kv.extend(cache, [6, 0, 0, 5], max_new=6)
    cache, _ = kv.fork(cache, [0, 0], [2, 1])
    cache, status = kv.reorder(cache, [2, 0, 1], [3, 3, 3])
    assert statuses(status) == [kv.Status.OK] * 3
    assert num_free(cache) == 7
    assert_invariants(cache)


def test_failed_rows_raise():
    kv.raise_for_status([kv.Status.OK, kv.Status.SKIPPED])
    with pytest.raises(kv.StatusError, match=r"extend failed for 2 of 3 rows \(row 0: .*; row 2: TOO_LONG"):
        kv.raise_for_status(jnp.array([kv.Status.OUT_OF_BLOCKS, kv.Status.OK, kv.Status.TOO_LONG]), "extend")


# --- figures ---


def test_figures():
    small = kv.FullAttention(1, 3, num_blocks=5, block_size=4)
    config = kv.CacheConfig([FULL, small], num_blocks=20, block_size=2, max_seqs=4, max_seq_len=16)
    cache, _ = kv.allocate(kv.init(config), [3, 1], [8, 7])  # 4 + 4 of 20 blocks and 2 + 2 of 5
    assert float(kv.utilization(cache)) == pytest.approx(0.8)
    assert [bool(kv.needs_eviction(cache, float(t))) for t in (0.9, kv.utilization(cache), 0.5)] == [0, 1, 1]
    assert [int(kv.num_available_blocks(cache, group=group)) for group in (None, 0, 1)] == [13, 12, 1]
    assert kv.active_seq_ids(cache).tolist() == [1, 3, 4, 4]
    assert kv.idle_seq_ids(cache, 3).tolist() == [0, 2, 4]
    cache, _ = kv.extend(cache, [0, 3, 0, 0], max_new=3)
    cache, _ = kv.fork(cache, [1], [0])
    cache, _ = kv.extend(cache, [1, 0, 0, 0], max_new=3)
    cache, _ = kv.free(cache, [3])
    cache, _ = kv.allocate(cache, [2], [1])
    figures = {name: int(value) for name, value in vars(kv.stats(cache)).items()}
    block_bytes = [group.block_bytes for group in config.groups]
    assert figures == dict(
        num_active_seqs=3,
        num_blocks_total=25,
        num_blocks_free=25 - 10,
        num_blocks_cached=0,
        num_blocks_used=6 + 4,
        num_blocks_shared=1,
        num_blocks_published=0,
        num_refs=(4 + 2 + 1) + (2 + 1 + 1),
        peak_used=9 + 5,
        num_allocations=3,
        num_forks=1,
        num_frees=1,
        num_copies=2,
        num_evictions=0,
        num_adoptions=0,
        num_request_queries=0,
        num_request_hits=0,
        num_block_queries=0,
        num_block_hits=0,
        num_token_queries=0,
        num_token_hits=0,
        bytes_used=6 * block_bytes[0] + 4 * block_bytes[1],
        bytes_cached=0,
        bytes_total=20 * block_bytes[0] + 5 * block_bytes[1],
    )


def test_donation_reuses_the_pools_and_reset_keeps_them():
    config = kv.CacheConfig([FULL], num_blocks=9, block_size=4, max_seqs=2, max_seq_len=16)
    cache, _ = kv.allocate(kv.init(config), [1], [2])
    old, address = cache, cache.pools[0].k.unsafe_buffer_pointer()
    cache, _ = kv.donate(lambda cache: kv.extend(cache, [0, 2], max_new=2))(cache)
    assert old.pools[0].k.is_deleted() and cache.pools[0].k.unsafe_buffer_pointer() == address
    fresh = kv.reset(cache)
    assert fresh.pools[0].k is cache.pools[0].k
    assert_same(leaf_bytes(kv.init(config).control), leaf_bytes(fresh.control))
