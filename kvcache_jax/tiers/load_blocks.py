"""The operation `load`: blocks of a store are published in a cache, after each was compared with its name."""

import array
import collections
import dataclasses
import functools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import as_list
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core import token_arguments
from kvcache_jax.core.attachment import ShardCache
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status
from kvcache_jax.operations.transfer import BlockContents, export_blocks, import_making_room
from kvcache_jax.tiers.block_store import BlockStore
from kvcache_jax.tiers.catalogue import Questions, StoreReport, read_entries, read_namespaces
from kvcache_jax.tiers.host import Host
from kvcache_jax.tiers.host_operations import prefetch
from kvcache_jax.tiers.hosted import capacity, tier_of
from kvcache_jax.tiers.published import Entry, Keyed, NamedBlocks, keyed_by, read_blocks
from kvcache_jax.tiers.save_blocks import (
    batch_size,
    checked_weights,
    namespace_digits,
    require_stored,
    scopes_of,
)
from kvcache_jax.tiers.stored_block import (
    BadValueError,
    BlockName,
    Scope,
    array_specs,
    arrays_text,
    config_digest,
    unpack_block,
)

_THREADS, _LEAST_BYTES = 4, 2**18
"""Threads that verify blocks of so many bytes. Smaller ones are verified without: threads would wait for each
other."""
_MISSING, _ALIGNMENT = "missing", 64
COUNTED = bytearray()
"""In place of the value of a block that was dropped and counted when it was read."""

type _Verified = dict[str, BlockName | str]
"""By key the name of a block, or the reason why it is none; "" for one that was counted."""


import_with_room = jax.jit(import_making_room, donate_argnums=0)


@explicit_transfers
def _import(cache: Cache, contents: BlockContents) -> tuple[Cache, Any]:
    """Publishes blocks where the cache is; donates it."""
    return cache.publish(contents) if isinstance(cache, ShardCache) else import_with_room(cache, contents)


def load(
    store: BlockStore,
    cache: Cache,
    *,
    weights: str,
    namespace: ArrayLike | None = None,
    prompts: Sequence[Sequence[int] | np.ndarray] | None = None,
) -> tuple[Cache, StoreReport]:
    """Publishes blocks of a store in a cache, so that prompts find them.

    Of every block the checksum, key, weights, config, namespace, arrays and lengths are compared with what
    was asked. One that differs is dropped, removed from the store and counted, and so are the blocks that
    continue it.

    Free blocks are filled, with the prefixes that were used last, and nothing is evicted; of what is loaded
    the prefixes used longest ago are evicted first. With `prompts`, cached blocks make room as for new rows.

    Args:
      store: As of `save`.
      cache: Donated; outside of jit. What it holds stays.
      weights: The digest under which the blocks were saved.
      namespace: u32[4], the only one. Default: all that were saved without one; with `prompts`, 0.
      prompts: Texts whose prefixes are looked for, and nothing else. Default: all that was saved.

    Returns:
      The cache; what was loaded, and what was not and why.

    Raises:
      ValueError, TypeError: as `save`, and prompts that are no token ids.
    """
    checked_weights(weights)
    require_stored("load", cache)
    listed = [] if prompts is None else as_list("prompts", prompts, "prompts, each a list of token ids")
    questions, words = Questions(store), namespace_digits(namespace)
    if words is not None:
        names = [words]
    elif prompts is not None:
        names = ["0" * 32]
    else:
        names = read_namespaces(questions, weights, config_digest(cache.config))
    scopes = scopes_of(cache, weights, names)
    texts = [token_arguments.host_tokens("prompts", prompt).tolist() for prompt in listed]
    cache = on_device(cache, texts, names[0] if names else "")
    named: NamedBlocks[Keyed] = NamedBlocks()
    named.update(read_blocks(cache), keyed_by(scopes, cache.config.indexed_group))
    held = dict(filter(None, named.names))
    if prompts is None:
        found = [(entry, scope) for scope in scopes.values() for entry in read_entries(questions, scope)]
    else:
        scope, num_slots = scopes[names[0]], slots_of(cache)
        found = [
            (entry, scope)
            for text in texts
            for entry in entries_of(text, scope, cache.config, num_slots, questions, held)
        ]
    cache, num_loaded, _ = load_entries(cache, questions, found, held, may_evict=prompts is not None)
    return cache, questions.report(num_loaded=num_loaded)


