"""Question: how fast are the GPU kernels beside the memory's bandwidth, and beside other people's?

Command: python -m experiments.kernel_speed [--quick] [--json] [--minutes 8] [--flashinfer DIR]
         python -m experiments.kernel_speed --interpret --output DIR    the same path on a CPU, no times
Machine: one NVIDIA Hopper GPU with nothing else on it; results/<device>.json and .png
Answer:  not yet measured.

First the ceilings: reading only, and copying. Then paged decode, batch {1, 8, 32, 128} x context {1k, 8k,
32k} x query heads per key/value head {1, 4, 8} x blocks of {16, 64, 128}, 8 key/value heads of 128, bfloat16:
ours, its plan made before (as once per step for all layers) and made again each time, beside every peer that
can be imported (`kernel_speed_sides`, `kernel_speed_torch`). Then the movement of tokens and blocks, and the
whole step of a decoder with the shape of Llama-3.2-1B beside its roofline.

Each side is checked against the float32 reference before it is timed; the sides of a cell take turns
(`kernel_speed_timing` says what is timed). Who is wrong or cannot run is reported with the reason, and cells
that do not fit into the memory or the time are listed; the most important ones come first. A ratio is the
fastest peer's median over ours: above 1 we are faster. GB/s count the keys and values of the rows, each once.
The results are written after every cell, so that whatever ends the run leaves what was measured.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from experiments import command, timing
from experiments.kernel_speed_cells import QUICK, TINY, Cell, all_cells
from experiments.kernel_speed_moves import (
    COPY,
    READ,
    TINY_POOLS,
    Pools,
    ceiling_contests,
    floor_contest,
    move_contests,
)
from experiments.kernel_speed_problem import TOLERANCE, error_of, expected_output, make_problem
from experiments.kernel_speed_report import draw, show
from experiments.kernel_speed_sides import jax_sides
from experiments.kernel_speed_summary import ceilings, comparison, gb_per_s, medians_us, summary
from experiments.kernel_speed_timing import FAILED, Contest, Side, compete, deadline, launches_for, one_line
from experiments.kernel_speed_torch import FLASHINFER_DIR, free_memory, torch_sides

RESULTS = Path(__file__).parent / "results"
NUM_MOVED = 512
"""Blocks that are gathered, scattered and copied."""
NUM_FIRST_CELLS = 6
"""Decodes before the other kernels have their turn."""
ANSWER_S = 90.0
"""A sample that takes longer is one that never ends."""


class Run:
    """One benchmark: its report, which is saved after every entry, and its time.

    Attributes:
      report: The object of `--json`.
      end: When it must be done, of `time.monotonic`.
      seconds: For the samples of an entry; None only checks.
    """

    def __init__(self, options: argparse.Namespace, device: Any):
        self.options, self.device, self.start = options, device, time.monotonic()
        self.end = self.start + 60 * options.minutes
        self.seconds = None if options.interpret else 0.6 if options.quick else 1.0
        self.longest_s = 0.0
        self.report: dict[str, Any] = {
            **environment(device),
            "is_interpreted": options.interpret,
            "is_quick": options.quick,
            "ceilings": {},
            "entries": [],
            "decodes": [],
            "moves": [],
            "steps": [],
            "skipped": [],
            "left_out": [],
            "stopped": "",
        }

    @property
    def path(self) -> Path:
        """Of the report."""
        slug = re.sub(r"[^a-z0-9]+", "_", self.report["device"]["name"].lower()).strip("_")
        kind = "_interpreted" if self.options.interpret else "_quick" if self.options.quick else ""
        return self.options.output / f"{slug}{kind}.json"

    def save(self) -> None:
        report = self.report
        report["ceilings"] = ceilings(report["entries"])
        for entry in report["decodes"]:
            entry["comparison"] = comparison(entry, report["ceilings"].get(READ))
        for kind, ceiling in (("moves", COPY), ("steps", READ)):
            rate = report["ceilings"].get(ceiling)
            for entry in report[kind]:
                shares = (
                    {side: (gb_per_s(entry, side) or 0) / rate for side in medians_us(entry)} if rate else {}
                )
                entry["of_ceiling"] = shares
        report["summary"] = summary(report["decodes"])
        report["seconds"] = time.monotonic() - self.start
        self.path.write_text(json.dumps(report, indent=1) + "\n")

    def watch(self, what: str) -> AbstractContextManager:
        """Ends the process if the device does not answer: nothing in this process can stop a kernel."""
        if self.options.interpret:
            return contextlib.nullcontext()

        def give_up() -> None:
            self.report["stopped"] = f"no answer within {ANSWER_S:g} s: {what}"
            self.save()
            print(f"{self.report['stopped']}; results so far: {self.path}", file=sys.stderr, flush=True)
            os._exit(3)

        return deadline(ANSWER_S, give_up)

    def enter(self, kind: str, name: str, make: Callable[[], tuple[Contest, Sequence[Side], dict]]) -> None:
        """Adds one entry to the report's `kind`, if there is time for it."""
        left = self.end - time.monotonic()
        if self.report["stopped"] or left < 1.2 * self.longest_s:
            self.report["left_out"].append(name)
            return
        start = time.monotonic()
        try:
            contest, sides, sizes = make()
        except Exception as failure:  # no room for the data, or no reference
            self.report["skipped"].append({"cell": name, "reason": one_line(failure)})
            return
        records = compete(contest, sides, self.seconds, self.watch)
        entry = {**sizes, "name": name, "num_bytes": contest.num_bytes, "sides": records}
        self.report[kind].append(entry)
        del contest, sides
        gc.collect()
        jax.clear_caches()
        free_memory()
        if any(record["status"] == FAILED for record in records):
            self._check_device(name)
        self.save()
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        print(f"{time.monotonic() - self.start:4.0f} s  {kind}: {name}", file=sys.stderr, flush=True)

    def _check_device(self, name: str) -> None:
        """After an illegal access, everything that follows would fail in the name of another."""
        try:
            jax.block_until_ready(jax.numpy.arange(8).sum())
        except Exception as failure:
            self.report["stopped"] = f"the device is lost after {name}: {one_line(failure)}"

    def decode(self, cell: Cell) -> None:
        limit = (self.device.memory_stats() or {}).get("bytes_limit")
        if limit is not None and cell.needed_bytes > limit:
            reason = f"needs {cell.needed_bytes / 1e9:.0f} GB, and {limit / 1e9:.0f} GB may be used"
            self.report["skipped"].append({"cell": cell.name, "reason": reason})
            return

        def make() -> tuple[Contest, Sequence[Side], dict]:
            interpret = self.options.interpret
            num_launches = 2 if interpret else launches_for(cell.kv_bytes)
            problem = jax.block_until_ready(make_problem(cell, num_buffers=2 if interpret else None))
            expected = expected_output(problem, (num_launches - 1) % problem.num_buffers)
            contest = Contest(
                cell.name, cell.kv_bytes, lambda out: error_of(out, expected), TOLERANCE, num_launches
            )
            sizes = {**cell._asdict(), "num_buffers": problem.num_buffers}
            return contest, [*jax_sides(problem, interpret), *torch_sides(problem)], sizes

        self.enter("decodes", cell.name, make)

    def measure(self) -> None:
        cells = list(TINY if self.options.interpret else QUICK if self.options.quick else all_cells())
        self._try("the ceilings", self._ceilings)
        for cell in cells[:NUM_FIRST_CELLS]:
            self.decode(cell)
        self._try("the movement of tokens and blocks", self._moves)
        self._try("the decoder's steps", self._steps)
        for cell in cells[NUM_FIRST_CELLS:]:
            self.decode(cell)

    def _try(self, name: str, stage: Callable[[], None]) -> None:
        """What cannot even be prepared is skipped: no room, a lost device, no flax for the decoder."""
        try:
            stage()
        except Exception as failure:
            self.report["skipped"].append({"cell": name, "reason": one_line(failure)})

    def _ceilings(self) -> None:
        self._enter_all("entries", [floor_contest()])
        self._enter_all(
            "entries", ceiling_contests(1 << 12) if self.options.interpret else ceiling_contests()
        )

    def _moves(self) -> None:
        if self.options.interpret:
            self._enter_all("moves", move_contests(TINY_POOLS, (3,), 2, interpret=True))
        else:
            num_tokens = (128,) if self.options.quick else (1, 128, 4096)
            self._enter_all("moves", move_contests(Pools(), num_tokens, NUM_MOVED))

    def _enter_all(self, kind: str, contests: list[tuple[Contest, list[Side]]]) -> None:
        """One by one, each freed before the next."""
        while contests:
            contest, sides = contests.pop(0)
            self.enter(kind, contest.name, functools.partial(tuple, (contest, sides, {})))
            del contest, sides

    def _steps(self) -> None:
        from experiments import kernel_speed_step as step  # needs flax

        interpret = self.options.interpret
        sizes = step.SIZES[:1] if self.options.quick else step.SIZES
        if interpret:
            sizes = (step.StepSizes(2, 32, num_steps=1),)
        decoder = step.make_decoder(step.TINY if interpret else step.LLAMA_1B)
        for size in sizes:
            config = {
                "param_bytes": step.param_bytes(decoder),
                "kv_bytes": step.kv_bytes(decoder.config, size),
            }

            def make(size=size, config=config):
                return (*step.step_contest(decoder, size, interpret), {**size._asdict(), **config})

            self.enter("steps", f"step of {size.batch} x {size.context} tokens", make)


