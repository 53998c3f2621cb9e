"""Emulates the kernels for H200 and other GPUs on a CPU, from their PTX, and compares with references.

    python -m tests.aot.emulated                    # all named shapes and a few random decodes
    python -m tests.aot.emulated decode_long copy   # decode_long, and those with `copy` in their names
    python -m tests.aot.emulated random --seed 7 --random 30

Needs the CUDA plugin's wheels, see `make .venv-aot`; `emulator/` says what is looked at. Each shape runs in
two models, the second one if nothing is wrong in the first: copies and products land at once, or only when
they are waited for. Exit status 1 if a result is wrong in one of them, if an access may go wrong on a GPU, or
if a kernel waits for what never comes. Without `--seed` the commit chooses the random shapes.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import jax
import numpy as np

from tests.aot.emulated_cases import SMALL_GPU, Case, cases
from tests.aot.emulator import launch
from tests.aot.emulator.memory import FaultError

WORKERS = 2
NUM_RANDOM = 4
OK = "ok"
MODELS = {"land at once": False, "land late": True}


def failures(case: Case) -> list[str]:
    """What is wrong in the first model in which something is, a phrase each."""
    expected, kernels, found = case.expected(), [], []
    for model, lands_late in MODELS.items():
        try:
            with _small_gpu(), launch.emulated(lands_late, case.target, kernels):
                results = case.call()
        except FaultError as fault:
            return [f"where copies and products {model}, {fault}"]
        for nth, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            result, wanted = (np.asarray(each, np.float32) for each in (result, wanted))
            num_wrong = np.sum(~np.isclose(result, wanted, case.rtol, case.atol, equal_nan=True))
            if num_wrong:
                wrong = f"{num_wrong} of {wanted.size} numbers of result {nth} are wrong"
                found.append(f"where copies and products {model}, {wrong}")
        if found:
            break
    return found


@contextlib.contextmanager
def _small_gpu() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, values in SMALL_GPU.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


_cases = functools.cache(cases)


def emulate(name: str, num_random: int, seed: int) -> str:
    """The verdict on the case of that name, in a process of the pool."""
    [case] = [case for case in _cases(num_random, seed) if case.name == name]
    try:
        found = failures(case)
    except Exception as error:  # whatever the compiler raises is this case's verdict
        return f"CRASHED: {type(error).__name__}: {error}"
    return f"FAILED: {'; '.join(found)}" if found else OK


def _prepare(folder: str) -> None:
    launch.prepare(pathlib.Path(tempfile.mkdtemp(dir=folder)))


def seed_of_commit() -> int:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(found.stdout, 16) if found.returncode == 0 else 0


def chosen(every: Sequence[Case], words: Sequence[str]) -> list[Case]:
    """The cases that a word names, or, where it names none, that have it in theirs; all without words."""
    names = {case.name for case in every}
    return [
        case
        for case in every
        if not words or any(word == case.name or (word in case.name and word not in names) for word in words)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Emulates the kernels and compares with references.")
    parser.add_argument(
        "words", nargs="*", metavar="word", help="only the case of that name, or with it in theirs"
    )
    parser.add_argument("--random", type=int, default=NUM_RANDOM, metavar="N", help="random decodes")
    parser.add_argument("--seed", type=int, help="of the random decodes")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    seed = seed_of_commit() if options.seed is None else options.seed
    found = chosen(cases(options.random, seed), options.words)
    if not found:
        parser.error(f"no case has {' or '.join(options.words)} in its name")
    print(f"Emulated by jax {jax.__version__}, random decodes of seed {seed}")
    start, num_failed = time.monotonic(), 0
    width = max(len(case.name) for case in found)
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        for target in dict.fromkeys(case.target for case in found):
            names = [case.name for case in found if case.target == target]
            for name, verdict in _emulate_all(names, options.random, seed, folder):
                num_failed += verdict != OK
                print(f"{name:{width}}  {verdict}", flush=True)
    print(f"{len(found) - num_failed} passed, {num_failed} failed in {time.monotonic() - start:.0f} s")
    return int(num_failed > 0)


def _emulate_all(names: Sequence[str], num_random: int, seed: int, folder: str) -> Iterator[tuple[str, str]]:
    """Names and verdicts, in order, of cases of one target: the compiler of a process knows but one."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(WORKERS, len(names)), context, initializer=_prepare, initargs=(folder,)
    ) as executor:
        futures = [executor.submit(emulate, name, num_random, seed) for name in names]
        for name, future in zip(names, futures, strict=True):
            yield name, future.result()


if __name__ == "__main__":
    sys.exit(main())
