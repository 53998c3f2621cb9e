"""Compiles the public operations and whole steps for a TPU v6e, with a host tier for a v5e, without one.

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
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from tests.aot.hlo import num_copies
from tests.aot.operation_programs import block_programs, operation_programs
from tests.aot.program import Program, placed
from tests.aot.step_programs import step_programs
from tests.aot.table import Table
from tests.aot.tpu import SURROUNDINGS

TARGET = "v6e:2x2"
HOST_TARGET = "v5e:2x2"
"""For caches that keep blocks in host memory."""
HEADINGS = ("program", "cache", "code", "temporary", "pool copies", "moved on host", "seconds", "verdict")
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
      pool_copies: Copies of arrays as large as one of keys, or of states.
      moved_host_bytes: Of what the cache keeps in host memory, what is not updated there in place.
    """

    code: int
    temporary: int
    pool_copies: int = 0
    moved_host_bytes: int = 0


OPERATION = TpuCost(8 * 2**20, 8_000_000)
MOVES = TpuCost(11 * 2**20, 70_000_000)  # tokens of rows, one layer after the other
REWRITE = TpuCost(9 * 2**20, 8_000_000)  # `extend` copies one block of a row, it any number
ATTENTION = TpuCost(6 * 2**20, 100_000_000)
STEP = TpuCost(16 * 2**20, 100_000_000)
ENGINE = TpuCost(28 * 2**20, 100_000_000)  # with the model twice: on prompts and next tokens, on these alone
HOST = TpuCost(45 * 2**20, 60_000_000)  # eviction and the index of both tiers
"""Arrays of a few columns take a tile of 128 lanes, so that temporaries are larger than on a GPU."""


def tpu_programs() -> list[tuple[Program, TpuCost]]:
    """Returns the programs, each with its limits."""
    chosen = []
    for program in operation_programs():
        if program.detail == MOVES_VALUES.get(program.subject, "2 groups, index, lru"):
            limits = {"rewrite": REWRITE, "compose": MOVES}.get(program.subject, OPERATION)
            chosen.append((program, ATTENTION if program.subject in ATTENDING else limits))
        elif program.host_bytes:
            chosen.append((program, HOST))
    chosen += [(program, OPERATION) for program in block_programs("mosaic_tpu")]
    for program in step_programs("mosaic_tpu"):
        limits = {"rows end": OPERATION, "engine step": ENGINE}.get(program.subject, STEP)
        if program.host_bytes:
            limits = TpuCost(limits.code + HOST.code, limits.temporary + HOST.temporary)
        chosen.append((program, limits))
    return chosen


def compile_for_tpu(program: Program) -> TpuCost:
    """Compiles the program. Only one process at a time can."""
    target = HOST_TARGET if program.host_bytes else TARGET
    device = topologies.get_topology_desc(platform="tpu", topology_name=target).devices[0]
    # From a NamedSharding alone types take the kind of memory.
    host = NamedSharding(Mesh([device], ("one",)), PartitionSpec(), memory_kind="pinned_host")
    arguments = placed(program.arguments(), SingleDeviceSharding(device), host)
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        compiled = program.jitted().lower(*arguments).compile()
    least = program.num_pool_elements
    if program.host_bytes and program.config.snapshot_groups:
        # Entries are smaller than the index, and of few heads laid out anew, without a host too.
        least = program.num_prefix_elements
    memory, copies = compiled.memory_analysis(), num_copies(compiled.as_text(), least)
    moved = program.host_bytes - memory.host_alias_size_in_bytes
    return TpuCost(memory.generated_code_size_in_bytes, memory.temp_size_in_bytes, copies, moved)


def failures(cost: TpuCost, limits: TpuCost) -> list[str]:
    """Returns what is wrong with the program, a phrase each."""
    names = "code bytes", "temporary bytes", "pool copies", "bytes of host memory not updated in place"
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
    print(f"Compiled for {TARGET}, with a host tier for {HOST_TARGET}, by jax {jax.__version__}\n")
    print(table.head())
    start, num_failed = time.monotonic(), 0
    for program, limits in chosen:
        before = time.monotonic()
        try:
            cost = compile_for_tpu(program)
        except Exception as error:  # whatever the compiler raises is this program's verdict
            found, numbers = [f"{type(error).__name__}: {error}"], [None] * 4
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
