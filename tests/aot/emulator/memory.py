"""Global and shared memory, and who may touch which byte of shared memory when."""

import bisect
from collections.abc import Iterator

import numpy as np

from tests.aot.emulator.order import FaultError, Known, Order
from tests.aot.emulator.order import refuse as _refuse

NUM_THREADS, NUM_WARPS = 128, 4
"""Of a warpgroup."""
SHARED = 1024
"""Address at which shared memory begins."""
GLOBAL, _GAP = 1 << 32, 1 << 16
"""Where global memory begins, and what lies between arrays."""
_CLEAN, _STORED, _FENCED = range(3)


class UnknownError(Exception):
    """What this emulator cannot run."""


class GlobalMemory:
    """Arrays, far from each other."""

    def __init__(self):
        self._starts: list[int] = []
        self._arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """Takes an array, which kernels then change in place, and returns its address."""
        last = self._starts[-1] + self._arrays[-1].size if self._starts else GLOBAL
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

    def read_exactly(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """uint8[threads, num_bytes], all within arrays."""
        return np.stack([array[place] for array, place in self._found(addresses, num_bytes)])

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Stores uint8[threads, bytes]."""
        for (array, place), row in zip(self._found(addresses, values.shape[1]), values, strict=True):
            array[place] = row

    def _found(self, addresses: np.ndarray, num_bytes: int) -> Iterator[tuple[np.ndarray, slice]]:
        for address in addresses.tolist():
            array, place = self.find(address, num_bytes)
            if place % num_bytes:
                raise FaultError(f"accesses {num_bytes} bytes at {address:#x}, which is not aligned")
            yield array, slice(place, place + num_bytes)


class SharedMemory:
    """The bytes of a CTA, and what happened to each.

    What threads do, `read` and `write`, is ordered between the warps of a warpgroup by `barrier` alone;
    asynchronous units read and write by `begin_*` and `end_*`, and come after what threads stored and loaded
    if a `fence` and then a `barrier` lie between. Of other warpgroups, `order` says what they know. Warps are
    counted through a CTA.
    """

    def __init__(self, num_bytes: int, num_warpgroups: int = 1):
        size = SHARED + num_bytes
        self.order = Order(size, num_warpgroups)
        self.data = np.full(size, 0xFF, np.uint8)  # NaN, for most types
        self._is_written = np.zeros(size, bool)
        self._stored = np.full(size, _CLEAN, np.uint8)
        self._num_readers, self._is_landing = np.zeros(size, np.int16), np.zeros(size, bool)  # asynchronous
        self._storer = np.zeros(size, np.uint8)  # the last warpgroup of which threads stored something
        # Since the last barrier: warps, a bit each, and the warpgroup whose asynchronous reads are done.
        self._readers, self._writers = np.zeros(size, np.uint16), np.zeros(size, np.uint16)
        self._was_read = np.zeros(size, np.uint8)
        self._loaded = np.zeros(size, np.uint8)  # by threads since their fence, a bit for each warpgroup

    def barrier(self, warpgroup: int) -> None:
        """All threads of a warpgroup wait for each other."""
        others = np.uint16(~_warps_of(warpgroup) & 0xFFFF)
        self._readers &= others
        self._writers &= others
        self._was_read &= np.uint8(~(1 << warpgroup) & 0xFF)
        self._stored[(self._stored == _FENCED) & (self._storer == warpgroup)] = _CLEAN

    def fence(self, warpgroup: int) -> None:
        """Threads pass on what they stored to asynchronous units, and what they loaded has been loaded."""
        self._loaded &= np.uint8(~(1 << warpgroup) & 0xFF)
        is_own = (self._stored == _STORED) & (self._storer == warpgroup)
        self._stored[is_own] = _FENCED
        self.order.wrote(warpgroup, is_own)  # now, for those who wait for the warpgroup

    def read(self, addresses: np.ndarray, num_bytes: int, warps: np.ndarray) -> np.ndarray:
        """Loads uint8[threads, num_bytes], by threads of these warps."""
        places = self._places(addresses, num_bytes)
        _refuse(self._is_landing[places], "reads what a copy is writing")
        warpgroup = warps[0] // NUM_WARPS
        others = (_warps_of(warpgroup) & ~(1 << warps)).astype(np.uint16)[:, None]
        _refuse(self._writers[places] & others, "reads what another warp wrote, without a barrier")
        self.order.check(warpgroup, places, "reads")
        for warp in np.unique(warps):
            self._readers[places[warps == warp]] |= np.uint16(1 << warp)
        self._loaded[places] |= np.uint8(1 << warpgroup)
        self.order.read(warpgroup, places)
        return self.data[places]

    def write(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """Stores uint8[threads, bytes], by threads of these warps."""
        places = self._places(addresses, values.shape[1])
        warpgroup = warps[0] // NUM_WARPS
        self._refuse_busy(places, "writes", warpgroup)
        self.order.check(warpgroup, places, "writes")
        self._storer[places] = warpgroup
        self.order.wrote(warpgroup, places)
        for warp in np.unique(warps):
            mine, new = places[warps == warp], values[warps == warp]
            others = np.uint16(_warps_of(warpgroup) & ~(1 << warp))
            _refuse(self._readers[mine] & others, "writes what another warp read, without a barrier")
            is_other = (self._writers[mine] & others != 0) & (self.data[mine] != new)
            _refuse(is_other, "writes what another warp wrote, without a barrier")
            self.data[mine] = new
            self._writers[mine] |= np.uint16(1 << warp)
            self._stored[mine], self._is_written[mine] = _STORED, True

    def begin_read(self, places: np.ndarray, warpgroup: int) -> None:
        """An asynchronous unit begins to read, for a warpgroup."""
        self._check_bounds(places)
        self._check_fenced(places, "reads", warpgroup)
        _refuse(self._is_landing[places], "reads what a copy is writing")
        self.order.check(warpgroup, places, "reads")
        _refuse(~self._is_written[places], "reads what was never written")
        self._num_readers[places] += 1

    def end_read(self, places: np.ndarray, warpgroup: int) -> None:
        """It is known to have read; to other warps after a barrier."""
        self._num_readers[places] -= 1
        self._was_read[places] |= np.uint8(1 << warpgroup)
        self.order.read(warpgroup, places)

    def begin_write(self, places: np.ndarray, warp: int) -> None:
        """A copy that a warp has started begins to write."""
        self._check_bounds(places)
        warpgroup = warp // NUM_WARPS
        self._refuse_busy(places, "copies over", warpgroup)
        others = self._readers[places] & np.uint16(_warps_of(warpgroup) & ~(1 << warp))
        _refuse(others, "copies over what another warp read, without a barrier")
        self._check_fenced(places, "copies over", warpgroup)
        self.order.check(warpgroup, places, "copies over")
        _refuse(self._loaded[places], "copies over what threads loaded, without a fence")
        self._is_landing[places] = True

    def end_write(self, places: np.ndarray, values: np.ndarray) -> Known:
        """The copy has landed; returns what those know who wait for it."""
        self.data[places] = values
        self._is_landing[places], self._is_written[places] = False, True
        return self.order.copied(places)

    def begin_thread_copy(self, places: np.ndarray, warps: np.ndarray) -> None:
        """Threads of these warps begin to copy to places [threads, bytes]; no fence lies between."""
        self._check_bounds(places)
        warpgroup = warps[0] // NUM_WARPS
        self._refuse_busy(places, "copies over", warpgroup)
        others = (_warps_of(warpgroup) & ~(1 << warps)).astype(np.uint16)[:, None]
        used = self._readers[places] | self._writers[places]
        _refuse(used & others, "copies over what another warp used, without a barrier")
        self._is_landing[places] = True

    def end_thread_copy(self, places: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """The copies have landed; for other warps like what these stored."""
        self._is_landing[places] = False
        self.write(places[:, 0], values, warps)

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

    def _check_fenced(self, places: np.ndarray, verb: str, warpgroup: int) -> None:
        """A warp of another warpgroup that waits for one after its fence sees what it stored."""
        stored = self._stored[places]
        lacks_barrier = (stored == _FENCED) & (self._storer[places] == warpgroup)
        _refuse(
            (stored == _STORED) | lacks_barrier, f"{verb} what threads stored, without a fence and a barrier"
        )

    def _refuse_busy(self, places: np.ndarray, verb: str, warpgroup: int) -> None:
        _refuse(self._is_landing[places], f"{verb} what a copy is writing")
        _refuse(self._num_readers[places], f"{verb} what a copy or a product is reading")
        _refuse(
            self._was_read[places] & np.uint8(1 << warpgroup),
            f"{verb} what a copy or a product read, without a barrier after the wait",
        )


def _warps_of(warpgroup: int) -> int:
    """A bit for each warp."""
    return (1 << NUM_WARPS) - 1 << NUM_WARPS * int(warpgroup)
