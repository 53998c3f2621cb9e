"""An alarm: a thread acts at a time, should another one still be waiting for the device then."""

import contextlib
import threading
from collections.abc import Callable, Iterator

_SOON_S = 10.0
"""Seconds after which nothing is waited for: no dispatch is as long."""


@contextlib.contextmanager
def alarm(seconds: float, ring: Callable[[], object]) -> Iterator[None]:
    """Calls a function from a thread of its own after so many seconds, unless the block has ended by then."""
    if seconds > _SOON_S:
        yield
        return
    timer = threading.Timer(max(seconds, 0), ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
