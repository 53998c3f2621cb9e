"""Errors of processes, as these note them for the others."""

import re
from typing import NamedTuple


class Failure(NamedTuple):
    """An error that a process noted.

    Attributes:
      order: Number of the order that it obeyed; 0 in a guarded call.
      call: Number of the guarded call; 0 in an order.
      is_symptom: A collective failed, for which another process or device may be the reason.
      error: Last line of what it says.
    """

    order: int
    call: int
    is_symptom: bool
    error: str

    @classmethod
    def of(cls, error: Exception, order: int, call: int) -> "Failure":
        """Describes an error."""
        return cls(order, call, is_symptom(error), last_line(error))

    def encode(self) -> bytes:
        """Writes it as text."""
        return f"{self.order} {self.call} {int(self.is_symptom)} {self.error}".encode()

    @classmethod
    def decode(cls, text: bytes) -> "Failure":
        """Reads what `encode` wrote."""
        order, call, symptom, error = text.decode().split(" ", 3)
        return cls(int(order), int(call), symptom == "1", error)


def last_line(error: Exception) -> str:
    """Returns the last line of an error, which may be a traceback."""
    return "".join(str(error).strip().splitlines()[-1:]) or repr(error)


def is_symptom(error: Exception) -> bool:
    """Tests whether a collective failed, for which another process or device may be the reason."""
    return re.search("gloo|nccl|collective", str(error), re.IGNORECASE) is not None
