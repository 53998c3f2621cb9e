"""How mutations are written: every character of a text counts, and what cannot be read is named."""

import dataclasses
import re

import pytest

from tests.mutants.__main__ import main
from tests.mutants.reading import ROOT, Mutation, parse
from tests.mutants.runner import why_stale

TEXT = """# Comments are left out.

= spaces, and lines that are empty
@ a/b.py
-     x = 1
# here too
-
-   y = \\
-
+
+ \ty = \\\\
! tests/test_b.py::test_c[two words]


= left out
@ a/c.py
- = x
! tests/test_b.py::test_d

= of the same file and test
- = z
"""
FIRST = Mutation(
    name="spaces, and lines that are empty",
    file="a/b.py",
    old="    x = 1\n\n  y = \n",
    new="\n\ty = \\",
    test="tests/test_b.py::test_c[two words]",
    where="b.txt:3",
)
SECOND = Mutation("left out", "a/c.py", "= x", "", "tests/test_b.py::test_d", "b.txt:15")
THIRD = dataclasses.replace(SECOND, name="of the same file and test", old="= z", where="b.txt:20")


def test_a_gate_may_stand_for_a_test():
    gate = dataclasses.replace(FIRST, test="python -m tests.aot.emulated long copy").gate
    assert gate == ["-m", "tests.aot.emulated", "long", "copy"] and FIRST.gate is None


def test_every_space_of_a_text_counts():
    assert parse(TEXT, "b.txt") == parse(TEXT.rstrip("\n"), "b.txt") == [FIRST, SECOND, THIRD]
    assert parse("# none\n", "b.txt") == parse("", "b.txt") == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("= left out\n", "", "15: got '@ a/c.py', expected '= its name'"),
        ("= left out", "=", "15: got '=', expected '= its name'"),
        ("empty\n@ a/b.py", "empty", "3: got a first mutation without '@ its file', expected it"),
        (
            "left out\n@ a/c.py\n- = x",
            "left out",
            "16: got '! tests/test_b.py::test_d', expected '@ its file' or",
        ),
        ("- = x\n", "", "17: got '! tests/test_b.py::test_d', expected '- old text'"),
        ("- = x", "-= x", "17: got '-= x', expected '- old text'"),
        ("- = x", "= x", "17: got '= x', expected '- old text'"),
        ("- = x", "- = x\n+ y\n- z", "19: got '- z', expected '+ new text' or '! its test'"),
        ("- = x", "- = x\n", "19: got '! tests/test_b.py::test_d', expected '= its name'"),
        ("! tests/test_b.py::test_c[two words]\n", "", "3: got a first mutation without '! its test'"),
        ("test_d\n", "test_d\n! tests\n", "19: got '! tests', expected a blank line"),
        ("- = x", "- = x ", "17: got '- = x ', which ends in a space, expected '\\' after it or no space"),
        ("- = x", "- = x\n+ = x", "15: got the same old and new text, expected a change"),
    ],
)
def test_what_cannot_be_read_is_named(old, new, expected):
    assert TEXT.count(old) == 1
    with pytest.raises(ValueError, match=re.escape(f"b.txt:{expected}")):
        parse(TEXT.replace(old, new), "b.txt")


def test_what_the_readme_shows_can_be_read():
    [shown] = re.findall(r"```\n(.*?)```", (ROOT / "mutants" / "README.md").read_text(), re.DOTALL)
    first, second = parse(shown, "README.md")
    assert first.new == "for row in rows[1:]:\n    total += " and second.new == ""


def test_a_text_that_does_not_occur_once_is_stale(tmp_path):
    (tmp_path / "a").mkdir()
    assert why_stale(tmp_path, SECOND) == "STALE     b.txt:15 left out: there is no a/c.py"
    for text, count in (("x = = y", 0), ("= x = x", 2)):
        (tmp_path / "a" / "c.py").write_text(text)
        why = f"STALE     b.txt:15 left out: its text occurs {count} times in a/c.py, expected once"
        assert why_stale(tmp_path, SECOND) == why
    assert why_stale(tmp_path, dataclasses.replace(SECOND, old="= x = x")) is None


def test_a_command_that_names_no_mutation_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["no such", "mutation at all"])
    assert "no mutation has no such or mutation at all in its name" in capsys.readouterr().err
