"""docs/recipes.md runs as it stands, in order, in one namespace: a test per block."""

import pytest
from test_readme import README

from tests.support.examples import python_blocks, run_block

RECIPES = README.parent / "docs" / "recipes.md"
BLOCKS = python_blocks(RECIPES.read_text())


@pytest.fixture(scope="module")
def namespace():
    return {"__name__": "recipes"}


@pytest.fixture(scope="module")
def done():
    return []


def test_the_recipes_are_found():
    assert len(BLOCKS) == 12


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(len(BLOCKS)))
def test_a_recipe_runs(namespace, done, nth):
    """After those before it; a traceback names the file's own line."""
    for first_line, source in BLOCKS[len(done) : nth + 1]:
        run_block(first_line, source, str(RECIPES), namespace)
        done.append(first_line)
