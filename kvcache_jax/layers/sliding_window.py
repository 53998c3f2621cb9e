"""Sliding-window attention: the last positions stay, and the first ones if they are sinks."""

import dataclasses

from kvcache_jax.layers.layer_kind import MAX_INDEX, LayerKind, check_not_negative, check_positive
from kvcache_jax.layers.span import Span


@dataclasses.dataclass(frozen=True)
class SlidingWindow(LayerKind):
    """A layer in which token `i` attends to token `j` if `i - window < j <= i` or `j < num_sink_tokens`.

    Attributes:
      window: Tokens in reach, the token itself included.
      num_sink_tokens: First tokens of a row that are kept and stay in reach (StreamingLLM).
      max_rollback: Tokens that `truncate` may drop again from a row longer than its window;
        as many more tokens are kept of those that the row computed. A row that began with a cached prefix
        has of it what its next token reads.
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
        """The window, the sinks, and what `max_rollback` keeps."""
        return Span(self.window, self.num_sink_tokens, self.max_rollback)

    @property
    def label(self) -> str:
        """Name and window, and sinks and rollback where there are any."""
        sinks = f", sinks {self.num_sink_tokens}" if self.num_sink_tokens else ""
        rollback = f", rollback {self.max_rollback}" if self.max_rollback else ""
        return f"SlidingWindow({self.window}{sinks}{rollback})"