def load_entries(
    cache: Cache,
    questions: Questions,
    found: Iterable[tuple[Entry, Scope]],
    held: Mapping[str, BlockName],
    *,
    may_evict: bool,
) -> tuple[Cache, int, Mapping[str, BlockName]]:
    """Publishes blocks that a store lists, as `load` does.

    Args:
      cache: Donated.
      questions: To the store.
      found: Each with its scope.
      held: By key the names of the blocks that the cache has, of the group that prefixes are found by.
      may_evict: Whether cached blocks make room.

    Returns:
      The cache, how many blocks were loaded, and what the cache has now.
    """
    loading = _Loading(cache, questions, held)
    entries = {entry.key: (entry, scope) for entry, scope in found}
    loading.publish(loading.plan(entries, may_evict))
    return loading.cache, loading.num_loaded, loading.names


def on_device(cache: Cache, texts: Sequence[Sequence[int]], namespace: str) -> Cache:
    """Promotes what the host has of prompts, so that blocks which continue it can be published."""
    cache = cache.config.keeper.settle(cache)
    if isinstance(cache.config.keeper, Host):
        width = cache.config.max_seq_len
        for text in texts:
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(text)] = text[:width]
            cache, _ = prefetch(cache, tokens, [min(len(text), width)], words_of(namespace))
    return cache.config.keeper.settle(cache)


class _Planned(NamedTuple):
    """A block of the indexed group that is to be published, with the linked blocks of other groups."""

    entry: Entry
    linked: list[Entry]
    scope: Scope


