"""The process of `experiments.kernel_speed` that its sides may end or hang; only Python."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from experiments.common.command import InputError
from experiments.kernel_speed.timing import FAILURES, Contest, Side, compete, one_line

START_S, LIMIT_S = 120.0, 120.0
"""What takes longer without a sign never ends; what a side does may be compiling."""


class Entries(Protocol):
    """What is measured, made in the other process; see `entries.Entries`."""

    environment: dict[str, Any]

    @property
    def names(self) -> list[tuple[str, str]]: ...

    def make(self, kind: str, name: str) -> tuple[Contest, Sequence[Side], dict[str, Any]]: ...

    def check(self) -> None: ...

    def clean(self) -> None: ...


def entries_of_device(is_quick: bool, interpret: bool) -> Entries:
    """Starts jax; only in the process that holds the device."""
    from experiments.kernel_speed import entries

    return entries.entries_of_device(is_quick, interpret)


class CrashError(RuntimeError):
    """The process ended or did not answer; `side` was at work, None if no side was."""

    def __init__(self, reason: str, side: str | None):
        super().__init__(reason)
        self.side = side


class Worker:
    """The process.

    Attributes:
      environment: Of its entries.
      names: (kind, name) of each entry.
    """

    def __init__(self, make_entries: Callable[[], Entries]):
        """Starts it.

        Raises:
          CrashError: It does not start.
          InputError: It cannot measure here.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make_entries, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._at: tuple[str | None, str] = None, "starting"
        self.environment, self.names = self._answer(time.monotonic() + START_S, START_S)

    def ask(self, kind: str, name: str, seconds: float | None, without: dict[str, str], end: float) -> Any:
        """Has an entry measured; returns its record, or why there is none.

        Raises:
          CrashError: There is no answer; the process is gone.
        """
        self._at = None, "freeing the memory"
        with contextlib.suppress(OSError):  # that it ended is found out below
            self._pipe.send((kind, name, seconds, without))
        return self._answer(end, LIMIT_S)

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join(10)  # it may hang in the driver, and nothing helps

    def _answer(self, end: float, limit_s: float) -> Any:
        while True:
            left_s = max(0.0, min(limit_s, end - time.monotonic()))
            try:
                if not self._pipe.poll(left_s):
                    raise self._crash(f"no answer within {left_s:.0f} s")
                what, content = self._pipe.recv()
            except (EOFError, OSError):
                self._process.join(10)
                raise self._crash(_how_ended(self._process.exitcode)) from None
            if what == "answer":
                return content
            if what == "refused":
                raise InputError(content)
            if what == "lost":
                raise self._crash(content)
            self._at = content

    def _crash(self, reason: str) -> CrashError:
        self.kill()
        side, step = self._at
        return CrashError(f"{step}: {reason}", side)


def _how_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _serve(make_entries: Callable[[], Entries], pipe: Connection) -> None:
    """Measures entry after entry; sends what it is about to do, and what came of it."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.dup2(2, 1)  # standard output is for the report
    try:
        entries = make_entries()
        pipe.send(("answer", (entries.environment, entries.names)))
        while True:
            job = pipe.recv()
            pipe.send(("answer", _measured(entries, pipe, *job)))
            entries.clean()
    except InputError as error:
        pipe.send(("refused", str(error)))
    except EOFError:
        pass  # the parent has ended
    except FAILURES as failure:
        pipe.send(("lost", one_line(failure)))
    os._exit(1)  # a lost device cannot be taken down in order


def _measured(
    entries: Entries, pipe: Connection, kind: str, name: str, seconds: float | None, without: dict[str, str]
) -> dict[str, Any] | str:
    """An entry's record, or why there is none; what the entry needed is garbage afterwards."""
    pipe.send(("at", (None, "making the data")))
    try:
        contest, sides, sizes = entries.make(kind, name)
    except FAILURES as failure:  # no room for the data, or no reference
        return one_line(failure)

    def announce(side: str, step: str) -> None:
        pipe.send(("at", (side, step)))

    records = compete(contest, sides, seconds, announce, entries.check, without)
    return {**sizes, "name": name, "num_bytes": contest.num_bytes, "sides": records}
