"""Compiles the public operations and whole steps for H200 and counts where they wait for the host.

    python -m tests.aot.loops                      # all of them, as `make aot` does
    python -m tests.aot.loops extend fork          # those with one of these words in their names
    python -m tests.aot.loops --lowered            # before XLA: no plugin needed, loops alone are counted
    python -m tests.aot.loops --markdown           # the table for docs/measured.md

Without `--lowered` it needs the CUDA plugin's wheels, see `make .venv-aot`. The programs and their limits are
in `operation_programs.py` and `step_programs.py`. Exit status 1 if a program waits more often, launches more,
takes more memory, copies a pool, or does not compile.
"""

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from tests.aot.program import Program
from tests.aot.program_cost import (
    ProgramCost,
    all_programs,
    compile_for_h200,
    failures,
    lower,
    start_compiler,
)
from tests.aot.table import Table

WORKERS = 2
HEADINGS = (
    "program",
    "cache",
    "loops",
    "conditionals",
    "at most",
    "known loops",
    "launches",
    "per trip",
    "pool copies",
    "temporary",
    "verdict",
)


def costs(programs: Sequence[Program], is_lowered: bool) -> Iterator[ProgramCost | BaseException]:
    """Yields each program's cost, or what the compiler raised, in order."""
    if is_lowered:
        for program in programs:
            try:
                yield lower(program)
            except Exception as error:  # this program's verdict
                yield error
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.aot.program_cost"])
    with concurrent.futures.ProcessPoolExecutor(WORKERS, context, initializer=start_compiler) as executor:
        futures = [executor.submit(compile_for_h200, program.name) for program in programs]
        for future in futures:
            yield future.exception() or future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts loops and launches of programs on an H200.")
    parser.add_argument("words", nargs="*", metavar="word", help="only programs with it in their names")
    parser.add_argument("--lowered", action="store_true", help="count before XLA compiles; needs no plugin")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    words = options.words or [""]
    programs = [program for program in all_programs() if any(word in program.name for word in words)]
    if not programs:
        parser.error(f"no program has {' or '.join(words)} in its name")
    start, num_failed = time.monotonic(), 0
    labels = [(program.subject, program.detail) for program in programs]
    table = Table(HEADINGS, list(zip(*labels, strict=True)), options.markdown)
    print(f"{'Lowered' if options.lowered else 'Compiled'} for H200 by jax {jax.__version__}\n")
    print(table.head())
    for program, cost in zip(programs, costs(programs, options.lowered), strict=True):
        if isinstance(cost, ProgramCost):
            counts, found = cost.counts, failures(cost, program.limits)
            launches = (None, None) if options.lowered else (counts.launches, counts.trip_launches)
            numbers = [counts.loops, counts.conditionals, program.limits.waits, counts.known_loops]
            numbers += [*launches, cost.pool_copies, cost.temporary_bytes]
        else:
            found, numbers = [f"{type(cost).__name__}: {cost}"], [None] * 8
        num_failed += bool(found)
        verdict = "FAILED: " + "; ".join(found) if found else "ok"
        print(table.line([program.subject, program.detail, *numbers, verdict]), flush=True)
    seconds = time.monotonic() - start
    print(f"\n{len(programs) - num_failed} passed, {num_failed} failed in {seconds:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
