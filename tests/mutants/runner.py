"""Tries a mutation: runs its test on a copy of the repository in which its text is replaced."""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.mutants.reading import ROOT, Mutation

WORKERS = 2
TIMEOUT, GATE_TIMEOUT = 120.0, 360.0
# What pytest's summary says of a test that noticed something; any other exception is a crash of the mutant.
NOTICED = ("AssertionError", "assert ", "Failed: DID NOT RAISE")
GATE_PYTHON = ROOT / ".venv-aot" / "bin" / "python"
"""Runs gates, which compile for a GPU."""


class Copy:
    """A folder's files without its caches, in a temporary folder; a context manager."""

    def __init__(self, source: pathlib.Path):
        self._source = source

    def __enter__(self) -> "Copy":
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self.root = pathlib.Path(self._folder.name).resolve() / "tree"
        left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
        shutil.copytree(self._source, self.root, ignore=left_out)
        # Compiled programs are found by content, so mutants may share them with the original and each other.
        programs = ROOT / ".cache" / "jax"
        programs.mkdir(parents=True, exist_ok=True)
        (self.root / ".cache").mkdir()
        (self.root / ".cache" / "jax").symlink_to(programs)
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def run(
        self, *arguments: str, timeout: float | None = None, python: str | pathlib.Path = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python in the copy, which goes before an installed kvcache_jax."""
        changes = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
        environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"} | changes
        command = [str(python), *arguments]
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=timeout
        )

    def test(self, tests: Sequence[str], *options: str, timeout: float | None = None):
        return self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests, timeout=timeout)


def why_stale(root: pathlib.Path, mutation: Mutation) -> str | None:
    """Why the mutation cannot be applied, or None."""
    file = root / mutation.file
    if not file.is_file():
        return f"STALE     {mutation.where} {mutation.name}: there is no {mutation.file}"
    if (count := file.read_text().count(mutation.old)) == 1:
        return None
    times = f"occurs {count} times in {mutation.file}, expected once"
    return f"STALE     {mutation.where} {mutation.name}: its text {times}"


def gates_of(mutations: Sequence[Mutation]) -> list[list[str]]:
    """The arguments of Python that run all gates, each module once with all its cases."""
    cases: dict[str, dict[str, None]] = {}
    for mutation in mutations:
        if mutation.gate:
            _, module, *words = mutation.gate
            cases.setdefault(module, {}).update(dict.fromkeys(words))
    return [["-m", module, *words] for module, words in cases.items()]


def why_unfit(copy: Copy, mutations: Sequence[Mutation]) -> str | None:
    """What is wrong with the copy before any mutation, or None: its own library must pass the tests."""
    found = copy.run("-c", "import kvcache_jax; print(kvcache_jax.__file__)").stdout.strip()
    if not pathlib.Path(found).is_relative_to(copy.root):
        return f"the tests would import {found or 'nothing'}, expected the copy in {copy.root}"
    gates = gates_of(mutations)
    if gates and not GATE_PYTHON.exists():
        named = ", ".join(sorted({mutation.test for mutation in mutations if mutation.gate}))
        return f"there is no {GATE_PYTHON}, which runs {named}: expected `make .venv-aot` before"
    tests = sorted({mutation.test for mutation in mutations if not mutation.gate})
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as executor:
        results = list(executor.map(copy.test, (tests[i::WORKERS] for i in range(min(WORKERS, len(tests))))))
    results += [copy.run(*command, python=GATE_PYTHON) for command in gates]
    texts = [result.stdout + result.stderr for result in results if result.returncode != 0]
    return "\n".join(["Without any mutation:", *texts]) if texts else None


def try_mutant(source: pathlib.Path, mutation: Mutation) -> tuple[bool, str]:
    """(killed, the line to print)."""
    start = time.monotonic()
    with Copy(source) as copy:
        file = copy.root / mutation.file
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        limit = GATE_TIMEOUT if mutation.gate else TIMEOUT
        try:
            if mutation.gate:
                result = copy.run(*mutation.gate, timeout=limit, python=GATE_PYTHON)
            else:
                result = copy.test([mutation.test], "-x", "--tb=line", timeout=limit)
        except subprocess.TimeoutExpired:
            return True, f"killed    {mutation.name}  by hanging for {limit:.0f} s in {mutation.test}"
    seconds = f"({time.monotonic() - start:.1f} s)"
    if result.returncode == 0:
        return False, f"SURVIVED  {mutation.name}  {mutation.test}  {seconds}"
    if mutation.gate and (failure := re.search(r"^(\S+) +FAILED: (.*)$", result.stdout, flags=re.MULTILINE)):
        return True, f"killed    {mutation.name}  by {failure[1]}: {failure[2]}  {seconds}"
    failure = re.search(r"^(?:FAILED|ERROR) (tests/.+?) - (.*)$", result.stdout, flags=re.MULTILINE)
    if result.returncode == 1 and failure and failure[2].startswith(NOTICED):
        return True, f"killed    {mutation.name}  by {failure[1]}  {seconds}"
    why = failure[0] if failure else f"pytest's exit status is {result.returncode}\n{result.stdout[-2000:]}"
    return False, f"CRASHED   {mutation.name}  {why}  {seconds}"
