"""The versions of jax that the kernels were tested with, for Pallas changes often, and the kernels' own."""

import functools
import hashlib
from pathlib import Path

import jax

OLDEST, BEFORE = (0, 11, 2), (0, 13)


def untested_jax() -> str | None:
    """One sentence if this version of jax was not tested, else None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
    if OLDEST <= version < BEFORE:
        return None
    oldest, before = (".".join(map(str, bound)) for bound in (OLDEST, BEFORE))
    return f"the kernels were tested with jax >= {oldest}, < {before}, and this is jax {jax.__version__}"


@functools.cache
def digest() -> str:
    """Computes a digest of the kernels' sources, which tells one version of them from another."""
    folder, found = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
