"""One program, compiled for H200 or lowered for CUDA, and what it costs."""

import dataclasses

from jax.sharding import SingleDeviceSharding

from tests.aot import h200
from tests.aot.hlo import num_copies
from tests.aot.loop_counts import LoopCounts, compiled_counts, lowered_counts
from tests.aot.operation_programs import block_programs, operation_programs
from tests.aot.program import Limits, Program, placed, traced_for_gpu
from tests.aot.step_programs import step_programs


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """A lowered or compiled program.

    Attributes:
      counts: Loops, conditionals and launches.
      pool_copies: Copies of arrays as large as one of keys; unknown before compilation.
      temporary_bytes: Device memory beside arguments and results; unknown before compilation.
      moved_host_bytes: Of what the cache keeps in host memory, what is not updated there in place; unknown
        before compilation.
    """

    counts: LoopCounts
    pool_copies: int | None = None
    temporary_bytes: int | None = None
    moved_host_bytes: int | None = None


def all_programs() -> list[Program]:
    """Returns operations, then steps."""
    return [*operation_programs(), *block_programs("mosaic_gpu"), *step_programs()]


def start_compiler() -> None:
    """Prepares a process to compile for H200; before jax starts a backend."""
    h200.start_compiler()
    h200.know_host_memory()


def lower(program: Program) -> ProgramCost:
    """Lowers the program for CUDA, on any machine."""
    with traced_for_gpu():
        lowered = program.jitted().trace(*program.arguments()).lower(lowering_platforms=("cuda",))
    return ProgramCost(lowered_counts(lowered.compiler_ir(), program.is_ordinary, program.is_loop))


def compile_for_h200(name: str) -> ProgramCost:
    """Compiles the program of that name for H200."""
    (program,) = (program for program in all_programs() if program.name == name)
    device = h200.mesh().devices.item()
    arguments = placed(program.arguments(), SingleDeviceSharding(device), h200.host_memory(device))
    with h200.lowering():
        compiled = program.jitted().lower(*arguments).compile()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    return ProgramCost(
        counts=compiled_counts(hlo, program.is_loop, program.is_ordinary),
        pool_copies=num_copies(hlo, program.num_pool_elements),
        temporary_bytes=memory.temp_size_in_bytes,
        moved_host_bytes=program.host_bytes - memory.host_alias_size_in_bytes,
    )


def failures(cost: ProgramCost, limits: Limits) -> list[str]:
    """Returns what is wrong with the program, a phrase each."""
    counts = cost.counts
    return [
        f"{value:,} {what}, at most {most:,}"
        for value, most, what in (
            (counts.waits, limits.waits, "waits for the host"),
            (counts.known_loops, limits.known_loops, "loops of known trips"),
            (counts.launches, limits.launches, "launches"),
            (cost.temporary_bytes, limits.temporary_bytes, "temporary bytes"),
            (cost.pool_copies, 0, "pool copies"),
            (cost.moved_host_bytes, 0, "bytes of host memory not updated in place"),
        )
        if value is not None and most is not None and value > most
    ]
