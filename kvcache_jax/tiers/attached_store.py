"""A store beside a loop on the host, which never waits for it: one thread writes to it and reads from it."""

import collections
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import finite_number, static_count
from kvcache_jax.core import token_arguments
from kvcache_jax.core.attachment import Attachment, require_prefix_caching, shard_of
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.tiers.block_store import BlockStore, MemoryStore
from kvcache_jax.tiers.catalogue import Questions, StoreReport
from kvcache_jax.tiers.load_blocks import COUNTED, entries_of, load, load_entries, on_device, slots_of
from kvcache_jax.tiers.published import (
    Entry,
    Keyed,
    NamedBlocks,
    keyed_by,
    namespaces_of,
    published_block,
    read_blocks,
)
from kvcache_jax.tiers.save_blocks import (
    Contents,
    checked_weights,
    namespace_digits,
    read_contents,
    require_pools_alone,
    require_stored,
    scopes_of,
    write_lists,
)
from kvcache_jax.tiers.stored_block import BlockName, Scope, pack_block

_MOST_KEYS, _MOST_PROMPTS = 2**18, 1024
_MOST_VALUES = 64
"""Values that are held at a time before they are copied: of a file each, mapped, takes a descriptor."""
_READ, _WRITE, _END = range(3)


class _Search(NamedTuple):
    """A prompt that the thread looks up."""

    scope: Scope
    found: list[Entry]  # what the store has, complete when it is done
    is_done: threading.Event
    ends_at: float


class _Look:
    """The last look at a cache, or at a shard of a mesh.

    Attributes:
      named: Its blocks' names.
      links: By layer group.
      left: Blocks that there was no room for.
      read: What the thread has read for it.
      found: Questions to that.
    """

    def __init__(self, max_bytes: int | None):
        self.read = MemoryStore(max_bytes)
        self.found = Questions(self.read)
        self.named: NamedBlocks[Keyed] = NamedBlocks()
        self.links: list[np.ndarray | None] = []
        self.left: set[int] = set()

    @property
    def held(self) -> Mapping[str, BlockName]:
        """By key the names of all blocks."""
        return dict(filter(None, self.named.names))


