"""The length of a dispatch that the host may shorten while it is under way.

A program on CPUs reads an argument where the host wrote it, if that begins at a multiple of 64 bytes, and the
loop of steps reads its length before each of them. So a dispatch ends with the step that is under way, and
nothing is compiled for it. It is a hint: tokens do not depend on where dispatches end. Where the device
has a copy, as all but CPUs, nothing can be shortened, and dispatches must be short by themselves.
"""

import threading

import jax
import numpy as np
from jax.sharding import Sharding

_ALIGNMENT = 64
_LEAST, _MOST, _SIZE = 0, 1, 3


class LiveLength:
    """The numbers i32[3] of a dispatch: least and most steps, and ticks. One serves one dispatch at a time.

    Args:
      home: Where the program runs; None on a mesh, whose devices must end after equal steps.

    Attributes:
      is_live: Whether the program reads what the host writes.
    """

    def __init__(self, home: Sharding | None):
        memory = np.zeros(2 * _ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        self._values = memory[first : first + _ALIGNMENT].view(np.int32)[:_SIZE]
        self._lock = threading.RLock()  # who shortens may come when the next dispatch begins
        self._array: jax.Array | None = None
        if home is not None and len(home.device_set) == 1 and next(iter(home.device_set)).platform == "cpu":
            array = jax.device_put(self._values, home, may_alias=True)
            self._array = array if array.unsafe_buffer_pointer() == self._values.ctypes.data else None
        self.is_live = self._array is not None

    def begin(self, *values: int) -> np.ndarray | jax.Array:
        """Sets the numbers, and returns the program's argument."""
        with self._lock:
            self._values[:] = values
        return self._values.copy() if self._array is None else self._array

    def shorten(self) -> None:
        """Ends the dispatch with the step that is under way, or after its least."""
        if self.is_live:
            with self._lock:
                self._values[_MOST] = self._values[_LEAST]
