"""Compiles the public operations and whole steps for a TPU v6e, without one.

    python -m tests.aot.tpu_programs               # as `make aot-tpu` does
    python -m tests.aot.tpu_programs extend fork   # those with one of these words in their names
    python -m tests.aot.tpu_programs --markdown    # the table for docs/measured.md

Loops stay on a TPU, so that they are not counted. Needs libtpu, see `make .venv-tpu`. Exit status 1 if a
program does not compile, copies a pool, or has more code or temporaries than it may have.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from tests.aot.hlo import num_copies
from tests.aot.operation_programs import operation_programs
from tests.aot.program import Program
from tests.aot.step_programs import step_programs
from tests.aot.table import Table
from tests.aot.tpu import SURROUNDINGS

TARGET = "v6e:2x2"
HEADINGS = ("program", "cache", "code", "temporary", "pool copies", "seconds", "verdict")
ATTENDING = ("attention", "write, attend")
MOVES_VALUES = {
    "attention": "2 groups",
    "write": "2 groups",
    "gather": "2 groups",
    "write, attend": "3 layers",
    "compress": "3 layers",
}
"""Operations that do the same with and without an index, and on what; the others are compiled with one."""


class TpuCost(NamedTuple):
    """A compiled program; as limits, at most so many.

    Attributes:
      code: Bytes of generated code.
      temporary: Bytes of HBM beside arguments and results.
      pool_copies: Copies of arrays as large as one of keys.
    """

    code: int
    temporary: int
    pool_copies: int = 0


OPERATION = TpuCost(8 * 2**20, 8_000_000)
MOVES = TpuCost(11 * 2**20, 70_000_000)  # tokens of rows, one layer after the other
REWRITE = TpuCost(9 * 2**20, 8_000_000)  # `extend` copies one block of a row, it any number
ATTENTION = TpuCost(6 * 2**20, 100_000_000)
STEP = TpuCost(16 * 2**20, 100_000_000)
ENGINE = TpuCost(26 * 2**20, 100_000_000)
"""Arrays of a few columns take a tile of 128 lanes, so that temporaries are larger than on a GPU."""


def tpu_programs() -> list[tuple[Program, TpuCost]]:
    """Returns the programs, each with its limits."""
    chosen = []
    for program in operation_programs():
        if program.detail == MOVES_VALUES.get(program.subject, "2 groups, index, lru"):
            limits = {"rewrite": REWRITE, "compose": MOVES}.get(program.subject, OPERATION)
            chosen.append((program, ATTENTION if program.subject in ATTENDING else limits))
    for program in step_programs("mosaic_tpu"):
        limits = {"rows end": OPERATION, "engine step": ENGINE}.get(program.subject, STEP)
        chosen.append((program, limits))
    return chosen


def compile_for_tpu(program: Program) -> TpuCost:
    """Compiles the program. Only one process at a time can."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TARGET).devices[0]
    placed = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), program.arguments()
    )
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        compiled = program.jitted().lower(*arguments).compile()
    memory, copies = compiled.memory_analysis(), num_copies(compiled.as_text(), program.num_pool_elements)
    return TpuCost(memory.generated_code_size_in_bytes, memory.temp_size_in_bytes, copies)


def failures(cost: TpuCost, limits: TpuCost) -> list[str]:
    """Returns what is wrong with the program, a phrase each."""
    names = ("code bytes", "temporary bytes", "pool copies")
    return [
        f"{value:,} {name}, at most {most:,}"
        for value, most, name in zip(cost, limits, names, strict=True)
        if value > most
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiles operations and steps for a TPU v6e.")
    parser.add_argument("words", nargs="*", metavar="word", help="only programs with it in their names")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    options = parser.parse_args(arguments)
    # Read when libtpu starts.
    os.environ |= SURROUNDINGS
    jax.config.update("jax_platforms", "cpu")
    words = options.words or [""]
    chosen = [each for each in tpu_programs() if any(word in each[0].name for word in words)]
    if not chosen:
        parser.error(f"no program has {' or '.join(words)} in its name")
    labels = [(program.subject, program.detail) for program, _ in chosen]
    table = Table(HEADINGS, list(zip(*labels, strict=True)), options.markdown)
    print(f"Compiled for {TARGET} by jax {jax.__version__}\n")
    print(table.head())
    start, num_failed = time.monotonic(), 0
    for program, limits in chosen:
        before = time.monotonic()
        try:
            cost = compile_for_tpu(program)
        except Exception as error:  # whatever the compiler raises is this program's verdict
            found, numbers = [f"{type(error).__name__}: {error}"], [None] * 3
        else:
            found, numbers = failures(cost, limits), [*cost]
        num_failed += bool(found)
        verdict = "FAILED: " + "; ".join(found) if found else "ok"
        seconds = round(time.monotonic() - before)
        print(table.line([program.subject, program.detail, *numbers, seconds, verdict]), flush=True)
    print(f"\n{len(chosen) - num_failed} passed, {num_failed} failed in {time.monotonic() - start:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
