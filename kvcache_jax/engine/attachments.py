"""Attachments of an engine: they see the cache, and may change it, while no dispatch is under way."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcache_jax.arrays.same_form import form_of
from kvcache_jax.core.attachment import Attachment
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.engine.device import Device
from kvcache_jax.engine.table import RequestTable


class Attachments:
    """All that is attached to an engine, whose state is of a mesh's shards, or of one cache.

    Args:
      config: Of a shard's cache.
      is_of_shards: Whether it is of a mesh.
      wake: A method, called from any thread when one of them has an answer that was to come later.

    Attributes:
      is_new: Whether a dispatch has changed the caches since they saw them.
      has_answer: Whether an answer came since they were asked.
    """

    def __init__(self, config: CacheConfig, is_of_shards: bool, wake: Callable[[], None]):
        self._config, self._is_of_shards, self._attached = config, is_of_shards, list[Attachment]()
        self._wake = weakref.WeakMethod(wake)  # a store's thread may outlive the engine
        self.is_new = self.has_answer = False

    def __len__(self) -> int:
        return len(self._attached)

    def add(self, attachment: Attachment) -> None:
        """Adds one; requests that wait for others are not asked for it."""
        if not isinstance(attachment, Attachment):
            raise TypeError(
                f"attachment is a {type(attachment).__name__}, expected such as a kv.tiers.AttachedStore"
            )
        if self._is_of_shards:
            attachment.check_shards(self._config)
        attachment.begin(self._config)
        attachment.wake = self._note_answer
        # Who is asked next is counted from the end.
        self._attached.insert(0, attachment)
        self.is_new = True

    def _note_answer(self) -> None:
        self.has_answer = True
        if (wake := self._wake()) is not None:
            wake()

    def attend(self, device: Device, tables: Sequence[RequestTable]) -> None:
        """Shows all the caches, and has them put into these what they have of requests that wait for them.

        While a dispatch is under way it does nothing.
        """
        if device.num_in_flight:
            return
        self.has_answer = False
        if self._attached and (self.is_new or any(True for table in tables for _ in table.asking())):
            device.change_caches(lambda shard, cache: self._attend_one(cache, tables[shard]))
            self.is_new = False

    def _attend_one(self, cache: Cache, table: RequestTable) -> Cache:
        if self.is_new:
            for each in self._attached:
                each.look(cache)
        for sample in table.asking():
            while sample.num_to_ask:
                asked = self._attached[-sample.num_to_ask]
                found = asked.find(cache, sample.known, table.namespace_of(sample))
                cache, is_done = _checked(asked, found, cache)
                if not is_done:
                    break
                sample.num_to_ask -= 1
        return cache

    def metrics(self) -> dict[str, float]:
        """Collects the metrics of all."""
        found = {}
        for each in self._attached:
            if not isinstance(of_one := each.metrics(), Mapping):
                name = f"{type(each).__name__}.metrics()"
                raise TypeError(f"{name} returned {form_of(of_one)}, expected numbers by their names")
            found |= of_one
        return found


def _checked(asked: Attachment, found: Any, cache: Cache) -> tuple[Cache, bool]:
    """Returns what an attachment answered; refuses what is not such a cache and whether it is all."""
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], type(cache)):
        if found[0].config == cache.config:
            return found
    got = [form_of(x) for x in found] if isinstance(found, tuple) else form_of(found)
    raise TypeError(
        f"{type(asked).__name__}.find() returned {got}, expected the cache that it was given, with what it "
        "has, and True, or False for later"
    )
