"""A busy host: how much later do tokens come while a thread holds the interpreter and a process burns a core?

Rows decode, and no request is admitted: between two deliveries is one dispatch of the engine, or one token of
the host's loop. The four of them (each side, idle and disturbed) take turns of as many steps.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.serve.server import Server, percentiles
from experiments.serve.workload import Job

STEPS_PER_DELIVERY = 16
IDLE, DISTURBED = "idle", "disturbed"


@contextlib.contextmanager
def disturbance() -> Iterator[None]:
    """Has a thread of this process run Python without a pause, and another process keep a core busy."""
    ends = threading.Event()

    def hold_interpreter() -> None:
        while not ends.is_set():
            sum(range(1000))

    thread = threading.Thread(target=hold_interpreter, daemon=True)
    burner = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    thread.start()
    try:
        yield
    finally:
        ends.set()
        burner.kill()
        burner.wait()
        thread.join()


def endless(jobs: list[Job], num_rows: int, num_tokens: int) -> list[Job]:
    """The first jobs, one per row, which come at once and get more tokens than are waited for."""
    return [Job(job.prompt, num_tokens, 0.0) for job in jobs[:num_rows]]


def warm_up(server: Server) -> None:
    """Serves until every row decodes."""
    while (server.num_tokens == 0).any():
        server.step()


def gaps(server: Server, num_steps: int) -> list[float]:
    """Seconds between deliveries of the next `num_steps` steps."""
    per_delivery = server.max_steps or STEPS_PER_DELIVERY
    server.clock.start()
    before = server.step()  # was under way when the turn began
    found = []
    for _ in range(num_steps // per_delivery):
        now = server.step()
        found.append(now - before)
        before = now
    jax.block_until_ready(server.engine.state.outbox_len)
    server.clock.stop()
    return found


def measure(servers: list[Server], num_rounds: int, steps_per_turn: int) -> list[dict[str, Any]]:
    """Times deliveries of all servers in turns, idle and disturbed; one record per server."""
    found: dict[tuple[str, str], list[float]] = {}
    for server in servers:
        warm_up(server)
    for _ in range(num_rounds):
        for state in (IDLE, DISTURBED):
            with disturbance() if state == DISTURBED else contextlib.nullcontext():
                for server in servers:
                    found.setdefault((server.name, state), []).extend(gaps(server, steps_per_turn))
    return [_record(server, found[server.name, IDLE], found[server.name, DISTURBED]) for server in servers]


def num_tokens(num_rounds: int, steps_per_turn: int) -> int:
    """Counts the tokens of a row that a measurement may take, with room to spare."""
    return 2 * num_rounds * (steps_per_turn + 4 * STEPS_PER_DELIVERY) + 4 * STEPS_PER_DELIVERY


def _record(server: Server, idle: list[float], disturbed: list[float]) -> dict[str, Any]:
    before, after = (percentiles(1e3 * np.array(values)) for values in (idle, disturbed))
    return {
        "side": server.name,
        "steps_per_delivery": server.max_steps,
        "deliveries": len(idle),
        "idle_ms": before,
        "disturbed_ms": after,
        **{f"slow_down_{name}": after[name] / before[name] for name in before},
    }
