"""Question: how fast are the GPU kernels beside the memory's bandwidth, and beside other people's?

Command: python -m experiments.kernel_speed [--quick] [--json] [--minutes 8] [--flashinfer DIR]
         python -m experiments.kernel_speed --only "32 x 8k, group 4" --without "FlashInfer XQA"
         python -m experiments.kernel_speed --interpret --output DIR    the same path on a CPU, no times
Machine: one NVIDIA Hopper GPU with nothing else on it; results/<device>.json and .png
Answer:  not yet measured.

First the ceilings: reading only, and copying. Then paged decode, batch {1, 8, 32, 128} x context {1k, 8k,
32k} x query heads per key/value head {1, 4, 8} x blocks of {16, 64, 128}, 8 key/value heads of 128, bfloat16:
ours, its plan made before (as once per step for all layers) and made again each time, beside every peer that
can be imported (`sides`, `torch_sides`); and rows whose lengths or number leave a GPU idle unless they are
split. Then the movement of tokens and blocks, and the whole step of a decoder with the shape of Llama-3.2-1B
beside its roofline.

Each side is checked against the float32 reference before it is timed; the sides of an entry take turns in
one process (`timing` says what is timed). Who is wrong or cannot run is reported and why;
entries that do not fit into the memory or the time are listed; the most important ones come first. A ratio is
the fastest peer's median over ours: above 1 we are faster. GB/s count the keys and values of the rows, each
once.

Only another process touches the device (`isolated`). When it ends, hangs or loses the device, the side that
was at work has failed, and a new process measures the entry again without it; a side that does so twice is
left out of what follows. The results are written after every entry, so that whatever ends the run leaves
what was measured.
"""

import argparse
import collections
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.common import command
from experiments.kernel_speed.isolated import CrashError, Entries, Worker, entries_of_device
from experiments.kernel_speed.names import SIDES
from experiments.kernel_speed.report import add_figures, draw, show
from experiments.kernel_speed.torch_sides import FLASHINFER_DIR

RESULTS = Path(__file__).parent.parent / "results"
SECONDS, QUICK_SECONDS = 1.0, 0.6
"""For the samples of an entry."""
GRACE_S = 20.0
"""An entry may take so much longer than the time that is left."""
ALLOWED_CRASHES = 2
"""A side is left out then."""


class Run:
    """One benchmark: its report, which is saved after every entry, its process and its time.

    Attributes:
      report: The object of `--json`.
      jobs: (kind, name) of every entry: the list of the report that it goes to.
    """

    def __init__(self, options: argparse.Namespace, make_entries: Callable[[], Entries]):
        """Starts the process.

        Raises:
          CrashError: It does not start.
          InputError: Nothing can be measured here.
        """
        self._options, self._make_entries, self._start = options, make_entries, time.monotonic()
        self._end = self._start + 60 * options.minutes
        self._seconds = None if options.interpret else QUICK_SECONDS if options.quick else SECONDS
        self._without = dict.fromkeys(options.without, "left out by --without")
        self._crashes: collections.Counter[str | None] = collections.Counter()
        self._worker: Worker | None = Worker(make_entries)
        self.jobs = self._worker.names
        self.report: dict[str, Any] = {
            **self._worker.environment,
            "is_interpreted": options.interpret,
            "is_quick": options.quick,
            "only": options.only,
            "without": options.without,
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
        kind = "_interpreted" if self._options.interpret else "_quick" if self._options.quick else ""
        return self._options.output / f"{slug}{kind}{'_only' * bool(self._options.only)}.json"

    def save(self) -> None:
        """Writes the report, whole or not at all."""
        self.report["seconds"] = time.monotonic() - self._start
        add_figures(self.report)
        unfinished = self.path.with_suffix(".json.unfinished")
        unfinished.write_text(json.dumps(self.report, indent=1) + "\n")
        unfinished.replace(self.path)

    def measure(self) -> None:
        """Measures all entries, or those of --only, as far as there is time."""
        beginnings = tuple(self._options.only)
        longest_s = 0.0
        for kind, name in self.jobs:
            if beginnings and not name.startswith(beginnings):
                continue
            start = time.monotonic()
            if self.report["stopped"] or start + 1.2 * longest_s >= self._end:
                self.report["left_out"].append(name)
                continue
            self._enter(kind, name)
            self.save()
            longest_s = max(longest_s, time.monotonic() - start)
            self._say(f"{kind}: {name}")
        self.save()
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.kill()

    def _enter(self, kind: str, name: str) -> None:
        """Adds an entry to the report's `kind`, without the sides that crash on it."""
        without, has_crashed = dict(self._without), False
        while True:
            try:
                self._worker = self._worker or Worker(self._make_entries)
            except (CrashError, command.InputError) as failure:
                self.report["stopped"] = f"after a crash nothing can be measured any more: {failure}"
                self.report["left_out"].append(name)
                return
            try:
                answer = self._worker.ask(kind, name, self._seconds, without, self._end + GRACE_S)
            except CrashError as crash:
                self._worker = None
                self._say(f"{kind}: {name}: {crash.side or 'no side'}, {crash}")
                if time.monotonic() >= self._end:
                    self.report["left_out"].append(name)
                    return
                if crash.side is None and has_crashed:  # no side can be left out
                    answer = str(crash)
                else:
                    has_crashed = True
                    self._blame(crash, name, without)
                    continue
            if isinstance(answer, str):
                self.report["skipped"].append({"cell": name, "reason": answer})
            else:
                self.report[kind].append(answer)
            return

    def _blame(self, crash: CrashError, name: str, without: dict[str, str]) -> None:
        """Leaves a side out of this entry, and out of all others once it has crashed too often."""
        if crash.side is None:
            return
        without[crash.side] = str(crash)
        self._crashes[crash.side] += 1
        if self._crashes[crash.side] >= ALLOWED_CRASHES:
            self._without[crash.side] = f"left out after its crash on {name}: {crash}"

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self._start:4.0f} s  {words}", file=sys.stderr, flush=True)


