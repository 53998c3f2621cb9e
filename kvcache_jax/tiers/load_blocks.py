"""The operation `load`: blocks of a store are published in a cache, after each was compared with its name."""

import collections
import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.core import token_arguments
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status
from kvcache_jax.operations.transfer import BlockContents, export_blocks, import_blocks
from kvcache_jax.prefix import eviction
from kvcache_jax.tiers.block_store import BlockStore, Data
from kvcache_jax.tiers.catalogue import Questions, StoreReport, read_entries, read_namespaces
from kvcache_jax.tiers.host import Host
from kvcache_jax.tiers.host_operations import prefetch
from kvcache_jax.tiers.hosted import capacity, tier_of
from kvcache_jax.tiers.published import Entry, Published, published_blocks, read_blocks
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
    config_digest,
    unpack_block,
)

_import = jax.jit(import_blocks, donate_argnums=0)
_make_room = jax.jit(eviction.make_room, static_argnames="config")


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
    questions, words = Questions(store), namespace_digits(namespace)
    if words is not None:
        names = [words]
    elif prompts is not None:
        names = ["0" * 32]
    else:
        names = read_namespaces(questions, weights, config_digest(cache.config))
    scopes = scopes_of(cache, weights, names)
    texts = [token_arguments.host_tokens("prompts", prompt).tolist() for prompt in prompts or ()]
    cache = _on_device(cache, texts, names)
    held = list(published_blocks(read_blocks(cache), cache.config.indexed_group, scopes, 0))
    loading = _Loading(cache, questions, held)
    if prompts is not None:
        keys = {entry.key for block in held for entry in block.entries}
        num_slots = slots_of(cache)
        found = [
            entries_of(text, scopes[names[0]], cache.config, num_slots, questions, keys) for text in texts
        ]
        entries = {entry.key: (entry, scopes[names[0]]) for some in found for entry in some}
    else:
        entries = {
            entry.key: (entry, scope) for scope in scopes.values() for entry in read_entries(questions, scope)
        }
    plan = loading.plan(entries, may_evict=prompts is not None)
    for start in range(0, len(plan), loading.size):
        loading.publish(plan[start : start + loading.size])
    loading.count()
    return loading.cache, questions.report(num_loaded=loading.num_loaded)


def _on_device(cache: Cache, texts: Sequence[Sequence[int]], names: Sequence[str]) -> Cache:
    """Promotes what the host has of prompts, so that blocks which continue it can be published."""
    cache = cache.config.keeper.settle(cache)
    if isinstance(cache.config.keeper, Host):
        width = cache.config.max_seq_len
        for text in texts:
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(text)] = text[:width]
            words = np.frombuffer(bytes.fromhex(names[0]), "<u4").astype(np.uint32)
            cache, _ = prefetch(cache, tokens, [min(len(text), width)], words)
    return cache.config.keeper.settle(cache)


class _Planned(NamedTuple):
    """A block of the indexed group that is to be published, with the linked blocks of other groups."""

    entry: Entry
    linked: list[Entry]
    scope: Scope


