"""Attachments of a loop on the host, which see its cache between the programs that run on it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ShardCache(Cache):
    """The cache of one shard of a mesh, as an attachment sees it; its devices may be in other processes.

    `control` is a copy in numpy, and `pools` are shapes, of all heads and tokens.

    Attributes:
      shard: Which one.
      export: Does `export_blocks` of block ids i32[n]; in numpy.
      publish: Does `import_blocks` of contents, for which cached blocks make room, and returns this shard's
        cache after it, and the status i32[n]. The cache from before serves no more.
    """

    shard: int
    export: Callable[[np.ndarray], Any]
    publish: Callable[[Any], tuple["ShardCache", np.ndarray]]

    @property
    def form(self) -> Cache:
        """The shapes of its arrays, and the control state."""
        return Cache(control=self.control, pools=self.pools, config=self.config)


def shard_of(cache: Cache) -> int:
    """Returns which shard of a mesh a cache is; 0 for one without a mesh."""
    return cache.shard if isinstance(cache, ShardCache) else 0


def require_prefix_caching(what: str, config: CacheConfig) -> None:
    """Refuses a loop whose cache has no prefix index, before its first program."""
    if not config.enable_prefix_caching:
        raise ValueError(
            f"{what} is attached to an engine without prefix caching, expected one with "
            "CacheConfig(enable_prefix_caching=True)"
        )


class Attachment:
    """A base of all that takes part in a loop's cache, such as a store or events; it does nothing itself.

    The loop calls these methods while no program of its own is under way, so that to read the cache waits for
    nothing. What they wait for, the loop waits for too: other work is for a thread.

    Attributes:
      wake: Set by the loop, or None. A thread calls it once `find` has an answer that was to come later: the
        loop then asks soon. It waits for nothing.
    """

    wake: Callable[[], object] | None = None

    def begin(self, config: CacheConfig) -> None:
        """Begins to see caches of a config, as the loop takes it; forgets the caches of a loop before.

        Raises:
          ValueError: it can do nothing with such caches.
        """

    def check_shards(self, config: CacheConfig) -> None:
        """Refuses to see the `ShardCache`s of a mesh; a subclass that can do with them overrides it.

        Raises:
          ValueError, NotImplementedError: always, here.
        """
        raise ValueError(
            f"the engine has a placement, and {type(self).__name__} sees one cache and not a mesh's, "
            "expected an engine without, or an attachment with `check_shards`"
        )

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