def make_entries(options: argparse.Namespace) -> Callable[[], Entries]:
    """What the other process makes its entries by."""
    return functools.partial(entries_of_device, options.quick, options.interpret)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.kernel_speed", __doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as one JSON object instead of tables")
    add("--quick", action="store_true", help="a handful of cells")
    minutes = command.number(0, is_above=True)
    add("--minutes", type=minutes, default=8.0, metavar="N", help="default %(default)g")
    text = "entries whose names begin so, as the tables print them; into a file of their own; repeatable"
    add("--only", action="append", default=[], metavar="CELL", help=text)
    text = f"leave a side out; repeatable; one of: {'; '.join(SIDES)}"
    add("--without", action="append", default=[], metavar="SIDE", help=text)
    add("--interpret", action="store_true", help="tiny cells on the CPU: everything but the times")
    text = "folder of the results; default: experiments/results"
    add("--output", type=command.folder, metavar="DIR", help=text)
    text = f"folder with FlashInfer's compiled modules; default: {FLASHINFER_DIR}"
    add("--flashinfer", type=command.folder, default=os.environ.get(FLASHINFER_DIR), metavar="DIR", help=text)
    options = parser.parse_args(arguments)
    if options.interpret and options.output is None:
        parser.error(
            "got --interpret without --output, expected a folder: nothing measured goes to the results"
        )
    for side in options.without:
        if side not in SIDES:
            parser.error(f"got --without {side!r}, expected one of: {'; '.join(SIDES)}")
    options.output = options.output or RESULTS
    # For the other process. The first is read when jax starts its backend: the peers need memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.flashinfer:
        os.environ[FLASHINFER_DIR] = str(options.flashinfer.resolve())
    try:
        run = Run(options, make_entries(options))
    except command.InputError as error:
        parser.error(str(error))
    except CrashError as crash:
        parser.fail(f"nothing was measured, {crash}")
    for beginning in options.only:
        if not any(name.startswith(beginning) for _, name in run.jobs):
            run.close()
            names = "; ".join(name for _, name in run.jobs[:8])
            parser.error(
                f"got --only {beginning!r}, expected the beginning of one of {len(run.jobs)}: {names}; ..."
            )
    run.measure()
    if options.json:
        print(json.dumps(run.report))
    else:
        show(run.report)
        print(f"in {run.path}", flush=True)
    try:
        draw(run.report, run.path.with_suffix(".png"))
    except ImportError:
        print("no picture, it needs matplotlib: pip install 'kvcache_jax[pictures]'", file=sys.stderr)
    return 1 if run.report["stopped"] else 0


if __name__ == "__main__":
    command.run(main)