class _Loading:
    """A cache into which blocks are loaded."""

    def __init__(self, cache: Cache, questions: Questions, held: Mapping[str, BlockName]):
        config = cache.config
        self.cache, self.num_loaded, self._size = cache, 0, batch_size(cache)
        self._questions, self._group_id = questions, config.indexed_group
        self._block_size = config.groups[self._group_id].block_size
        self.names = dict(held)  # of blocks that are there
        self._specs = [array_specs(config, g) for g in range(len(config.groups))]
        self._ends = [arrays_text(specs) for specs in self._specs]
        self._forms = _forms_of(config, self._size)
        self._pending: tuple[dict[int, tuple[str, int]], Any] = {}, np.zeros(0, np.int32)
        self._text = "", array.array("i")  # the last one that was put together, by its key

    @explicit_transfers
    def plan(self, entries: Mapping[str, tuple[Entry, Scope]], may_evict: bool) -> list[_Planned]:
        """Chooses what there is room for, what was used last first; lists it in the order of publication.

        A prefix that was used later is published later, and so evicted later.
        """
        room = []
        for pool in self.cache.control.block_pools:
            assert pool.cached is not None
            room.append(int(pool.num_free) + (int(pool.cached.num_cached) if may_evict else 0))
        keeper = self.cache.config.keeper
        if isinstance(keeper, Host) and not may_evict:  # what the device evicts for others goes there
            for g, most in enumerate(capacity(self.cache.config, keeper.num_blocks)):
                hosted = tier_of(self.cache.control).control.block_pools[g].cached
                assert hosted is not None
                room[g] += max(most - int(hosted.num_cached), 0)
        by_age = sorted((entry for entry, _ in entries.values()), key=lambda entry: -entry.stamp)
        linked: dict[str, list[Entry]] = collections.defaultdict(list)
        chosen: dict[str, Entry] = {}
        for entry in by_age:
            if entry.group_id == self._group_id and entry.key not in self.names and entry.key not in chosen:
                path = self._path(entry, entries, chosen)
                if path is None:
                    self._questions.drop("the block before it is missing")
                elif len(path) > room[self._group_id]:
                    self._questions.drop("no room")
                else:
                    room[self._group_id] -= len(path)
                    chosen |= {each.key: each for each in path}
        for entry in by_age:
            g = entry.group_id
            if entry.anchor in chosen and g != self._group_id and self._is_place(entry):
                others = linked[entry.anchor]
                if any((other.group_id, other.slot) == (g, entry.slot) for other in others):
                    self._questions.drop("of another slot")  # else it would be read over what has its place
                elif room[g] > 0:
                    room[g] -= 1
                    others.append(entry)
                else:
                    self._questions.drop("no room")
        planned: dict[str, _Planned] = {}
        for entry in reversed(by_age):
            if entry.key in chosen and entry.key not in planned:
                for each in reversed(self._path(entry, entries, planned) or []):
                    planned[each.key] = _Planned(each, linked[each.key], entries[each.key][1])
        return [*planned.values()]

    def publish(self, plan: Sequence[_Planned]) -> None:
        """Reads blocks, verifies them and publishes those that are what was asked.

        A batch is read and verified while the device publishes the one before.
        """
        batches = [plan[start : start + self._size] for start in range(0, len(plan), self._size)]
        # One is filled while the device reads the other.
        contents = _Contents.make(min(len(batches), 2), self._forms, self._specs)
        with ThreadPoolExecutor(_THREADS) as threads:
            for nth, batch in enumerate(batches):
                mine = contents[nth % 2]
                self._publish(mine, batch, self._read(batch, mine, threads))
        self._count()

    def _read(
        self, batch: Sequence[_Planned], contents: "_Contents", threads: ThreadPoolExecutor
    ) -> _Verified:
        """Reads a batch, verifies it and fills contents, while the device publishes the one before."""
        asked = [
            (row, entry, planned)
            for row, planned in enumerate(batch)
            for entry in (planned.entry, *planned.linked)
        ]
        values = self._questions.get([entry.key for _, entry, _ in asked], COUNTED)
        contents.clear()

        def verify(nth: int, step: int) -> _Verified:
            found: _Verified = {}
            mine = asked[nth::step], values[nth::step]
            for (row, entry, planned), data in zip(*mine, strict=True):
                if data is None or data is COUNTED:
                    found[entry.key] = _MISSING if data is None else ""
                    continue
                place, end = (entry.group_id, entry.slot), self._ends[entry.group_id]
                try:
                    name, rest = unpack_block(
                        data, entry.key, planned.scope, planned.entry.anchor, place, end
                    )
                    contents.fill(row, *place, rest)
                except BadValueError as error:
                    found[entry.key] = str(error)
                else:
                    found[entry.key] = name
            return found

        if max((len(value) for value in values if value is not None), default=0) < _LEAST_BYTES:
            return verify(0, 1)
        parts = threads.map(lambda nth: verify(nth, _THREADS), range(_THREADS))
        return {key: name for part in parts for key, name in part.items()}

    def _publish(self, contents: "_Contents", batch: Sequence[_Planned], found: _Verified) -> None:
        spoilt: list[str] = []
        counts: dict[int, tuple[str, int]] = {}

        def drop(reason: str, entries: Iterable[Entry]) -> None:
            if count := sum(found[each.key] != "" for each in entries):
                self._questions.drop(reason, count)

        for row, planned in enumerate(batch):
            entry = planned.entry
            if entry.anchor and entry.anchor not in self.names:
                drop("the block before it is dropped", [entry, *planned.linked])
                continue
            name = self._verified(entry.key, found, spoilt)
            if name and len(name.tokens) != self._block_size:
                self._questions.drop("of other tokens")
                name = None
            if name is None:
                drop("the block that it is linked to is dropped", planned.linked)
                continue
            self.names[entry.key] = name
            others = [(each, self._verified(each.key, found, spoilt)) for each in planned.linked]
            held = [each for each, other in others if other is not None and other.tokens == name.tokens]
            contents.name(row, self._text_of(entry.key), planned.scope.namespace, [entry, *held])
            counts[row] = entry.key, 1 + len(held)
        self._questions.remove(spoilt)
        self._count()
        if counts:
            self.cache, status = _import(self.cache, contents.whole)
            self._pending = counts, status

    @explicit_transfers
    def _count(self) -> None:
        """Waits for the batch before and counts what became of it."""
        counts, status = self._pending
        codes = np.asarray(status).tolist()
        for row, (key, num_blocks) in counts.items():
            if codes[row] == Status.OK:
                self.num_loaded += num_blocks
            else:
                self._questions.drop(Status(codes[row]).name, num_blocks)
                del self.names[key]
        self._pending = {}, np.zeros(0, np.int32)

    def _verified(self, key: str, found: _Verified, spoilt: list[str]) -> BlockName | None:
        name = found[key]
        if isinstance(name, BlockName):
            return name
        if name:
            self._questions.drop(name)
        if name not in ("", _MISSING):
            spoilt.append(key)
        return None

    def _path(
        self, entry: Entry, entries: Mapping[str, tuple[Entry, Scope]], known: Mapping[str, object]
    ) -> list[Entry] | None:
        """Lists a block and those before it that are not known yet, the last first; None for no such path."""
        path = []
        while True:
            path.append(entry)
            if not entry.anchor or entry.anchor in known or entry.anchor in self.names:
                return path
            # The list may be anything, such as a circle.
            if entry.anchor not in entries or len(path) > len(entries):
                return None
            entry, _ = entries[entry.anchor]

    def _is_place(self, entry: Entry) -> bool:
        is_held = self._forms.is_held
        return entry.group_id < len(is_held) and entry.slot < is_held[entry.group_id].shape[1]

    def _text_of(self, key: str) -> np.ndarray:
        """Puts the tokens up to a block's end together; the array is there until the next call."""
        parts, at = [], key
        while at and at != self._text[0]:
            parts.append(self.names[at].tokens)
            at = self.names[at].parent
        text = self._text[1] if at else array.array("i")
        for tokens in reversed(parts):
            text.extend(tokens)
        self._text = key, text
        return np.frombuffer(text, np.int32)


