"""The check that arrays came by their names and in their shapes."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp


def require_shapes(
    what: str, given: Any, expected: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()
) -> None:
    """Refuses arrays by name which are not of the expected shapes.

    Args:
      what: Name of `given`, with the label of the layer that takes it.
      given: Should be a mapping from names to arrays.
      expected: The shapes by name; -1 for an axis of any size.
      optional: Names which may be missing.
    """
    got = {name: jnp.shape(x) for name, x in given.items()} if isinstance(given, Mapping) else given
    is_fine = isinstance(got, dict) and expected.keys() - {*optional} <= got.keys() <= expected.keys()
    if not is_fine or not all(_fits(shape, expected[name]) for name, shape in got.items()):
        left_out = "".join(f"; {name!r} may be left out" for name in optional)
        raise ValueError(f"{what} are {got}, expected {dict(expected)}{left_out}")


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    sizes = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(wanted in (-1, size) for size, wanted in sizes)
