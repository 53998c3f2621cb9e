"""The shape of the package: its layers, what an import costs, what ships, what every file keeps to."""

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib

import jax
import pytest

import kvcache_jax
from tests.support.sources import (
    DOORS,
    LAYERS,
    NAMESPACES,
    ROOMS,
    ROOT,
    SOURCE_FOLDERS,
    read_imports,
    source_files,
)

SHIPPED = ("pallas_kernels", "kvcache_jax")
KERNEL_CALLERS = ("kvcache_jax/attention/mosaic.py",)
# Third-party packages of the wheel, and the files that may use one more, inside a function.
DEPENDENCIES = {"jax", "numpy"}
OPTIONAL_IMPORTS = {
    "kvcache_jax/inspect/block_map.py": {"matplotlib"},
    "kvcache_jax/processes/event_publisher.py": {"msgspec", "zmq"},
    "kvcache_jax/tiers/mooncake_store.py": {"mooncake"},
    "kvcache_jax/tiers/tensor_store.py": {"tensorstore"},
    "kvcache_jax/tiers/valkey_store.py": {"valkey"},
} | {f"kvcache_jax/integrations/{door}.py": {package, "flax", "tqdm"} for door, package in DOORS.items()}
MAX_LINES = dict.fromkeys(LAYERS, 400) | {"kvcache_jax": 500, "tests": 500}
# Of the tests, what concerns the whole repository.
TESTS_OF_ALL = {"conftest.py", "reached_files.py"} | {
    f"test_{name}.py"
    for name in "docstrings guides how_it_works package promises reached_files readme rooms".split()
}

pytestmark = pytest.mark.contract


# --- imports ---


def import_violations(file: str, source: str) -> list[str]:
    """Returns one sentence for each import of a layer's file that breaks a rule."""
    layer = file.split("/")[0]
    violations = []
    for entry in read_imports(file, source):
        top = entry.name.split(".")[0]
        where = f"{file}:{entry.line} imports {entry.name}"
        if top == "?":
            violations.append(f"{where}: a computed name cannot be checked")
        elif top == "tests":
            violations.append(f"{where}: nothing imports the tests")
        elif top in LAYERS:
            if LAYERS.index(top) > LAYERS.index(layer):
                violations.append(f"{where}: {layer} stands before {top}")
            elif layer == "kvcache_jax" and top == "pallas_kernels":
                if file not in KERNEL_CALLERS:
                    violations.append(f"{where}: only {' and '.join(KERNEL_CALLERS)} call kernels")
                elif not entry.is_deferred:
                    violations.append(f"{where}: kernels are imported inside a function")
        elif layer == "kvcache_jax" and "pallas" in entry.name.split("."):
            violations.append(f"{where}: Pallas belongs to pallas_kernels")
        elif layer in SHIPPED and top not in DEPENDENCIES and top not in sys.stdlib_module_names:
            if top not in OPTIONAL_IMPORTS.get(file, ()):
                violations.append(f"{where}: the wheel depends on jax and numpy alone")
            elif not entry.is_deferred and not file.startswith("kvcache_jax/integrations/"):
                violations.append(f"{where}: optional packages are imported inside a function")
    return violations


def test_imports_point_down_the_layers():
    files = source_files(*LAYERS)
    assert {"kvcache_jax", "pallas_kernels"} <= {path.relative_to(ROOT).parts[0] for path in files}
    violations = []
    for path in files:
        violations += import_violations(path.relative_to(ROOT).as_posix(), path.read_text())
    assert not violations, "\n".join(violations)


