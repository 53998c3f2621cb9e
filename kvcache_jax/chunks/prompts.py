"""The value that tells `generate` and `score` which passages of prompts are chunks."""

import dataclasses
from collections.abc import Sequence

from kvcache_jax.chunks.chunk_reuse import ChunkReuse, prompt_spans
from kvcache_jax.chunks.prompt_chunks import ChunkRows
from kvcache_jax.decoding import prompts
from kvcache_jax.decoding.prompts import PromptCall


@dataclasses.dataclass(frozen=True)
class Prompts(prompts.Prompts):
    """Prompts that are put together from chunks: the `prompts` of `generate`, or the `context` of `score`.

    Each passage is computed once, alone, and kept in the cache's `Store`. A chunk that never finds room
    beside its prompt is computed as other text is.

    Attributes:
      tokens: Token ids of each prompt; one for `score`.
      spans: For each prompt the pairs `(start, end)` of its passages, at any place, in any order.
      reuse: Says how chunks are composed, and how much of them is computed again.

    Example:
      >>> import kvcache_jax as kv
      >>> rotate = kv.chunks.key_rotation([1.0, 0.1], max_distance=100)
      >>> composed = kv.chunks.Prompts([range(40)], [[(0, 20), (20, 35)]], kv.chunks.Reuse(rotate=rotate))
    """

    spans: Sequence[Sequence[tuple[int, int]]]
    reuse: ChunkReuse

    def rows(self, call: PromptCall) -> ChunkRows:
        """Checks the spans, and returns the prompts as rows are started for them.

        Raises:
          ValueError, TypeError: spans that are none, or a cache without a store of chunks.
        """
        return ChunkRows(call, prompt_spans(call, self.spans, self.reuse), self.reuse)
