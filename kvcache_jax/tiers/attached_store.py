"""A store beside a loop on the host, which never waits for it: one thread writes to it and reads from it."""

import collections
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.core import token_arguments
from kvcache_jax.core.state import Cache
from kvcache_jax.tiers.block_store import BlockStore, Data, MemoryStore
from kvcache_jax.tiers.catalogue import Questions, StoreReport
from kvcache_jax.tiers.load_blocks import entries_of, load, slots_of
from kvcache_jax.tiers.published import published_blocks, read_blocks
from kvcache_jax.tiers.save_blocks import (
    checked_weights,
    namespace_digits,
    require_stored,
    scopes_of,
    write_blocks,
    write_lists,
)

_MOST_KEYS, _MOST_PROMPTS = 2**18, 1024


class AttachedStore:
    """A store that a loop on the host saves to and finds prompts in, as `CacheManager(store=)` does.

    Keys and values are copied to host memory when `save` is called; a thread writes them. What it cannot take
    in time is dropped and counted. A prompt is looked up by the thread too: `find` answers "later" until it
    is there.

    Attributes:
      num_dropped: Blocks that were not written, and prompts that were not looked up, for want of room in the
        queue.

    Raises:
      ValueError, TypeError: no store, or no digest.
    """

    def __init__(
        self, store: BlockStore, *, weights: str, max_queued: int = 64, max_bytes: int | None = 2**28
    ):
        """Starts the thread.

        Args:
          store: Such as `DirectoryStore`; this thread alone calls it after `load`.
          weights: As of `save`.
          max_queued: Jobs that may wait, each of up to 64 blocks or one prompt.
          max_bytes: Bytes that were read and not yet asked for.
        """
        self._store, self._weights, self._questions = store, checked_weights(weights), Questions(store)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(
            static_count("max_queued", max_queued)
        )
        self._written: set[str] = set()
        self._read = MemoryStore(max_bytes)
        self._prompts: collections.OrderedDict[Any, threading.Event] = collections.OrderedDict()
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._work, name="kvcache_jax store", daemon=True)
        self._thread.start()

    def load(self, cache: Cache) -> tuple[Cache, StoreReport]:
        """Loads what was saved, see `load`; waits for the store. The cache is donated."""
        cache, report = load(self._store, cache, weights=self._weights)
        self._written |= self._held(cache)
        return cache, report

    def save(self, cache: Cache) -> StoreReport:
        """Hands what is new to the thread; `num_saved` counts what it took. See `save`."""
        require_stored("save", cache)
        questions = Questions(_Handed(self))
        num_saved, listed = write_blocks(cache, questions, self._weights, None)
        if num_saved:
            self._give(lambda: write_lists(self._questions, listed, is_open=True), 0)
        return questions.report(num_saved=num_saved)

    def find(
        self, cache: Cache, prompt: Sequence[int] | np.ndarray, namespace: ArrayLike | None = None
    ) -> tuple[Cache, bool]:
        """Publishes what the store has of a prompt, once the thread has read it.

        Args:
          cache: Donated where it answers True.
          prompt: Token ids.
          namespace: u32[4]. Default: 0.

        Returns:
          The cache; and True if there is nothing to wait for any more, False for "later".
        """
        require_stored("find", cache)
        text = token_arguments.host_tokens("prompt", prompt).tolist()
        words = namespace_digits(namespace) or "0" * 32
        name = words, tuple(text)
        if name not in self._prompts:
            held, is_read = self._held(cache), threading.Event()
            scope, config, num_slots = (
                scopes_of(cache, self._weights, [words])[words],
                cache.config,
                slots_of(cache),
            )

            def read() -> None:
                try:
                    entries = entries_of(text, scope, config, num_slots, self._questions, held)
                    keys = [entry.key for entry in entries]
                    values = zip(keys, self._questions.get(keys), strict=True)
                    self._read.put([(key, value) for key, value in values if value is not None])
                finally:
                    is_read.set()

            if not self._give(read, 1):
                return cache, True
            self._prompts[name] = is_read
            if len(self._prompts) > _MOST_PROMPTS:
                self._prompts.popitem(last=False)
        if not self._prompts[name].is_set():
            return cache, False
        del self._prompts[name]
        cache, _ = load(self._read, cache, weights=self._weights, namespace=namespace, prompts=[text])
        self._written |= self._held(cache)
        return cache, True

    def report(self) -> StoreReport:
        """Counts the failures of the store so far, by reason."""
        return self._questions.report()

    def flush(self) -> None:
        """Waits until the thread has done all that it was given."""
        self._jobs.join()

    def close(self, timeout: float = 10.0) -> bool:
        """Ends the thread after what it was given; returns whether all was done within `timeout` seconds."""
        try:
            self._jobs.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _held(self, cache: Cache) -> set[str]:
        blocks = read_blocks(cache)
        words = {blocks.namespace(int(block)) for block in np.flatnonzero(blocks.is_published)}
        found = published_blocks(
            blocks, cache.config.indexed_group, scopes_of(cache, self._weights, words), 0
        )
        return {entry.key for block in found for entry in block.entries}

    def _give(self, job: Callable[[], None], num_lost: int) -> bool:
        """Gives the thread a job, if the queue has room; counts what is lost otherwise."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.num_dropped += num_lost
            return False
        return True

    def _write(self, items: Sequence[tuple[str, Data]]) -> None:
        if not self._questions.put(items):
            self._written.difference_update(key for key, _ in items)  # to be tried again

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                self._jobs.task_done()
        self._jobs.task_done()


class _Handed:
    """The side of an `AttachedStore` that a loop writes to: it has what was handed over."""

    def __init__(self, attached: AttachedStore):
        self._attached = attached

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return [key in self._attached._written for key in keys]

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        return [None] * len(keys)

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        attached = self._attached
        if not attached._give(lambda: attached._write(items), len(items)):
            raise queue.Full
        if len(attached._written) > _MOST_KEYS:
            attached._written.clear()  # what is written again is the same
        attached._written.update(key for key, _ in items)

    def remove(self, keys: Sequence[str]) -> None:
        pass
