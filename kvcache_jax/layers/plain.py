"""Layers of keys and values as they are: full attention, sliding windows, layers that share another's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvcache_jax.layers.layer_kind import MAX_INDEX, LayerKind, check_not_negative, check_positive
from kvcache_jax.layers.span import Span


@dataclasses.dataclass(frozen=True)
class FullAttention(LayerKind):
    """A layer in which every token attends to all tokens before it and to itself."""


@dataclasses.dataclass(frozen=True)
class SlidingWindow(LayerKind):
    """A layer in which token `i` attends to token `j` if `i - window < j <= i` or `j < num_sink_tokens`.

    Attributes:
      window: Tokens in reach, the token itself included.
      num_sink_tokens: First tokens of a row that are kept and stay in reach (StreamingLLM).
      max_rollback: Tokens that `truncate` may drop again from a row longer than its window;
        as many more tokens are kept of those that the row computed. A row that began with a cached prefix
        has the tokens of it that its next token reads.
    """

    window: int = dataclasses.field(kw_only=True)
    num_sink_tokens: int = dataclasses.field(default=0, kw_only=True)
    max_rollback: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "window")
        check_not_negative(self, "num_sink_tokens", "max_rollback")
        reach = self.window + self.max_rollback
        if reach >= MAX_INDEX:
            raise ValueError(
                f"window + max_rollback is {reach}, expected below 2**31, as far as 32-bit positions reach; "
                f"lower window = {self.window} or max_rollback = {self.max_rollback}"
            )

    @property
    def span(self) -> Span:
        """The window, the sinks, and the tokens that `max_rollback` keeps."""
        return Span(self.window, self.num_sink_tokens, self.max_rollback)

    @property
    def label(self) -> str:
        """Name and window, and sinks and rollback where there are any."""
        sinks = f", sinks {self.num_sink_tokens}" if self.num_sink_tokens else ""
        rollback = f", rollback {self.max_rollback}" if self.max_rollback else ""
        return f"SlidingWindow({self.window}{sinks}{rollback})"


@dataclasses.dataclass(frozen=True)
class SharedWith(LayerKind):
    """A layer that reads the keys and values of an earlier layer, in its span, and stores none.

    It takes no memory. A model calls `attend(cache, layer, q, step)` there, once the other layer's keys and
    values of the step are written; `attention` and `write` refuse it.

    Attributes:
      layer: The earlier model layer, which stores keys and values of its own.

    Example:
      >>> import kvcache_jax as kv
      >>> layers = [kv.FullAttention(num_kv_heads=2, head_dim=64)] * 2 + [kv.SharedWith(1)] * 4
      >>> kv.memory_bytes(kv.CacheConfig(layers, num_blocks=4)) == kv.memory_bytes(
      ...     kv.CacheConfig(layers[:2], num_blocks=4))
      True

    References:
      Cross-Layer Attention (Brandon et al.; arXiv:2405.12981).
    """

    num_kv_heads: int = dataclasses.field(init=False, default=1)
    head_dim: int = dataclasses.field(init=False, default=1)
    layer: int
    num_blocks: int | None = dataclasses.field(init=False, default=None)
    block_size: int | None = dataclasses.field(init=False, default=None)
    dtype: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        check_not_negative(self, "layer")

    @property
    def shared_layer(self) -> int:
        """The earlier layer."""
        return self.layer

    @property
    def label(self) -> str:
        """Name and layer."""
        return f"SharedWith({self.layer})"

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing."""
        return {}
