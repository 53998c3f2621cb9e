"""A store of blocks in Valkey or Redis."""

from collections.abc import Sequence
from typing import Any

from kvcache_jax.arrays.number_checks import positive_seconds
from kvcache_jax.tiers.block_store import Data, checked_key

_REPLACE = """
if (redis.call('get', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2])
return 1
"""


class ValkeyStore:
    """A store in a server of Valkey or Redis, which several processes and machines may share.

    Its limit of memory, and what goes first, is the server's `maxmemory` and `maxmemory-policy allkeys-lru`.

    Attributes:
      url: Such as "valkey://host:6379/0" or "unix:///run/valkey.sock".
      prefix: The beginning of the server's keys.
      timeout: Seconds after which a call fails, and counts as misses.

    Raises:
      ImportError: valkey is missing; the extra `valkey` brings it.
      ValueError, TypeError: no URL of a server, no prefix, no positive number of seconds.
    """

    def __init__(self, url: str, *, prefix: str = "kvcache_jax:", timeout: float = 5.0):
        try:
            import valkey
        except ImportError as error:
            raise ImportError(
                "ValkeyStore needs valkey, of the extra `valkey`: pip install 'kvcache_jax[valkey]'"
            ) from error
        for name, text in (("url", url), ("prefix", prefix)):
            if not isinstance(text, str):
                raise TypeError(f"{name} is {text!r}, expected a string")
        self.url, self.prefix, self.timeout = url, prefix, positive_seconds("timeout", timeout)
        limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        self._client: Any = valkey.Valkey.from_url(url, **limits)
        if self._client.get_connection_kwargs().get("decode_responses"):
            raise ValueError(f"url is {url!r}, expected one without decode_responses: values are bytes")

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys have a value."""
        pipeline = self._client.pipeline(transaction=False)
        for key in self._names(keys):
            pipeline.exists(key)
        return [bool(count) for count in pipeline.execute()]

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        """Reads the value of each key; None for a miss."""
        return self._client.mget(self._names(keys)) if keys else []

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value, all at once."""
        if items:
            names = self._names([key for key, _ in items])
            self._client.mset({name: bytes(value) for name, (_, value) in zip(names, items, strict=True)})

    def replace(self, key: str, before: Data | None, after: Data) -> bool:
        """Writes a value if the one before is still there; None if there was none. Returns whether it did."""
        [name] = self._names([key])
        return bool(self._client.eval(_REPLACE, 1, name, bytes(before or b""), bytes(after)))

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped."""
        if keys:
            self._client.unlink(*self._names(keys))

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self.prefix + checked_key(key) for key in keys]