def test_a_helper_of_the_tests_has_one_name():
    """Under two names it would be two modules, and all that it jits would be compiled twice.

    Files of tests go by the names that pytest gives them.
    """
    files = source_files("tests")
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"testing"}
    helpers = {path.stem for path in files if path.stem[:5] != "test_"} - {"__init__", "__main__"}
    assert "helpers" in helpers and "support" in rooms
    outside = rooms | helpers - {*LAYERS, *sys.stdlib_module_names, "tests"}
    for path in files:
        for entry in read_imports(path.relative_to(ROOT).as_posix(), path.read_text()):
            first, *rest = entry.name.split(".")
            is_bare = first in outside - {*LAYERS, *sys.stdlib_module_names}
            assert not is_bare, f"{path.name}:{entry.line} imports {first}, expected tests.{first}"
            is_test = first == "tests" and any(part.startswith("test_") for part in rest[:-1])
            assert not is_test, (
                f"{path.name}:{entry.line} imports {entry.name}, expected no test of another file"
            )


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("pallas_kernels/a.py", "import kvcache_jax", "stands before"),
        ("pallas_kernels/mosaic_gpu/a.py", "from ...kvcache_jax import cache", "stands before"),
        ("kvcache_jax/a.py", "def f():\n  from models.decoder import Decoder", "stands before"),
        ("kvcache_jax/a.py", "from .. import models", "stands before"),
        ("models/a.py", "class A:\n  def f(self):\n    import experiments.study", "stands before"),
        ("models/a.py", "import importlib\nimportlib.import_module('experiments')", "stands before"),
        ("experiments/a.py", "from tests import oracle", "nothing imports the tests"),
        ("kvcache_jax/a.py", "__import__('mod' + 'els')", "computed name"),
        ("kvcache_jax/operations/api.py", "def f():\n  import pallas_kernels", "call kernels"),
        ("kvcache_jax/sub/attention.py", "def f():\n  import pallas_kernels", "call kernels"),
        ("kvcache_jax/attention/mosaic.py", "from pallas_kernels import reference", "inside a function"),
        (
            "kvcache_jax/attention/mosaic.py",
            "if True:\n  import pallas_kernels.reference as r",
            "inside a function",
        ),
        (
            "kvcache_jax/attention/mosaic.py",
            "def f(r=__import__('pallas_kernels')): pass",
            "inside a function",
        ),
        (
            "kvcache_jax/attention/mosaic.py",
            "def f():\n  from jax.experimental import pallas as pl",
            "belongs to",
        ),
        ("kvcache_jax/a.py", "def f():\n  import chex", "jax and numpy alone"),
        ("pallas_kernels/a.py", "import optax", "jax and numpy alone"),
        ("kvcache_jax/inspect/block_map.py", "import matplotlib.pyplot as plt", "inside a function"),
    ],
)
def test_a_forbidden_import_is_found(file, source, expected):
    [violation] = import_violations(file, source)
    assert expected in violation


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("pallas_kernels/a.py", "import jax.experimental.pallas as pl\nfrom . import reference"),
        ("kvcache_jax/a.py", "import os, numpy as np\nfrom jax import lax\nfrom .b import c"),
        (
            "kvcache_jax/attention/mosaic.py",
            "def f():\n  def g():\n    from pallas_kernels import reference",
        ),
        ("kvcache_jax/attention/mosaic.py", "async def f():\n  import pallas_kernels"),
        ("kvcache_jax/inspect/block_map.py", "def figure():\n  import matplotlib.pyplot as plt"),
        ("models/a.py", "import flax, kvcache_jax as kv, pallas_kernels"),
        ("experiments/a.py", "import models, kvcache_jax, rich"),
    ],
)
def test_an_allowed_import_passes(file, source):
    assert import_violations(file, source) == []


# --- the cost of an import ---

