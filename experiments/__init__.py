"""Demos, benchmarks and studies; each file opens with its question, its command and its measured answer."""

import os
import signal
import sys
from collections.abc import Callable


def on_interrupt(handler: Callable[..., object]) -> None:
    """Has Ctrl-C call `handler`, unless the starter of this process has it ignored."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def end_at_once(*_: object) -> None:
    """Handles Ctrl-C where nothing is lost: while modules load, and while the process ends."""
    os._exit(130)


if sys.argv[:1] == ["-m"]:  # `python -m` is still looking for the command, whose imports come next
    on_interrupt(end_at_once)
