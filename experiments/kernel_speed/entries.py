"""What `experiments.kernel_speed` measures, made by name: ceilings, decodes, movements, whole steps.

They are made where the device is, in the process of `isolated`.
"""

import contextlib
import datetime
import functools
import gc
import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.common import command, timing
from experiments.kernel_speed.cells import QUICK, STEPS, TINY, TINY_STEPS, Cell, StepSizes, all_cells
from experiments.kernel_speed.moves import TINY_POOLS, Pools, ceiling_makers, move_makers
from experiments.kernel_speed.problem import TOLERANCE, error_of, expected_output, make_problem
from experiments.kernel_speed.sides import jax_sides
from experiments.kernel_speed.timing import Contest, Side, launches_for, one_line
from experiments.kernel_speed.torch_sides import FLASHINFER_DIR, free_memory, synchronize, torch_sides

NUM_MOVED = 512
"""Blocks that are gathered, scattered and copied."""
NUM_FIRST_CELLS = 6
"""Decodes before the other kernels have their turn."""

Made = tuple[Contest, Sequence[Side], dict[str, Any]]
"""What is to be done, by whom, and sizes for the record."""


class NoRoomError(MemoryError):
    """The data do not fit into the device's memory."""


class Entries:
    """All entries of one benchmark, the most important ones first.

    Attributes:
      environment: Where and when, for the report.
    """

    def __init__(self, device: Any, is_quick: bool, interpret: bool):
        self.device, self.interpret = device, interpret
        self.environment = environment(device)
        cells = TINY if interpret else QUICK if is_quick else all_cells()
        decodes = [("decodes", cell.name, functools.partial(self._decode, cell)) for cell in cells]
        ceilings = ceiling_makers(1 << 12) if interpret else ceiling_makers()
        if interpret:
            moves = move_makers(TINY_POOLS, (3,), 2, interpret=True)
        else:
            moves = move_makers(Pools(), (128,) if is_quick else (1, 128, 4096), NUM_MOVED)
        steps = TINY_STEPS if interpret else STEPS[:1] if is_quick else STEPS
        self._makers: dict[tuple[str, str], Callable[[], Made]] = {
            (kind, name): make
            for kind, name, make in (
                *(("entries", name, functools.partial(_without_sizes, ceilings[name])) for name in ceilings),
                *decodes[:NUM_FIRST_CELLS],
                *(("moves", name, functools.partial(_without_sizes, moves[name])) for name in moves),
                *(("steps", sizes.name, functools.partial(self._step, sizes)) for sizes in steps),
                *decodes[NUM_FIRST_CELLS:],
            )
        }

    @property
    def names(self) -> list[tuple[str, str]]:
        """(kind, name) of each: the list of the report, and its entry."""
        return list(self._makers)

    def make(self, kind: str, name: str) -> Made:
        return self._makers[kind, name]()

    def check(self) -> None:
        """Raises if the device answers nobody, as after an illegal access."""
        jax.block_until_ready(jax.numpy.arange(8).sum())
        synchronize()

    def clean(self) -> None:
        """Frees what an entry held."""
        gc.collect()
        jax.clear_caches()
        free_memory()
        self.check()

    def _decode(self, cell: Cell) -> Made:
        limit = (self.device.memory_stats() or {}).get("bytes_limit")
        if limit is not None and cell.needed_bytes > limit:
            raise NoRoomError(f"needs {cell.needed_bytes / 1e9:.0f} GB, and {limit / 1e9:.0f} GB may be used")
        num_launches = 2 if self.interpret else launches_for(cell.kv_bytes)
        problem = jax.block_until_ready(make_problem(cell, num_buffers=2 if self.interpret else None))
        expected = expected_output(problem, (num_launches - 1) % problem.num_buffers)
        contest = Contest(
            cell.name, cell.kv_bytes, lambda out: error_of(out, expected), TOLERANCE, num_launches
        )
        sizes = {**cell._asdict(), "num_buffers": problem.num_buffers}
        return contest, [*jax_sides(problem, self.interpret), *torch_sides(problem)], sizes

    def _step(self, sizes: StepSizes) -> Made:
        from experiments.kernel_speed import step  # needs flax

        decoder = step.make_decoder(step.TINY if self.interpret else step.LLAMA_1B)
        config = {
            "param_bytes": step.param_bytes(decoder),
            "kv_bytes": step.kv_bytes(decoder.config, sizes),
        }
        return (*step.step_contest(decoder, sizes, self.interpret), {**sizes._asdict(), **config})


def _without_sizes(make: Callable[[], tuple[Contest, list[Side]]]) -> Made:
    return (*make(), {})


def environment(device: Any) -> dict[str, Any]:
    """Where and when; of packages that are not installed, nothing."""
    peers, folder = {}, os.environ.get(FLASHINFER_DIR)
    for package in (
        "torch",
        "flashinfer-python",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "nvidia-cudnn-cu13",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            peers[package] = importlib.metadata.version(package)
    return {
        "device": {
            "name": device.device_kind,
            "platform": device.platform,
            "compute_capability": getattr(device, "compute_capability", None),
            "runtime": device.client.platform_version.splitlines()[0],
            "driver": _driver() if device.platform == "gpu" else None,
        },
        "machine": timing.machine(),
        "revision": timing.revision(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "jax": jax.__version__,
        "packages": peers,
        "flashinfer_modules": sorted(path.stem for path in Path(folder).glob("*/*.so")) if folder else [],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0].strip() if lines else None


def entries_of_device(is_quick: bool, interpret: bool) -> Entries:
    """Starts jax.

    Raises:
      command.InputError: see `find_device`.
    """
    device = find_device(interpret)
    jax.config.update("jax_default_device", device)
    return Entries(device, is_quick, interpret)


def find_device(interpret: bool) -> Any:
    """The device that is measured.

    Raises:
      command.InputError: it is none that the kernels are for.
    """
    from pallas_kernels.versions import untested_jax

    if reason := untested_jax():
        raise command.InputError(reason)
    advice = "run it on an H100 or H200, or see the path with --interpret --output DIR"
    try:
        device = jax.devices("cpu")[0] if interpret else jax.devices()[0]
    except RuntimeError as error:
        raise command.InputError(f"jax finds no device ({one_line(error)}): {advice}") from error
    if interpret:
        return device
    if device.platform != "gpu":
        raise command.InputError(
            f"jax runs on {device.platform} here, expected an NVIDIA Hopper GPU: {advice}"
        )
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        raise command.InputError(
            f"{device.device_kind} has compute capability {capability}, expected 9.0 (Hopper): {advice}"
        )
    return device
