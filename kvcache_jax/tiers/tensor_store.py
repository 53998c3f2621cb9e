"""A store of blocks in TensorStore's key-value stores: files, S3, GCS and others."""

import os
import pathlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvcache_jax.tiers.block_store import Data, checked_key, checked_limit

_NEWEST, _SIZES = "newest", "size of "


class TensorStore:
    """A store in one of TensorStore's key-value stores, with a transaction for each `put`.

    With a limit, values go to the newer of two halves. When that is full, the older one is removed as a
    whole, with its files, and a new one begins. A value that is read in the older half is written to the
    newer one, so that what goes was not used for half of the limit. Without a limit the same place is
    another store.

    Attributes:
      spec: The store as TensorStore describes it. A path means `ocdbt` there, which keeps many values in
        few files and which several processes may write.
      max_bytes: Bytes of values, written again or not, of all processes together. One of more than half of
        them is not kept. None for no limit.

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
        is_database = max_bytes is not None and self.spec.get("driver") == "ocdbt"
        self._root: Any = self._open(self.spec["base"] if is_database else self.spec)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys have a value."""
        ranges = [self._ts.KvStore.KeyRange(checked_key(key), key + "\0") for key in keys]
        found = [False] * len(keys)
        for values in self._stores():
            listed = [future.result() for future in [values.list(each) for each in ranges]]
            found = [was or bool(is_one) for was, is_one in zip(found, listed, strict=True)]
        return found

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        """Reads the value of each key; None for a miss."""
        newest, *older = self._stores()
        found = self._read(newest, [checked_key(key) for key in keys])
        for values in older:
            left = [i for i, value in enumerate(found) if value is None]
            again = self._read(values, [keys[i] for i in left])
            found = [*found]
            for i, value in zip(left, again, strict=True):
                found[i] = value
            self.put([(keys[i], value) for i in left if (value := found[i]) is not None])
        return found

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value in one transaction, or where a half is full in two."""
        pairs = [(checked_key(key), bytes(value)) for key, value in items]
        if self.max_bytes is None:
            self._write(self._root, pairs)
            return
        most = self.max_bytes // 2
        if large := [key for key, value in pairs if len(value) > most]:
            self.remove(large)
        pairs = [pair for pair in pairs if len(pair[1]) <= most]
        with self._lock:
            while pairs:
                pairs = self._put_some(pairs, most)

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped."""
        for values in self._stores():
            self._write(values, [(checked_key(key), None) for key in keys])

    def _put_some(self, pairs: list[tuple[str, bytes]], most: int) -> list[tuple[str, bytes]]:
        """Writes pairs until the newer half has `most` bytes, and begins a new one; returns those left."""
        number, stamp = self._newest()
        values = self._half(number)
        sizes = values.list(self._ts.KvStore.KeyRange(_SIZES, _SIZES + "~")).result()
        sizes = {key.decode(): int(values.read(key).result().value or 0) for key in sizes}
        num_own, num_left = sizes.get(_SIZES + self._writer, 0), most - sum(sizes.values())
        num_taken = 0
        for _, value in pairs:
            if len(value) > num_left:
                break
            num_taken, num_own, num_left = num_taken + 1, num_own + len(value), num_left - len(value)
        if num_taken:
            self._write(values, [*pairs[:num_taken], (_SIZES + self._writer, b"%d" % num_own)])
        pairs = pairs[num_taken:]
        if pairs:
            # Of processes that find it full at once, one makes the next.
            self._root.write(_NEWEST, b"%d" % (number + 1), if_equal=stamp).result()
            old = self._name(number - 1)
            self._root.delete_range(self._ts.KvStore.KeyRange(old, old + "~")).result()
        return pairs

    def _stores(self) -> list[Any]:
        """Lists where values may be, the newest first."""
        if self.max_bytes is None:
            return [self._root]
        number, _ = self._newest()
        return [self._half(number), self._half(number - 1)]

    def _newest(self) -> tuple[int, Any]:
        """Reads the newer half's number, which another process may have raised, and its stamp."""
        found = self._root.read(_NEWEST).result()
        return int(found.value or 1), found.stamp.generation

    def _half(self, number: int) -> Any:
        """Opens a half; those before the last two are gone."""
        if number not in self._halves:
            place = self._root + self._name(number)
            if self.spec.get("driver") == "ocdbt":
                place = self._open({**self.spec, "base": place.spec().to_json()})
            kept = {each: values for each, values in self._halves.items() if abs(number - each) == 1}
            self._halves = kept | {number: place}
        return self._halves[number]

    def _name(self, number: int) -> str:
        return f"{number:012}/"

    def _open(self, spec: Any) -> Any:
        return self._ts.KvStore.open(spec, context=self._context).result()

    def _read(self, values: Any, keys: Sequence[str]) -> list[Data | None]:
        futures = [values.read(key) for key in keys]
        results = [future.result() for future in futures]
        return [result.value if result.state == "value" else None for result in results]

    def _write(self, values: Any, items: Sequence[tuple[str, bytes | None]]) -> None:
        with self._ts.Transaction() as transaction:
            values = values.with_transaction(transaction)
            for future in [values.write(key, value) for key, value in items]:
                future.result()
