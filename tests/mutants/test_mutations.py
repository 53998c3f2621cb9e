"""The mutations that `make mutants` applies fit the library as it is now."""

import pathlib

from tests.mutants import __main__ as mutants

TESTS = pathlib.Path(__file__).parent.parent


def test_every_mutation_can_be_applied():
    stale = [why for mutation in mutants.MUTATIONS if (why := mutants.why_stale(mutants.ROOT, mutation))]
    assert not stale, "\n".join(stale)


def test_every_mutation_names_a_test_that_exists():
    for mutation in mutants.MUTATIONS:
        file, name = mutation.test.split("::")
        assert f"def {name.split('[')[0]}(" in (TESTS / file).read_text(), mutation.test


def test_no_two_mutations_are_called_the_same():
    names = [mutation.name for mutation in mutants.MUTATIONS]
    assert len(names) == len(set(names))
    assert len(names) >= 20
