"""README's guarantees, and the tests that `promises.md` names for them."""

import ast
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).resolve().parent
README = TESTS.parent / "README.md"
PROMISES = TESTS / "promises.md"
PART = re.compile(r"  - [^`]+: `(?P<file>[\w/]+\.py)::(?P<test>test_\w+)(?:\[(?P<case>.+)\])?`")


def bullets(text: str) -> dict[str, list[str]]:
    """The top bullets of a text, each as one line, and the bullets below each."""
    text = re.sub(r"\n +(?![ -])", " ", text)  # a bullet goes on in the next line
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("* "):
            found[line] = []
        elif line.startswith("  - ") and found:
            found[list(found)[-1]].append(line)
    return found


def guarantees(readme: str) -> list[str]:
    return list(bullets(readme.partition("\n## Guarantees\n")[2].partition("\n## ")[0]))


def why_no_promise(source: str, test: str, case: str | None) -> str | None:
    """Why the test of a file does not hold a guarantee in `make test`, or None."""
    tree = ast.parse(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
    if not functions:
        return "there is no such test"
    marks = [ast.unparse(node) for node in functions[0].decorator_list]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks += map(ast.unparse, node.value.elts if isinstance(node.value, ast.List) else [node.value])
    if "pytest.mark.slow" in marks:
        return "it is slow"
    quick = [
        ast.literal_eval(mark.removeprefix("pytest.mark.quick_cases")[:-1] + ",)")
        for mark in marks
        if mark.startswith("pytest.mark.quick_cases(")
    ]
    if quick and case is not None and case not in quick[0]:
        return f"this case is slow, the quick ones are {quick[0]}"
    return None


def test_every_guarantee_has_a_test_that_runs_each_time():
    promises = bullets(PROMISES.read_text())
    assert list(promises) == guarantees(README.read_text())
    for guarantee, parts in promises.items():
        assert parts, f"{guarantee}: no test holds it"
        for part in parts:
            match = PART.fullmatch(part)
            assert match, f"{part!r}, expected '  - what it holds: `file::test`'"
            source = (TESTS / match["file"]).read_text()
            why = why_no_promise(source, match["test"], match["case"])
            assert why is None, f"{part}: {why}"


@pytest.mark.parametrize(
    ("source", "case", "expected"),
    [
        ("def test_a(): pass", None, None),
        ("def test_b(): pass", None, "there is no such test"),
        ("@pytest.mark.slow\ndef test_a(): pass", None, "it is slow"),
        ("pytestmark = pytest.mark.slow\ndef test_a(): pass", None, "it is slow"),
        ("pytestmark = [pytest.mark.contract, pytest.mark.slow]\ndef test_a(): pass", None, "it is slow"),
        ("@pytest.mark.quick_cases('x')\ndef test_a(): pass", None, None),
        ("@pytest.mark.quick_cases('x', 'y')\ndef test_a(): pass", "y", None),
        ("@pytest.mark.quick_cases('x')\ndef test_a(): pass", "y", "the quick ones are ('x',)"),
    ],
)
def test_a_promise_that_nothing_holds_is_found(source, case, expected):
    why = why_no_promise(source, "test_a", case)
    assert why is None if expected is None else expected in why


def test_bullets_are_those_of_the_guarantees():
    readme = "# A\n* not this\n\n## Guarantees\n\n* One.\n* Two,\n  three.\n\ntext\n\n## More\n* nor this\n"
    assert guarantees(readme) == ["* One.", "* Two, three."]
    assert bullets("* One.\n  - a\n  - b\n* Two.\n") == {"* One.": ["  - a", "  - b"], "* Two.": []}
