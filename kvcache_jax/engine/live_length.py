"""The length of a dispatch that the host may shorten while it is under way.

A program on CPUs reads an argument where the host wrote it, if that begins at a multiple of 64 bytes, and the
loop of steps reads its length before each of them. So a dispatch ends with the step that is under way, and
nothing is compiled for it. It is a hint: tokens do not depend on where dispatches end. Where the device
has a copy, as all but CPUs, nothing can be shortened, and dispatches must be short by themselves.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Sharding

_ALIGNMENT = 64
_LEAST, _MOST = range(2)


class LiveLength:
    """The numbers i32[3] of a dispatch: least and most steps, and ticks.

    Args:
      values: The numbers.
      home: Where the program runs; None on a mesh, whose devices must end after equal steps.

    Attributes:
      argument: The array for the program.
      is_live: Whether it reads what the host writes.
    """

    def __init__(self, values: Sequence[int], home: Sharding | None):
        self.argument: np.ndarray | jax.Array = np.array(values, np.int32)
        self.is_live = False
        if home is None or len(home.device_set) > 1 or next(iter(home.device_set)).platform != "cpu":
            return
        memory = np.zeros(2 * _ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        self._values = memory[first : first + _ALIGNMENT].view(np.int32)[: len(values)]
        self._values[:] = values
        self.argument = jax.device_put(self._values, home, may_alias=True)
        self.is_live = self.argument.unsafe_buffer_pointer() == self._values.ctypes.data

    def shorten(self) -> None:
        """Ends the dispatch with the step that is under way, or after its least."""
        if self.is_live:
            self._values[_MOST] = self._values[_LEAST]
