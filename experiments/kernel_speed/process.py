"""Holds the process in which `experiments.kernel_speed` measures, and sees how it ends; only Python."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common.command import InputError
from experiments.kernel_speed.timing import CLEAN, COMPARE, DATA, LAUNCH, PREPARE, SAMPLE, START

COMMAND = ("-m", "experiments.kernel_speed.worker")
LIMIT_S = {START: 120.0, DATA: 120.0, PREPARE: 120.0, LAUNCH: 30.0, COMPARE: 60.0, SAMPLE: 20.0, CLEAN: 30.0}
"""What takes longer never ends; making the data compiles its reference, and preparing is compiling too."""
ABORT_S, KILL_S = 3.0, 10.0
"""For the process to say where it is, and to end."""


class CrashError(RuntimeError):
    """The process ended, or was ended because it did not answer; the message says how.

    Attributes:
      side: Whose turn it was; None if nobody's.
      step: What it was about to do.
      is_hang: It had to be ended.
      last_words: The last lines that it printed.
    """

    def __init__(self, how: str, side: str | None, step: str, is_hang: bool, last_words: Sequence[str]):
        super().__init__(how)
        self.side, self.step, self.is_hang, self.last_words = side, step, is_hang, list(last_words)


class OutOfTimeError(RuntimeError):
    """The benchmark must end, so that the process was ended in the middle of a job."""


class Worker:
    """One process.

    Attributes:
      hello: Its `environment`, and the `names` of its jobs.
      is_alive: False once it ended.
    """

    def __init__(self, arguments: Sequence[str], log: Path, end: float, slowness: float = 1):
        """Starts it.

        Args:
          arguments: Of `kernel_speed_worker`.
          log: Takes what it prints, at the end.
          end: Of `time.monotonic`, whatever happens.
          slowness: All limits are longer by this factor.

        Raises:
          CrashError: It does not start.
          InputError: It cannot measure here.
          OutOfTimeError: It had not started at `end`.
        """
        self.log, self.slowness = log, slowness
        self.is_alive, self._side, self._step = True, None, START
        self._read, write = os.pipe()
        self._lines: list[str] = []
        self._unfinished = b""
        try:
            with log.open("ab") as output:
                self._log_start = output.tell()
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-u",
                        "-X",
                        "faulthandler",
                        *COMMAND,
                        *arguments,
                        "--events",
                        str(write),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write,),
                    cwd=Path(__file__).parent.parent.parent,
                )
        finally:
            os.close(write)
        try:
            first = self._event(end)
        except BaseException:
            self.kill()
            raise
        if "refused" in first:
            self.kill()
            raise InputError(first["refused"])
        self.hello: dict[str, Any] = first["hello"]

    def ask(self, job: dict[str, Any], end: float) -> dict[str, Any]:
        """What comes of a job: `entry` or `skipped`.

        Args:
          job: `kind`, `name`, `seconds` for its samples and sides to go `without`.
          end: Of `time.monotonic`, whatever happens.

        Raises:
          CrashError: The process ended, before there was an answer.
          OutOfTimeError: There was none at `end`.
        """
        assert self._process.stdin is not None
        self._side, self._step, answer = None, DATA, None
        self._log_start = self.log.stat().st_size
        with contextlib.suppress(OSError):  # that it ended is found out below
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        while True:
            try:
                event = self._event(end)
            except (CrashError, OutOfTimeError):
                if answer is None:
                    raise
                return answer  # the next job needs another process
            if "step" in event:
                self._side, self._step = event["side"], event["step"]
            elif "lost" in event:
                self._side = event["side"]
                self.kill()
                raise self._crash(f"{event['lost']}; then the device was lost", is_hang=False)
            elif "ready" in event:
                assert answer is not None
                return answer
            else:
                answer = event

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        if not self.is_alive:
            return
        self.is_alive = False
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver, and nothing helps
            self._process.kill()
            self._process.wait(KILL_S)
        self._close()

    def _event(self, end: float) -> dict[str, Any]:
        limit_s = LIMIT_S[self._step] * self.slowness
        give_up = time.monotonic() + limit_s
        while not self._lines:
            left = min(give_up, end) - time.monotonic()
            if left <= 0:
                self._abort()
                if end < give_up:
                    raise OutOfTimeError
                raise self._crash(f"no answer within {limit_s:g} s", is_hang=True)
            has_ended = self._process.poll() is not None
            # Programs that it started may keep the pipe open.
            if select.select([self._read], [], [], 0 if has_ended else min(left, 0.5))[0]:
                if part := os.read(self._read, 1 << 16):
                    *lines, self._unfinished = (self._unfinished + part).split(b"\n")
                    self._lines += [line.decode() for line in lines]
                    continue
                has_ended = True
            if has_ended:
                raise self._ended()
        return json.loads(self._lines.pop(0))

    def _abort(self) -> None:
        """Asks where it is, which goes to the log, before it is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGABRT)
            self._process.wait(ABORT_S)
        self.kill()

    def _ended(self) -> CrashError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        code = self._process.returncode
        self.kill()
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            with contextlib.suppress(ValueError):
                code = signal.Signals(-code).name
            how = f"ended by {code}"
        else:
            how = f"ended with exit status {code}"
        return self._crash(how, is_hang=False)

    def _crash(self, how: str, is_hang: bool) -> CrashError:
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - (1 << 14)))
            printed = log.read().decode(errors="replace")
        lines = [line.rstrip()[:300] for line in printed.splitlines() if line.strip()]
        # Before a fatal signal Python prints its stack, and before that a library says why.
        said = [nth for nth, line in enumerate(lines) if line.startswith("Fatal Python error")]
        why = lines[said[0] - 1] if said and said[0] else lines[-1] if lines and not said else ""
        if why and not is_hang:
            how += f": {why.strip()[:200]}"
        return CrashError(how, self._side, self._step, is_hang, lines[-40:])

    def _close(self) -> None:
        os.close(self._read)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
