"""docs/how_it_works.md and docs/extending.md run as they are, and print what they say."""

import dataclasses
import inspect
import re

import pytest
from test_readme import README

import kvcache_jax as kv
from tests.support.examples import run_examples

HOW_IT_WORKS, EXTENDING = (README.parent / "docs" / f"{name}.md" for name in ("how_it_works", "extending"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "least"), [(HOW_IT_WORKS, 9), (EXTENDING, 6)], ids=["life", "extending"]
)
def test_the_examples_print_what_stands_below_them(document, least):
    text = document.read_text()
    found = run_examples(text, str(document))
    assert len(found) == text.count("```python") and sum(below != "" for _, below in found) >= least
    assert text.count("```text") == sum(below != "" for _, below in found), "a text block stands alone"
    for printed, below in found:
        assert printed == below


def test_the_arrays_of_the_table_are_those_of_the_state():
    table = HOW_IT_WORKS.read_text().partition("| where | array |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)", line.split("|")[2])]
    classes = kv.state.Control, kv.state.BlockPool, kv.state.PrefixIndex, kv.state.KVPool
    fields = {field.name for kind in classes for field in dataclasses.fields(kind)}
    assert len(named) > 20 and {*named} <= fields


def test_the_hooks_of_the_table_are_those_of_an_extra():
    table = EXTENDING.read_text().partition("| hook | is asked by |")[2].partition("\n\n")[0]
    named = [line.split("`")[1] for line in table.splitlines()[2:]]
    hooks = [name for name, value in vars(kv.state.Extra).items() if inspect.isfunction(value)]
    assert sorted(named) == sorted(name for name in hooks if name[0] != "_")


def test_an_example_that_prints_something_else_is_found():
    text = "Title\n\n```python\nx = 1\n```\n\n```python\nprint(x, '\\n2 ')\n```\n\n```text\n1\n2\n```\n"
    assert run_examples(text, "some.md") == [("", ""), ("1\n2\n", "1\n2\n")]
    assert run_examples(text.replace("(x", "(3"), "some.md")[1] == ("3\n2\n", "1\n2\n")
    with pytest.raises(ZeroDivisionError) as error:
        run_examples(text.replace("print(x", "print(x / 0"), "some.md")
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno + 1) == ("some.md", 8)
