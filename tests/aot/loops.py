"""Compiles each public operation for H200 and counts where it waits for the host.

    python -m tests.aot.loops                      # all operations, as `make aot` does
    python -m tests.aot.loops extend fork          # those with one of these words in their names
    python -m tests.aot.loops --lowered            # before XLA: no plugin needed, no launches counted
    python -m tests.aot.loops --markdown           # the table for docs/measured.md

Without `--lowered` it needs the CUDA plugin's wheels, see `make .venv-aot`. Exit status 1 if an operation
waits more often than `operation_cases.py` allows, copies a pool, or does not compile.
"""

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from tests.aot.operation_cases import OPERATION_CASES, OperationCase
from tests.aot.operation_cost import OperationCost, compile_operation, lower, start_compiler
from tests.aot.table import Table

WORKERS = 2
HEADINGS = (
    "operation",
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


def failures(cost: OperationCost, case: OperationCase) -> list[str]:
    """What is wrong with the program, a phrase each."""
    counts = cost.counts
    found = []
    for value, most, what in (
        (counts.waits, case.max_waits, "waits for the host"),
        (counts.known_loops, case.max_known_loops, "loops of known trips"),
        (counts.launches, case.max_launches, "launches"),
        (cost.pool_copies, 0, "pool copies"),
    ):
        if value is not None and most is not None and value > most:
            found.append(f"{value} {what}, at most {most}")
    return found


def costs(cases: Sequence[OperationCase], is_lowered: bool) -> Iterator[OperationCost | Exception]:
    """Yields each case's cost, or what the compiler raised, in order."""
    if is_lowered:
        for case in cases:
            try:
                yield lower(case)
            except Exception as error:  # this case's verdict
                yield error
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.aot.operation_cost"])
    with concurrent.futures.ProcessPoolExecutor(WORKERS, context, initializer=start_compiler) as executor:
        futures = [executor.submit(compile_operation, case.name) for case in cases]
        for future in futures:
            yield future.exception() or future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts loops and launches of the operations on an H200.")
    parser.add_argument("words", nargs="*", metavar="word", help="only cases with it in their names")
    parser.add_argument("--lowered", action="store_true", help="count before XLA compiles; needs no plugin")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    cases = [case for case in OPERATION_CASES if any(word in case.name for word in words)]
    if not cases:
        parser.error(f"no case has {' or '.join(words)} in its name")
    jax.config.update("jax_platforms", "cpu")
    start, num_failed = time.monotonic(), 0
    table = Table(HEADINGS, [[case.operation for case in cases], [case.cache_name for case in cases]])
    print(f"{'Lowered' if options.lowered else 'Compiled'} for H200 by jax {jax.__version__}\n")
    print(table.head(options.markdown))
    for case, cost in zip(cases, costs(cases, options.lowered), strict=True):
        if isinstance(cost, Exception):
            found, numbers = [f"{type(cost).__name__}: {cost}"], [None] * 8
        else:
            counts, found = cost.counts, failures(cost, case)
            launches = (None, None) if options.lowered else (counts.launches, counts.trip_launches)
            numbers = [counts.loops, counts.conditionals, case.max_waits, counts.known_loops, *launches]
            numbers += [cost.pool_copies, cost.temporary_bytes]
        num_failed += bool(found)
        verdict = "FAILED: " + "; ".join(found) if found else "ok"
        print(table.line([case.operation, case.cache_name, *numbers, verdict], options.markdown), flush=True)
    seconds = time.monotonic() - start
    print(f"\n{len(cases) - num_failed} passed, {num_failed} failed in {seconds:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
