"""The configs of random scripts: one size for all, so that the programs of the control plane are shared."""

import functools

import kvcache_jax as kv

ROWS, MAX_SOURCE = 6, 11
NUM_CHUNKS, MAX_CHUNK = 5, 9
SIZES = {"num_blocks": 24, "block_size": 4, "max_seqs": ROWS, "max_seq_len": 31}
DROPPING = [kv.compression.Dropping()]
CHUNKS = [kv.chunks.Store(NUM_CHUNKS, MAX_CHUNK), *DROPPING]

FULL, FINER = kv.FullAttention(1, 5), kv.FullAttention(2, 5, block_size=2, num_blocks=40)
WINDOW, NARROW = (
    kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=40),
    kv.SlidingWindow(1, 5, window=1, block_size=3, num_blocks=14),
)
CROSS = kv.CrossAttention(1, 3, max_source_len=MAX_SOURCE, num_blocks=9)
FINER_CROSS = kv.CrossAttention(1, 3, max_source_len=MAX_SOURCE, num_blocks=9, block_size=3)
FEW_OF_WINDOW = kv.SlidingWindow(
    2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=26
)


def config_of(*layers, **sizes):
    return kv.CacheConfig(layers, **SIZES | sizes)


full_config = functools.partial(config_of, FULL, FULL)
grouped_config = functools.partial(config_of, WINDOW, FULL, NARROW, WINDOW, max_query_len=9)
source_config = functools.partial(config_of, FULL, CROSS, FINER_CROSS, CROSS)
# Rows of the first cannot be compressed.
dropping_config = functools.partial(config_of, WINDOW, FULL, WINDOW, max_query_len=9, extras=DROPPING)
chunk_config = functools.partial(config_of, FULL, FINER, extras=CHUNKS)
window_chunk_config = functools.partial(
    config_of, FEW_OF_WINDOW, kv.SlidingWindow(1, 5, window=1, block_size=3), max_query_len=9, extras=CHUNKS
)
prefix_config = functools.partial(config_of, FULL, FULL, enable_prefix_caching=True)
prefix_chunk_config = functools.partial(prefix_config, extras=CHUNKS)