class _Loading:
    """A cache into which blocks are loaded."""

    def __init__(self, cache: Cache, questions: Questions, held: Sequence[Published]):
        config = cache.config
        self.cache, self.size, self.num_loaded = cache, batch_size(cache), 0
        self._questions, self._group_id = questions, config.indexed_group
        self._names = {block.entries[0].key: block.names[0] for block in held}  # of blocks that are there
        self._specs = [array_specs(config, g) for g in range(len(config.groups))]
        self._forms = jax.eval_shape(export_blocks, cache, jax.ShapeDtypeStruct((self.size,), jnp.int32))
        self._pending: tuple[list[tuple[str, int]], Any] = [], np.zeros(0, np.int32)
        self._text = "", np.zeros(0, np.int32)  # the last one that was put together, by its key

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
            if entry.group_id == self._group_id and entry.key not in self._names and entry.key not in chosen:
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
                if room[g] > 0:
                    room[g] -= 1
                    linked[entry.anchor].append(entry)
                else:
                    self._questions.drop("no room")
        planned: dict[str, _Planned] = {}
        for entry in reversed(by_age):
            if entry.key in chosen and entry.key not in planned:
                for each in reversed(self._path(entry, entries, planned) or []):
                    planned[each.key] = _Planned(each, linked[each.key], entries[each.key][1])
        return [*planned.values()]

    def publish(self, batch: Sequence[_Planned]) -> None:
        """Reads blocks, verifies them and publishes those that are what was asked."""
        asked = [entry for planned in batch for entry in (planned.entry, *planned.linked)]
        values = self._questions.get([entry.key for entry in asked])
        found = dict(zip([entry.key for entry in asked], values, strict=True))
        contents = _Contents(self._forms)
        spoilt: list[str] = []
        counts: list[tuple[str, int]] = []
        for planned in batch:
            entry, data = planned.entry, found[planned.entry.key]
            if entry.anchor and entry.anchor not in self._names:
                self._questions.drop("the block before it is dropped", 1 + len(planned.linked))
                continue
            block = self._verified(entry, data, planned.scope, entry.anchor, spoilt)
            if block is None:
                self._drop_linked(planned)
                continue
            name, arrays = block
            if len(name.tokens) != self.cache.config.groups[self._group_id].block_size:
                self._questions.drop("of other tokens")
                self._drop_linked(planned)
                continue
            self._names[entry.key] = name
            blocks = {(self._group_id, 0): arrays}
            for each in planned.linked:
                other = self._verified(each, found[each.key], planned.scope, entry.anchor, spoilt)
                if other is not None and other[0].tokens == name.tokens:
                    blocks[each.group_id, each.slot] = other[1]
            contents.add(self._text_of(entry.key), planned.scope.namespace, blocks)
            counts.append((entry.key, len(blocks)))
        self._questions.remove(spoilt)
        if not counts:
            return
        needs = {g: np.int32(held.sum()) for g, held in enumerate(contents.whole().is_held)}
        control = _make_room(self.cache.control, needs, config=self.cache.config)
        self.cache = dataclasses.replace(self.cache, control=control)
        self.count()
        # The device publishes this batch while the next one is read.
        self.cache, status = _import(self.cache, contents.whole())
        self._pending = counts, status

    def count(self) -> None:
        """Counts what became of the last batch."""
        counts, status = self._pending
        for (key, num_blocks), code in zip(counts, np.asarray(status).tolist(), strict=False):
            if code == Status.OK:
                self.num_loaded += num_blocks
            else:
                self._questions.drop(Status(code).name, num_blocks)
                del self._names[key]
        self._pending = [], np.zeros(0, np.int32)

    def _path(
        self, entry: Entry, entries: Mapping[str, tuple[Entry, Scope]], known: Mapping[str, object]
    ) -> list[Entry] | None:
        """Lists a block and those before it that are not known yet, the last first; None for no such path."""
        path = []
        while True:
            path.append(entry)
            if not entry.anchor or entry.anchor in known or entry.anchor in self._names:
                return path
            # The list may be anything, such as a circle.
            if entry.anchor not in entries or len(path) > len(entries):
                return None
            entry, _ = entries[entry.anchor]

    def _is_place(self, entry: Entry) -> bool:
        is_held = self._forms.is_held
        return entry.group_id < len(is_held) and entry.slot < is_held[entry.group_id].shape[1]

    def _verified(
        self, entry: Entry, data: Data | None, scope: Scope, parent: str, spoilt: list[str]
    ) -> tuple[BlockName, dict[str, np.ndarray]] | None:
        if data is None:
            self._questions.drop("missing")
            return None
        try:
            place = entry.group_id, entry.slot
            return unpack_block(data, entry.key, scope, parent, place, self._specs[entry.group_id])
        except BadValueError as error:
            self._questions.drop(str(error))
            spoilt.append(entry.key)
            return None

    def _drop_linked(self, planned: _Planned) -> None:
        if planned.linked:
            self._questions.drop("the block that it is linked to is dropped", len(planned.linked))

    def _text_of(self, key: str) -> np.ndarray:
        """Puts the tokens up to a block's end together."""
        parts, at = [], key
        while at and at != self._text[0]:
            parts.append(np.array(self._names[at].tokens, np.int32))
            at = self._names[at].parent
        before = [self._text[1]] if at else []
        self._text = key, np.concatenate([*before, *reversed(parts)])
        return self._text[1]


class _Contents:
    """`BlockContents` that are filled block by block; what is left over is no block."""

    def __init__(self, forms: BlockContents):
        self._contents: BlockContents = jax.tree.map(lambda form: np.zeros(form.shape, form.dtype), forms)
        self._count = 0

    def add(
        self, text: np.ndarray, namespace: str, blocks: Mapping[tuple[int, int], Mapping[str, np.ndarray]]
    ) -> None:
        """Adds a block with those linked to it, by layer group and slot."""
        contents, i = self._contents, self._count
        contents.num_tokens[i] = len(text)
        contents.tokens[i, : len(text)] = text[: contents.tokens.shape[1]]
        contents.namespace[i] = np.frombuffer(bytes.fromhex(namespace), "<u4")
        for (g, slot), arrays in blocks.items():
            contents.is_held[g][i, slot] = True
            for name, values in arrays.items():
                contents.arrays[g][name][i, slot] = values
        self._count += 1

    def whole(self) -> BlockContents:
        """Returns the contents."""
        return self._contents


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
