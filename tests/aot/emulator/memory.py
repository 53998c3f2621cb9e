"""Global and shared memory, and who may touch which byte of shared memory when."""

import bisect

import numpy as np

NUM_THREADS, NUM_WARPS = 128, 4
SHARED = 1024
"""Address at which shared memory begins."""
_GLOBAL, _GAP = 1 << 32, 1 << 16
_CLEAN, _STORED, _FENCED = range(3)


class FaultError(Exception):
    """What would or might go wrong on a GPU."""


class UnknownError(Exception):
    """What this emulator cannot run."""


class GlobalMemory:
    """Arrays, far from each other."""

    def __init__(self):
        self._starts: list[int] = []
        self._arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """Takes an array, which kernels then change in place, and returns its address."""
        last = self._starts[-1] + self._arrays[-1].size if self._starts else _GLOBAL
        self._starts.append(-(-last // _GAP) * _GAP + _GAP)
        self._arrays.append(array.reshape(-1).view(np.uint8))
        return self._starts[-1]

    def find(self, address: int, num_bytes: int) -> tuple[np.ndarray, int]:
        """Returns the bytes of the array that holds an address, and the place in it."""
        nth = bisect.bisect_right(self._starts, address) - 1
        place = address - self._starts[nth]
        if nth < 0 or place + num_bytes > self._arrays[nth].size:
            raise FaultError(f"{num_bytes} bytes of global memory at {address:#x} are out of bounds")
        return self._arrays[nth], place

    def read(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """uint8[threads, num_bytes]. Compilers widen loads to aligned ones that may end after an array."""
        distinct, inverse = np.unique(addresses, return_inverse=True)
        loaded = np.full((distinct.size, num_bytes), 0xFF, np.uint8)
        for row, address in zip(loaded, distinct, strict=True):
            array, place = self.find(int(address), 1)
            if place % num_bytes or num_bytes > 16:
                raise FaultError(f"loads {num_bytes} bytes at {address:#x}, which is not aligned")
            part = array[place : place + num_bytes]
            row[: part.size] = part
        return loaded[inverse]


class SharedMemory:
    """The bytes of a CTA, and what happened to each.

    What threads do, `read` and `write`, is ordered between warps by `barrier` alone; asynchronous units read
    and write by `begin_*` and `end_*`, and see what threads stored after `fence` and then `barrier`.
    """

    def __init__(self, num_bytes: int):
        size = SHARED + num_bytes
        self.data = np.full(size, 0xFF, np.uint8)  # NaN, for most types
        self._is_written = np.zeros(size, bool)
        self._stored = np.full(size, _CLEAN, np.uint8)
        self._num_readers, self._is_landing = np.zeros(size, np.int16), np.zeros(size, bool)  # asynchronous
        # Since the last barrier: warps, a bit each, and whether an asynchronous unit was done with it.
        self._readers, self._writers = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self._was_read = np.zeros(size, bool)

    def barrier(self) -> None:
        """All threads wait for each other."""
        self._readers[:], self._writers[:], self._was_read[:] = 0, 0, False
        self._stored[self._stored == _FENCED] = _CLEAN

    def fence(self) -> None:
        """Threads pass on what they stored to asynchronous units."""
        self._stored[self._stored == _STORED] = _FENCED

    def read(self, addresses: np.ndarray, num_bytes: int, warps: np.ndarray) -> np.ndarray:
        """Loads uint8[threads, num_bytes], by threads of these warps."""
        places = self._places(addresses, num_bytes)
        _refuse(self._is_landing[places], "reads what a copy is writing")
        own = (1 << warps).astype(np.uint8)[:, None]
        _refuse(self._writers[places] & ~own, "reads what another warp wrote, without a barrier")
        for warp in range(NUM_WARPS):
            self._readers[places[warps == warp]] |= 1 << warp
        return self.data[places]

    def write(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """Stores uint8[threads, bytes], by threads of these warps."""
        places = self._places(addresses, values.shape[1])
        self._refuse_busy(places, "writes")
        for warp in range(NUM_WARPS):
            mine, new = places[warps == warp], values[warps == warp]
            others = np.uint8(~(1 << warp) & 0xFF)
            _refuse(self._readers[mine] & others, "writes what another warp read, without a barrier")
            is_other = (self._writers[mine] & others != 0) & (self.data[mine] != new)
            _refuse(is_other, "writes what another warp wrote, without a barrier")
            self.data[mine] = new
            self._writers[mine] |= 1 << warp
            self._stored[mine], self._is_written[mine] = _STORED, True

    def begin_read(self, places: np.ndarray) -> None:
        """An asynchronous unit begins to read."""
        self._check_bounds(places)
        _refuse(self._stored[places] != _CLEAN, "reads what threads stored, without a fence and a barrier")
        _refuse(self._is_landing[places], "reads what a copy is writing")
        _refuse(~self._is_written[places], "reads what was never written")
        self._num_readers[places] += 1

    def end_read(self, places: np.ndarray) -> None:
        """It is known to have read; to other warps after a barrier."""
        self._num_readers[places] -= 1
        self._was_read[places] = True

    def begin_write(self, places: np.ndarray, warp: int) -> None:
        """A copy that a warp has started begins to write."""
        self._check_bounds(places)
        self._refuse_busy(places, "copies over")
        others = self._readers[places] & np.uint8(~(1 << warp) & 0xFF)
        _refuse(others, "copies over what another warp read, without a barrier")
        _refuse(
            self._stored[places] != _CLEAN, "copies over what threads stored, without a fence and a barrier"
        )
        self._is_landing[places] = True

    def end_write(self, places: np.ndarray, values: np.ndarray) -> None:
        """The copy has landed."""
        self.data[places] = values
        self._is_landing[places], self._is_written[places] = False, True

    def check_idle(self) -> None:
        """Raises a fault if something is still going on."""
        _refuse(self._is_landing, "ends while a copy is writing to shared memory")
        _refuse(self._num_readers, "ends while a copy or a product is reading shared memory")

    def _places(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        _refuse(addresses % num_bytes, f"accesses {num_bytes} bytes that are not aligned")
        places = addresses[:, None] + np.arange(num_bytes)
        self._check_bounds(places)
        return places

    def _check_bounds(self, places: np.ndarray) -> None:
        _refuse((places < SHARED) | (places >= self.data.size), "is out of the bounds of shared memory")

    def _refuse_busy(self, places: np.ndarray, verb: str) -> None:
        _refuse(self._is_landing[places], f"{verb} what a copy is writing")
        _refuse(self._num_readers[places], f"{verb} what a copy or a product is reading")
        _refuse(
            self._was_read[places], f"{verb} what a copy or a product read, without a barrier after the wait"
        )


def _refuse(is_bad: np.ndarray, what: str) -> None:
    if np.any(is_bad):
        raise FaultError(what)
