"""Figures of a cache, counted by hand."""

import numpy as np
import pytest

import kvcache_jax as kv


def test_figures():
    small = kv.FullAttention(1, 3, num_blocks=5, block_size=4)
    config = kv.CacheConfig(
        [kv.FullAttention(2, 5), small], num_blocks=20, block_size=2, max_seqs=4, max_seq_len=16
    )
    cache, _ = kv.allocate(kv.init(config), [3, 1], [8, 7])  # 4 + 4 of 20 blocks and 2 + 2 of 5
    assert float(kv.utilization(cache)) == pytest.approx(0.8)
    assert [int(kv.num_available_blocks(cache, group=group)) for group in (None, 0, 1)] == [13, 12, 1]
    cache, _ = kv.extend(cache, [0, 3, 0, 0], max_new=3)
    cache, _ = kv.fork(cache, [1, 4], [0, 4])  # max_seqs is skipped
    cache, _ = kv.extend(cache, [1, 0, 0, 0], max_new=3)
    cache, _ = kv.free(cache, [3])
    cache, _ = kv.allocate(cache, [2, 4], [1, 9])
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
        num_tokens_without_state=0,
        bytes_used=6 * block_bytes[0] + 4 * block_bytes[1],
        bytes_cached=0,
        bytes_total=20 * block_bytes[0] + 5 * block_bytes[1],
    )


@pytest.mark.quick_cases("9-10")
@pytest.mark.parametrize(("num_used", "num_blocks"), [(9, 10), (35, 49)])
def test_utilization_is_the_quotient_to_the_last_bit(num_used, num_blocks):
    """Callers compare it with quotients of their own; a product with 1 / num_blocks may be more or less."""
    assert np.float32(num_used) * (np.float32(1) / np.float32(num_blocks)) != np.float32(
        num_used / num_blocks
    )
    config = kv.CacheConfig([kv.FullAttention(1, 3)], num_blocks=num_blocks, block_size=1, max_seqs=1)
    cache, _ = kv.allocate(kv.init(config, storage=False), [0], [num_used])
    assert np.asarray(kv.utilization(cache)) == np.float32(num_used / num_blocks)
    after, dropped = kv.preempt_to_utilization(cache, num_used / num_blocks)
    assert dropped.tolist() == [1] and bool(after.is_active[0])
