"""Errors of the device and of callbacks, and interrupts: an engine survives them."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class EngineFailed(RuntimeError):  # noqa: N818
    """Says that the device, or a callback in the model, failed; its cause is that error.

    No request is lost: `Engine.reset` makes a new state, and all that have not ended go on.
    """


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back an interrupt (SIGINT) until the end of the block, which so is done as a whole or not begun.

    Python calls signal handlers in the main thread alone; in others nothing is to be done.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):
        yield
        return
    held: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
