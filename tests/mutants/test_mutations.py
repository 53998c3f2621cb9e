"""The mutations that `make mutants` applies fit the library as it is now."""

from tests.mutants.__main__ import main
from tests.mutants.reading import ROOT, read_all
from tests.mutants.runner import why_stale

MUTATIONS = read_all()


def test_every_mutation_can_be_applied():
    stale = [why for mutation in MUTATIONS if (why := why_stale(ROOT, mutation))]
    assert not stale, "\n".join(stale)


def test_every_mutation_names_a_test_that_exists():
    for mutation in MUTATIONS:
        if mutation.gate:
            option, module, *_ = mutation.gate
            assert option == "-m" and (ROOT / f"{module.replace('.', '/')}.py").is_file(), mutation.where
            continue
        file, name = mutation.test.split("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text(), (mutation.where, mutation.test)


def test_no_two_mutations_are_called_the_same():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names))
    assert len(names) >= 20


def test_stale_mutations_are_listed(capsys):
    assert main(["--stale", MUTATIONS[0].name]) == 0
    assert capsys.readouterr().out == "0 of 1 are stale\n"
