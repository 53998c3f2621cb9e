"""Checks of a model's sizes and dtypes."""

import sys
from typing import Any

import jax.numpy as jnp


def float_dtype(name: str, value: Any) -> jnp.dtype:
    """Returns the dtype that `value` stands for.

    Raises:
      ValueError: it is neither float32 nor bfloat16; says that `name` is it.
    """
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{name} is {value if dtype is None else dtype}, expected float32 or bfloat16")
    return dtype


def require_positive(name: str, value: Any) -> None:
    """Refuses what is no positive, finite number."""
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is {value}, expected a positive, finite number")


def check_positive(owner: Any, *names: str) -> None:
    """Refuses fields that are no positive, finite numbers."""
    for name in names:
        require_positive(name, getattr(owner, name))


def check_positive_or_none(owner: Any, *names: str) -> None:
    """Refuses fields that are neither None nor positive, finite numbers."""
    check_positive(owner, *(name for name in names if getattr(owner, name) is not None))
