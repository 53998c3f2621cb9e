"""Functions by name, such as policies, scorers and selectors: configs and programs go by the name."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Registered[F](NamedTuple):
    """A function of a registry.

    Attributes:
      function: As it was handed to the decorator.
      needs: The optional fields of its metadata that it reads.
      options: What the decorator was given beside these.
    """

    function: F
    needs: frozenset[str]
    options: Mapping[str, Any]


class Registry[F]:
    """The functions of one kind, which all take the same metadata.

    Attributes:
      optional: Fields of the metadata that have defaults: a function sees those that it needs.
    """

    def __init__(self, noun: str, decorator: str, metadata: Any, reserved: Sequence[str] = ()):
        """Makes an empty registry.

        Args:
          noun: A function in the words of errors, such as "an eviction policy".
          decorator: Name of the public decorator.
          metadata: The NamedTuple that the functions take.
          reserved: Names that mean something else.
        """
        self.optional = frozenset(metadata._field_defaults)
        self._article, self._noun = noun.split(" ", 1)
        self._decorator, self._metadata, self._reserved = decorator, metadata.__name__, tuple(reserved)
        self._entries: dict[str, Registered[F]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were registered."""
        return (*self._reserved, *self._entries)

    def decorate(self, name: str, needs: Iterable[str] = (), **options: Any) -> Callable[[F], F]:
        """Returns the decorator that registers a function, and returns it unchanged.

        Raises:
          ValueError, TypeError: the name is taken or no str, `needs` names no field, or what is decorated is
            no function.
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

    def find(self, name: str, argument: str) -> Registered[F]:
        """Returns the function of a name.

        Raises:
          ValueError: there is none, as the value of `argument`.
        """
        if name not in self._entries:
            names = ", ".join(map(repr, self.names))
            raise ValueError(
                f"{argument} is {name!r}, expected one of {names}; register others first, with the decorator "
                f"kvcache_jax.{self._decorator}"
            )
        return self._entries[name]

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Adds a note to what is raised within, which names the function and what it sees."""
        try:
            yield
        except Exception as error:
            needs = sorted(self._entries[name].needs)
            error.add_note(f"{self._noun} {name!r} has needs={needs} and sees no other optional metadata")
            raise

    def _require_new(self, name: str) -> None:
        if name in self.names:
            raise ValueError(
                f"there is {self._article} {self._noun} {name!r} already, expected a new name: compiled "
                "programs go by it"
            )
