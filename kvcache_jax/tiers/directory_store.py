"""A store of blocks in a directory, which several processes may read and write."""

import contextlib
import json
import mmap
import os
import pathlib
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvcache_jax.tiers.block_store import Data, checked_key, checked_limit

_MARKER = "kvcache_jax_blocks.json"
_FORMAT = 1
_LOCK_SECONDS = 5.0
"""Time for which another process that replaces a value is waited for: it may have been stopped."""
_STALE_SECONDS = 3600
"""Age at which a temporary file is one whose writer was killed; no clock is ahead of another by more."""
_VALUE, _TEMPORARY = re.compile("[0-9a-f]{62}"), re.compile(r"\.[0-9a-f]{62}\.[0-9a-f]{16}")


class DirectoryStore:
    """A store that keeps each value as a file, under folders of two letters.

    A file is written under a temporary name and renamed, so that readers see a whole value whatever happens
    to the writer. It is read as mapped memory, which a file that something else cuts short meanwhile is not:
    that ends the process. Several processes may share the directory. What else lies in it, such as a folder
    in a value's place, is never removed, and costs no other value.

    Attributes:
      path: The directory: a new or empty one, or one that a `DirectoryStore` made.
      max_bytes: Bytes of values; the files used longest ago make room. Processes that share the directory may
        exceed it by a sixteenth each. None for no limit.
      is_synced: Whether a value is on the disk when `put` returns, so that it also outlives the machine's
        end.

    Raises:
      ValueError, OSError: a directory of something else or of a newer format, or one without rights.

    Example:
      >>> import tempfile, kvcache_jax as kv
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kv.tiers.DirectoryStore(folder).put([("0" * 64, b"value")])
      ...     bytes(kv.tiers.DirectoryStore(folder).get(["0" * 64])[0])
      b'value'
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int | None = None, is_synced: bool = False
    ):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path is {path!r}, expected the path of a folder")
        self.path = pathlib.Path(path)
        self.max_bytes = checked_limit(max_bytes)
        self.is_synced = is_synced
        self._lock = threading.Lock()
        self._room = 0  # bytes that may be written before the files are looked at again
        self._seen = set[pathlib.Path]()  # folders in which this process has written
        self._open()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys have a value."""
        return [self._file(key).is_file() for key in keys]

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        """Reads the value of each key as mapped memory; None for a miss, or for a file that alone fails."""
        found: list[Data | None] = [None] * len(keys)

        def read(at: int) -> None:
            found[at] = self._read(self._file(keys[at]))

        failures = _each(read, range(len(keys)))
        if failures and len(failures) == len(keys):
            raise failures[0]
        return found

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Writes pairs of a key and a value, also after one that alone fails; then that is raised."""
        num_bytes = 0

        def write(item: tuple[str, Data]) -> None:
            nonlocal num_bytes
            file = self._file(item[0])
            file.parent.mkdir(exist_ok=True)
            if file.parent not in self._seen:
                self._seen.add(file.parent)
                _values_in(file.parent)
            self._write(file, item[1])
            num_bytes += len(item[1])

        failures = _each(write, items)
        self._make_room(num_bytes)
        if failures:
            raise failures[0]

    def replace(self, key: str, before: Data | None, after: Data) -> bool:
        """Writes a value if the one before is still there; None if there was none. Returns whether it did."""
        with open(self.path / _MARKER, "rb") as marker:
            _wait_for_lock(marker.fileno())
            if self._read(self._file(key)) != before:
                return False
            self.put([(key, after)])
        return True

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values; keys without one are skipped."""
        if failures := _each(lambda key: self._file(key).unlink(missing_ok=True), keys):
            raise failures[0]

    def _file(self, key: str) -> pathlib.Path:
        # A key is digits alone: none leads out of the directory.
        return self.path / checked_key(key)[:2] / key[2:]

    def _open(self) -> None:
        marker = self.path / _MARKER
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not marker.exists():
                # Another process may be opening the same new directory.
                found = [entry.name for entry in self.path.iterdir() if _MARKER not in entry.name]
                if found and not marker.exists():
                    raise ValueError(
                        f"{self.path} has {found[0]!r} and no blocks, expected a new or an empty directory, "
                        "or one that a DirectoryStore made"
                    )
                self._write(marker, json.dumps({"format_version": _FORMAT}).encode())
            text = marker.read_bytes()
        except OSError as error:
            raise type(error)(f"{self.path} is no directory that can be read and written: {error}") from error
        try:
            version = json.loads(text)["format_version"]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{marker} is broken, expected a format version there: remove the directory"
            ) from error
        if version != _FORMAT:
            raise ValueError(
                f"{self.path} has blocks of format {version!r}, expected {_FORMAT}: read it with the "
                "kvcache_jax that wrote it, or name another directory"
            )

    def _write(self, file: pathlib.Path, value: Data) -> None:
        # No two writers share a name, on whichever machines.
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            with open(temporary, "wb") as opened:
                opened.write(value)
                if self.is_synced:
                    opened.flush()
                    os.fsync(opened.fileno())
            os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _read(self, file: pathlib.Path) -> Data | None:
        try:
            with open(file, "rb", opener=_open_at_once) as opened:
                with contextlib.suppress(OSError):  # where others' files may be read alone
                    os.utime(opened.fileno())  # the time of its use, which mounts may not note
                return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            return None
        except ValueError:  # an empty file cannot be mapped
            return b""

    def _make_room(self, num_bytes: int) -> None:
        if self.max_bytes is None:
            return
        with self._lock:
            self._room -= num_bytes
            if self._room >= 0:
                return
            total = 0
            # The most recently used first, to keep these.
            for _, size, file in sorted(self._files(), reverse=True):
                total += size
                if total > self.max_bytes:
                    with contextlib.suppress(OSError):  # what was written is there, whatever cannot go
                        pathlib.Path(file).unlink(missing_ok=True)
                        total -= size
            self._room = min(self.max_bytes - total, self.max_bytes // 16)

    def _files(self) -> list[tuple[int, int, str]]:
        """Lists the time of use, bytes and path of each value; removes what killed writers left."""
        found, latest = [], time.time() + _STALE_SECONDS
        for number in range(256):
            for entry in _values_in(self.path / f"{number:02x}"):
                with contextlib.suppress(OSError):  # another process removed it
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        # What was used in the future was used before the clock was set back.
                        used_at = status.st_mtime_ns if status.st_mtime < latest else 0
                        found.append((used_at, status.st_size, entry.path))
        return found


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for a writer, which a pipe in a value's place may never have."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _each[Item](act: Callable[[Item], None], items: Iterable[Item]) -> list[OSError]:
    """Acts on each item, also after one that fails; returns the failures."""
    failures = []
    for item in items:
        try:
            act(item)
        except OSError as error:
            failures.append(error)
    return failures


def _values_in(folder: pathlib.Path) -> list[os.DirEntry[str]]:
    """Lists what bears a value's name in a folder, if it is one; removes what killed writers left there."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _VALUE.fullmatch(entry.name):
                found.append(entry)
            elif _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another process removed it
                    if time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                        os.unlink(entry.path)
    return found


def _wait_for_lock(file: int) -> None:
    """Locks a file until it is closed, where the system and the mount can; goes on without after a while."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    ends_at = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < ends_at:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            return
        else:
            return
