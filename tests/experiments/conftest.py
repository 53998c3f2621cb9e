"""What the tests of studies share: a model of random weights, and what a command prints and refuses."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"


@pytest.fixture(scope="module")
def decoder(request):
    """A decoder of random weights, of the sizes that the module calls TINY."""
    nnx, decoders = pytest.importorskip("flax.nnx"), pytest.importorskip("models.decoder")
    return decoders.Decoder(request.module.TINY, rngs=nnx.Rngs(0))


@pytest.fixture
def recorded():
    """name -> the record of a study."""
    return lambda name: json.loads((RESULTS / f"{name}.json").read_text())


@pytest.fixture
def report_of(capsys):
    """(module, *arguments) -> the object that its command prints with --json, and nothing else."""

    def run(module, *arguments, code=0):
        assert module.main([*map(str, arguments), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refusal(capsys):
    """(module, *arguments) -> the sentence with which its command refuses them, and nothing else."""

    def run(module, *arguments):
        with pytest.raises(SystemExit) as stopped:
            module.main([*map(str, arguments)])
        captured = capsys.readouterr()
        assert stopped.value.code == 2 and captured.err.count("\n") == 1 and not captured.out
        assert captured.err.startswith("python -m experiments.")
        return captured.err

    return run
