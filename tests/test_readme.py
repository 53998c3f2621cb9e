"""README.md's Python blocks run as they stand, in order, in one namespace."""

import inspect
import pathlib
import re

import pytest

import kvcache_jax as kv

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Returns (number of the first line, source) of every fenced python block."""
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block.group(1)) for block in blocks]


def run_blocks(text: str, filename: str) -> dict:
    """Runs the blocks; a traceback names the file's own line."""
    namespace = {"__name__": "readme"}
    for first_line, source in python_blocks(text):
        exec(compile("\n" * (first_line - 1) + source, filename, "exec"), namespace)
    return namespace


@pytest.mark.contract
def test_readme_blocks_run():
    text = README.read_text()
    assert python_blocks(text), "README.md has no python block"
    assert text.count("```python") == len(python_blocks(text)), "a python block is indented or not closed"
    run_blocks(text, str(README))


def test_functions_that_are_said_to_go_on_with_a_cache_take_one():
    said = re.search(r"([^;.]+) across calls that hand `cache=` on", README.read_text())
    assert said is not None
    names = re.findall(r"`(\w+)`", said.group(1))
    assert {"generate", "score"} <= set(names)
    for name in names:
        assert "cache" in inspect.signature(getattr(kv, name)).parameters


def test_blocks_share_a_namespace_and_fail_at_their_line():
    text = "Title\n```python\nx = 1\n```\ntext\n```python\ny = x + 1\n```\n"
    assert python_blocks(text) == [(3, "x = 1\n"), (7, "y = x + 1\n")]
    assert run_blocks(text, "some.md")["y"] == 2
    with pytest.raises(ZeroDivisionError) as error:
        run_blocks(text + "```python\ny / 0\n```\n", "some.md")
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno + 1) == ("some.md", 10)
