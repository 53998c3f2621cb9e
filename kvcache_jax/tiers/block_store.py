"""Stores of blocks as bytes, by key: what a store is asked, and the one in this process's memory.

A store may lose, reorder, repeat or spoil what it was given, or be down: `save` and `load` compare all that
comes back with what was asked. So a store of one's own needs these four functions and no care beyond.
"""

import collections
import re
import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

type Data = bytes | bytearray | memoryview
"""A value, or what one is read as without a copy."""

_KEY = re.compile("[0-9a-f]{64}")


@runtime_checkable
class BlockStore(Protocol):
    """A place where values of bytes are kept by keys of 64 hexadecimal digits.

    A call may raise any exception; its keys then count as misses. A store that several processes write also
    has `replace(key, before, after) -> bool`, as `MemoryStore` has it: without it, of lists of blocks that
    two processes write at the same moment one is lost, and its blocks are found by `load(prompts=)` alone.
    """

    def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        """Tests which keys have a value."""
        ...

    def get(self, keys: Sequence[str]) -> Sequence[Data | None]:
        """Reads the value of each key; None for a miss."""
        ...

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value; a reader sees an old value or a whole new one."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped."""
        ...


def checked_key(key: str) -> str:
    """Returns a key; refuses one that is none, such as a path."""
    if not (isinstance(key, str) and _KEY.fullmatch(key)):
        raise ValueError(f"key is {key!r}, expected 64 hexadecimal digits, as `save` makes them")
    return key


def checked_limit(max_bytes: int | None) -> int | None:
    """Returns a limit of bytes; refuses one that is not positive, and True, which is an int."""
    is_count = isinstance(max_bytes, int) and not isinstance(max_bytes, bool)
    if max_bytes is not None and not (is_count and max_bytes > 0):
        raise ValueError(f"max_bytes is {max_bytes!r}, expected a positive int, or None for no limit")
    return max_bytes


class MemoryStore:
    """A store in this process's memory; calls may come from any thread.

    Attributes:
      max_bytes: Bytes of values; those used longest ago make room. None for no limit.

    Example:
      >>> import kvcache_jax as kv
      >>> store = kv.tiers.MemoryStore()
      >>> store.put([("0" * 64, b"value")])
      >>> store.get(["0" * 64, "1" * 64])
      [b'value', None]
    """

    def __init__(self, max_bytes: int | None = None):
        self.max_bytes = checked_limit(max_bytes)
        self._values: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.RLock()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys have a value."""
        with self._lock:
            return [checked_key(key) in self._values for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads the value of each key; None for a miss."""
        with self._lock:
            for key in keys:
                if checked_key(key) in self._values:
                    self._values.move_to_end(key)
            return [self._values.get(key) for key in keys]

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value."""
        with self._lock:
            for key, value in items:
                self._drop(checked_key(key))
                self._values[key] = bytes(value)
                self._num_bytes += len(value)
            while self.max_bytes is not None and self._num_bytes > self.max_bytes:
                self._drop(next(iter(self._values)))

    def replace(self, key: str, before: Data | None, after: Data) -> bool:
        """Writes a value if the one before is still there; None if there was none. Returns whether it did."""
        with self._lock:
            if self._values.get(checked_key(key)) != before:
                return False
            self.put([(key, after)])
        return True

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped."""
        with self._lock:
            for key in keys:
                self._drop(checked_key(key))

    def _drop(self, key: str) -> None:
        self._num_bytes -= len(self._values.pop(key, b""))
