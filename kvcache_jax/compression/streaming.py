"""Streaming: endless texts in fixed memory, of which the first tokens and the last ones stay."""

import dataclasses
from typing import Any

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.layer_kinds.span import Span, ceil_div


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming:
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
      >>> kv.Streaming()
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

        What was dropped in the blocks of the last sink and of the first token of the window is still held.
        """
        unit = config.drop_unit
        return ceil_div(self.num_sink_tokens, unit) * unit + unit - 1 + self.window - 1 + num_new


def require_streaming(caller: str, streaming: Any, config: CacheConfig) -> None:
    """Refuses what is no `Streaming`, and a cache whose rows cannot stream so.

    Raises:
      ValueError, TypeError: names got, expected and the fix.
    """
    if not isinstance(streaming, Streaming):
        raise TypeError(f"{caller} got {streaming!r}, expected kv.Streaming(window=..., num_sink_tokens=...)")
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
