"""Streaming within the loops of decoding: what no later token sees is dropped before each step."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.compression.drop import drop
from kvcache_jax.compression.streaming import Streaming, require_streaming
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache


def streaming_chunk_len(streaming: Streaming, config: CacheConfig, num_drafts: int, chunk_len: int) -> int:
    """Limits the tokens of one call of the model to those that a row holds beside what stays.

    Raises:
      ValueError, TypeError: `generate` cannot stream so; names got, expected and the fix.
    """
    require_streaming("generate", streaming, config)
    if num_drafts:
        raise ValueError(
            f"generate got streaming and num_drafts = {num_drafts}, expected 0: rows that stream take none"
        )
    room = config.max_seq_len - streaming.max_held_len(config, 0)
    if room < 1:
        raise ValueError(
            f"max_seq_len is {config.max_seq_len}, expected at least {streaming.max_held_len(config, 1)}: "
            f"{streaming.num_sink_tokens} sinks, a window of {streaming.window}, and what fills their blocks "
            f"of {config.drop_unit}; raise max_seq_len"
        )
    return min(chunk_len, room)


def streaming_width(prompts: Sequence[np.ndarray], max_new_tokens: int) -> int:
    """Returns the width of arrays that hold every text: a power of two, so that lengths share programs."""
    return 1 << (max(map(len, prompts), default=0) + max_new_tokens - 1).bit_length()


def drop_unseen(cache: Cache, rows: jax.Array, streaming: Streaming) -> Cache:
    """Drops what the next token of `rows` i32[n] will not see; `max_seqs` is skipped."""
    assert cache.control.holes is not None
    text_len = get_at(cache.context_len, rows, 0) + cache.control.holes.of_rows(rows).num_dropped
    start = jnp.full_like(rows, streaming.num_sink_tokens)
    length = jnp.maximum(text_len + 1 - streaming.window - start, 0)
    return drop(cache, rows, start, length)[0]
