"""Streaming: endless texts in fixed memory, of which the first tokens and the last ones stay."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.compression.drop_tokens import drop
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.decoding.prompts import Retention
from kvcache_jax.layers.span import Span, ceil_div


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(Retention):
    """The tokens of a text that stay as it goes on; the others are dropped (StreamingLLM).

    A token sees the first `num_sink_tokens` and the last `window`, whatever the layers' kinds, which may see
    less.

    Attributes:
      window: Last tokens that a token sees, itself included.
      num_sink_tokens: First tokens of the text, which are always seen.

    Raises:
      ValueError, TypeError: a window of less than 1 token, sinks of less than 0, or no integers.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.compression.Streaming()
      Streaming(window=508, num_sink_tokens=4)

    References:
      Efficient Streaming Language Models with Attention Sinks (Xiao et al.; arXiv:2309.17453).
    """

    window: int = 508
    num_sink_tokens: int = 4

    def __post_init__(self):
        for name, least in (("window", 1), ("num_sink_tokens", 0)):
            object.__setattr__(self, name, static_count(name, getattr(self, name), least=least))

    @property
    def span(self) -> Span:
        """The positions that a token sees."""
        return Span(window=self.window, num_sink_tokens=self.num_sink_tokens)

    def max_held_len(self, config: CacheConfig, num_new: int) -> int:
        """Counts the most tokens that a row holds in a step of `num_new`, hidden ones too.

        Tokens dropped in the blocks of the last sink and of the window's first token are still held.
        """
        unit = config.drop_unit
        return ceil_div(self.num_sink_tokens, unit) * unit + unit - 1 + self.window - 1 + num_new

    def check(self, caller: str, config: CacheConfig, num_drafts: int) -> None:
        """Refuses drafts, and a cache whose rows cannot stream so."""
        require_streaming(caller, self, config)
        if num_drafts:
            raise ValueError(
                f"{caller} got streaming and num_drafts = {num_drafts}, expected 0: rows that stream take "
                "none"
            )
        if config.max_seq_len < self.max_held_len(config, 1):
            raise ValueError(
                f"max_seq_len is {config.max_seq_len}, expected at least {self.max_held_len(config, 1)}: "
                f"{self.num_sink_tokens} sinks, a window of {self.window}, and what fills their blocks of "
                f"{config.drop_unit}; raise max_seq_len"
            )

    def prefill_len(self, config: CacheConfig, prefill_len: int) -> int:
        """Limits the tokens of one call of the model to those that fit beside a row's sinks and window."""
        return min(prefill_len, config.max_seq_len - self.max_held_len(config, 0))

    def max_text_len(self, config: CacheConfig, prompts: Sequence[np.ndarray], max_new_tokens: int) -> int:
        """Counts the tokens of the longest text: a power of two, so that lengths share programs."""
        return 1 << (max(map(len, prompts), default=0) + max_new_tokens - 1).bit_length()

    def drop_unseen(self, cache: Cache, rows: jax.Array) -> Cache:
        """Drops tokens that the next token of `rows` i32[n] will not see."""
        assert cache.control.holes is not None
        text_len = get_at(cache.context_len, rows, 0) + cache.control.holes.of_rows(rows).num_dropped
        start = jnp.full_like(rows, self.num_sink_tokens)
        length = jnp.maximum(text_len + 1 - self.window - start, 0)
        return drop(cache, rows, start, length)[0]


def require_streaming(caller: str, streaming: Any, config: CacheConfig) -> None:
    """Refuses anything but a `Streaming`, and a cache whose rows cannot stream so."""
    if not isinstance(streaming, Streaming):
        raise TypeError(
            f"{caller} got {streaming!r}, expected kv.compression.Streaming(window=..., num_sink_tokens=...)"
        )
    if config.enable_prefix_caching:
        raise ValueError(
            f"{caller} got streaming and a cache with enable_prefix_caching=True, expected "
            "False: what is behind dropped tokens is not found by its own"
        )
    if not config.hides_tokens:
        raise ValueError(f"{caller} got streaming, expected a cache with extras=[kv.compression.Dropping()]")
    least = max(group.num_sink_tokens for group in config.groups)
    if streaming.num_sink_tokens < least:
        raise ValueError(
            f"streaming has num_sink_tokens = {streaming.num_sink_tokens}, expected at least {least}: the "
            "sinks of a layer kind are never dropped"
        )
