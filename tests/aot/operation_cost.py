"""One public operation, compiled for H200 or lowered for CUDA, and what the program costs."""

import dataclasses
import os

import jax

from tests.aot import h200
from tests.aot.hlo import num_copies
from tests.aot.loop_counts import LoopCounts, compiled_counts, lowered_counts
from tests.aot.operation_cases import OPERATION_CASES, OperationCase


def start_compiler() -> None:
    """Prepares a process to compile for H200; before jax starts a backend."""
    jax.config.update("jax_platforms", "cpu")
    # Read when the CUDA plugin starts. There is no GPU to tune on.
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0").strip()


@dataclasses.dataclass(frozen=True)
class OperationCost:
    """A lowered or compiled operation.

    Attributes:
      counts: Loops, conditionals and launches.
      pool_copies: Copies of arrays as large as a pool; unknown before compilation.
      temporary_bytes: Device memory beside arguments and results; unknown before compilation.
    """

    counts: LoopCounts
    pool_copies: int | None = None
    temporary_bytes: int | None = None


def lower(case: OperationCase) -> OperationCost:
    """Lowers the case for CUDA, on any machine."""
    lowered = _jitted(case).trace(*case.shapes()).lower(lowering_platforms=("cuda",))
    return OperationCost(lowered_counts(lowered.compiler_ir()))


def compile_operation(name: str) -> OperationCost:
    """Compiles the case of that name for H200."""
    (case,) = (case for case in OPERATION_CASES if case.name == name)
    arguments = h200.place(case.shapes())
    with h200.lowering():
        compiled = _jitted(case).lower(*arguments).compile()
    hlo = compiled.as_text()
    return OperationCost(
        counts=compiled_counts(hlo),
        pool_copies=num_copies(hlo, case.num_pool_elements),
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )


def _jitted(case: OperationCase):
    return jax.jit(case.function, donate_argnums=0 if case.returns_cache else ())
