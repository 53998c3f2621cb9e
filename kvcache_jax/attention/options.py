"""The static part of an attention call."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """What is known when the call is traced; see `attention.attention`.

    Attributes:
      scale: Of the logits.
      soft_cap: Bounds the scaled logits.
      window: Keys that a query sees, itself included; None for all.
      num_sink_tokens: First positions seen beside the window.
      num_sink_blocks: Columns of the block table that hold them.
      num_blocks: Blocks of one layer.
      implementation: One of `IMPLEMENTATIONS`.
      head_axis: Mesh axis over which the heads are split, or None.
    """

    scale: float
    soft_cap: float | None
    window: int | None
    num_sink_tokens: int
    num_sink_blocks: int
    num_blocks: int
    implementation: str
    head_axis: str | None
