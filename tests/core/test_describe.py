"""What `describe` and `memory_bytes` say of a cache is what it takes."""

import jax
import pytest

import kvcache_jax as kv
from kvcache_jax.core.config import format_bytes
from kvcache_jax.core.describe import control_bytes

FULL, WINDOW = kv.FullAttention(1, 4), kv.SlidingWindow(1, 4, window=5, num_blocks=9)


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ([FULL], {}),
        ([FULL, WINDOW], {"enable_prefix_caching": True}),
        ([FULL], {"enable_prefix_caching": True, "eviction_policy": "hyperbolic"}),
    ],
)
def test_the_control_state_takes_what_the_plan_says(layers, options):
    config = kv.CacheConfig(layers, num_blocks=37, block_size=4, max_seqs=3, max_seq_len=50, **options)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(kv.init(config, storage=False).control))
    assert control_bytes(config) == num_bytes
    assert kv.describe(config).endswith(f"control state {format_bytes(num_bytes)}")
