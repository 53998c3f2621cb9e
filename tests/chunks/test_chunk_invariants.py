"""Stores of chunks that no operation makes are found, with a sentence each."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import kvcache_jax as kv

SIZES: dict[str, Any] = dict(
    num_blocks=9, block_size=4, max_seqs=2, max_seq_len=20, extras=[kv.chunks.Store(3, 5)]
)
pytestmark = pytest.mark.slow


def stored():
    """Two chunks of row 0, which it ended, 4 blocks of their own."""
    cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **SIZES), storage=False)
    cache, _ = kv.allocate(cache, [0], [16])
    cache, _ = kv.extend(cache, [16, 0], max_new=16)
    cache, stored = kv.chunks.store(cache, [0, 0], [2, 7], [5, 5], jnp.arange(10).reshape(2, 5))
    assert stored.status.tolist() == [0, 0] and kv.check_invariants(cache) == []
    return cache


def test_broken_stores_are_found():
    cache = stored()
    chunks = cache.control.extras["chunks"]
    tokens, ids = chunks.tokens, chunks.block_ids[0]
    for changed, violation in [
        (dict(tokens=tokens.at[1].set(tokens[0])), "chunks 0 and 1 have the same name"),
        (dict(start=chunks.start.at[0].set(17)), "chunk 0 has 5 tokens from 17, which do not fit"),
        (dict(length=chunks.length.at[1].set(4)), "chunk 1 of 4 tokens has more in its name"),
        (dict(num_uses=chunks.num_uses.at[2].set(1)), "place 2 holds no chunk and has num_uses"),
        (dict(last_used=chunks.last_used.at[2].set(1)), "place 2 holds no chunk and has last_used"),
        (dict(block_ids=(ids.at[0, 1].set(9),)), "group 0: chunk 0 holds blocks [0], expected [0, 1]"),
    ]:
        extras = cache.control.extras | {"chunks": dataclasses.replace(chunks, **changed)}
        control = dataclasses.replace(cache.control, extras=extras)
        found = kv.check_invariants(dataclasses.replace(cache, control=control))
        assert violation in found, (violation, found)
