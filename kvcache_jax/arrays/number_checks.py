"""Checks of numbers and lists that are known before anything is traced. Imports nothing of the package."""

import contextlib
import math
import operator
from typing import Any

import numpy as np


def as_integer(name: str, value: Any) -> int:
    """Converts `value`, of any integer type, to a Python int."""
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:  # also of a tracer
        pass
    raise TypeError(f"{name} is {value!r}, expected an integer: a Python int or a NumPy one")


def static_count(name: str, value: Any, least: int = 1, most: int | None = None, most_name: str = "") -> int:
    """Converts `value` to a Python int of at least `least`, and at most `most` if there is one."""
    value = as_integer(name, value)
    if most is None and value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} is {value}, expected {least} <= {name} <= {most_name} = {most}")
    return value


def finite_number(name: str, value: Any) -> float:
    """Converts `value`, also an array of one number, to a Python float that is finite, also in float32."""
    found = value
    if getattr(value, "shape", None) == ():
        with contextlib.suppress(TypeError):  # of tracers and keys
            found = np.asarray(value).item()
    is_real = isinstance(found, int | float | np.floating) and not isinstance(found, bool)
    try:
        number = float(found) if is_real else math.nan
    except OverflowError:  # of an int
        number = math.inf
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    return number


def positive_seconds(name: str, value: Any) -> float:
    """Converts `value` to a Python float that is finite and above 0."""
    if (number := finite_number(name, value)) <= 0:
        raise ValueError(f"{name} is {value!r}, expected a positive number of seconds")
    return number


def static_flag(name: str, value: Any) -> bool:
    """Converts `value` to a Python bool; only booleans count as true or false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}, expected True or False")
    return bool(value)


def as_list(name: str, values: Any, what: str) -> list:
    """Lists values that a caller may iterate over once."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {values!r}, expected a list of {what}") from None
