"""Attachments of a loop on the host, which see its cache between the programs that run on it."""

from collections.abc import Mapping, Sequence

import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.core.state import Cache


class Attachment:
    """A base of all that takes part in a loop's cache, such as a store or events; it does nothing itself.

    The loop calls these methods while no program of its own is under way, so that to read the cache waits for
    nothing. What they wait for, the loop waits for too: other work is for a thread.
    """

    def look(self, cache: Cache) -> None:
        """Sees the cache after a program; it is donated later, so that what is needed of it is copied."""

    def find(
        self, cache: Cache, prompt: Sequence[int] | np.ndarray, namespace: ArrayLike | None = None
    ) -> tuple[Cache, bool]:
        """Puts what it has of a prompt into the cache, before the prompt's request starts.

        Args:
          cache: Donated, or returned.
          prompt: Token ids.
          namespace: u32[4], who may share its blocks. Default: 0.

        Returns:
          The cache; and True if there is nothing to wait for any more, False for "later": the loop asks again
          after its next program.
        """
        return cache, True

    def metrics(self) -> Mapping[str, float]:
        """Returns counts by their names in vLLM's metrics, for the metrics of the loop."""
        return {}