IMPORT_SCRIPT = """
    import importlib, pkgutil, sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {blocked}:
                raise ImportError(f"{{name}} is blocked")

    sys.meta_path.insert(0, Blocker())
    import jax, jax.numpy, numpy
    before = set(sys.modules)

    package = importlib.import_module({package!r})
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".integrations." not in module.name:
            importlib.import_module(module.name)

    from jax._src import xla_bridge
    assert not xla_bridge._backends, f"started backends: {{list(xla_bridge._backends)}}"
    new = set(sys.modules) - before
    assert package.__name__ in new
    kernels = sorted(name for name in new if {{"pallas", "pallas_kernels"}} & set(name.split(".")))
    assert not kernels, f"imported kernels: {{kernels}}"
    allowed = {{package.__name__, "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy"}}
    foreign = sorted({{name.split(".")[0] for name in new}} - allowed - sys.stdlib_module_names)
    assert not foreign, f"imported foreign packages: {{foreign}}"
"""
BLOCKED = [
    *"flax chex optax orbax safetensors tokenizers matplotlib rich hypothesis pytest".split(),
    *("tensorstore", "valkey", "mooncake"),
]


def import_alone(package: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Imports the package and all its modules in a fresh interpreter where no jax platform can start."""
    environment = os.environ | {"JAX_PLATFORMS": "none_may_start", "PYTHONPATH": str(folder)}
    script = textwrap.dedent(IMPORT_SCRIPT.format(blocked=BLOCKED, package=package))
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


def test_import_needs_jax_and_numpy_alone_and_starts_nothing():
    result = import_alone("kvcache_jax", ROOT)
    assert result.returncode == 0, result.stderr
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize("door", DOORS)
def test_a_door_names_the_package_that_is_absent_and_its_extra(door, monkeypatch):
    """No other file of the library imports a door."""
    for name in [name for name in sys.modules if name.split(".")[0] == DOORS[door]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, DOORS[door], None)
    monkeypatch.delitem(sys.modules, f"kvcache_jax.integrations.{door}", raising=False)
    with pytest.raises(
        ImportError, match=rf"integrations.{door} needs .*pip install 'kvcache_jax\["
    ) as raised:
        importlib.import_module(f"kvcache_jax.integrations.{door}")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [extra] = re.findall(r"\[([\w-]+)\]", str(raised.value))
    package = DOORS[door].replace("_", "-")
    assert any(re.split("[>=]", each)[0].endswith(package) for each in extras[extra]), extras[extra]
    for path in source_files(*LAYERS):
        names = [entry.name for entry in read_imports(path.relative_to(ROOT).as_posix(), path.read_text())]
        assert not [name for name in names if name.startswith("kvcache_jax.integrations")], path


@pytest.mark.quick_cases(
    "import chex-chex is blocked", "import packaging-imported foreign packages: ['packaging']"
)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import chex", "chex is blocked"),
        ("import jax.numpy as jnp; zero = jnp.zeros(3)", "none_may_start"),
        ("import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()", "started backends"),
        ("import jax.experimental.pallas", "imported kernels"),
        ("import packaging", "imported foreign packages: ['packaging']"),
    ],
)
def test_a_costly_import_is_found(tmp_path, source, expected):
    (tmp_path / "culprit").mkdir()
    (tmp_path / "culprit" / "__init__.py").touch()
    (tmp_path / "culprit" / "inner.py").write_text(source)
    result = import_alone("culprit", tmp_path)
    assert result.returncode != 0
    assert expected in result.stderr


def test_the_suite_runs_on_eight_host_devices_with_strict_promotion():
    assert len(jax.devices("cpu")) == 8
    with pytest.raises(jax.dtypes.TypePromotionError, match="strict"):
        jax.numpy.add(jax.numpy.arange(3), jax.numpy.ones(3))


# --- what ships ---


def test_wheel_ships_two_typed_packages_that_need_jax_and_numpy():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    assert project["name"] == "kvcache_jax"
    assert project["requires-python"] == ">=3.12"
    assert project["license"] == "Apache-2.0"
    assert project["dependencies"] == ["jax>=0.11.2", "numpy"]
    assert set(project["optional-dependencies"]) == {
        "models",
        "training",
        "tests",
        "pictures",
        "metrics",
        "server",
        "tensorstore",
        "valkey",
        "mooncake",
        "events",
        "serve",
        "lm-eval",
        "tunix",
        "docs",
        "dev",
    }
    assert pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == sorted(SHIPPED)
    for package in SHIPPED:
        assert (ROOT / package / "__init__.py").is_file()
        assert (ROOT / package / "py.typed").is_file()


# --- what every file keeps to ---


def test_the_package_names_each_of_its_rooms_in_order():
    named = re.findall(r"^\* `(\w+)`", kvcache_jax.__doc__, re.MULTILINE)
    assert named == list(ROOMS)


def test_a_public_name_has_one_place():
    """Few names are flat; the others are in namespaces, and none is in two."""
    spaces = [name for name in kvcache_jax.__all__ if inspect.ismodule(getattr(kvcache_jax, name))]
    assert {*NAMESPACES} <= {*spaces} <= {*NAMESPACES, *ROOMS} and len(spaces) == 12
    assert len(kvcache_jax.__all__) - len(spaces) == 67
    places = {name: [getattr(kvcache_jax, name)] for name in kvcache_jax.__all__ if name not in spaces}
    for space in spaces:
        module = getattr(kvcache_jax, space)
        places |= {f"{space}.{name}": [getattr(module, name)] for name in module.__all__}
    by_value = {}
    for place, [value] in places.items():
        by_value.setdefault(id(value), []).append(place)
    assert [names for names in by_value.values() if len(names) > 1] == []


def test_no_file_of_a_room_hides_a_name_of_the_room():
    for room in ROOMS:
        public = getattr(importlib.import_module(f"kvcache_jax.{room}"), "__all__", ())
        files = {path.stem for path in (ROOT / "kvcache_jax" / room).glob("*.py")}
        assert not files & {*public}, room


def too_long(file: str, text: str) -> bool:
    return len(text.splitlines()) > MAX_LINES[file.split("/")[0]]


def test_no_source_file_is_too_long():
    for file, limit in (("models/a.py", 400), ("tests/a.py", 500)):
        assert too_long(file, "\n" * (limit + 1)) and not too_long(file, "\n" * limit)
    names = {path.relative_to(ROOT).as_posix(): path for path in source_files(*SOURCE_FOLDERS)}
    assert [name for name, path in names.items() if too_long(name, path.read_text())] == []


def test_tests_stand_in_rooms():
    """A test is found in the room of what it tests; beside the rooms stand those of the whole repository."""
    assert {path.name for path in (ROOT / "tests").glob("*.py")} == TESTS_OF_ALL
    rooms = {path.parent.relative_to(ROOT / "tests").as_posix() for path in source_files("tests")} - {"."}
    tested = {*ROOMS, *LAYERS} - {"blocks", "pallas_kernels", "kvcache_jax"}
    assert rooms == {
        *tested,
        "aot",
        "aot/emulator",
        "fixtures",
        "integrations",
        "kernels",
        "kinds",
        "mutants",
        "oracle",
        "site",
        "support",
        "wheel",
    }


# A folder at the root of somebody's machine; example.org/home/ and a/work/ are none.
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:work|root|home|Users|opt|mnt)(?:/|\b)")


def repository_files() -> list[pathlib.Path]:
    """Every file of the repository; environments, caches and builds are not of it."""
    generated = {".git", ".cache", "__pycache__", "build", "dist"}
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in generated and not name.startswith(".venv")]
        folders[:] = [name for name in folders if not name.endswith((".egg-info", "_cache", ".hypothesis"))]
        found += [pathlib.Path(folder, name) for name in files if name not in generated]
    return sorted(found)


def test_no_file_names_a_path_of_a_machine():
    files = repository_files()
    assert {"Makefile", "README.md", "run", "test_package.py"} <= {path.name for path in files}
    named = []
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                named.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not named, "\n".join(named)


def test_a_path_of_a_machine_is_found():
    for folder in ("work", "root", "home", "Users"):
        assert MACHINE_PATH.search(f"see /{folder}/somebody/file.py")
        assert MACHINE_PATH.search(f'open("/{folder}/file.py")')
        assert not MACHINE_PATH.search(f"https://example.org/{folder}/file.py and src/{folder}/file.py")
