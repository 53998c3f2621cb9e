"""Stores of chunks that no operation makes are found, with a sentence each."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import kvcache_jax as kv

SIZES: dict[str, Any] = dict(
    num_blocks=9, block_size=4, max_seqs=2, max_seq_len=20, num_chunks=3, max_chunk_len=5
)
BEFORE = jnp.zeros((3, 2, 2), jnp.uint32)
pytestmark = pytest.mark.slow


def stored(**options):
    """Two chunks of row 0, which it ended, 4 blocks of their own."""
    cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **SIZES, **options), storage=False)
    cache, _ = kv.allocate(cache, [0], [16])
    cache, _ = kv.extend(cache, [16, 0], max_new=16)
    cache, stored = kv.store_chunk(cache, [0, 0], [2, 7], [5, 5], jnp.arange(10).reshape(2, 5))
    assert stored.status.tolist() == [0, 0] and kv.check_invariants(cache) == []
    return cache


def test_broken_stores_are_found():
    cache = stored(max_chunks_before=2)
    more = stored(max_chunks_before=2, max_chunk_variants=2)
    chunks, of_more = cache.control.chunks, more.control.chunks
    assert chunks is not None and chunks.stats is not None and of_more is not None
    tokens, ids = chunks.tokens, chunks.block_ids[0]
    twins = dict(tokens=tokens.at[1].set(tokens[0]))
    unknown = chunks.stats
    for base, changed, violation in [
        (cache, twins, "chunks [0, 1] have the same name, expected at most 1 of one"),
        (more, twins, "chunks 0 and 1 have the same name behind the same chunks"),
        (cache, dict(start=chunks.start.at[0].set(17)), "chunk 0 has 5 tokens from 17, which do not fit"),
        (cache, dict(length=chunks.length.at[1].set(4)), "chunk 1 of 4 tokens has more in its name"),
        (cache, dict(num_uses=chunks.num_uses.at[2].set(1)), "place 2 holds no chunk and has num_uses"),
        (
            cache,
            dict(stats=dataclasses.replace(unknown, inter=unknown.inter.at[2, 0].set(1))),
            "place 2 holds no chunk and has inter",
        ),
        (
            cache,
            dict(stats=dataclasses.replace(unknown, before=BEFORE.at[0, 1].set(1))),
            "chunk 0 stood behind chunks [False, True], expected the first",
        ),
        (
            cache,
            dict(block_ids=(ids.at[0, 1].set(9),)),
            "group 0: chunk 0 holds blocks [0], expected [0, 1]",
        ),
    ]:
        control = dataclasses.replace(
            base.control, chunks=dataclasses.replace(base.control.chunks, **changed)
        )
        found = kv.check_invariants(dataclasses.replace(base, control=control))
        assert violation in found, (violation, found)
    different = unknown.before.at[0, 0].set(1)
    control = dataclasses.replace(
        more.control,
        chunks=dataclasses.replace(of_more, **twins, stats=dataclasses.replace(unknown, before=different)),
    )
    assert kv.check_invariants(dataclasses.replace(more, control=control)) == []
