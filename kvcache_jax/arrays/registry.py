"""Functions by name, such as policies, scorers and selectors: configs and programs go by the name."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Registered[F](NamedTuple):
    """A function of a registry."""

    function: F
    needs: frozenset[str]  # optional fields of its metadata that it reads
    options: Mapping[str, Any]  # further arguments of the decorator


class Registry[F]:
    """The functions of one kind, which all take the same metadata, a NamedTuple.

    Errors call a function `noun`, such as "an eviction policy", its public decorator `decorator`, such as
    "policies.eviction_policy", and the argument that takes a name `argument`.
    """

    def __init__(self, noun: str, decorator: str, argument: str, metadata: Any, reserved: Sequence[str] = ()):
        # Fields of the metadata that have defaults: a function sees those that it needs.
        self.optional = frozenset(metadata._field_defaults)
        self._article, self._noun = noun.split(" ", 1)
        self._decorator, self._argument = f"kvcache_jax.{decorator}", argument
        self._metadata, self._reserved = metadata.__name__, tuple(reserved)
        self._entries: dict[str, Registered[F]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were registered."""
        return (*self._reserved, *self._entries)

    def decorate(self, name: str, needs: Iterable[str] = (), **options: Any) -> Callable[[F], F]:
        """Returns the decorator that registers a function, and returns it unchanged.

        Refuses a name that is taken or no str, `needs` that name no field, and anything but a function.
        """
        if not isinstance(name, str) or not name:
            arguments = "'name', needs=[...]" if self.optional else "'name'"
            raise TypeError(f"name is {name!r}, expected a str: write @{self._decorator}({arguments})")
        self._require_new(name)
        is_list = isinstance(needs, Iterable) and not isinstance(needs, str)
        fields = list(needs) if is_list else []
        if not is_list or not all(isinstance(field, str) and field in self.optional for field in fields):
            raise ValueError(f"needs is {needs!r}, expected some of {sorted(self.optional)}")

        def register(function: F) -> F:
            if not callable(function):
                raise TypeError(
                    f"the {self._noun} {name!r} is {function!r}, expected a function of {self._metadata}"
                )
            self._require_new(name)  # a decorator may be kept, and used twice
            self._entries[name] = Registered(function, frozenset(fields), options)
            return function

        return register

    def find(self, name: str) -> Registered[F]:
        """Returns the function of a name; refuses a name without one."""
        if not isinstance(name, str) or name not in self._entries:
            names = ", ".join(map(repr, self.names))
            raise ValueError(
                f"{self._argument} is {name!r}, expected one of {names}; register others first, with the "
                f"decorator {self._decorator}"
            )
        return self._entries[name]

    def call(self, name: str, metadata: Any, *shapes: tuple[int, ...], dtype: Any) -> jax.Array:
        """Calls the function of a name, and returns its result as `dtype`.

        Refuses a result that is no array of one of `shapes` and of numbers such as `dtype`. Errors that the
        function raises come with a note that names it.
        """
        function: Any = self.find(name).function
        with self.noted(name):
            return self.checked(name, function(metadata), *shapes, dtype=dtype)

    def checked(self, name: str, result: Any, *shapes: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns a function's result as `dtype`, or refuses it as `call` does."""
        if isinstance(result, np.ndarray):
            result = jnp.asarray(result)  # of 32 bits, as all that jax computes
        is_array = isinstance(result, jax.Array) and result.shape in shapes
        if not is_array or not _converts(result.dtype, jnp.dtype(dtype)):
            is_shaped = hasattr(result, "shape") and hasattr(result, "dtype")
            got = f"{result.dtype}{list(result.shape)}" if is_shaped else f"a {type(result).__name__}"
            expected = " or ".join(f"{jnp.dtype(dtype).name}{list(shape)}" for shape in shapes)
            raise TypeError(f"{self._noun} {name!r} returned {got}, expected {expected}")
        return result.astype(dtype)

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Adds a note to errors raised within, which names the function and the metadata that it sees."""
        try:
            yield
        except Exception as error:
            needs = sorted(self._entries[name].needs)
            sees = f" has needs={needs} and sees no other optional metadata" if self.optional else ""
            error.add_note(f"{self._noun} {name!r}{sees}")
            raise

    def _require_new(self, name: str) -> None:
        if name in self.names:
            raise ValueError(
                f"there is {self._article} {self._noun} {name!r} already, expected a new name: compiled "
                "programs go by it"
            )


def _converts(found: np.dtype, dtype: np.dtype) -> bool:
    """Tests whether numbers are such as `dtype`: floating ones, or integers that lose no digits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.issubdtype(found, jnp.floating)
    return found.kind == "b" or (found.kind == "i" and found.itemsize <= dtype.itemsize)
