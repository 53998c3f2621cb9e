"""The scheduler on a machine that is only named: the forward is a table, and the clock its costs.

The engine's program is the real one, with as many rows, blocks and requests. What the model would compute is
left out, and keys and values have one number a token. So what is measured beside the simulated figures is the
time that the scheduler takes here.
"""

import time

import kvcache_jax as kv
from experiments.serve.machines import LLAMA, Machine, SimulatedClock
from experiments.serve.program import warm_up
from experiments.serve.server import Server
from experiments.serve.sides import (
    BLOCK_SIZE,
    CONTINUOUS,
    STATIC,
    Sizes,
    look_up,
    make_server,
    table_of,
)
from experiments.serve.view import Board
from experiments.serve.workload import Workload

VOCAB_SIZE = 2
LAYERS = [kv.FullAttention(1, 1)]
MOST_PROMPT_TOKENS = 8192  # of a step
STEPS_PER_DISPATCH = 4
NUM_TURNS = 40


def simulate(work: Workload, machine: Machine, rows: int, board: Board) -> dict:
    """Serves a workload on a machine; the report of `--simulate`.

    Where there are rows for all requests, a static batch is what continuous batching does too, and left out.
    """
    names = (STATIC, CONTINUOUS) if len(work.jobs) > rows else (CONTINUOUS,)
    sizes = Sizes(
        rows=rows,
        max_seq_len=work.longest,
        num_blocks=LLAMA.num_blocks(machine, BLOCK_SIZE),
        steps_per_dispatch=STEPS_PER_DISPATCH,
        token_budget=rows + MOST_PROMPT_TOKENS,
    )
    records = []
    for name in names:  # one after the other: their states are large, and nobody's clock is this machine's
        server = _server(name, work, machine, sizes)
        start = time.perf_counter()
        with board.showing([server]) as show:
            for i in range(1, NUM_TURNS + 1):
                server.turn(work.num_tokens * i // NUM_TURNS)
                show()
                if server.is_done:
                    break
        record = server.record()
        seconds = time.perf_counter() - start
        here = {"here_s": seconds, "here_step_ms": 1e3 * seconds / record["num_steps"]}
        most = max(check_in.running for check_in in server.check_ins)
        records.append(record | here | {"most_rows": most, "timeline": server.timeline()})
    return {
        "machine": machine.name,
        "num_chips": machine.num_chips,
        "model": LLAMA.name,
        "rows": rows,
        "num_blocks": sizes.num_blocks,
        "steps_per_delivery": STEPS_PER_DISPATCH,
        "source": work.source,
        "sides": records,
    }


def _server(name: str, work: Workload, machine: Machine, sizes: Sizes) -> Server:
    engine = sizes.engine(look_up, table_of(VOCAB_SIZE), LAYERS, False)
    warm_up(engine)
    clock = SimulatedClock(machine, LLAMA, engine)
    return make_server(name, engine, work.jobs, clock)


def holds_one(work: Workload, machine: Machine) -> bool:
    """Tells whether the machine's memory holds the model and the longest request."""
    return LLAMA.num_blocks(machine, BLOCK_SIZE) * BLOCK_SIZE >= work.longest