class AttachedStore(Attachment):
    """A store that a loop on the host saves to and finds prompts in: `engine.attach`, `CacheManager(store=)`.

    Keys and values are copied to host memory when `save` is called; a thread writes them. What it cannot take
    in time is dropped and counted. A prompt is looked up by the thread too: `find` answers "later" until it
    is there. Each block is handed over once: one that the store fails to write is dropped and counted.
    Once it is closed it does nothing, and the loop goes on.

    Attributes:
      num_dropped: Blocks that were not written for want of room in the queue, and prompts that were not
        looked up in time.

    Raises:
      ValueError, TypeError: no store, or no digest.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        weights: str,
        max_queued: int = 64,
        max_bytes: int | None = 2**28,
        timeout: float = 1.0,
        namespace: ArrayLike | None = None,
    ):
        """Starts the thread.

        Args:
          store: Such as `DirectoryStore`; this thread alone calls it after `load`.
          weights: As of `save`.
          max_queued: Jobs that may wait when blocks are handed over, each of up to 64.
          max_bytes: Bytes that were read and not yet asked for, of each shard of a mesh.
          timeout: Seconds after which a prompt waits no longer; while the store takes longer for one job, no
            prompt is looked up.
          namespace: u32[4], the only one that the store sees, as of `save`; of an engine's requests it is
            `Engine.namespace_of(...)`. Default: all.
        """
        self._store, self._weights, self._questions = store, checked_weights(weights), Questions(store)
        # Prompts go first, and `None`, the end, last.
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers, self._max_queued = itertools.count(), static_count("max_queued", max_queued)
        self._timeout = finite_number("timeout", timeout)
        self._namespace, self._words = namespace, namespace_digits(namespace)
        # By shard.
        self._looks: dict[int, _Look] = collections.defaultdict(functools.partial(_Look, max_bytes))
        self._written: set[str] = set()
        self._to_list: dict[Scope, dict[str, Entry]] = {}  # the thread's: written, and not in the list
        self._searches: dict[tuple[int, str, bytes], _Search] = {}  # the oldest first
        self._began_at: float | None = None  # when the thread began its present job
        self._is_closed, self._lock = False, threading.Lock()  # of what the thread is given
        self._num_asked = self._num_hit = 0
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._work, name="kvcache_jax store", daemon=True)
        self._thread.start()

    def load(self, cache: Cache) -> tuple[Cache, StoreReport]:
        """Loads what was saved, see `load`; waits for the store. The cache is donated."""
        cache, report = load(self._store, cache, weights=self._weights, namespace=self._namespace)
        self._update(cache)
        self._written |= self._looks[shard_of(cache)].held.keys()
        return cache, report

    def save(self, cache: Cache) -> StoreReport:
        """Hands what is new to the thread; `num_saved` counts what it took. See `save`."""
        require_stored("save", cache)
        if self._is_closed:
            return StoreReport()
        if not bool(cache.config.keeper.is_settled(cache.control)):
            cache = cache.config.keeper.settle(cache)
        new, look = self._update(cache), self._looks[shard_of(cache)]
        num_new, is_full = len(new - look.left), self._is_full
        look.left |= new
        if is_full:
            self.num_dropped += num_new
            return StoreReport(reasons={"Full": num_new} if num_new else {})
        named, now, blocks = look.named, time.time_ns(), []
        assert named.blocks is not None
        for at in sorted(look.left):
            if keyed := named.names[at]:
                block = published_block(named.blocks, at, keyed, now)
                if not all(entry.key in self._written for entry in block.entries):
                    blocks.append(block)
        look.left, num_saved = set(), 0
        for batch, contents in read_contents(cache, blocks):
            entries = {entry.key: entry for block in batch for entry in block.entries}
            contents = [each for each in contents if each[1] not in self._written]
            if self._is_full:
                self.num_dropped += len(contents)
                look.left.update(block.ids[0] for block in batch)
                continue
            self._give(_WRITE, lambda contents=contents, entries=entries: self._write(contents, entries))
            num_saved += len(contents)
            self._written.update(key for _, key, _ in contents)
        if len(self._written) > _MOST_KEYS:
            self._written.clear()  # what is written again is the same
        return StoreReport(num_saved=num_saved)

    def begin(self, config: CacheConfig) -> None:
        """Forgets which blocks the cache before held; what was written is in the store."""
        require_prefix_caching("an AttachedStore", config)
        self._looks.clear()

    def check_shards(self, config: CacheConfig) -> None:
        """Refuses a mesh's caches that keep blocks outside of their pools."""
        require_pools_alone(self, config)

    def look(self, cache: Cache) -> None:
        """Saves what is new."""
        self.save(cache)

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
        tokens = token_arguments.host_tokens("prompt", prompt)
        words = namespace_digits(namespace) or "0" * 32
        if self._words not in (None, words):
            return cache, True
        name = shard_of(cache), words, tokens.tobytes()
        now, search = time.monotonic(), self._searches.get(name)
        if search is None and self._is_closed:
            return cache, True
        if search is None:
            if self._began_at is not None and now - self._began_at > self._timeout:
                self.num_dropped += 1
                return cache, True
            if len(self._searches) >= _MOST_PROMPTS:
                # One that nothing has asked for until now is forgotten.
                if self._searches[first := next(iter(self._searches))].ends_at > now:
                    return cache, False
                del self._searches[first]
            self._searches[name] = search = self._search(cache, tokens.tolist(), words, now + self._timeout)
        if not search.is_done.is_set():
            if now < search.ends_at:
                return cache, False
            self.num_dropped += 1
        del self._searches[name]
        self._num_asked += len(tokens)
        if search.is_done.is_set() and search.found:
            cache = self._publish(cache, tokens.tolist(), search)
        return cache, True

    def metrics(self) -> dict[str, float]:
        """Counts the tokens of prompts that were looked up, and of these that the store had."""
        return {
            "vllm:external_prefix_cache_queries": self._num_asked,
            "vllm:external_prefix_cache_hits": self._num_hit,
        }

    def report(self) -> StoreReport:
        """Counts the failures of the store so far, by reason."""
        reasons = (look.found.reasons for look in self._looks.values())
        return StoreReport(reasons=dict(sum(reasons, start=self._questions.reasons)))

    def flush(self) -> None:
        """Waits until the thread has done all that it was given."""
        self._jobs.join()

    def close(self, timeout: float = 10.0) -> bool:
        """Ends the thread after what it was given; returns whether all was done within `timeout` seconds."""
        self._give(_END, None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _update(self, cache: Cache) -> set[int]:
        """Reads the index; lists the blocks that are new, or have new ones linked to them."""
        blocks, look = read_blocks(cache), self._looks[shard_of(cache)]
        names = namespaces_of(blocks) if self._words is None else [self._words]
        scopes = scopes_of(cache, self._weights, names)
        new = set(look.named.update(blocks, keyed_by(scopes, cache.config.indexed_group)))
        for links, before in zip(blocks.links, look.links or [None] * len(blocks.links), strict=True):
            if links is not None and before is not None and len(links) == len(before):
                changed = np.flatnonzero((links != before).any(axis=1)).tolist()
                new.update(block for block in changed if look.named.names[block])
        look.links = blocks.links
        return new

    def _search(self, cache: Cache, text: list[int], words: str, ends_at: float) -> _Search:
        """Gives the thread a prompt to look for."""
        look = self._looks[shard_of(cache)]
        look.left |= self._update(cache)
        held, config, num_slots = look.held, cache.config, slots_of(cache)
        scope = scopes_of(cache, self._weights, [words])[words]
        search = _Search(scope, [], threading.Event(), ends_at)

        def look_up() -> None:
            try:
                found = list(entries_of(text, scope, config, num_slots, self._questions, held))
                for some in itertools.batched(found, _MOST_VALUES):
                    values = self._questions.get([entry.key for entry in some], COUNTED)
                    read = [pair for pair in zip(some, values, strict=True) if pair[1] is not COUNTED]
                    look.read.put([(entry.key, value) for entry, value in read if value is not None])
                    search.found.extend(entry for entry, _ in read)
            finally:
                search.is_done.set()
                if self.wake is not None:
                    self.wake()

        self._give(_READ, look_up)
        return search

    def _publish(self, cache: Cache, text: list[int], search: _Search) -> Cache:
        """Publishes what the thread has read."""
        scope, keys = search.scope, [entry.key for entry in search.found]
        look = self._looks[shard_of(cache)]
        was_read = look.read.contains(keys)
        cache = on_device(cache, [text], scope.namespace)
        look.left |= self._update(cache)
        held = look.held
        found = [(entry, scope) for entry in search.found]
        cache, _, now = load_entries(cache, look.found, found, held, may_evict=True)
        is_good = dict(zip(keys, look.read.contains(keys), strict=True))
        look.read.remove(keys)
        if spoilt := [key for key, was in zip(keys, was_read, strict=True) if was and not is_good[key]]:
            self._give(_WRITE, lambda: self._questions.remove(spoilt))
        self._written.update(key for key in keys if is_good[key])
        block_size = cache.config.groups[cache.config.indexed_group].block_size
        self._num_hit += (len(now) - len(held)) * block_size
        return cache

    @property
    def _is_full(self) -> bool:
        return self._jobs.qsize() >= self._max_queued

    def _give(self, kind: int, job: Callable[[], None] | None) -> None:
        """Gives the thread a job, before the end: it does what it was given."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = kind == _END
                self._jobs.put((kind, next(self._numbers), job))

    def _write(self, contents: Contents, entries: Mapping[str, Entry]) -> None:
        known = self._questions.contains([key for _, key, _ in contents])
        items = [
            (key, pack_block(name, arrays))
            for (name, key, arrays), is_one in zip(contents, known, strict=True)
            if not is_one
        ]
        if not items or self._questions.put(items):
            for name, key, _ in contents:
                self._to_list.setdefault(name.scope, {})[key] = entries[key]

    def _work(self) -> None:
        kind = _READ
        while kind != _END:
            kind, _, job = self._jobs.get()
            self._began_at = time.monotonic()
            try:
                if job is not None:
                    job()
                # To list blocks is to write the whole list: it is done when there is nothing else to do.
                if self._to_list and (kind == _END or self._jobs.empty()):
                    listed, self._to_list = self._to_list, {}
                    write_lists(self._questions, listed, is_open=self._words is None)
            except BaseException as error:  # such as asyncio's: a store costs hits, and never the thread
                self._questions.drop(type(error).__name__)
            finally:
                self._began_at = None
                self._jobs.task_done()
