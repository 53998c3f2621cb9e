"""A store of blocks in Mooncake's pool, which the memory of many processes makes up."""

import socket
from collections.abc import Sequence
from typing import Any

from kvcache_jax.tiers.block_store import Data, checked_key

_END = b"."
"""Of each value, for an empty one and a miss are the same there."""
_NOT_FOUND = -704
"""The code that `batch_remove` gives for a key without a value."""


class MooncakeStore:
    """A store in a pool of Mooncake: `mooncake_master` knows which process has which value in its memory.

    Its limit is the memory that the processes give; which values go first is the master's to say. While it
    makes room, `put` fails.

    Attributes:
      master: Host and port of `mooncake_master`.
      prefix: The beginning of the pool's keys.

    Raises:
      ImportError: mooncake is missing, or the library libibverbs.so.1 that it needs without RDMA too; the
        extra `mooncake` brings the first.
      ValueError, OSError: no host and port, or no master there.

    Example:
      store = kv.tiers.MooncakeStore("host0:50051", segment_bytes=2**33)  # this process gives 8 GiB
    """

    def __init__(
        self,
        master: str,
        *,
        segment_bytes: int = 0,
        buffer_bytes: int = 2**27,
        host: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        prefix: str = "kvcache_jax:",
    ):
        """Joins the pool.

        Args:
          master: Such as "host0:50051".
          segment_bytes: Memory that this process gives to the pool; 0 for none.
          buffer_bytes: Memory for values on their way, of which a value may need four times its size.
          host: The name by which other processes reach this machine.
          metadata: Of Mooncake's transfer engine, such as its server's address. Default: none is needed.
          protocol: "tcp" or "rdma".
          devices: Names of RDMA devices.
          prefix: The beginning of the pool's keys.
        """
        try:
            from mooncake.store import MooncakeDistributedStore  # type: ignore  # not in all environments
        except ImportError as error:
            raise ImportError(
                "MooncakeStore needs mooncake, of the extra `mooncake`: pip install 'kvcache_jax[mooncake]', "
                f"and libibverbs.so.1, of Debian's libibverbs1 ({error})"
            ) from error
        self.master, self.prefix, self._most = master, prefix, buffer_bytes // 4
        name, _, port = master.rpartition(":")
        if not (name and port.isdigit()):
            raise ValueError(f"master is {master!r}, expected a host and a port such as 'host0:50051'")
        socket.create_connection((name, int(port)), 5.0).close()  # without one the pool waits for minutes
        self._joined: Any = MooncakeDistributedStore()
        code = self._pool.setup(host, metadata, segment_bytes, buffer_bytes, protocol, devices, master)
        _check("setup", code)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys have a value."""
        found = self._pool.batch_is_exist(self._names(keys)) if keys else []
        _check("batch_is_exist", *found)
        return [each == 1 for each in found]

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        """Reads the value of each key; None for a miss."""
        found = zip(self._names(keys), self.contains(keys), strict=True)
        # One by one: of what has no room in the buffer together, some would be left out.
        values = [self._pool.get(name) if is_there else b"" for name, is_there in found]
        return [memoryview(value)[: -len(_END)] if value else None for value in values]

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value, as many at a time as the buffer has room for."""
        names = self._names([key for key, _ in items])
        values = [bytes(value) + _END for _, value in items]
        while values:
            num = num_bytes = 0
            while num < len(values) and (not num or num_bytes + len(values[num]) <= self._most):
                num, num_bytes = num + 1, num_bytes + len(values[num])
            _check("upsert_batch", self._pool.upsert_batch(names[:num], values[:num]))
            names, values = names[num:], values[num:]

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped."""
        if keys:
            codes = self._pool.batch_remove(self._names(keys), True)  # also those that were just read
            _check("batch_remove", *(code for code in codes if code != _NOT_FOUND))

    def close(self) -> None:
        """Leaves the pool, with the memory that this process gave."""
        pool, self._joined = self._joined, None
        if pool is not None:
            pool.close()

    @property
    def _pool(self) -> Any:
        if self._joined is None:  # the pool's own functions would end the process
            raise OSError("the pool was left, expected calls before close()")
        return self._joined

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self.prefix + checked_key(key) for key in keys]


def _check(call: str, *codes: int) -> None:
    """Raises where the pool says that it failed."""
    if bad := [code for code in codes if code < 0]:
        raise OSError(f"Mooncake's {call} gives the code {bad[0]}, expected a master and room in the pool")
