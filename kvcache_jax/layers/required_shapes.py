"""The check that arrays came by their names, in their shapes, and are floats."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp


def require_shapes(
    what: str,
    given: Any,
    expected: Mapping[str, tuple[int, ...]],
    *,
    first_axis: int = 0,
    optional: Collection[str] = (),
) -> None:
    """Refuses arrays that are missing, have a name too many, have another shape, or are no floats.

    Args:
      what: Name of `given`, for the error.
      given: Should be a mapping from names to arrays.
      expected: The shapes by name.
      first_axis: Axes before it may have any size.
      optional: Names that may be missing.
    """
    shapes = given
    if isinstance(given, Mapping):
        shapes = {name: getattr(x, "shape", ())[first_axis:] for name, x in given.items()}
        is_optional = {*optional} - {*shapes}
        if shapes == {name: shape for name, shape in expected.items() if name not in is_optional}:
            dtypes = {name: x.dtype.name for name, x in given.items()}
            if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes.values()):
                raise TypeError(f"{what} are {dtypes}, expected floats")
            return
    left_out = "".join(f"; {name!r} may be left out" for name in optional)
    raise ValueError(f"{what} are {shapes}, expected {dict(expected)}{left_out}")
