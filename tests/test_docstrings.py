"""What is documented, and how a docstring begins."""

import ast
import dataclasses
import doctest
import enum
import importlib.util
import inspect
import io
import pathlib
import pkgutil
import re
import tokenize
import types

import jax
import pytest

import kvcache_jax
from tests.support.sources import DOORS

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A function's docstring begins with a verb in the third person; these end in "s" and are none.
NO_VERBS = {
    *("Arrays", "As", "Blocks", "Bytes", "Columns", "Entries", "Fields", "Has", "Ids", "Is", "Keys"),
    *("Lengths", "Logits", "Numbers", "Pieces", "Rows", "Slots", "This", "Tokens", "Values", "Was", "Zeros"),
}
# The docstring of a class or module begins with a noun, and with none of these.
NO_NOUNS = {"Does", "How", "That", "They", "This", "Those", "What", "Where", "Which", "Who", "Whose", "Why"}
ROOMS = "kvcache_jax", "pallas_kernels", "models", "experiments"
# Words that hide the subject or the noun, in docstrings, comments and messages; what to write is beside each.
RIDDLES = {
    r"\b(nobody|whoever|anybody)\b": "no row, any caller",
    r"\bbehind\b": "after",
    r"\bstands\b(?! for\b)|\bstand there\b": "is, is stored",
}
NOUN_LEFT_OUT = r"\b(those|that) of\b"
LEAST_COMMENTS = 0.015

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
    assert len(spaces) == 12
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


def docstrings_of(source: str) -> dict[int, str]:
    """Reads the docstrings, also the attributes' own, by the line on which each begins."""
    return {
        node.lineno: inspect.cleandoc(node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def messages_of(source: str) -> dict[int, str]:
    """Reads the other strings that have words, by line: what callers are told."""
    docstrings = docstrings_of(source)
    return {
        node.lineno: node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " in node.value
        and node.lineno not in docstrings
    }


def comments_of(source: str) -> dict[int, str]:
    """Reads the comments that are lines of their own, or end one, by line; blocks of them are one text."""
    found, last = {}, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, line = token.string.lstrip("# "), token.start[0]
            first = next((n for n in reversed(found) if line == last + 1), line)
            found[first] = f"{found[first]} {text}" if first in found else text
            last = line
    return found


def hidden_subjects(file: str, texts: dict[int, str]) -> list[str]:
    """Lists the words of texts, by line, that leave a subject or a place to be guessed."""
    return [
        f"{file}:{line} {match[0]}, expected {better}"
        for line, text in texts.items()
        for pattern, better in RIDDLES.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def riddles(file: str, source: str) -> list[str]:
    """Lists the words of a file's docstrings and comments that leave a subject or a noun to be guessed."""
    found = []
    for texts in (docstrings_of(source), comments_of(source)):
        found += hidden_subjects(file, texts)
        for line, text in texts.items():
            first_line = text.split("\n")[0]
            starts = re.findall(rf"(?:^|[.:!?]\s+){NOUN_LEFT_OUT}", text, re.IGNORECASE)
            if starts or re.search(NOUN_LEFT_OUT, first_line, re.IGNORECASE):
                found.append(f"{file}:{line} those of, that of: expected the noun again")
    return found


def comment_lines(source: str) -> tuple[int, int]:
    """Counts the lines that are a comment alone, and the lines of code without docstrings and blank lines."""
    docstrings, code, comments = set(), set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    blank = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        lines = set(range(token.start[0], token.end[0] + 1))
        if token.type == tokenize.COMMENT:
            comments |= lines
        elif token.type not in blank:
            code |= lines
    return len(comments - code), len(code - docstrings)


def test_docstrings_comments_and_messages_name_their_nouns():
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            file, source = path.relative_to(ROOT).as_posix(), path.read_text()
            found += riddles(file, source)
            if room == "kvcache_jax":
                found += hidden_subjects(file, messages_of(source))
    assert not found, "\n".join(found)


def test_a_hidden_subject_of_a_message_is_found():
    source = (
        'def f(x):\n    """Says nobody."""\n    raise ValueError(\n        f"{x} is what nobody holds"\n    )'
    )
    found = hidden_subjects("a.py", messages_of(source))
    assert found == ["a.py:4 nobody, expected no row, any caller"]


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("Copies the blocks of rows.", True),
        ("Copies blocks that no row holds, and then\n\nthe sizes, those of rows.", True),
        ("Stores what a field understands.", True),
        ("Copies what nobody holds.", False),
        ("Copies a block.\n\nWhoever writes copies first.", False),
        ("A loop for anybody's model.", False),
        ("Copies the blocks, those of rows.", False),
        ("Copies blocks.\n\nThose of rows are full.", False),
        ("Copies blocks.\n\nSizes follow: that of rows is first.", False),
        ("Copies the block behind the last one.", False),
        ("Says where a block stands.", False),
        ("Copies blocks.\n\nThey stand there.", False),
    ],
)
def test_a_riddle_is_found(text, is_fine):
    module = f'"""{text}"""'
    comment = "x = 1\n" + "\n".join(f"# {line}" for line in text.split("\n") if line)
    function = f'def f():\n    """{text}"""'
    for source in (module, function):
        assert bool(riddles("a.py", source)) != is_fine
    if "\n" not in text:
        assert bool(riddles("a.py", comment)) != is_fine
        assert bool(riddles("a.py", f"x = 1  # {text}")) != is_fine


def test_a_comment_of_two_lines_is_one_text():
    assert riddles("a.py", "x = 1\n# Blocks of rows, and then\n# those of chunks.\n") != []
    assert list(comments_of("# one\n# two\nx = 1  # three\n\n# four\n").values()) == ["one two three", "four"]


def test_comments_say_what_branches_promise():
    counts = [comment_lines(path.read_text()) for path in (ROOT / "kvcache_jax").rglob("*.py")]
    num_comments, num_code = map(sum, zip(*counts, strict=True))
    print(f"{num_comments} lines of comments, {num_code} of code: {num_comments / num_code:.2%}")
    assert num_comments >= LEAST_COMMENTS * num_code
    assert comment_lines('"""A\nB"""\n# a promise\n\nx = [  # not a line of its own\n    1,\n]\n') == (1, 3)


def examples() -> dict[str, doctest.DocTest]:
    """Finds the examples in the docstrings of the library, by the names of what they show."""
    modules = pkgutil.walk_packages(kvcache_jax.__path__, "kvcache_jax.")
    found = [
        each
        for module in modules
        if importlib.util.find_spec(DOORS.get(module.name.split(".")[-1], "jax"))
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
    """What goes together is one value. A cache's options, which have no groups, are two more than 15."""
    calls = {name: getattr(kvcache_jax, name) for name in kvcache_jax.__all__}
    num = {name: len(inspect.signature(call).parameters) for name, call in calls.items() if callable(call)}
    assert {"generate", "score", "beam_search", "Engine", "GenerationRequest", "extend"} <= {*num}
    assert {name for name in num if num[name] > 15} == {"CacheConfig"} and num["CacheConfig"] == 17
