"""Compiles the kernels for H200, some for other GPUs, without a GPU and holds each to its budget.

    python -m tests.aot.gpu                      # all cases, as `make aot` does on the newest jax
    python -m tests.aot.gpu decode append_64     # those with one of these words in their names
    python -m tests.aot.gpu append --dump kept   # and keep ptx, ptxas's report, sass and hlo, a folder a case

Needs the CUDA plugin's wheels, see `make .venv-aot`. The cases and their budgets are in `kernel_cases.py`,
`move_cases.py`, `step.py` and `cache_cases.py` beside this file. Exit status 1 if a program costs more than
its budget, has fewer tensor core or copy engine instructions or fences than demanded, waits for tensor cores
less often than it uses them, does not call a kernel, copies a pool or moves it to another device, would fault
where only a GPU notices it, or does not compile.
"""

import argparse
import concurrent.futures
import multiprocessing
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

import jax

from tests.aot.budget import CompileCase
from tests.aot.cases import CASES
from tests.aot.compiling import ProgramCost, compile_case

WORKERS = 2
TMA_ALIGNMENT = 128
"""Of addresses in shared memory."""
MAX_GRID = (2**31 - 1, 65535, 65535)
"""CTAs along x, y and z."""
HEADINGS = (
    "registers",
    "spilled",
    "shared",
    "HGMMA",
    "HMMA",
    "UTMALDG",
    "LDGSTS",
    "fences",
    "temporary",
    "verdict",
)


def failures(cost: ProgramCost, case: CompileCase) -> list[str]:
    """What is wrong with the program, a phrase each."""
    budget = case.budget
    found = [f"does not call {name}" for name in case.kernels if name not in cost.called]
    registers, spills, shared, wgmma, mma, tma, thread_copies, fences = totals(cost)
    for what, value, most in (
        ("registers", registers, budget.registers),
        ("spilled bytes", spills, budget.spill_bytes),
        ("bytes of shared memory", shared, budget.shared_memory),
        ("temporary bytes", cost.temporary_bytes, budget.temporary_bytes),
    ):
        if value > most:
            found.append(f"{value} {what}, at most {most}")
    for what, value, least in (
        ("HGMMA", wgmma, budget.min_wgmma),
        ("HMMA", mma, budget.min_mma),
        ("UTMALDG", tma, budget.min_tma),
        ("LDGSTS", thread_copies, budget.min_thread_copies),
        ("fences", fences, budget.min_fences),
    ):
        if value < least:
            found.append(f"{value} {what}, at least {least}")
    for kernel in cost.kernels:
        if kernel.tma_alignment < TMA_ALIGNMENT:
            found.append(
                f"{kernel.name} copies to or from shared memory at multiples of {kernel.tma_alignment} "
                f"bytes, expected of {TMA_ALIGNMENT}"
            )
        if any(size > most for size, most in zip(kernel.grid, MAX_GRID, strict=True)):
            found.append(f"{kernel.name} has a grid of {kernel.grid}, at most {MAX_GRID}")
        least = max(kernel.wgmma_groups, min(kernel.wgmma, 1))
        if kernel.wgmma_waits < least:
            found.append(f"{kernel.name} waits for wgmma {kernel.wgmma_waits} times, at least {least}")
        found += [f"{kernel.name} has a TMA descriptor with {fault}" for fault in kernel.descriptor_faults]
        if kernel.serialized:
            found.append(f"{kernel.name} has its products serialized by ptxas")
        if kernel.tanh_approx:
            found.append(f"{kernel.name} has {kernel.tanh_approx} tanh.approx, which is 5e-4 off")
    if cost.collectives:
        found.append(f"moves arrays between devices: {', '.join(cost.collectives)}")
    if cost.pool_copies:
        found.append(f"copies a pool {cost.pool_copies} times")
    if cost.missing_alias_bytes:
        found.append(f"{cost.missing_alias_bytes} bytes not updated in place")
    return found


def totals(cost: ProgramCost) -> tuple[int, ...]:
    """Of all kernels, as `Budget` counts them, in the order of `HEADINGS`."""
    kernels = cost.kernels
    return (
        max((kernel.registers for kernel in kernels), default=0),
        sum(kernel.spill_bytes for kernel in kernels),
        max((kernel.shared_memory for kernel in kernels), default=0),
        sum(kernel.wgmma for kernel in kernels),
        sum(kernel.mma for kernel in kernels),
        sum(kernel.tma for kernel in kernels),
        sum(kernel.thread_copies for kernel in kernels),
        sum(kernel.fences for kernel in kernels),
    )


def chosen(words: Sequence[str]) -> list[CompileCase]:
    """The cases that have one of the words in their names; all without words."""
    return [case for case in CASES if not words or any(word in case.name for word in words)]


def report(cases: Sequence[CompileCase], folder: pathlib.Path) -> int:
    """Prints the table, a line a case, and returns the number of cases that failed."""
    width = max(len(case.name) for case in cases)
    print(" " * width, *(f"{heading:>9}" for heading in HEADINGS[:-1]), f" {HEADINGS[-1]}")
    num_failed = 0
    # Each case in a fresh process, forked from one that has imported jax.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.aot.compiling"])
    with concurrent.futures.ProcessPoolExecutor(WORKERS, context, max_tasks_per_child=1) as executor:
        futures = []
        for case in cases:
            (folder / case.name).mkdir(parents=True, exist_ok=False)
            futures.append(executor.submit(compile_case, case.name, folder / case.name))
        for case, future in zip(cases, futures, strict=True):
            try:
                cost = future.result()
            except Exception as error:  # whatever the compiler raises is this case's verdict
                found, numbers = [f"{type(error).__name__}: {error}"], [""] * (len(HEADINGS) - 1)
            else:
                found, numbers = failures(cost, case), [*totals(cost), cost.temporary_bytes]
            num_failed += bool(found)
            verdict = "FAILED: " + "; ".join(found) if found else "ok"
            print(f"{case.name:{width}}", *(f"{number:>9}" for number in numbers), f" {verdict}", flush=True)
    return num_failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiles the kernels and checks their budgets.")
    parser.add_argument("words", nargs="*", metavar="word", help="only cases with it in their names")
    parser.add_argument("--dump", type=pathlib.Path, metavar="DIR", help="keep what the compiler wrote here")
    options = parser.parse_args(arguments)
    cases = chosen(options.words)
    if not cases:
        parser.error(f"no case has {' or '.join(options.words)} in its name")
    targets = dict.fromkeys(case.target.gpu.example for case in cases)
    print(f"Compiled for {', '.join(targets)} by jax {jax.__version__}")
    start = time.monotonic()
    if options.dump:
        folder = options.dump.absolute()
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder} is not empty, expected a new or empty folder")
        num_failed = report(cases, folder)
    else:
        with tempfile.TemporaryDirectory(prefix="aot-") as temporary:
            num_failed = report(cases, pathlib.Path(temporary))
    print(f"{len(cases) - num_failed} passed, {num_failed} failed in {time.monotonic() - start:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
