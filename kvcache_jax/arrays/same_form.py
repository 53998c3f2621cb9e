"""The form of states and arrays that a caller's own function returns, such as a hook or a backend's part."""

from typing import Any

import jax


def same_form[T](what: str, found: T, like: Any) -> T:
    """Returns what a function returned, `found`, a pytree of `like`'s type, names, shapes and dtypes.

    Args:
      what: The function's name, for the error.
      found: The result.
      like: A pytree of arrays, or of their shapes.

    Raises:
      TypeError: it has another form, which a loop could not carry on.
    """
    if not hasattr(like, "dtype") and type(found) is not type(like):
        raise TypeError(f"{what} returned {form_of(found)}, expected {form_of(like)}")
    got, expected = _forms(found), _forms(like)
    for path in expected | got:
        if got.get(path) != expected.get(path):
            where = f" as {type(like).__name__}{path}" if path else ""
            raise TypeError(
                f"{what} returned {got.get(path, 'nothing')}{where}, expected {expected.get(path, 'nothing')}"
            )
    return found


def _forms(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): form_of(leaf) for path, leaf in leaves}


def form_of(value: Any) -> str:
    """Names the dtype and shape of an array, or the type of anything else."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
