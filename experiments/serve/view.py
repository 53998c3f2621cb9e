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
    look = server.looks[-1] if server.looks else None
    return (
        f"{server.num_ended}/{len(server.jobs)}",
        f"{record['seconds']:.1f}",
        f"{look.running if look else 0}",
        f"{look.waiting if look else 0}",
        f"{record['tokens_per_s']:,.0f}",
        f"{record['hit_rate']:.0%}",
        f"{look.blocks if look else 0}/{record['num_blocks']}",
        f"{record['preemptions']}",
    )


class Board:
    """Shows how far servers have got, on standard error: a table in a terminal, else lines now and then.

    Args:
      every: Looks behind which there is a line.
    """

    def __init__(self, every: int = 8):
        self._every = every

    @contextlib.contextmanager
    def showing(self, servers: Sequence[Server], title: str = "") -> Iterator[Callable[[], None]]:
        """Shows them; each call of what it gives is a look, in nobody's time."""
        console = Console(stderr=True)
        num_looks = 0

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

            def look() -> None:
                nonlocal num_looks
                num_looks += 1
                if live is not None:
                    live.update(table(), refresh=True)
                elif num_looks % self._every == 0 or all(server.is_done for server in servers):
                    for server in servers:
                        print(_line(server), file=sys.stderr, flush=True)

            yield look


def _line(server: Server) -> str:
    pairs = zip(COLUMNS, cells(server), strict=True)
    return f"{server.name}: {', '.join(f'{name} {cell}' for name, cell in pairs)}"
