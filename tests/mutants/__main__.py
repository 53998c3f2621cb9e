"""Breaks the library on purpose, one mutation of `mutations.py` at a time, and demands that a test fails.

    python -m tests.mutants                  # all of them, as `make mutants` does
    python -m tests.mutants window rollback  # those with one of these words in their names
    python -m tests.mutants --stale          # names those that do not fit the library any more, tries none

Each mutant is a copy of the repository with one text replaced, in a folder of its own, on which the tests
that ought to notice run, two mutants at a time. A mutant counts as killed if one of them fails by an
assertion or hangs. A mutant that survives, crashes, or whose text is not found exactly once (somebody edited
the library: adapt the mutation) is a failure; stale ones are named first, once more at the end, and do not
keep the others from being tried. Tests that already fail on the copy without a mutation are a failure of all.
"""

import argparse
import concurrent.futures
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.mutants.attention import MUTATIONS as ATTENTION
from tests.mutants.chunk_selectors import MUTATIONS as CHUNK_SELECTORS
from tests.mutants.chunks import MUTATIONS as CHUNKS
from tests.mutants.commit import MUTATIONS as COMMIT
from tests.mutants.compress import MUTATIONS as COMPRESS
from tests.mutants.core import MUTATIONS as CORE
from tests.mutants.decode_chunks import MUTATIONS as DECODE_CHUNKS
from tests.mutants.decoder import MUTATIONS as MODELS
from tests.mutants.decoding import MUTATIONS as DECODE
from tests.mutants.engine import MUTATIONS as ENGINE
from tests.mutants.extend import MUTATIONS as EXTEND
from tests.mutants.gpu_decode import MUTATIONS as GPU_DECODE
from tests.mutants.kernel_speed import MUTATIONS as KERNEL_SPEED
from tests.mutants.kernels import MUTATIONS as KERNELS
from tests.mutants.kinds import MUTATIONS as KINDS
from tests.mutants.manager import MUTATIONS as MANAGER
from tests.mutants.mutations import Mutation
from tests.mutants.operations import MUTATIONS as OPERATIONS
from tests.mutants.prefix import MUTATIONS as PREFIX
from tests.mutants.rewrite import MUTATIONS as REWRITE
from tests.mutants.rollouts import MUTATIONS as ROLLOUTS
from tests.mutants.serve import MUTATIONS as SERVE
from tests.mutants.tpu import MUTATIONS as TPU

MUTATIONS = [
    *CORE,
    *EXTEND,
    *OPERATIONS,
    *COMMIT,
    *PREFIX,
    *REWRITE,
    *COMPRESS,
    *CHUNKS,
    *CHUNK_SELECTORS,
    *KINDS,
    *ATTENTION,
    *DECODE,
    *DECODE_CHUNKS,
    *ENGINE,
    *MANAGER,
    *MODELS,
    *GPU_DECODE,
    *KERNELS,
    *TPU,
    *KERNEL_SPEED,
    *ROLLOUTS,
    *SERVE,
]
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORKERS = 2
TIMEOUT = 120.0
# What pytest's summary says of a test that noticed something; any other exception is a crash of the mutant.
NOTICED = ("AssertionError", "assert ", "Failed: DID NOT RAISE")


