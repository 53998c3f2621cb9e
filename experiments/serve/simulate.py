"""The scheduler on a machine that is only named: the forward is a table, and the clock its costs.

The engine's program is the real one, with as many rows, blocks and requests. What the model would compute is
left out, and keys and values have one number a token. So what is measured beside the simulated figures is the
time that the scheduler takes here.

Figures of machines are of data sheets, dense bfloat16: what a kernel reaches of them is left out, and what
chips say to each other too.
"""

import dataclasses
import time

import kvcache_jax as kv
from experiments.serve import sides
from experiments.serve.server import Clock, Counter, computed_tokens, take_turns
from experiments.serve.sides import BLOCK_SIZE, CONTINUOUS, STATIC, Sizes
from experiments.serve.workload import Workload

VOCAB_SIZE = 2
LAYERS = [kv.FullAttention(1, 1)]
MOST_PROMPT_TOKENS = 8192  # of a step
STEPS_PER_DISPATCH = 4
NUM_TURNS = 40


@dataclasses.dataclass(frozen=True)
class Machine:
    """So many chips that are used as one; what each reads from memory, computes and holds in bytes."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory: float
    num_chips: int = 1

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """Computes what both take, one beside the other."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s) / self.num_chips


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("A100", 2.04e12, 312e12, 80e9),
        Machine("H100", 3.35e12, 989e12, 80e9),
        Machine("H200", 4.8e12, 989e12, 141e9),
        Machine("B200", 8.0e12, 2250e12, 180e9),
        Machine("v5e", 0.82e12, 197e12, 16e9),
        Machine("v6e", 1.64e12, 918e12, 32e9),
    )
}


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """A model as its costs see it: a step reads all parameters; all numbers have as many bytes."""

    name: str
    num_params: float
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    bytes_per_number: int = 2

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_number

    def num_blocks(self, machine: Machine, block_size: int, share: float = 0.9) -> int:
        """Counts the blocks that `share` of the memory holds beside the parameters."""
        left = share * machine.memory * machine.num_chips - self.num_params * self.bytes_per_number
        return max(int(left // (self.bytes_per_token * block_size)), 0)

    def step_seconds(
        self, machine: Machine, num_tokens: float, num_held: float, *, num_pairs: float | None = None
    ) -> float:
        """Computes the time of a step, given the tokens that it computes and those that rows hold and read.

        `num_pairs` counts tokens that are computed, each with one that it attends to. Default: of decoding.
        """
        num_bytes = self.num_params * self.bytes_per_number + num_held * self.bytes_per_token
        pairs = num_held if num_pairs is None else num_pairs
        in_attention = 4 * self.layers * self.q_heads * self.head_dim * pairs
        return machine.seconds(num_bytes, 2 * self.num_params * num_tokens + in_attention)


LLAMA = ModelSizes("Llama 3.1 8B", 8.03e9, layers=32, q_heads=32, kv_heads=8, head_dim=128)


class SimulatedClock(Clock):
    """Seconds that steps would take on a machine; this one's seconds do not count.

    A delivery takes its steps times the time of their mean: computed tokens are those of the engine's
    counters, held ones those of the blocks in use at its end.
    """

    def __init__(self, machine: Machine, model: ModelSizes, engine: kv.Engine):
        super().__init__()
        self._machine, self._model = machine, model
        self._block_size = engine.config.groups[0].block_size
        self._counts = engine.figures().counts

    def start(self) -> None:
        """Goes on."""

    def stop(self) -> None:
        """Waits."""

    def count(self, figures: kv.engine.Figures) -> None:
        """Goes forward by the time of a delivery's steps."""
        steps = figures.counts[Counter.STEPS] - self._counts[Counter.STEPS]
        if steps:
            mean = (computed_tokens(figures.counts) - computed_tokens(self._counts)) / steps
            held = figures.blocks_used * self._block_size
            self._seconds += steps * self._model.step_seconds(self._machine, mean, held)
        self._counts = figures.counts


def simulate(work: Workload, machine: Machine, rows: int) -> dict:
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
    for name in names:  # one after the other: their states are large, and no clock is this machine's
        engine = sizes.engine(sides.look_up, sides.table_of(VOCAB_SIZE), LAYERS, False)
        sides.warm_up(engine)
        server = sides.make_server(name, engine, work.jobs, SimulatedClock(machine, LLAMA, engine))
        start = time.perf_counter()
        take_turns([server], work, NUM_TURNS)
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


def holds_one(work: Workload, machine: Machine) -> bool:
    """Tells whether the machine's memory holds the model and the longest request."""
    return LLAMA.num_blocks(machine, BLOCK_SIZE) * BLOCK_SIZE >= work.longest
