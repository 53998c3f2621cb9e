"""The text that the small model is trained on: the source of Python's standard library, as bytes.

It is on every machine, and differs a little between versions of Python: what a record says holds for the
version that it names. Every file comes after an `END`, a byte that source does not have.
"""

import functools
import gzip
import hashlib
import lzma
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

MODEL = (
    Path(__file__).parent.parent.parent / "models" / "stdlib_bytes"
)  # trained on it by `experiments.train`
END = 0

# Never trained on. Drawn at random among the files of 4 to 60 kB, before anything was trained.
HELD_OUT = (
    "_py_abc.py",
    "asyncio/events.py",
    "asyncio/sslproto.py",
    "asyncio/timeouts.py",
    "asyncio/windows_utils.py",
    "configparser.py",
    "dbm/__init__.py",
    "hmac.py",
    "json/__init__.py",
    "lzma.py",
    "multiprocessing/connection.py",
    "multiprocessing/forkserver.py",
    "opcode.py",
    "re/_compiler.py",
    "threading.py",
    "timeit.py",
    "tokenize.py",
    "tracemalloc.py",
    "urllib/robotparser.py",
    "wsgiref/validate.py",
)

# Tests and tables of characters are no prose and no program; the other folders are not the library's.
_EXCLUDED = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


def folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def training_files() -> list[str]:
    """Names of the files that are trained on, in order."""
    names = (path.relative_to(folder()) for path in sorted(folder().rglob("*.py")))
    return [
        name.as_posix()
        for name in names
        if not _EXCLUDED & set(name.parts) and name.as_posix() not in HELD_OUT
    ]


@functools.cache
def training_bytes() -> np.ndarray:
    """u8[n], the training files, each after an `END`."""
    return np.frombuffer(
        b"".join(with_end((folder() / name).read_bytes()) for name in training_files()), np.uint8
    )


def held_out_files() -> dict[str, bytes]:
    """Name and bytes of the held-out files; those that this Python does not have are left out."""
    return {name: (folder() / name).read_bytes() for name in HELD_OUT if (folder() / name).exists()}


def with_end(file: bytes) -> bytes:
    """The file as the model sees it: its first byte follows an `END`, which ended the file before."""
    return bytes([END]) + file


def digest(data: np.ndarray | bytes) -> str:
    """First half of the SHA-256 of the bytes, to tell two versions of Python apart."""
    return hashlib.sha256(bytes(data)).hexdigest()[:32]


def windows(data: np.ndarray, seed: int, step: int, num_rows: int, length: int) -> np.ndarray:
    """i32[num_rows, length + 1] at random places: a function of seed and step, for resuming."""
    starts = np.random.default_rng([seed, step]).integers(0, len(data) - length, num_rows)
    return data[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def compressed_bits(data: bytes) -> dict[str, float]:
    sizes = {"gzip -9": len(gzip.compress(data, 9)), "lzma 9": len(lzma.compress(data, preset=9))}
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def share_seen(files: Collection[bytes], data: bytes, length: int = 64) -> float:
    """Share of all places in the files whose next `length` bytes stand somewhere in `data`, too."""
    pieces = [piece for file in files for piece in _pieces(file, length)]
    wanted = set(pieces)
    seen = {piece for piece in _pieces(data, length) if piece in wanted}
    return sum(piece in seen for piece in pieces) / len(pieces)


def _pieces(data: bytes, length: int) -> Iterable[bytes]:
    return (data[start : start + length] for start in range(len(data) - length + 1))