class Copy:
    """A folder's files without its caches, in a temporary folder; a context manager."""

    def __init__(self, source: pathlib.Path):
        self._source = source

    def __enter__(self) -> "Copy":
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self.root = pathlib.Path(self._folder.name).resolve() / "tree"
        left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")
        shutil.copytree(self._source, self.root, ignore=left_out)
        # Compiled programs are found by content, so mutants may share them with the original and each other.
        programs = ROOT / ".cache" / "jax"
        programs.mkdir(parents=True, exist_ok=True)
        (self.root / ".cache").mkdir()
        (self.root / ".cache" / "jax").symlink_to(programs)
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def run(self, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Runs this interpreter in the copy, which goes before an installed kvcache_jax."""
        changes = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
        environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"} | changes
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=timeout
        )

    def test(self, tests: Sequence[str], *options: str, timeout: float | None = None):
        ids = [f"tests/{test}" for test in tests]
        return self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *ids, timeout=timeout)


def why_stale(root: pathlib.Path, mutation: Mutation) -> str | None:
    """Why the mutation cannot be applied, or None."""
    file = root / mutation.file
    count = file.read_text().count(mutation.old) if file.is_file() else 0
    if count == 1 and mutation.old != mutation.new:
        return None
    return f"STALE     {mutation.name}: its text occurs {count} times in {mutation.file}, expected once"


def why_unfit(copy: Copy, mutations: Sequence[Mutation]) -> str | None:
    """What is wrong with the copy before any mutation, or None: its own library must pass the tests."""
    found = copy.run("-c", "import kvcache_jax; print(kvcache_jax.__file__)").stdout.strip()
    if not pathlib.Path(found).is_relative_to(copy.root):
        return f"the tests would import {found or 'nothing'}, expected the copy in {copy.root}"
    tests = sorted({mutation.test for mutation in mutations})
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as executor:
        results = list(executor.map(copy.test, (tests[i::WORKERS] for i in range(min(WORKERS, len(tests))))))
    texts = [result.stdout + result.stderr for result in results if result.returncode != 0]
    return "\n".join(["Without any mutation:", *texts]) if texts else None


def try_mutant(source: pathlib.Path, mutation: Mutation) -> tuple[bool, str]:
    """(killed, the line to print)."""
    start = time.monotonic()
    with Copy(source) as copy:
        file = copy.root / mutation.file
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        try:
            result = copy.test([mutation.test], "-x", "--tb=line", timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return True, f"killed    {mutation.name}  by hanging for {TIMEOUT:.0f} s in tests/{mutation.test}"
    seconds = f"({time.monotonic() - start:.1f} s)"
    if result.returncode == 0:
        return False, f"SURVIVED  {mutation.name}  tests/{mutation.test}  {seconds}"
    failure = re.search(r"^(?:FAILED|ERROR) (tests/.+?) - (.*)$", result.stdout, flags=re.MULTILINE)
    if result.returncode == 1 and failure and failure[2].startswith(NOTICED):
        return True, f"killed    {mutation.name}  by {failure[1]}  {seconds}"
    why = failure[0] if failure else f"pytest's exit status is {result.returncode}\n{result.stdout[-2000:]}"
    return False, f"CRASHED   {mutation.name}  {why}  {seconds}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Shows that every mutation of the library fails a test.")
    parser.add_argument("words", nargs="*", metavar="word", help="only mutations with it in their names")
    parser.add_argument("--stale", action="store_true", help="only name those that do not fit the library")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [mutation for mutation in MUTATIONS if any(word in mutation.name for word in words)]
    if not chosen:
        parser.error(f"no mutation has {' or '.join(words)} in its name")
    stale = {mutation.name: why for mutation in chosen if (why := why_stale(ROOT, mutation))}
    mutations = [mutation for mutation in chosen if mutation.name not in stale]
    print(*stale.values(), sep="\n", end="\n" if stale else "", flush=True)
    if options.stale:
        print(f"{len(stale)} of {len(chosen)} are stale")
        return int(bool(stale))
    num_killed = 0
    with Copy(ROOT) as original:
        if mutations and (error := why_unfit(original, mutations)):
            print(error)
        else:
            attempt = functools.partial(try_mutant, original.root)
            with concurrent.futures.ThreadPoolExecutor(WORKERS) as executor:
                for is_killed, line in executor.map(attempt, mutations):
                    print(line, flush=True)
                    num_killed += is_killed
    print(*stale.values(), sep="\n", end="\n" if stale else "")
    print(f"{num_killed} passed, {len(chosen) - num_killed} failed, {len(stale)} of them stale")
    return int(num_killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
