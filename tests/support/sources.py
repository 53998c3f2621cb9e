"""The files of the repository, their layers and rooms, and what each imports."""

import ast
import dataclasses
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYERS = ("pallas_kernels", "kvcache_jax", "models", "experiments")  # each may import those before it
SOURCE_FOLDERS = (*LAYERS, "tests")
# The rooms of the library: each imports only from itself and from those before it.
ROOMS = (
    "arrays",
    "recurrence",
    "layers",
    "quantised",
    "core",
    "blocks",
    "attention",
    "prefix",
    "operations",
    "inspect",
    "decoding",
    "compression",
    "chunks",
    "conversations",
    "tiers",
    "processes",
    "engine",
    "manager",
    "testing",
    "integrations",
)
# Doors into programs of others: to import one takes the package that it is for.
DOORS = {"flax_nnx": "flax", "lm_eval": "lm_eval", "tunix": "tunix"}
# Files beside the rooms, which hold public names and nothing else.
NAMESPACES = ("backends", "policies", "state")


def source_files(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@dataclasses.dataclass(frozen=True)
class Import:
    """One import: the absolute name of what is imported, its line, and whether it waits inside a function."""

    name: str
    line: int
    is_deferred: bool


@functools.cache  # several tests read all files
def read_imports(file: str, source: str) -> list[Import]:
    """Reads every import of a file; `file` is its path from the repository's root, with forward slashes.

    `from a import b` counts as `a.b`, for b may be a module. Relative imports are resolved. Calls of
    `importlib.import_module` and `__import__` count too; a computed name reads as "?".
    """
    package = file.split("/")[:-1]
    found = []

    def visit(node: ast.AST, is_deferred: bool) -> None:
        names = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                base = package[: max(0, len(package) - node.level + 1)] if node.level else []
                base = base + (node.module.split(".") if node.module else [])
                names = [".".join([*base, alias.name]) for alias in node.names]
            case ast.Call() if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                match node.args:
                    case [ast.Constant(value=str(name)), *_] if not name.startswith("."):
                        names = [name]
                    case _:
                        names = ["?"]
        found.extend(Import(name, getattr(node, "lineno", 0), is_deferred) for name in names)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for field, child in ast.iter_fields(node):
            # Decorators and default values run with the module; only the body waits.
            for item in child if isinstance(child, list) else [child]:
                if isinstance(item, ast.AST):
                    visit(item, is_deferred or (is_function and field == "body"))

    visit(ast.parse(source), False)
    return found
