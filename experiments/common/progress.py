"""How far a long command has got, on standard error."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn


@contextlib.contextmanager
def progress(what: str, total: int, every: int) -> Iterator[Callable[[int, str], None]]:
    """A bar that `show(num_done, figure)` moves; where standard error is a file, a line `every` few steps.

    Nothing is written before the first step: bad input is one line.
    """
    console = Console(stderr=True)
    columns = (what, BarColumn(), MofNCompleteColumn(), "{task.fields[figure]}", TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("", total=total, figure="")

    def show(num_done: int, figure: str) -> None:
        bar.start()
        bar.update(task, completed=num_done, figure=figure)
        if not console.is_terminal and (num_done % every == 0 or num_done == total):
            print(f"{what}: {num_done} of {total}{figure and f', {figure}'}", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
