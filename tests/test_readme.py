"""README.md's Python blocks run as they stand, in order, in one namespace; what documents name is there."""

import inspect
import pathlib
import re

import pytest

import kvcache_jax as kv
from tests.support.examples import python_blocks, run_blocks

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
OTHERS = (ROOT / name for name in ("CONTRIBUTING.md", "pallas_kernels/NOTES.md"))
DOCUMENTS = README, *sorted((ROOT / "docs").rglob("*.md")), *OTHERS


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


def test_readme_is_short_and_names_the_rooms_as_the_package_does():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 160] == []
    assert kv.__doc__ is not None
    rooms = re.findall(r"^\* `(\w+)`", kv.__doc__, re.MULTILINE)
    assert re.findall(r"^\* `(\w+)/`", README.read_text(), re.MULTILINE) == rooms


def missing_names(text: str, folder: pathlib.Path) -> list[str]:
    """Lists what a document names and does not exist: links, modules, targets of make, names of the library.

    Paths in back quotes count where they begin with a folder of the repository.
    """
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [link for link in links if not (folder / link).exists()]
    top = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    paths = re.findall(rf"`((?:{top})/[\w./]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    for module in re.findall(r"python -m ((?:experiments|tests)[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            missing.append(module)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing += [name for name in re.findall(r"(?:`|^    )make ([\w-]+)", text, re.M) if name not in targets]
    return missing + [name for name in re.findall(r"\bkv\.[a-z_A-Z][\w.]*\w", text) if not is_public(name)]


def is_public(name: str) -> bool:
    """Tests whether a name such as kv.chunks.store, or what follows it, leads somewhere."""
    value = kv
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_what_a_document_names_is_there(document):
    assert missing_names(document.read_text(), document.parent) == []


def test_a_name_of_nothing_is_found():
    text = "[a](no.md) `kvcache_jax/no.py` `python -m tests.no` `make no`\n    make nothing\nkv.chunks.no"
    expected = ["no.md", "kvcache_jax/no.py", "tests.no", "no", "nothing", "kv.chunks.no"]
    assert missing_names(text, ROOT) == expected
    fine = (
        "[a](README.md#x) [b](https://a.b/c) `core/no.py` `python -m tests.aot.loops --lowered` `make demo`"
    )
    fine += " kv.Status.OK\n"
    assert missing_names(fine, ROOT) == []


def test_blocks_share_a_namespace_and_fail_at_their_line():
    text = "Title\n```python\nx = 1\n```\ntext\n```python\ny = x + 1\n```\n"
    assert python_blocks(text) == [(3, "x = 1\n"), (7, "y = x + 1\n")]
    assert run_blocks(text, "some.md")["y"] == 2
    with pytest.raises(ZeroDivisionError) as error:
        run_blocks(text + "```python\ny / 0\n```\n", "some.md")
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno + 1) == ("some.md", 10)
