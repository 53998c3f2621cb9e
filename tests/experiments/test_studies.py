"""What all studies do alike: input that does not fit is one sentence on standard error, and nothing else."""

import importlib

import pytest

from experiments.common import byte_model
from tests.experiments import tiny


@pytest.fixture
def refused(refusal, monkeypatch, tmp_path):
    """(command below `experiments`, *arguments) -> the sentence, in an empty folder without data."""
    monkeypatch.delenv("KVCACHE_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        module = importlib.import_module(f"experiments.{name}")
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"experiments.{name}.__main__")
        said = refusal(module, *arguments)
        assert said.startswith(f"python -m experiments.{name}: ")
        return said

    return run


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "quantised",
            {"windows": (4, 4)},
            "has windows, which dense attention to rounded keys does not",
        ),
        ("streaming", {"windows": (4, 4)}, "has windows, which the mask without a cache does not have"),
        ("decode_speed", {"windows": (4, 4)}, "has windows, which the dense cache beside it does not have"),
        *(
            (name, {"vocab_size": 99}, "has 99 tokens, expected one per byte")
            for name in (
                "compression",
                "quantised",
                "streaming",
                "evaluate",
                "learned_prefix",
                "prefix_prompts",
            )
        ),
    ],
)
def test_a_model_that_does_not_fit_is_one_sentence(refused, monkeypatch, name, changes, said):
    class Other:
        config = tiny.config(**changes)

    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: Other)
    assert said in refused(name)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        *(
            (name, ["--checkpoint", "/nowhere"], "/nowhere")
            for name in (
                *("compression", "quantised", "streaming", "evaluate", "learned_prefix", "prefix_prompts"),
                *("decode_speed", "decode", "serve"),
            )
        ),
        *(
            (name, ["--data", "/nowhere"], "there is no folder /nowhere")
            for name in ("evaluate", "prefix_prompts", "decode_speed", "serve")
        ),
        ("prefix_prompts", ["--data", "x" * 300], "there is no folder xxx"),
        ("learned_prefix", ["--steps", "0"], "got '0'"),
        ("bookkeeping", ["--seconds", "nan"], "argument --seconds: got 'nan', expected a number above 0"),
        ("bookkeeping", ["--peers-python", "no"], "got --peers-python without --peers, expected both: add"),
        ("bookkeeping", ["--peers", "--peers-python", "no"], "got --peers-python no, expected a Python"),
        ("prefix_prompts", ["--shared", "10000000"], "got --shared 10000000, expected fewer than the text"),
        ("prefix_prompts", ["--own", "10000000"], "got --own 10000000, expected fewer than the text has: "),
        ("prefix_prompts", ["--prompts", "1"], "expected an integer from 2 to 10000"),
        ("prefix_prompts", ["--data", "."], "got text/gsm8k_test.jsonl, expected openai's gsm8k test.jsonl"),
        (
            "serve",
            ["--simulate", "v5e", "--chips", "1", "--requests", "4"],
            "1 v5e hold no model and",
        ),
        ("serve", ["--simulate", "abacus"], "invalid choice: 'abacus'"),
        ("serve", ["--simulate", "--demo"], "not allowed with"),
        ("serve", ["--markdown", "/nowhere"], "expected what --json printed"),
        ("serve", ["--trace", "/nowhere.csv"], "cannot be read"),
        ("serve", ["--metrics", "/nowhere/a.prom"], "there is no folder /nowhere: make it first"),
        ("first_gpu_run", ["--interpret"], "got --interpret without --output"),
        ("first_gpu_run", ["--output", "/nowhere"], "there is no folder /nowhere"),
        ("first_gpu_run", ["--flashinfer", "/nowhere"], "there is no folder /nowhere"),
        ("first_gpu_run", ["--minutes", "0"], "expected a number above 0"),
        ("first_gpu_run", ["--without", "theirs"], "got --without 'theirs', expected one of: ours; "),
    ],
)
def test_bad_input_is_one_sentence(refused, name, arguments, said):
    assert said in refused(name, *arguments)
