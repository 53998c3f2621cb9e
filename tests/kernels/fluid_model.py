"""How a decode's plan fills a GPU, by a model of fluids: bandwidth flows to the programs that run.

Programs start in order as slots get free, wait for their first tile, then read; each reads at most as fast as
one program can, and all together at most as fast as the memory. What a launch costs beside is one number. The
merge of many parts of one row is not in it, nor what programs without work cost.
"""

from typing import NamedTuple

import numpy as np

LAUNCHES_US = 9.0
"""Of the decode and of the merge, with the gaps before them."""
FIRST_TILE_US = 2.0
_EMPTY = 1e-6


class Gpu(NamedTuple):
    """A GPU and what one program of a kernel can read.

    Attributes:
      num_slots: Programs that run side by side.
      gb_per_s: Of the memory.
      program_gb_per_s: Of one program.
    """

    num_slots: int
    gb_per_s: float
    program_gb_per_s: float


def of_ceiling(kilobytes: np.ndarray, gpu: Gpu) -> float:
    """Says which part of the memory's bandwidth is used by programs that read so much, in this order."""
    needed_us = kilobytes.sum() / gpu.gb_per_s  # 10^9 bytes a second are a kilobyte in a microsecond
    return needed_us / (_microseconds(kilobytes, gpu) + LAUNCHES_US)


def _microseconds(kilobytes: np.ndarray, gpu: Gpu) -> float:
    """Returns the microseconds until the last program ends."""
    left, wait = np.zeros(gpu.num_slots), np.zeros(gpu.num_slots)
    started, now = 0, 0.0
    while True:
        free = np.flatnonzero(left <= _EMPTY)[: len(kilobytes) - started]
        left[free], wait[free] = kilobytes[started : started + len(free)], FIRST_TILE_US
        started += len(free)
        runs = left > _EMPTY
        if not runs.any():
            return now
        reads = runs & (wait <= _EMPTY)
        rate = min(gpu.program_gb_per_s, gpu.gb_per_s / max(1, reads.sum()))
        step = np.where(reads, left / rate, wait)[runs].min()  # until one ends or begins to read
        now += step
        left[reads] -= step * rate
        wait[runs & ~reads] -= step
