"""Installs a wheel and an sdist, each in a fresh environment outside of the clone, and tries them there.

    python -m tests.wheel dist    # `make dist` builds the two first

The environment has jax and numpy alone: the newest jax for the wheel, the oldest that is supported for the
sdist. In it README's examples run, and then the contract tests that need no more of the clone than `tests/`;
pytest and hypothesis come from a folder beside the environment.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence

from tests.support.sources import ROOT
from tests.wheel.archives import faults, read_sdist, read_wheel

# Beside the library: jax, numpy and what they bring.
ALONE = {"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy", "kvcache_jax", "pip"}
TEST_TOOLS = {"pytest", "pytest-xdist", "hypothesis", "flatbuffers"}
COPIED = ("README.md", "pyproject.toml")
# Those of experiments test what is no part of a wheel.
NOT_OF_THE_WHEEL = {"experiments"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = (
    "import jax, kvcache_jax as kv; print(kv.__version__, 'with jax', jax.__version__, 'in', kv.__file__)"
)
PIP = "-m", "pip", "--disable-pip-version-check"


def contract_tests() -> list[str]:
    """Lists the files with contract tests of the library; tests of the whole repository are in no room."""
    files = [
        path for path in (ROOT / "tests").glob("*/test_*.py") if path.parent.name not in NOT_OF_THE_WHEEL
    ]
    marked = [path for path in files if "pytest.mark.contract" in path.read_text()]
    return sorted(path.relative_to(ROOT).as_posix() for path in marked)


def oldest_jax() -> str:
    [bound] = [each for each in PROJECT["dependencies"] if each.startswith("jax>=")]
    return bound.replace(">=", "==")


def tools_of_tests() -> list[str]:
    return [
        each for each in PROJECT["optional-dependencies"]["tests"] if re.split("[>=~]", each)[0] in TEST_TOOLS
    ]


class Place:
    """A folder outside of the clone: its tests and README, none of its packages, and a fresh environment."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.python = folder / "environment" / "bin" / "python"
        self.tools = folder / "tools"
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for name in COPIED:
            shutil.copy(ROOT / name, folder)
        # Programs that the clone's tests compiled are not compiled again.
        (ROOT / ".cache").mkdir(exist_ok=True)
        (folder / ".cache").symlink_to(ROOT / ".cache")
        self.run(sys.executable, "-m", "venv", "environment")
        self.run(sys.executable, *PIP, "install", "--quiet", "--target", "tools", *tools_of_tests())

    def run(self, *command: str | pathlib.Path, **environment: str) -> str:
        """Runs a command here, and fails with it; returns what it printed."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=inherited | environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise SystemExit(f"{result.stdout}\n{' '.join(map(str, command))} failed")
        return result.stdout

    def install(self, *requirements: str) -> None:
        self.run(self.python, *PIP, "install", "--quiet", *requirements)
        self.run(self.python, *PIP, "check")
        listed = self.run(self.python, *PIP, "list", "--format=freeze").split()
        installed = {line.partition("==")[0] for line in listed}
        if installed - {"setuptools"} != ALONE:
            raise SystemExit(f"the environment has {sorted(installed)}, expected {sorted(ALONE)}")
        found = self.run(self.python, "-c", VERSIONS)
        if str(self.python.parent.parent) not in found:
            raise SystemExit(f"imported {found}, expected a file of {self.python.parent.parent}")
        print(found.partition(" in ")[0], flush=True)

    def try_examples(self) -> None:
        print(self.run(self.python, "-m", "tests.support.examples", "README.md"), end="", flush=True)

    def try_contract(self, share: str | None) -> None:
        options = "-q -n 2 --dist loadfile --max-worker-restart=0 -p no:cacheprovider".split()
        options += ["--share", share] if share else []
        marks = "contract and not newest and not slow"
        printed = self.run(
            self.python, "-m", "pytest", *options, "-m", marks, *contract_tests(), PYTHONPATH=str(self.tools)
        )
        print(printed.splitlines()[-1], flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tries a wheel and an sdist in fresh environments.")
    parser.add_argument("folder", type=pathlib.Path, help="holds one of each")
    parser.add_argument("--share", metavar="K/N", help="run that share of the contract tests")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        parser.error(
            f"{folder} holds {len(wheels)} wheels and {len(sdists)} sdists, expected one of each: make dist"
        )
    if found := faults(read_wheel(wheels[0]), read_sdist(sdists[0]), ROOT):
        print(*found, sep="\n")
        return 1
    for archive, jax in ((wheels[0], "jax"), (sdists[0], oldest_jax())):
        print(f"{archive.name}: {archive.stat().st_size:,} bytes", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvcache_jax-") as outside:
            place = Place(pathlib.Path(outside))
            place.install(str(archive), jax)
            place.try_examples()
            place.try_contract(options.share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
