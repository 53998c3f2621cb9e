"""Question: how fast are the GPU kernels beside the memory's bandwidth, and beside other people's?

Command: python -m experiments.kernel_speed [--quick] [--json] [--minutes 8] [--flashinfer DIR]
         python -m experiments.kernel_speed --resume                    what is missing, into the same file
         python -m experiments.kernel_speed --only "32 x 8k, group 4" --without "FlashInfer XQA"
         python -m experiments.kernel_speed --interpret --output DIR    the same path on a CPU, no times
Machine: one NVIDIA Hopper GPU with nothing else on it; results/<device>.json and .png
Answer:  not yet measured.

First the ceilings: reading only, and copying. Then paged decode, batch {1, 8, 32, 128} x context {1k, 8k,
32k} x query heads per key/value head {1, 4, 8} x blocks of {16, 64, 128}, 8 key/value heads of 128, bfloat16:
ours, its plan made before (as once per step for all layers) and made again each time, beside every peer that
can be imported (`sides`, `torch_sides`). Then the movement of tokens and blocks, and the
whole step of a decoder with the shape of Llama-3.2-1B beside its roofline.

Each side is checked against the float32 reference before it is timed; the sides of an entry take turns in
one process (`kernel_speed_timing` says what is timed). Who is wrong or cannot run is reported and why;
entries that do not fit into the memory or the time are listed; the most important ones come first. A ratio is
the fastest peer's median over ours: above 1 we are faster. GB/s count the keys and values of the rows, each
once.

Only another process, the worker, touches the device. When it ends, hangs or loses the device, the side whose
turn it was has failed, and a new worker measures the entry again without it; a side that does so repeatedly
is left out of what follows. The results are written after every entry, so that whatever ends the run leaves
what was measured; what the workers printed is in kernel_speed.log beside them.

--resume goes on where earlier calls on the same device, with the same code and versions, ended. The ceilings
are measured in each call, and an entry's share is of those of its own call; ratios are within one entry.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.common import command
from experiments.kernel_speed.names import OURS, SIDES, WITH_PLAN
from experiments.kernel_speed.process import CrashError, OutOfTimeError, Worker
from experiments.kernel_speed.report import draw, show
from experiments.kernel_speed.resume import missing, resumed
from experiments.kernel_speed.summary import add_figures
from experiments.kernel_speed.torch_sides import FLASHINFER_DIR

RESULTS = Path(__file__).parent.parent / "results"
LOG = "kernel_speed.log"
SECONDS, QUICK_SECONDS = 1.0, 0.6
"""For the samples of an entry."""
GRACE_S = 20.0
"""An entry may take so much longer than the time that is left."""
SLOW = 20.0
"""Interpreted kernels may take so many times as long."""
NUM_STARTS, PAUSE_S = 3, 3.0
"""A device may need a moment after a process on it was ended."""
ALLOWED_CRASHES = 2
"""A side is left out then; a hang counts as two."""
ALLOWED_OF_OURS = 3


class EndedError(BaseException):
    """SIGTERM; not an Exception, so that nothing takes it for a failure."""


class Run:
    """One benchmark: its report, which is saved after every entry, its worker and its time.

    Attributes:
      report: The object of `--json`.
      seconds: For the samples of an entry; None only checks.
      jobs: (kind, name) of every entry: the list of the report that it goes to.
    """

    def __init__(self, options: argparse.Namespace):
        """Starts the worker.

        Raises:
          InputError: Nothing can be measured here, or added to what was measured before.
        """
        self.options, self._start = options, time.monotonic()
        self.seconds = None if options.interpret else QUICK_SECONDS if options.quick else SECONDS
        self._end = self._start + 60 * options.minutes
        self._longest_s = self._start_s = 0.0
        self._without = dict.fromkeys(options.without, "left out by --without")
        self._crashes: collections.Counter[str] = collections.Counter()
        if not options.resume:
            (options.output / LOG).write_text("")
        self._worker: Worker | None = self._new_worker()
        self.jobs: list[tuple[str, str]] = [(kind, name) for kind, name in self._worker.hello["names"]]
        self.report: dict[str, Any] = {
            **self._worker.hello["environment"],
            "is_interpreted": options.interpret,
            "is_quick": options.quick,
            "only": options.only,
            "without": options.without,
            "calls": [],
            "entries": [],
            "decodes": [],
            "moves": [],
            "steps": [],
            "skipped": [],
            "left_out": [],
            "crashes": [],
            "stopped": "",
        }
        if options.resume:
            try:
                self.report = resumed(self.path, self.report)
            except command.InputError:
                self.close()
                raise
            for crash in self.report["crashes"]:
                self._blame(crash)

    @property
    def path(self) -> Path:
        """Of the report."""
        slug = re.sub(r"[^a-z0-9]+", "_", self.report["device"]["name"].lower()).strip("_")
        kind = "_interpreted" if self.options.interpret else "_quick" if self.options.quick else ""
        return self.options.output / f"{slug}{kind}{'_only' * bool(self.options.only)}.json"

    def save(self) -> None:
        """Whole or not at all."""
        report = self.report
        report["calls"][-1]["seconds"] = time.monotonic() - self._start
        add_figures(report)
        unfinished = self.path.with_suffix(".json.unfinished")
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        unfinished.replace(self.path)

    def measure(self) -> None:
        """All entries that are missing, or those of --only; what ends it early is in the report."""
        only = tuple(self.options.only)
        todo = missing([job for job in self.jobs if not only or job[1].startswith(only)], self.report)
        if not todo:
            self.close()
            add_figures(self.report)
            return
        of_call = "date", "revision", "machine", "only"
        self.report["calls"].append({name: self.report.get(name) for name in of_call})
        try:
            while todo:
                self.enter(*todo[0])
                del todo[0]
        except (EndedError, KeyboardInterrupt) as end:
            self.report["stopped"] = f"ended by {'SIGTERM' if isinstance(end, EndedError) else 'Ctrl-C'}"
            self.report["left_out"] += [name for _, name in todo]
        finally:
            self.close()
            self.save()

    def enter(self, kind: str, name: str) -> None:
        """Adds one entry to the report's `kind`, if there is time for it."""
        without = dict(self._without)
        while self._has_time():
            try:
                worker = self._ready_worker()
                if worker is None:
                    break
                start = time.monotonic()
                job = {"kind": kind, "name": name, "seconds": self.seconds, "without": without}
                answer = worker.ask(job, self._end + GRACE_S)
            except OutOfTimeError:
                break
            except CrashError as crash:
                self._note(crash, kind, name)
                if crash.side is None or crash.side in without:  # nobody can be left out
                    self.report["skipped"].append({"cell": name, "reason": f"{crash.step}: {crash}"})
                    return
                without[crash.side] = f"{crash.step}: {crash}"
                continue
            if "skipped" in answer:
                self.report["skipped"].append({"cell": name, "reason": answer["skipped"]})
                return
            self.report[kind].append({**answer["entry"], "call": len(self.report["calls"]) - 1})
            self.save()
            self._longest_s = max(self._longest_s, time.monotonic() - start)
            self._say(f"{kind}: {name}")
            return
        self.report["left_out"].append(name)

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.kill()

    def _has_time(self) -> bool:
        is_running = self._worker is not None and self._worker.is_alive
        needed_s = 1.2 * self._longest_s + (0 if is_running else self._start_s)
        return not self.report["stopped"] and self._end - time.monotonic() > needed_s

    def _new_worker(self) -> Worker:
        start = time.monotonic()
        flags = [flag for flag in ("quick", "interpret") if getattr(self.options, flag)]
        worker = Worker(
            [f"--{flag}" for flag in flags],
            self.options.output / LOG,
            self._end + GRACE_S,
            SLOW if self.options.interpret else 1,
        )
        self._start_s = max(self._start_s, time.monotonic() - start)
        return worker

    def _ready_worker(self) -> Worker | None:
        """The one there is, or a new one; None, and the run is stopped, if none starts any more."""
        if self._worker is not None and self._worker.is_alive:
            return self._worker
        reason = ""
        for nth in range(NUM_STARTS):
            time.sleep(PAUSE_S if nth else 0)
            try:
                self._worker = self._new_worker()
            except (CrashError, command.InputError) as failure:
                reason = str(failure)
                self._say(f"no worker: {reason}")
            else:
                return self._worker
        self.report["stopped"] = f"after a crash nothing can be measured any more: {reason}"
        return None

    def _note(self, crash: CrashError, kind: str, name: str) -> None:
        side = crash.side
        self._say(f"{kind}: {name}: {side or 'no side'}, {crash.step}: {crash}")
        self.report["crashes"].append(
            {
                "entry": name,
                "side": side,
                "step": crash.step,
                "how": str(crash),
                "is_hang": crash.is_hang,
                "last_words": crash.last_words,
            }
        )
        self._blame(self.report["crashes"][-1])

    def _blame(self, crash: dict[str, Any]) -> None:
        """Counts a crash of the report; who has too many is left out of what follows."""
        side = crash["side"]
        if side is None:
            return
        self._crashes[side] += 2 if crash["is_hang"] else 1
        if self._crashes[side] >= (ALLOWED_OF_OURS if side in (OURS, WITH_PLAN) else ALLOWED_CRASHES):
            self._without[side] = f"left out after its crash on {crash['entry']}: {crash['how']}"

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self._start:4.0f} s  {words}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises `EndedError`, once; a lender of machines sends it before SIGKILL."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise EndedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.kernel_speed", __doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as one JSON object instead of tables")
    add("--quick", action="store_true", help="a handful of cells")
    add("--resume", action="store_true", help="measure what earlier calls left out, and add it to theirs")
    add(
        "--minutes",
        type=command.number(0, is_above=True),
        default=8.0,
        metavar="N",
        help="default %(default)g",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="CELL",
        help="entries whose names begin so, as the tables print them; into a file of their own; repeatable",
    )
    add(
        "--without",
        action="append",
        default=[],
        metavar="SIDE",
        help=f"leave a side out; repeatable; one of: {'; '.join(SIDES)}",
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
    for side in options.without:
        if side not in SIDES:
            parser.error(f"got --without {side!r}, expected one of: {'; '.join(SIDES)}")
    options.output = options.output or RESULTS
    if options.flashinfer is None and FLASHINFER_DIR in os.environ:
        options.flashinfer = Path(os.environ[FLASHINFER_DIR])
    for folder in (options.output, options.flashinfer):
        if folder is not None and not folder.is_dir():
            parser.error(f"there is no folder {folder}: make it first")
    # For the workers. The first is read when jax starts its backend: the peers need memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.flashinfer:
        os.environ[FLASHINFER_DIR] = str(options.flashinfer.resolve())
    with ended_by_sigterm():
        try:
            return _measure(parser, options)
        except EndedError:
            return 1


def _measure(parser: command.Parser, options: argparse.Namespace) -> int:
    try:
        run = Run(options)
    except command.InputError as error:
        parser.error(str(error))
    except (CrashError, OutOfTimeError) as error:
        parser.exit(1, f"{parser.prog}: nothing was measured, {str(error) or 'there was no time'}\n")
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
