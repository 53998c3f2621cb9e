"""A store of blocks in TensorStore's key-value stores: files, S3, GCS and others."""

import contextlib
import functools
import os
import pathlib
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvcache_jax.tiers.block_store import Data, checked_key, checked_limit

_NEWEST, _SIZES = "newest", "size of "
_NUMBER = re.compile("[0-9]{1,12}")
_MOST_LOOKS = 4
"""At the halves for the same keys, while others write so much that one after the other begins."""
# Of `ocdbt`, as measured with keys of 64 digits: a transaction writes the tree of all keys, and a manifest.
_ENTRY_BYTES, _MOST_INLINED, _TRANSACTION_BYTES = 112, 100, 400


class TensorStore:
    """A store in one of TensorStore's key-value stores, with a transaction for each `put`.

    With a limit, values go to the newer of two halves. When that is full, the older one is removed as a
    whole, with its files, and a new one begins. A value that is read in the older half is written to the
    newer one, so that what goes was not read for half of the limit; to be asked for by `contains` is no use.
    Without a limit the same place is another store, and a database keeps the room of what was replaced or
    removed.

    Attributes:
      spec: The store as TensorStore describes it. A path means `ocdbt` there, which keeps many values in
        few files and which several processes may write.
      max_bytes: Bytes that values take, written again or not, of all processes together. What the database
        writes with each `put` counts, which is some 100 bytes for each value that it has: so few small values
        are kept that are put one by one. What processes write at the same moment comes on top. A value that
        takes more than half of the limit is not kept. None for no limit.

    Raises:
      ImportError: tensorstore is missing; the extra `tensorstore` brings it.
      ValueError: TensorStore cannot open it, or the limit is none.

    Example:
      >>> import kvcache_jax as kv
      >>> store = kv.tiers.TensorStore({"driver": "memory"})
      >>> store.put([("0" * 64, b"value")])
      >>> store.get(["0" * 64, "1" * 64])
      [b'value', None]
    """

    def __init__(self, spec: str | os.PathLike[str] | Mapping[str, Any], *, max_bytes: int | None = None):
        try:
            import tensorstore
        except ImportError as error:
            raise ImportError(
                "TensorStore needs tensorstore, of the extra `tensorstore`: pip install "
                "'kvcache_jax[tensorstore]'"
            ) from error
        if not isinstance(spec, Mapping):
            base = f"file://{pathlib.Path(spec).resolve()}/"
            spec = {"driver": "ocdbt", "base": base}
        self.spec, self.max_bytes = dict(spec), checked_limit(max_bytes)
        self._ts: Any = tensorstore
        self._context = tensorstore.Context()
        self._lock, self._writer, self._halves = threading.Lock(), secrets.token_hex(8), dict[int, Any]()
        self._is_database = self.spec.get("driver") == "ocdbt"
        are_halves = max_bytes is not None and self._is_database
        self._root: Any = self._open(self.spec["base"] if are_halves else self.spec)
        if are_halves and self._root.path and not self._root.path.endswith("/"):
            self._root = self._root + "/"

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys have a value."""
        found = dict.fromkeys(map(checked_key, keys), False)
        for number, _ in self._places():
            left = [key for key, is_there in found.items() if not is_there]
            found |= self._ask(self._are_in, number, left) or {}
            if all(found.values()):
                break
        return [found[key] for key in keys]

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        """Reads the value of each key; None for a miss."""
        found: dict[str, bytes] = {}
        moved, stamps, left = [], {}, [*dict.fromkeys(map(checked_key, keys))]
        for number, is_older in self._places():
            for key, result in (self._ask(self._read, number, left) or {}).items():
                # A database says of a value whose file is gone that it is empty.
                if result.state == "value" and (result.value or not self._is_gone(number)):
                    found[key] = result.value
                    if is_older and not self._is_large(result.value):
                        moved.append((key, result.value))
                elif not is_older:
                    stamps[key] = result.stamp.generation
            left = [key for key in left if key not in found]
            if not left:
                break
        # What was read is returned, also where it cannot be written, or another process wrote meanwhile.
        with self._lock, contextlib.suppress(ValueError, RuntimeError, OSError):
            while moved:
                moved = self._put_some(moved, stamps)
        return [found.get(key) for key in keys]

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value in one transaction, or where halves are full in several."""
        pairs = [(checked_key(key), bytes(value)) for key, value in items]
        if self.max_bytes is None:
            self._write(self._root, pairs)
            return
        if large := [key for key, value in pairs if self._is_large(value)]:
            self.remove(large)
        pairs = [pair for pair in pairs if not self._is_large(pair[1])]
        with self._lock:
            while pairs:
                pairs = self._put_some(pairs)

    def replace(self, key: str, before: Data | None, after: Data) -> bool:
        """Writes a value if the one before is still there; None if there was none. Returns whether it did.

        With a limit it writes the value always.
        """
        if self.max_bytes is not None:
            self.put([(key, after)])
            return True
        found = self._root.read(checked_key(key)).result()
        if (found.value if found.state == "value" else None) != before:
            return False
        written = self._root.write(key, bytes(after), if_equal=found.stamp.generation).result()
        return bool(written.generation)

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped.

        With a limit, one that another process reads meanwhile may come back, by its move to the newer half.
        """
        checked = [*map(checked_key, keys)]
        for number, _ in self._places():
            self._ask(self._remove, number, checked)

    def _remove(self, values: Any, keys: Sequence[str]) -> None:
        found = self._are_in(values, keys)
        # Of a database also a transaction that changes nothing may take room.
        if there := [(key, None) for key, is_there in found.items() if is_there]:
            self._write(values, there)

    def _put_some(
        self, pairs: list[tuple[str, bytes]], stamps: Mapping[str, Any] = MappingProxyType({})
    ) -> list[tuple[str, bytes]]:
        """Writes pairs until the newer half is full, and begins a new one; returns the pairs left.

        Of a key in `stamps` the newer half must be as it was then, or nothing is written.
        """
        number, stamp = self._newest()
        left = self._ask(functools.partial(self._put_in, number, stamp, stamps), number, pairs)
        return pairs if left is None else left

    def _put_in(
        self,
        number: int,
        stamp: Any,
        stamps: Mapping[str, Any],
        values: Any,
        pairs: list[tuple[str, bytes]],
    ) -> list[tuple[str, bytes]]:
        """Writes to a half, and begins the next if `stamp` is still the newest number's."""
        assert self.max_bytes is not None
        own = _SIZES + self._writer
        names = values.list(self._ts.KvStore.KeyRange(_SIZES, _SIZES + "~")).result()
        sizes = {name.decode(): self._numbers(values.read(name).result().value) for name in names}
        num_bytes, num_in_nodes = map(sum, zip((0, 0), *sizes.values(), strict=True))
        num_taken, num_new = 0, 0
        for _, value in pairs:
            nodes = num_in_nodes + self._bytes_in_nodes(value)
            if num_bytes + num_new + len(value) + self._bytes_of_put(nodes) > self.max_bytes // 2:
                break
            num_taken, num_new, num_in_nodes = num_taken + 1, num_new + len(value), nodes
        if num_taken:
            num_own, num_own_in_nodes = sizes.get(own, (0, 0))
            num_own += num_new + self._bytes_of_put(num_in_nodes)
            num_own_in_nodes += sum(self._bytes_in_nodes(value) for _, value in pairs[:num_taken])
            size = own, b"%d %d" % (num_own, num_own_in_nodes)
            self._write(values, [*pairs[:num_taken], size], stamps)
        pairs = pairs[num_taken:]
        if pairs:
            # Of processes that find it full at once, one makes the next.
            self._root.write(_NEWEST, b"%d" % (number + 1), if_equal=stamp).result()
            # All that are older go, also what a process left that was killed here.
            self._root.delete_range(self._ts.KvStore.KeyRange(self._name(0), self._name(number))).result()
        return pairs

    def _numbers(self, text: bytes) -> tuple[int, int]:
        """Reads what a process wrote to a half: bytes of all transactions, and bytes that nodes keep."""
        numbers = text.split()
        if len(numbers) != 2 or not all(map(bytes.isdigit, numbers)):
            return self.max_bytes or 0, 0  # spoilt: the half counts as full, so that the next one begins
        return int(numbers[0]), int(numbers[1])

    def _bytes_in_nodes(self, value: bytes) -> int:
        """Bounds what the database's nodes keep of a value and of its key."""
        inlined = len(value) if len(value) <= _MOST_INLINED else 0
        return _ENTRY_BYTES + inlined if self._is_database else 0

    def _bytes_of_put(self, num_in_nodes: int) -> int:
        """Bounds what a transaction writes beside values: all nodes, of which the ones before stay too."""
        return _TRANSACTION_BYTES + num_in_nodes if self._is_database else 0

    def _is_large(self, value: bytes) -> bool:
        assert self.max_bytes is not None
        num_bytes = len(value) + self._bytes_of_put(self._bytes_in_nodes(value))
        return num_bytes > self.max_bytes // 2

    def _places(self) -> Iterator[tuple[int | None, bool]]:
        """Yields the halves where values may be, the newest first, and whether it is the older one.

        Without a limit there is one place, None.

        Where a half begins meanwhile the last two come again, for values move from one to the next.
        """
        if self.max_bytes is None:
            yield None, False
            return
        before = None
        for _ in range(_MOST_LOOKS):
            number, _ = self._newest()
            if number == before:
                return
            yield number, False
            yield number - 1, True
            before = number

    def _ask[A, T](self, question: Callable[[Any, A], T], number: int | None, about: A) -> T | None:
        """Asks a half; returns None where processes that are faster have removed it meanwhile."""
        try:
            return question(self._root if number is None else self._half(number), about)
        except ValueError:  # of files that are gone
            if not self._is_gone(number):
                raise
            return None

    def _is_gone(self, number: int | None) -> bool:
        """Tests whether another process has begun a half two after this one, which it removes then."""
        return number is not None and number < self._newest()[0] - 1

    def _newest(self) -> tuple[int, Any]:
        """Reads the newer half's number, which another process may have raised, and its stamp.

        Where it is lost or spoilt the newest half that is there has it, until the next one begins.
        """
        found = self._root.read(_NEWEST).result()
        text = found.value.decode(errors="replace")
        if not (_NUMBER.fullmatch(text) and int(text)):
            names = [name.decode().partition("/") for name in self._root.list().result()]
            numbers = [int(half) for half, slash, _ in names if slash and _NUMBER.fullmatch(half)]
            text = str(max(numbers, default=1))
        return int(text), found.stamp.generation

    def _half(self, number: int) -> Any:
        """Opens a half; those before the last two are gone."""
        place = self._halves.get(number)
        if place is None:
            place = self._root + self._name(number)
            if self._is_database:
                place = self._open({**self.spec, "base": place.spec().to_json()})
            kept = {each: values for each, values in self._halves.items() if abs(number - each) == 1}
            self._halves = kept | {number: place}
        return place

    def _name(self, number: int) -> str:
        return f"{number:012}/"

    def _open(self, spec: Any) -> Any:
        return self._ts.KvStore.open(spec, context=self._context).result()

    def _are_in(self, values: Any, keys: Sequence[str]) -> dict[str, bool]:
        ranges = [self._ts.KvStore.KeyRange(key, key + "\0") for key in keys]
        listed = [future.result() for future in [values.list(each) for each in ranges]]
        return dict(zip(keys, map(bool, listed), strict=True))

    def _read(self, values: Any, keys: Sequence[str]) -> dict[str, Any]:
        futures = {key: values.read(key) for key in keys}
        return {key: future.result() for key, future in futures.items()}

    def _write(
        self,
        values: Any,
        items: Sequence[tuple[str, bytes | None]],
        stamps: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        with self._ts.Transaction() as transaction:
            values = values.with_transaction(transaction)
            for future in [values.write(key, value, if_equal=stamps.get(key)) for key, value in items]:
                future.result()
