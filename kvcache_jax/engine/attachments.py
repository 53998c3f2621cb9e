"""What is attached to an engine: it sees the cache, and may change it, while no dispatch is under way."""

from collections.abc import Sequence

from kvcache_jax.core.attachment import Attachment
from kvcache_jax.core.state import Cache
from kvcache_jax.engine.options import Placement
from kvcache_jax.engine.table import RequestTable


class Attachments:
    """All that is attached to an engine.

    Attributes:
      is_new: Whether a dispatch has changed the cache since they saw it.
    """

    def __init__(self, attached: Sequence[Attachment], placement: Placement | None):
        for each in attached:
            if not isinstance(each, Attachment):
                raise TypeError(
                    f"attached has a {type(each).__name__}, expected such as a kv.tiers.AttachedStore"
                )
        if attached and placement is not None:
            raise ValueError(
                "got attached and a placement, expected one of them: a mesh has a cache for each shard, and "
                "none that others can see"
            )
        self._attached, self.is_new = tuple(attached), False

    def __len__(self) -> int:
        return len(self._attached)

    def attend(self, cache: Cache, table: RequestTable) -> Cache:
        """Shows all the cache, and has them put into it what they have of requests that wait for them."""
        if self.is_new:
            self.is_new = False
            for each in self._attached:
                each.look(cache)
        for sample in table.asking():
            while sample.num_to_ask:
                asked = self._attached[-sample.num_to_ask]
                cache, is_done = asked.find(cache, sample.known, table.namespace_of(sample))
                if not is_done:
                    break
                sample.num_to_ask -= 1
        return cache

    def metrics(self) -> dict[str, float]:
        """Collects the metrics of all."""
        return {name: value for each in self._attached for name, value in each.metrics().items()}
