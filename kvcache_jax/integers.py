"""Checks of integers that are known before anything is traced. Imports nothing of the package."""

import operator
from typing import Any

import numpy as np


def as_integer(name: str, value: Any) -> int:
    """`value`, of whatever integer type, as a Python int."""
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:  # also of a tracer
        pass
    raise TypeError(f"{name} is {value!r}, expected an integer: a Python int or a NumPy one")


def static_count(name: str, value: Any, least: int = 1, most: int | None = None, most_name: str = "") -> int:
    """`value` as a Python int of at least `least`, and at most `most`, if there is one."""
    value = as_integer(name, value)
    if most is None and value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} is {value}, expected {least} <= {name} <= {most_name} = {most}")
    return value
