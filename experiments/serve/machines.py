"""Machines and models that are only named: what a step would take on them, by bytes and FLOPs.

Figures are those of data sheets, dense bfloat16: what a kernel reaches of them is left out, as is what chips
say to each other.
"""

import dataclasses

import kvcache_jax as kv
from experiments.serve.clock import Clock, computed_tokens


@dataclasses.dataclass(frozen=True)
class Machine:
    """Chips that are used as one.

    Attributes:
      name: Of a chip.
      bytes_per_s: Read from memory, by one.
      flops_per_s: By one.
      memory: Bytes of one.
      num_chips: How many.
    """

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
    """A model as its costs see it.

    Attributes:
      name: As printed.
      num_params: All of which a step reads, in `bytes_per_number` each.
      layers: Layers.
      q_heads: Query heads.
      kv_heads: Key and value heads.
      head_dim: Width of a head.
      bytes_per_number: Of parameters, keys and values.
    """

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

    def step_seconds(self, machine: Machine, num_tokens: float, num_held: float) -> float:
        """Computes the time of a step.

        Args:
          machine: It runs on.
          num_tokens: Computed in the step.
          num_held: Tokens in the cache, each read once: by the row that holds it.
        """
        num_bytes = self.num_params * self.bytes_per_number + num_held * self.bytes_per_token
        in_attention = 4 * self.layers * self.q_heads * self.head_dim * num_held
        return machine.seconds(num_bytes, 2 * self.num_params * num_tokens + in_attention)


LLAMA = ModelSizes("Llama 3.1 8B", 8.03e9, layers=32, q_heads=32, kv_heads=8, head_dim=128)


class SimulatedClock(Clock):
    """Seconds that steps would take on a machine; those of this one do not count.

    A delivery takes its steps times the time of their mean: computed tokens are those of the engine's
    counters, held ones those of the blocks in use at its end.
    """

    def __init__(self, machine: Machine, model: ModelSizes, engine: kv.Engine):
        super().__init__()
        self._machine, self._model = machine, model
        self._block_size = engine.config.groups[0].block_size
        figures = engine.figures()
        self._num_tokens, self._num_steps = computed_tokens(figures), figures.counts[kv.engine.Counter.STEPS]

    def start(self) -> None:
        """Goes on."""

    def stop(self) -> None:
        """Stands still."""

    def count(self, figures: kv.engine.Figures) -> None:
        """Goes forward by the time of a delivery's steps."""
        num_tokens, num_steps = computed_tokens(figures), figures.counts[kv.engine.Counter.STEPS]
        steps = num_steps - self._num_steps
        if steps:
            mean = (num_tokens - self._num_tokens) / steps
            held = figures.blocks_used * self._block_size
            self._seconds += steps * self._model.step_seconds(self._machine, mean, held)
        self._num_tokens, self._num_steps = num_tokens, num_steps
