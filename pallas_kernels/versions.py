"""The versions of jax that the kernels were tested with; Pallas changes often."""

import jax

OLDEST, BEFORE = (0, 11, 2), (0, 13)


def untested_jax() -> str | None:
    """One sentence if this version of jax was not tested, else None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
    if OLDEST <= version < BEFORE:
        return None
    oldest, before = (".".join(map(str, bound)) for bound in (OLDEST, BEFORE))
    return f"the kernels were tested with jax >= {oldest}, < {before}, and this is jax {jax.__version__}"
