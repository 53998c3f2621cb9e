"""docs/recipes.md runs as it stands, in order, in one namespace."""

from test_readme import README, python_blocks, run_blocks

RECIPES = README.parent / "docs" / "recipes.md"


def test_recipes_run():
    text = RECIPES.read_text()
    assert len(python_blocks(text)) == 9
    run_blocks(text, str(RECIPES))