@functools.lru_cache(16)
def _forms_of(config: CacheConfig, num_blocks: int) -> BlockContents:
    """Finds the shapes of an export of so many blocks."""
    whole = dataclasses.replace(config, head_axis=None, context_axis=None)
    ids = jax.ShapeDtypeStruct((num_blocks,), jnp.int32)
    return jax.eval_shape(lambda ids: export_blocks(init(whole), ids), ids)


class _Contents:
    """`BlockContents` that are filled block by block; what has no name is no block.

    Attributes:
      whole: The contents. A program may read them in place: they are cleared when it has ended.
    """

    def __init__(self, whole: Any, specs: Sequence[Sequence[Any]]):
        self.whole = whole
        # In the order of a value, which need not be the order of a tree.
        self._bytes = [
            [_bytes_of(arrays[name]) for name, *_ in each]
            for arrays, each in zip(whole.arrays, specs, strict=True)
        ]

    @classmethod
    def make(cls, num: int, forms: BlockContents, specs: Sequence[Sequence[Any]]) -> list["_Contents"]:
        """Makes several, in one piece of memory: the system gives large ones in large pages."""
        leaves, structure = jax.tree.flatten(forms)
        sizes = [form.dtype.itemsize * math.prod(form.shape) for form in leaves] * num
        # Each array begins where CPU devices read it without a copy.
        ends = np.cumsum([0, *(size + -size % _ALIGNMENT for size in sizes)])
        memory = np.zeros(ends[-1] + _ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNMENT :]
        arrays = [
            memory[start : start + size].view(form.dtype).reshape(form.shape)
            for form, start, size in zip(leaves * num, ends, sizes, strict=False)
        ]
        count = len(leaves)
        return [
            cls(jax.tree.unflatten(structure, arrays[i * count : (i + 1) * count]), specs) for i in range(num)
        ]

    def clear(self) -> None:
        """Makes all entries no blocks."""
        for each in (self.whole.num_tokens, *self.whole.is_held):
            each[...] = 0

    def fill(self, row: int, group_id: int, slot: int, data: memoryview) -> None:
        """Copies the bytes of a block's arrays, one after the other; from any thread."""
        places = [x[row, slot] for x in self._bytes[group_id]]
        if sum(map(len, places)) != len(data):
            raise BadValueError("another length than its arrays")
        values = np.frombuffer(data, np.uint8)
        for place in places:
            place[:], values = values[: len(place)], values[len(place) :]

    def name(self, row: int, text: np.ndarray, namespace: str, entries: Sequence[Entry]) -> None:
        """Says that a block and those linked to it are there."""
        self.whole.num_tokens[row] = len(text)
        self.whole.tokens[row, : len(text)] = text[: self.whole.tokens.shape[1]]
        self.whole.namespace[row] = words_of(namespace)
        for entry in entries:
            self.whole.is_held[entry.group_id][row, entry.slot] = True


@functools.lru_cache(64)
def words_of(namespace: str) -> np.ndarray:
    """Reads a namespace, u32[4], from 32 hexadecimal digits."""
    return np.frombuffer(bytes.fromhex(namespace), "<u4").astype(np.uint32)


def _bytes_of(values: np.ndarray) -> np.ndarray:
    """Views the bytes of each block."""
    num_bytes = values.itemsize * math.prod(values.shape[2:])
    return values.view(np.uint8).reshape(*values.shape[:2], num_bytes)


def slots_of(cache: Cache) -> list[int]:
    """Counts the blocks of each layer group that one of the group that prefixes are found by may link to."""
    index = cache.control.prefix_index
    assert index is not None
    return [0 if links is None else links.block_ids.shape[1] for links in index.group_links]


def entries_of(
    text: list[int],
    scope: Scope,
    config: CacheConfig,
    num_slots: Sequence[int],
    questions: Questions,
    held: Collection[str],
) -> Iterator[Entry]:
    """Yields what a store has of a prompt, without its last token and the blocks with the keys `held`."""
    now, group_id = time.time_ns(), config.indexed_group
    block_size = config.groups[group_id].block_size
    names, parent = {}, ""
    for start in range(0, (len(text) - 1) // block_size * block_size, block_size):
        name = BlockName(scope, parent, tuple(text[start : start + block_size]), group_id)
        parent = name.key
        names[parent] = name
    asked = [key for key in names if key not in held]
    linked = []
    for key, is_there in zip(asked, questions.contains(asked), strict=True):
        if not is_there:
            break
        yield Entry(key, names[key].parent, group_id, 0, now)
        for g, num in enumerate(num_slots):
            for slot in range(num):
                linked.append(Entry(names[key]._replace(group_id=g, slot=slot).key, key, g, slot, now))
    known = questions.contains([entry.key for entry in linked])
    yield from (entry for entry, is_one in zip(linked, known, strict=True) if is_one)
