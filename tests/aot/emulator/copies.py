"""The copy engine (TMA): tensors, barriers in shared memory, and copies on their way."""

import dataclasses

import numpy as np

from tests.aot.descriptors import Descriptor
from tests.aot.emulator.memory import FaultError, SharedMemory
from tests.aot.emulator.order import Known, Order

_ALIGNMENT = 128


@dataclasses.dataclass
class Copy:
    """From or to `places` in shared memory, to or from as many `offsets` in the bytes of a global array."""

    places: np.ndarray
    array: np.ndarray
    offsets: np.ndarray
    taken: np.ndarray | None = None  # of a store: what it has read of shared memory

    @property
    def num_bytes(self) -> int:
        return self.places.size


@dataclasses.dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there.

    Those who wait for it learn what those have passed on who arrived, see `Order`.
    """

    count: int
    num_warpgroups: int = 1
    phase: int = 0
    num_bytes: int = 0
    is_fenced: bool = False
    is_known: bool = False  # to all threads and to the copy engine

    def __post_init__(self):
        self.pending = self.count
        self.loads: list[Copy] = []
        self._arriving, self.known = (Order.nothing(self.num_warpgroups) for _ in range(2))

    def arrive(self, expected_bytes: np.ndarray, known: Known) -> None:
        """Threads arrive, each of which announces bytes, and pass on what they know."""
        if expected_bytes.size > self.pending:
            raise FaultError(f"{expected_bytes.size} arrive at a barrier that expects {self.pending}")
        self.pending -= expected_bytes.size
        self.num_bytes += int(expected_bytes.sum())
        self._arriving.add(known)
        self.end_phase()

    def land(self, shared: SharedMemory) -> None:
        """Lets all loads land that are on their way."""
        for load in self.loads:
            self._arriving.add(shared.end_write(load.places, load.array[load.offsets]))
            self.num_bytes -= load.num_bytes
        self.loads = []
        self.end_phase()

    def end_phase(self) -> None:
        if self.pending == self.num_bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.known = self._arriving.copy()


class ThreadCopies:
    """What the threads of a warpgroup copy to shared memory (cp.async), in groups that land in order."""

    def __init__(self, shared: SharedMemory, lands_late: bool):
        self._shared, self._lands_late = shared, lands_late
        self._groups: list[list[tuple]] = [[]]  # the last one is open

    def begin(self, places: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """Begins to write uint8[threads, bytes], by threads of these warps."""
        self._shared.begin_thread_copy(places, warps)
        self._groups[-1].append((places, values, warps))
        if not self._lands_late:
            self._land(self._groups[-1])

    def commit(self) -> None:
        """Ends a group."""
        self._groups.append([])

    def wait(self, num_groups: int) -> None:
        """Lets all but the last so many groups land."""
        while len(self._groups) - 1 > num_groups:
            self._land(self._groups.pop(0))

    def _land(self, group: list[tuple]) -> None:
        for copy in group:
            self._shared.end_thread_copy(*copy)
        group.clear()


def tensor_copy(descriptor: Descriptor, array: np.ndarray, first: tuple[int, ...], address: int) -> Copy:
    """A box of a tensor, at a swizzled place in shared memory."""
    if address % _ALIGNMENT:
        raise FaultError(f"copies to or from address {address}, expected a multiple of {_ALIGNMENT}")
    elements, box = np.zeros((), np.int64), descriptor.box
    for start, length, size, stride in zip(first, box, descriptor.sizes, descriptor.strides, strict=True):
        if not 0 <= start <= size - length:
            raise FaultError(f"copies the box {box} at {first} of a tensor of {descriptor.sizes}")
        elements = elements[..., None] + np.arange(start, start + length) * stride
    offsets = elements.reshape(-1, 1) * descriptor.width + np.arange(descriptor.width)
    places = address + np.arange(offsets.size)
    return Copy(swizzled(places, descriptor.swizzle), array, offsets.reshape(-1))


def swizzled(addresses: np.ndarray, num_bytes: int) -> np.ndarray:
    """Where the bytes of rows of 128, 64 or 32 bytes lie; 16 is no swizzle."""
    return addresses ^ ((addresses >> 7 & (num_bytes // 16 - 1)) << 4)
