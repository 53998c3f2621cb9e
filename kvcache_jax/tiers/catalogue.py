"""Questions to a store, with its failures counted; and the list, in the store, of what was saved there."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvcache_jax.tiers.block_store import BlockStore, Data
from kvcache_jax.tiers.published import Entry
from kvcache_jax.tiers.stored_block import BadValueError, Scope, key_of, pack, unpack

_ROW = np.dtype([("key", "V32"), ("anchor", "V32"), ("group_id", "<u2"), ("slot", "<u2"), ("stamp", "<u8")])
_NO_KEY = "0" * 64
_NAMESPACE = re.compile("[0-9a-f]{32}")
_MOST_ROWS = 2**18
_BATCH = 256
_MOST_TRIES = 16
"""To write a list that other processes write too; the last one overwrites what they write."""


@dataclasses.dataclass(frozen=True)
class StoreReport:
    """The result of `save` and `load`, in blocks of all layer groups.

    Attributes:
      num_saved: Blocks that were written.
      num_loaded: Blocks that the cache got.
      num_dropped: Blocks that were neither, for the reasons below.
      reasons: How many, by reason: such as "wrong checksum", "of other weights", "of other tokens",
        "missing", "no room", "the block before it is dropped"; or "ConnectionError" of a call that failed.
    """

    num_saved: int = 0
    num_loaded: int = 0
    reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        """Blocks that were neither saved nor loaded."""
        return sum(self.reasons.values())


class Questions:
    """Questions to a store. One that fails is answered with misses, and counted by its error's name.

    Attributes:
      reasons: Counts of what was dropped, by reason.
    """

    def __init__(self, store: BlockStore):
        if not isinstance(store, BlockStore):
            raise TypeError(
                f"store is a {type(store).__name__}, expected one with contains, get, put and remove: "
                "kv.tiers.DirectoryStore, for one"
            )
        self._store = store
        self.reasons: collections.Counter[str] = collections.Counter()

    def contains(self, keys: Sequence[str], default: bool = False) -> list[bool]:
        """Tests which keys have a value; `default` is the answer where the store gives none."""
        return self._answers(lambda keys: [bool(each) for each in self._store.contains(keys)], keys, default)

    def get(self, keys: Sequence[str], dropped: Data | None = None) -> list[Data | None]:
        """Reads the value of each key; None for a miss, and `dropped` where the reason was counted here."""

        def read(value: Any) -> Data | None:
            if value is None or _is_bytes(value):
                return value
            if value is not _FAILED:
                self.drop("no bytes")
            return dropped

        return [read(value) for value in self._answers(self._store.get, keys, _FAILED)]

    def put(self, items: Sequence[tuple[str, Data]]) -> bool:
        """Writes values; returns whether the store says that it did."""
        return self._call(self._store.put, items) is not _FAILED

    def replace(self, key: str, before: Data | None, after: Data) -> bool:
        """Writes a value; returns False if there is another one than before, where the store can tell."""
        replace = getattr(self._store, "replace", None)
        if replace is None:
            self.put([(key, after)])
            return True
        return self._call(lambda keys: bool(replace(*keys, before, after)), [key]) is not False

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values."""
        if keys:
            self._call(self._store.remove, keys)

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts blocks that are dropped."""
        self.reasons[reason] += count

    def report(self, **counts: int) -> StoreReport:
        """Makes the report."""
        return StoreReport(**counts, reasons=dict(self.reasons))

    def _answers(self, ask: Callable[[Sequence[str]], Sequence[Any]], keys: Sequence[str], miss: Any) -> list:
        found: list[Any] = []
        for start in range(0, len(keys), _BATCH):
            some = keys[start : start + _BATCH]
            answers = self._call(lambda some: [*ask(some)], some)
            if answers is not _FAILED and len(answers) != len(some):
                self.drop("the store gave another number of answers", len(some))
                answers = _FAILED
            found += [miss] * len(some) if answers is _FAILED else answers
        return found

    def _call(self, ask: Callable[[Any], Any], what: Sequence[Any]) -> Any:
        try:
            return ask(what)
        except Exception as error:  # a store may fail in any way, and costs hits alone
            self.drop(type(error).__name__, len(what))
            return _FAILED


_FAILED: Any = object()


def _is_bytes(value: Any) -> bool:
    try:
        return isinstance(value, Data.__value__) and memoryview(value).c_contiguous
    except ValueError:  # memory that was released
        return False


def read_entries(store: Questions, scope: Scope) -> list[Entry]:
    """Reads what was saved of a scope; nothing where the list is lost or spoilt."""
    key = key_of("catalogue", scope._asdict())
    return _entries_in(key, *_read(store, key)[:2])


def _entries_in(key: str, header: Mapping[str, Any], rest: Data) -> list[Entry]:
    if header != {"catalogue": key} or len(rest) % _ROW.itemsize:
        return []
    rows, digits = np.frombuffer(rest, _ROW), rest.hex()
    columns = [rows[name].tolist() for name in ("group_id", "slot", "stamp")]
    keys = [digits[start : start + 128] for start in range(0, len(digits), 2 * _ROW.itemsize)]
    return [
        Entry(both[:64], "" if both[64:] == _NO_KEY else both[64:], *places)
        for both, *places in zip(keys, *columns, strict=True)
    ]


def write_entries(
    store: Questions, scope: Scope, change: Callable[[Sequence[Entry]], Iterable[Entry]]
) -> None:
    """Writes what `change` makes of the list of a scope, the entries used last where they are too many."""
    key = key_of("catalogue", scope._asdict())

    def changed(header: Mapping[str, Any], rest: Data) -> bytes:
        entries = change(_entries_in(key, header, rest))
        kept = sorted(entries, key=lambda entry: -entry.stamp)[:_MOST_ROWS]
        keys = [(bytes.fromhex(entry.key), bytes.fromhex(entry.anchor or _NO_KEY)) for entry in kept]
        rows = np.array([(*both, *entry[2:]) for both, entry in zip(keys, kept, strict=True)], _ROW)
        return pack({"catalogue": key}, [rows.tobytes()])

    _update(store, key, changed)


def read_namespaces(store: Questions, weights: str, config: str) -> list[str]:
    """Reads the namespaces that were saved without one being named, each as 32 hexadecimal digits."""
    return _names_in(_read(store, _namespaces_key(weights, config))[0])


def _names_in(header: Mapping[str, Any]) -> list[str]:
    names = header.get("namespaces")
    names = names if isinstance(names, list) else []
    return [name for name in names if isinstance(name, str) and _NAMESPACE.fullmatch(name)]


def write_namespaces(store: Questions, weights: str, config: str, namespaces: Sequence[str]) -> None:
    """Adds to the namespaces that were saved."""

    def changed(header: Mapping[str, Any], rest: Data) -> bytes | None:
        known = {*_names_in(header)}
        return None if known >= {*namespaces} else pack({"namespaces": sorted(known.union(namespaces))}, [])

    _update(store, _namespaces_key(weights, config), changed)


def _namespaces_key(weights: str, config: str) -> str:
    return key_of("namespaces", {"weights": weights, "config": config})


def _update(store: Questions, key: str, change: Callable[[Mapping[str, Any], Data], bytes | None]) -> None:
    """Writes what `change` makes of a list, also where others write it meanwhile; None for no change."""
    last: Any = _FAILED
    for nth in range(_MOST_TRIES):
        header, rest, before = _read(store, key)
        after = change(header, rest)
        if after is None:
            return
        # One that cannot be replaced though it has not changed cannot be read.
        if before == last or nth + 1 == _MOST_TRIES:
            store.put([(key, after)])
            return
        if store.replace(key, before, after):
            return
        last = before


def _read(store: Questions, key: str) -> tuple[dict[str, Any], Data, Data | None]:
    """Reads a list: its header, what follows it, and all of its bytes, None where it is lost or spoilt."""
    data = store.get([key])[0]
    if data is not None:
        try:
            return *unpack(data), data
        except BadValueError as error:
            store.drop(f"list {error}")
            store.remove([key])
    return {}, b"", None
