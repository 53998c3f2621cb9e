"""The live table: each side as it is served."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from experiments.serve.server import Server

COLUMNS = "served", "second", "running", "waiting", "tokens/s", "hits", "blocks", "preempted"


def cells(server: Server) -> tuple[str, ...]:
    """A side's row of the table."""
    record = server.record()
    check_in = server.check_ins[-1] if server.check_ins else None
    return (
        f"{server.num_ended}/{len(server.jobs)}",
        f"{record['seconds']:.1f}",
        f"{check_in.running if check_in else 0}",
        f"{check_in.waiting if check_in else 0}",
        f"{record['tokens_per_s']:,.0f}",
        f"{record['hit_rate']:.0%}",
        f"{check_in.blocks if check_in else 0}/{record['num_blocks']}",
        f"{record['preemptions']}",
    )


class Board:
    """Shows how far servers have got, on standard error: a table in a terminal, else lines now and then.

    Args:
      every: Check-ins after which there is a line.
    """

    def __init__(self, every: int = 8):
        self._every = every

    @contextlib.contextmanager
    def showing(self, servers: Sequence[Server], title: str = "") -> Iterator[Callable[[], None]]:
        """Shows them; each call of what it gives is a check-in, in no side's time."""
        console = Console(stderr=True)
        num_check_ins = 0

        def table() -> Table:
            found = Table(title=title, title_justify="left")
            for i, name in enumerate(("", *COLUMNS)):
                found.add_column(name, justify="right" if i else "left")
            for server in servers:
                found.add_row(server.name, *cells(server))
            return found

        with (
            Live(console=console, auto_refresh=False)
            if console.is_terminal
            else contextlib.nullcontext() as live
        ):

            def check_in() -> None:
                nonlocal num_check_ins
                num_check_ins += 1
                if live is not None:
                    live.update(table(), refresh=True)
                elif num_check_ins % self._every == 0 or all(server.is_done for server in servers):
                    for server in servers:
                        print(_line(server), file=sys.stderr, flush=True)

            yield check_in


def _line(server: Server) -> str:
    pairs = zip(COLUMNS, cells(server), strict=True)
    return f"{server.name}: {', '.join(f'{name} {cell}' for name, cell in pairs)}"