def environment(device: Any) -> dict[str, Any]:
    """Where and when; of packages that are not installed, nothing."""
    peers = {}
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
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0].strip() if lines else None


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


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.kernel_speed", __doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as one JSON object instead of tables")
    add("--quick", action="store_true", help="a handful of cells")
    add(
        "--minutes",
        type=command.number(0, is_above=True),
        default=8.0,
        metavar="N",
        help="default %(default)g",
    )
    add("--interpret", action="store_true", help="tiny cells on the CPU: everything but the times")
    add("--output", type=Path, metavar="DIR", help="folder of the results; default: experiments/results")
    add(
        "--flashinfer",
        type=Path,
        metavar="DIR",
        help=f"folder with FlashInfer's compiled modules; default: {FLASHINFER_DIR}",
    )
    options = parser.parse_args(arguments)
    if options.interpret and options.output is None:
        parser.error(
            "got --interpret without --output, expected a folder: nothing measured goes to the results"
        )
    options.output = options.output or RESULTS
    if options.flashinfer is None and FLASHINFER_DIR in os.environ:
        options.flashinfer = Path(os.environ[FLASHINFER_DIR])
    for folder in (options.output, options.flashinfer):
        if folder is not None and not folder.is_dir():
            parser.error(f"there is no folder {folder}: make it first")
    # Read when jax starts its backend: the peers need memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        device = find_device(options.interpret)
    except command.InputError as error:
        parser.error(str(error))
    if options.flashinfer:
        os.environ[FLASHINFER_DIR] = str(options.flashinfer.resolve())

    run = Run(options, device)
    with jax.default_device(device):
        run.measure()
    run.save()
    picture = run.path.with_suffix(".png")
    try:
        draw(run.report, picture)
    except ImportError:
        print("no picture, it needs matplotlib: pip install 'kvcache_jax[pictures]'", file=sys.stderr)
    if options.json:
        print(json.dumps(run.report))
    else:
        show(run.report)
        print(f"written: {run.path}")
    return 1 if run.report["stopped"] else 0


if __name__ == "__main__":
    command.run(main)
