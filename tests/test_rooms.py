"""The rooms of the library: who imports whom, and where features are named."""

import pathlib
import re

import pytest

from tests.support.sources import LAYERS, NAMESPACES, ROOMS, ROOT, read_imports, source_files

pytestmark = pytest.mark.contract


def room_violations(file: str, source: str) -> list[str]:
    """Returns one sentence for each import of a library file that runs back up the list of rooms."""
    rooms = file.split("/")[1:-1]
    violations = []
    for entry in read_imports(file, source):
        top, *path = entry.name.split(".")
        if top != "kvcache_jax" or not rooms:
            continue
        if not path or path[0] not in ROOMS:
            violations.append(f"{file}:{entry.line} imports {entry.name}, expected a file of a room")
        elif ROOMS.index(path[0]) > ROOMS.index(rooms[0]):
            violations.append(f"{file}:{entry.line} imports {entry.name}: {rooms[0]} stands before {path[0]}")
    return violations


def test_rooms_import_only_rooms_above_them():
    files = source_files("kvcache_jax")
    assert {path.relative_to(ROOT).parts[1] for path in files} == {
        *ROOMS,
        "__init__.py",
        *(f"{name}.py" for name in NAMESPACES),
    }
    violations = []
    for path in files:
        violations += room_violations(path.relative_to(ROOT).as_posix(), path.read_text())
    assert not violations, "\n".join(violations)


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Finds the groups of files that import one another, whether to run, for types or inside a function.

    Args:
      sources: By their paths from the repository's root.
    """
    files = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in sources}

    def imported(file: str) -> set[str]:
        names = {entry.name for entry in read_imports(file, sources[file])}
        # `from a import b` is read as `a.b`: where that is no file, it is a name in the file a.
        modules = {name if name in files else name.rpartition(".")[0] for name in names}
        return {files[module] for module in modules if module in files} - {file}

    arrows = {file: imported(file) for file in sources}
    reached = dict.fromkeys(sources, frozenset())
    for file in sources:
        found, to_visit = set(), [file]
        while to_visit:
            new = arrows[to_visit.pop()] - found
            found |= new
            to_visit += new
        reached[file] = frozenset(found)
    within = {frozenset(other for other in reached[file] if file in reached[other]) for file in sources}
    return sorted(sorted(group) for group in within if group)


def test_no_files_import_one_another():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in source_files(*LAYERS)}
    assert circles(sources) == []


@pytest.mark.parametrize(
    "back",
    [
        "import kvcache_jax.a",
        "def f():\n  from kvcache_jax import a",
        "if TYPE_CHECKING:\n  from .a import A",
    ],
)
def test_files_that_import_one_another_are_found(back):
    sources = {
        "kvcache_jax/a.py": "from kvcache_jax.core.b import B",
        "kvcache_jax/core/b.py": "from kvcache_jax.c import c",
        "kvcache_jax/c.py": back,
        "kvcache_jax/d.py": "from kvcache_jax import a",
    }
    assert circles(sources) == [["kvcache_jax/a.py", "kvcache_jax/c.py", "kvcache_jax/core/b.py"]]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from kvcache_jax.decoding import kernels", "operations stands before decoding"),
        ("def f():\n  from kvcache_jax.testing.poison import poison", "operations stands before testing"),
        ("import kvcache_jax as kv", "expected a file of a room"),
        ("from kvcache_jax import fork", "expected a file of a room"),
    ],
)
def test_an_import_that_runs_back_up_is_found(source, expected):
    [violation] = room_violations("kvcache_jax/operations/a.py", source)
    assert expected in violation
    assert room_violations("kvcache_jax/operations/a.py", "from kvcache_jax.core import state") == []


# Words of features, and the rooms in which they are said. A status is one for all operations.
FEATURES = {
    "chunks": r"\b([Cc]hunks?|\w+_chunks?|[Cc]hunk_\w+|[Cc]ompos(e|es|ed|ing))\b",
    "compression": r"\b(compress|compress_\w+|[Ss]treaming|[Dd]ropping|drop_to_utilization"
    r"|(original|rotated|moved)[ _]sinks?)\b",
}
NAME_FEATURES = {"kvcache_jax/core/status.py"}


def features_named(file: str, source: str) -> list[str]:
    """Returns one sentence for each line of a library file that names a feature of another room."""
    path = pathlib.PurePosixPath(file)
    if path.name == "__init__.py" or file in NAME_FEATURES:
        return []
    return [
        f"{file}:{number} names {match[0]}, of {room}"
        for room, pattern in FEATURES.items()
        for number, line in enumerate(source.splitlines(), start=1)
        if (match := re.search(pattern, line)) and path.parent.name not in FEATURES
    ]


def test_general_code_names_no_feature():
    """A feature is a value in a room of its own; what it does elsewhere goes through hooks."""
    named = []
    for path in source_files("kvcache_jax"):
        named += features_named(path.relative_to(ROOT).as_posix(), path.read_text())
    assert not named, "\n".join(named)
    assert features_named("kvcache_jax/operations/fork.py", "x = 1\nif chunks is None:") == [
        "kvcache_jax/operations/fork.py:2 names chunks, of chunks"
    ]
    assert features_named("kvcache_jax/core/config.py", "max_sink_len: original sinks")
    assert not features_named("kvcache_jax/chunks/a.py", "chunks") + features_named(
        "kvcache_jax/a/b.py", "sinks"
    )
