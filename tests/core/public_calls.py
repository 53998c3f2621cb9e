"""Calls of public operations, with arguments that they take."""

from typing import Any

import numpy as np

import kvcache_jax as kv

SIZES: dict[str, Any] = dict(num_blocks=8, block_size=4, max_seqs=2, max_seq_len=16)
PLAIN = kv.CacheConfig([kv.FullAttention(1, 5)], **SIZES)
CACHED = kv.CacheConfig([kv.FullAttention(1, 5)], **SIZES, enable_prefix_caching=True)
TOKENS, ROWS, NEW = np.ones((2, 4), np.int32), [0, 1], np.ones((2, 4, 1, 5), np.float32)

# name -> (function, arguments after the cache, options)
PLAIN_CALLS = {
    "free": (kv.free, [ROWS], {}),
    "gather": (kv.gather, [0, 0], {}),
    "num_blocks_needed": (kv.num_blocks_needed, [[1, 1]], dict(seq_ids=ROWS)),
    "truncate": (kv.truncate, [ROWS, [1, 1]], {}),
    "reorder": (kv.reorder, [ROWS, [1, 0]], {}),
    "rewrite": (kv.rewrite, [ROWS, [[0], [0]]], {}),
    "drop": (kv.compression.drop, [ROWS, [0, 0], [1, 1]], dict(positions="text", rotate=None)),
    "preempt_to_utilization": (kv.preempt_to_utilization, [0.5], dict(policy="lru")),
    "block_map": (kv.block_map, [], dict(group=None, color=False, width=20)),
    "draw_block_map": (kv.inspect.draw_block_map, [], dict(group=0, ax=None)),
}
CACHED_CALLS = {
    "allocate": (
        kv.allocate,
        [ROWS, [4, 4]],
        dict(tokens=TOKENS, namespace=None, priority=ROWS, reuse=True),
    ),
    "extend": (kv.extend, [[4, 4]], dict(max_new=4, tokens=TOKENS)),
    "append": (kv.append, [NEW[None], NEW[None], [4, 4]], dict(tokens=TOKENS)),
    "commit": (kv.commit, [ROWS], dict(final_len=[1, 1])),
    "lookup": (kv.lookup, [TOKENS, [4, 4]], dict(namespace=None)),
    "evict": (kv.evict, [1], {}),
    "scrub": (kv.scrub, [ROWS], dict(namespace=None)),
    "explain": (kv.inspect.explain, [TOKENS[0]], {}),
    "export_blocks": (kv.tiers.export_blocks, [[0]], {}),
    "copy_prompts": (kv.tiers.copy_prompts, [kv.init(CACHED), [[1]]], {}),
}
