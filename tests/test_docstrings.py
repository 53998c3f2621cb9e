"""What is documented, and how a docstring begins."""

import ast
import dataclasses
import doctest
import enum
import importlib
import inspect
import pathlib
import pkgutil
import re
import types

import jax
import pytest

import kvcache_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A function's docstring begins with a verb in the third person; these end in "s" and are none.
NO_VERBS = {
    *("Arrays", "As", "Blocks", "Bytes", "Columns", "Entries", "Fields", "Has", "Ids", "Is", "Keys"),
    *("Lengths", "Logits", "Numbers", "Pieces", "Rows", "Slots", "This", "Tokens", "Values", "Was", "Zeros"),
}
# The docstring of a class or module begins with a noun, and with none of these.
NO_NOUNS = {"Does", "How", "That", "They", "This", "Those", "What", "Where", "Which", "Who", "Whose", "Why"}

pytestmark = pytest.mark.contract


def undocumented(namespace: types.ModuleType) -> list[str]:
    """Returns the names in `__all__` without a docstring of their own, neither inherited nor generated."""
    missing = []
    for name in namespace.__all__:
        value = getattr(namespace, name)
        if name == "__version__":
            continue
        own = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
        is_generated = isinstance(value, type) and own is not None and own.startswith(f"{value.__name__}(")
        has_own_place = isinstance(value, type | types.ModuleType) or callable(value)
        if not (own or "").strip() or is_generated or not has_own_place:
            missing.append(name)
    return missing


def test_every_public_name_has_a_docstring():
    assert kvcache_jax.__all__
    assert len(set(kvcache_jax.__all__)) == len(kvcache_jax.__all__)
    assert (kvcache_jax.__doc__ or "").strip()
    assert undocumented(kvcache_jax) == []
    spaces = [value for name in kvcache_jax.__all__ if inspect.ismodule(value := getattr(kvcache_jax, name))]
    assert len(spaces) == 11
    assert {space.__name__: missing for space in spaces if (missing := undocumented(space))} == {}


def test_a_missing_docstring_is_found():
    @dataclasses.dataclass
    class Generated:
        x: int

    class Inherited(enum.IntEnum):
        OK = 0

    class Documented:
        """Says what it is."""

    def silent():
        pass

    @jax.jit
    def documented():
        """Says what it does."""

    names = dict(Generated=Generated, Inherited=Inherited, silent=silent, CONSTANT=3)
    fine = dict(Documented=Documented, documented=documented, inspect=inspect, __version__="0")
    namespace = types.SimpleNamespace(**names, **fine, __all__=[*names, *fine])
    assert undocumented(namespace) == list(names)  # pyright: ignore[reportArgumentType]


def not_begun_with_a_verb(file: str, source: str) -> list[str]:
    """Lists the functions of a file whose docstring does not say first what they do: "Returns", "Copies".

    Properties and dunder methods begin with a noun.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or (node.name.startswith("__") and node.name.endswith("__")):
            continue
        is_property = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
        words = (ast.get_docstring(node) or "").split()
        if words and not is_property and (not re.fullmatch("[A-Z][a-z]*s", words[0]) or words[0] in NO_VERBS):
            found.append(f"{file}:{node.lineno} {node.name} begins with {words[0]}, expected a verb: Returns")
    return found


def not_begun_with_a_noun(file: str, source: str) -> list[str]:
    """Lists the module and the classes of a file whose docstring begins with a question or a pronoun."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef):
            word = (ast.get_docstring(node) or "A").split()[0]
            if word in NO_NOUNS:
                found.append(f"{file} {getattr(node, 'name', 'module')} begins with {word}, expected a noun")
    return found


def test_docstrings_begin_with_what_a_thing_does_or_is():
    found = []
    for path in sorted((ROOT / "kvcache_jax").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        found += not_begun_with_a_verb(file, path.read_text())
        found += not_begun_with_a_noun(file, path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "is_fine"),
    [
        ("Copies whole blocks.", True),
        ("i32[n], the bucket of each hash.", False),
        ("`value` as an int.", False),
        ("The row's colour.", False),
        ("Whether it was donated.", False),
        ("Tokens that a request holds.", False),
        ("Which blocks are free.", False),
    ],
)
def test_a_docstring_that_begins_with_no_verb_is_found(docstring, is_fine):
    source = (
        f'def f():\n  """{docstring}"""\nclass A:\n  """A thing."""\n  def g(self):\n    """{docstring}"""'
    )
    assert len(not_begun_with_a_verb("a.py", source)) == (0 if is_fine else 2)
    for exempt in (
        "@property\ndef f(self):",
        "@functools.cached_property\ndef f(self):",
        "def __call__(self):",
    ):
        assert not_begun_with_a_verb("a.py", f'{exempt}\n  """{docstring}"""') == []


def test_a_docstring_that_begins_with_no_noun_is_found():
    source = '"""{}"""\nclass A:\n  """{}"""'
    assert not_begun_with_a_noun("a.py", source.format("A heap.", "Which rows decode.")) == [
        "a.py A begins with Which, expected a noun"
    ]
    assert len(not_begun_with_a_noun("a.py", source.format("Does it hold?", "What it returns."))) == 2


def examples() -> dict[str, doctest.DocTest]:
    """Finds the examples in the docstrings of the library, by the names of what they show."""
    modules = pkgutil.walk_packages(kvcache_jax.__path__, "kvcache_jax.")
    found = [
        each
        for module in modules
        for each in doctest.DocTestFinder().find(importlib.import_module(module.name), module.name)
    ]
    return {each.name.split(".")[-1]: each for each in found if each.examples}


EXAMPLES = examples()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name):
    assert len(EXAMPLES) >= 30
    said = []
    doctest.DocTestRunner().run(EXAMPLES[name], out=said.append)
    assert not said, "".join(said)


def test_no_public_call_has_many_parameters():
    """What goes together is one value. A cache's options, which have no groups, are one more than 15."""
    calls = {name: getattr(kvcache_jax, name) for name in kvcache_jax.__all__}
    num = {name: len(inspect.signature(call).parameters) for name, call in calls.items() if callable(call)}
    assert {"generate", "score", "beam_search", "Engine", "GenerationRequest", "extend"} <= {*num}
    assert {name for name in num if num[name] > 15} == {"CacheConfig"} and num["CacheConfig"] == 16
