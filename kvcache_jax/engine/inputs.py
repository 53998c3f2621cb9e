"""Inputs: values of each request's own that the model and its hooks are handed, row by row.

They are columns of the table, declared once, so that a request with other values compiles nothing.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.decoding.prompt_parts import NO_PARTS, PromptParts

PARTS = "parts"
"""What a request calls the parts of its prompt among its inputs."""
AdvanceInputs = Callable[..., Mapping[str, jax.Array]]


class InputSpec(NamedTuple):
    """Name, shape and dtype of an input (static)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Values that requests of an engine may have, by name, and how they change.

    Attributes:
      kinds: {name: dtype}, or a `jax.ShapeDtypeStruct` each. Default: none.
      advance: `(inputs {name: [n, ...]}, tokens i32[n]) -> inputs`, pure: those that change after each of the
        requests' tokens, as the state of an automaton does. A parameter `params` is handed the model's.
      parts: The way in which prompts are put together from parts, which requests name in their input
        "parts". Default: no parts.

    Raises:
      TypeError, ValueError: no dtype, no `PromptParts`, or an input that is called as those are.
    """

    kinds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    advance: AdvanceInputs | None = None
    parts: PromptParts = NO_PARTS

    def __post_init__(self):
        if not isinstance(self.parts, PromptParts):
            raise TypeError(f"parts is {self.parts!r}, expected a value such as a feature's `Parts`")
        if self.parts.max_parts and PARTS in self.kinds:
            raise ValueError(
                f"kinds has {PARTS!r}, expected another name: it is what requests call their parts"
            )
        if not isinstance(self.kinds, Mapping):
            raise TypeError(f"inputs is {self.kinds!r}, expected {{name: dtype}}, or kv.engine.Inputs")
        self.specs()

    def specs(self) -> tuple[InputSpec, ...]:
        """Lists the inputs as static values."""
        specs = []
        for name, kind in self.kinds.items():
            if not isinstance(name, str):
                raise TypeError(f"inputs has the name {name!r}, expected a str")
            is_struct = not isinstance(kind, type) and hasattr(kind, "shape") and hasattr(kind, "dtype")
            shape, dtype = (tuple(kind.shape), kind.dtype) if is_struct else ((), kind)
            try:
                dtype = object if dtype is None else dtype  # which numpy takes for float64
                dtype = jax.dtypes.canonicalize_dtype(dtype)  # as the device has it: no value is cut there
            except TypeError:
                dtype = np.dtype(object)
            if not (jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"):
                raise TypeError(
                    f"inputs[{name!r}] is {kind!r}, expected a dtype, or jax.ShapeDtypeStruct(shape, dtype)"
                )
            specs.append(InputSpec(name, shape, dtype.name))
        return tuple(specs)


def empty_inputs(specs: tuple[InputSpec, ...], num_slots: int) -> dict[str, Any]:
    """Makes the columns of inputs, zeros, in numpy."""
    return {spec.name: np.zeros((num_slots, *spec.shape), spec.dtype) for spec in specs}


def check_inputs(inputs: Mapping[str, np.ndarray], specs: tuple[InputSpec, ...]) -> None:
    """Refuses inputs that an engine did not declare, or that are none of their shape and dtype."""
    declared = {spec.name: spec for spec in specs}
    for name, value in inputs.items():
        if name not in declared:
            raise ValueError(
                f"a request has the input {name!r}, expected one of {sorted(declared)}: declare it by "
                f"Engine(inputs={{{name!r}: dtype}})"
            )
        _, shape, dtype = declared[name]
        if value.shape != shape or not _fits(value, dtype):
            raise ValueError(
                f"a request has the input {name!r} of {value.dtype}{list(value.shape)}, expected values of "
                f"{dtype}{list(shape)}, as the engine declares it"
            )


def _fits(value: np.ndarray, dtype: str) -> bool:
    """Tests whether a dtype holds values: floats up to rounding, integers to the last one."""
    is_integer = value.dtype.kind in "iu"
    # A Python integer is signed, also where it is for an unsigned dtype.
    is_kind = is_integer and jnp.issubdtype(dtype, jnp.integer)
    if not is_kind and not np.can_cast(value.dtype, dtype, "same_kind"):
        return False
    with np.errstate(over="ignore"):
        stored = value.astype(dtype)
    return (
        not (stored != value).any() if is_integer else bool((np.isfinite(stored) | ~np.isfinite(value)).all())
    )


def inputs_of(columns: Mapping[str, jax.Array], slots: jax.Array) -> dict[str, jax.Array]:
    """Reads the inputs of requests `slots` i32[n], {name: [n, ...]}; zeros of none."""
    return {name: get_at(column, slots, 0) for name, column in columns.items()}


def asks_for(function: Callable, name: str) -> bool:
    """Tests whether a function has a parameter of that name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a callable that is not written in Python
        return False
