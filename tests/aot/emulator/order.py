"""What the warpgroups of a CTA know of each other, by vector clocks that barriers pass on.

Whatever another warpgroup or a copy did to a byte must be known to the warpgroup that touches it next, in
whichever order the emulator happens to run them.
"""

import dataclasses

import numpy as np


class FaultError(Exception):
    """What would or might go wrong on a GPU."""


@dataclasses.dataclass
class Known:
    """What is known: of each warpgroup, all up to an epoch; and copies that have landed, by their numbers."""

    epochs: np.ndarray
    copies: set[int] = dataclasses.field(default_factory=set)

    def add(self, other: "Known") -> None:
        """Adds what another knows."""
        self.epochs = np.maximum(self.epochs, other.epochs)
        self.copies |= other.copies

    def copy(self) -> "Known":
        """Returns one that stays as it is."""
        return Known(self.epochs.copy(), self.copies.copy())


class Order:
    """Of the bytes of shared memory; of one warpgroup alone nothing is kept, for its own barriers order it.

    A warpgroup is in its first epoch until it passes on what it knows, which begins its next one.
    """

    def __init__(self, num_bytes: int, num_warpgroups: int):
        self._is_kept = num_warpgroups > 1
        self._known = [self.nothing(num_warpgroups) for _ in range(num_warpgroups)]
        for warpgroup, known in enumerate(self._known):
            known.epochs[warpgroup] = 1
        self._num_copies = 0
        size = num_bytes if self._is_kept else 0
        self._read_in, self._written_in = np.zeros((2, num_warpgroups, size), np.int32)
        self._copy = np.zeros(size, np.int32)  # the last one that landed

    @staticmethod
    def nothing(num_warpgroups: int) -> Known:
        """Returns what is known at first."""
        return Known(np.zeros(num_warpgroups, np.int32))

    def check(self, warpgroup: int, places: np.ndarray, verb: str) -> None:
        """Raises a fault unless the warpgroup knows what others did there; if it reads, wrote there."""
        if not self._is_kept:
            return
        known = self._known[warpgroup]
        for other, epoch in enumerate(known.epochs):
            is_unknown = self._written_in[other][places] > epoch
            refuse(is_unknown, f"{verb} what another warpgroup wrote, without a wait for it")
            if verb != "reads":
                is_unknown = self._read_in[other][places] > epoch
                refuse(is_unknown, f"{verb} what another warpgroup read, without a wait for it")
        copies = set(np.unique(self._copy[places]).tolist())
        refuse(copies - known.copies - {0}, f"{verb} what was copied, without a wait for the copy")

    def read(self, warpgroup: int, places: np.ndarray) -> None:
        """Notes that it has read there; places are indices or a mask."""
        if self._is_kept:
            self._read_in[warpgroup][places] = self._known[warpgroup].epochs[warpgroup]

    def wrote(self, warpgroup: int, places: np.ndarray) -> None:
        """Notes that it has written there."""
        if self._is_kept:
            self._written_in[warpgroup][places] = self._known[warpgroup].epochs[warpgroup]

    def copied(self, places: np.ndarray) -> Known:
        """Notes that a copy has landed there, and returns what those know who wait for it."""
        landed = self.nothing(len(self._known))
        if self._is_kept:
            self._num_copies += 1
            self._copy[places] = self._num_copies
            landed.copies.add(self._num_copies)
        return landed

    def passed_on(self, warpgroup: int) -> Known:
        """What the warpgroup knows; what it does from now on is not part of it."""
        known = self._known[warpgroup].copy()
        self._known[warpgroup].epochs[warpgroup] += 1
        return known

    def learned(self, warpgroup: int, known: Known) -> None:
        """The warpgroup knows that too."""
        self._known[warpgroup].add(known)


def refuse(is_bad: object, what: str) -> None:
    """Raises a fault if anything is bad."""
    if np.any(is_bad) if isinstance(is_bad, np.ndarray) else is_bad:
        raise FaultError(what)
