"""A store of blocks in TensorStore's key-value stores: files, S3, GCS and others."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvcache_jax.tiers.block_store import Data, checked_key


class TensorStore:
    """A store in one of TensorStore's key-value stores, with a transaction for each `put`.

    Attributes:
      spec: The store as TensorStore describes it. A path means `ocdbt` there, which keeps many values in
        few files and which several processes may write.

    Raises:
      ImportError: tensorstore is missing; the extra `tensorstore` brings it.
      ValueError: TensorStore cannot open it.

    Example:
      >>> import kvcache_jax as kv
      >>> store = kv.tiers.TensorStore({"driver": "memory"})
      >>> store.put([("0" * 64, b"value")])
      >>> store.get(["0" * 64, "1" * 64])
      [b'value', None]
    """

    def __init__(self, spec: str | os.PathLike[str] | Mapping[str, Any]):
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
        self.spec = dict(spec)
        self._ts: Any = tensorstore
        self._values = tensorstore.KvStore.open(self.spec).result()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys have a value."""
        ranges = [self._ts.KvStore.KeyRange(checked_key(key), key + "\0") for key in keys]
        return [bool(future.result()) for future in [self._values.list(each) for each in ranges]]

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        """Reads the value of each key; None for a miss."""
        futures = [self._values.read(checked_key(key)) for key in keys]
        results = [future.result() for future in futures]
        return [result.value if result.state == "value" else None for result in results]

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value in one transaction."""
        self._write([(checked_key(key), bytes(value)) for key, value in items])

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped."""
        self._write([(checked_key(key), None) for key in keys])

    def _write(self, items: Sequence[tuple[str, bytes | None]]) -> None:
        with self._ts.Transaction() as transaction:
            values = self._values.with_transaction(transaction)
            for future in [values.write(key, value) for key, value in items]:
                future.result()
