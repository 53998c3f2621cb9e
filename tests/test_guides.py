"""The guides and the start page run as they are, and print what they say; a test per document."""

import pytest
from test_readme import README

from tests.support.examples import run_examples

DOCS = README.parent / "docs"
GUIDES = {
    path.stem: path
    for path in (DOCS / "index.md", DOCS / "recipes.md", *sorted((DOCS / "guides").glob("*.md")))
}


def test_every_guide_has_examples():
    assert {"index", "own_model", "batching", "prefix_cache", "engine", "training"} <= GUIDES.keys()
    assert [name for name, path in GUIDES.items() if "```python" not in path.read_text()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_runs(name):
    text = GUIDES[name].read_text()
    found = run_examples(text, str(GUIDES[name]))
    assert len(found) == text.count("```python"), "a python block is indented or not closed"
    assert text.count("```text") == sum(below != "" for _, below in found), "a text block stands alone"
    for printed, below in found:
        assert printed == below
