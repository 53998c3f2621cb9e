"""Choices that are compiled into the engine's program."""

import dataclasses

from kvcache_jax.core.config import ceil_div
from kvcache_jax.core.state import Cache


@dataclasses.dataclass(frozen=True)
class Options:
    """Static choices; hashable.

    Attributes:
      policy: Name of a `request_policy`.
      num_pieces: Pieces of prompts that a step computes beside the rows' next tokens.
      piece_len: Tokens of a piece.
      num_drafts: Draft tokens per row and step.
      num_top_logprobs: Most probable tokens whose log-probabilities are reported.
      watermark: Share of the blocks that an admission leaves free while a row runs.
      ageing_steps: As in `RequestMetadata`.
      max_bypasses: Later requests that may be admitted before one, as in `RequestMetadata`.
      most_admissions: Requests looked at for admission in one step.
      long_prefill_len: Most tokens of one prompt in one step.
      input_weight: Service of a token of a prompt.
      output_weight: Service of a generated token.
      batch_invariant: Whether a token's logits may not depend on its company, to the bit; pieces are then of
        one token.
    """

    policy: str
    num_pieces: int
    piece_len: int
    num_drafts: int
    num_top_logprobs: int
    watermark: float
    ageing_steps: int
    max_bypasses: int
    most_admissions: int
    long_prefill_len: int
    input_weight: int
    output_weight: int
    batch_invariant: bool = False

    @property
    def width(self) -> int:
        """Tokens of a row in the part of a step that all rows take part in."""
        return 1 + self.num_drafts

    def num_reserved(self, cache: Cache) -> list[int]:
        """Counts the blocks of each group that the watermark holds back."""
        pools = cache.control.block_pools
        return [ceil_div(int(self.watermark * pool.num_blocks * 1000), 1000) for pool in pools]
