"""Entries for `experiments.kernel_speed`: made-up sides, and what a CPU does in seconds."""

import dataclasses
import functools
import os
import time
from pathlib import Path

import jax

from experiments.common.command import InputError
from experiments.kernel_speed import cells, entries
from experiments.kernel_speed.cells import Cell, StepSizes
from experiments.kernel_speed.moves import Pools, ceiling_makers
from experiments.kernel_speed.timing import Contest, Program, Side

CELL = Cell(2, 64, 4, 16, num_kv_heads=1, head_dim=64)
CACHE = Path(__file__).parent.parent.parent / ".cache" / "jax" / jax.__version__
ENTRIES, SIDES = ("one", "two", "three", "four"), ("ours", "peer", "other peer")


@dataclasses.dataclass
class Fakes:
    """Entries ENTRIES of SIDES, which end, hang and break as they are told to.

    Attributes:
      acts: By side, or None for the data, "entry act step"; an entry is "*" for all.
      starts: What each start does, the last also those that follow; they are counted in the file `counter`.
    """

    acts: dict[str | None, str]
    counter: Path
    starts: tuple[str, ...] = ("",)
    is_lost: bool = False
    now: str = ""
    environment = {
        "device": {"name": "Fake GPU", "platform": "gpu"},
        "jax": "0",
        "date": "today",
        "revision": "abc",
    }
    names = [("decodes", name) for name in ENTRIES]

    def __call__(self) -> "Fakes":
        with self.counter.open("ab") as file:
            file.write(b".")
            nth = file.tell()
        self.act(self.starts[min(nth, len(self.starts)) - 1])
        return self

    def act(self, told: str) -> None:
        if told == "abort":
            os.abort()
        elif told == "exit":
            raise SystemExit("the peer does not support this")
        elif told == "leave":
            os._exit(3)
        elif told == "hang":
            time.sleep(600)
        elif told == "raise":
            raise RuntimeError("it does not work")
        elif told == "refuse":
            raise InputError("jax runs on cpu here")
        self.is_lost |= told == "lose"
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def told(self, side: str | None, name: str, step: str) -> str:
        entry, act, at = self.acts.get(side, "no act step").split()
        return act if entry in (name, "*") and at == step else ""

    def make(self, kind, name):
        self.now = name
        self.act(self.told(None, name, "data"))
        sides = [Side(side, functools.partial(self.prepare, side, name), side == "ours") for side in SIDES]
        return Contest(name, 10**9, lambda _: 0.0, 0.0, 2), sides, {"block_size": 16, "pid": os.getpid()}

    def prepare(self, side, name, num_launches):
        num_runs = 0

        def run():
            nonlocal num_runs
            num_runs += 1
            self.act(self.told(side, name, "launch") if num_runs == 1 else "")
            self.act(self.told(side, name, "sample") if num_runs == 3 else "")
            time.sleep(0.001)

        self.act(self.told(side, name, "prepare"))
        return Program(run, lambda _: None, lambda _: None)

    def check(self):
        self.act("")

    def clean(self):
        self.act(self.told(None, self.now, "clean"))


def interpreted() -> entries.Entries:
    """The whole path on tiny cells."""
    _keep_programs()
    entries.TINY = (CELL,)
    return entries.entries_of_device(is_quick=False, interpret=True)


def timed() -> entries.Entries:
    """As on a GPU."""
    _keep_programs()
    entries.QUICK = (CELL._replace(batch=1),)
    cells.ROTATED_BYTES = 3 * CELL.kv_bytes
    entries.ceiling_makers = functools.partial(ceiling_makers, 1 << 12)
    entries.Pools = functools.partial(Pools, 2, 8, 1, 8, 64)
    entries.NUM_MOVED = 2
    entries.STEPS = (StepSizes(2, 32, num_steps=2),)
    from experiments.kernel_speed import step

    step.LLAMA_1B = step.TINY
    return entries.Entries(jax.devices()[0], is_quick=True, interpret=False)


def _keep_programs() -> None:
    from tests.support.interpreters import callbacks_on_the_host

    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    callbacks_on_the_host().__enter__()  # until the process ends
