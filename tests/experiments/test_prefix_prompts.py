"""The prefix-prompts experiment on a tiny model: what is found, what is said, what is refused."""

import json

import pytest

from experiments import prefix_prompts
from experiments.common.benchmarks import few_shot_prompts
from experiments.common.command import InputError
from models import checkpoint
from models.tokenizer import ByteTokenizer
from tests.experiments import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    checkpoint.save(folder, tiny.decoder(**tiny.ONE_LAYER), ByteTokenizer())
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    (data / "text").mkdir()
    examples = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(12)]
    lines = "".join(json.dumps(example) + "\n" for example in examples)
    (data / "text" / "gsm8k_test.jsonl").write_text(lines)
    return data


@pytest.fixture(scope="module")
def prompts(data):
    return few_shot_prompts(data, 3)


@pytest.fixture(scope="module")
def lengths(prompts):
    """The made-up prompts are as long as the longest of the others: their programs are the same."""
    return ["--shared", str(max(map(len, prompts)) - 5), "--own", "5"]


@pytest.mark.slow
def test_second_prompts_and_later_questions_find_what_is_shared(folder, data, prompts, lengths, report_of):
    arguments = ["--checkpoint", str(folder), *lengths, "--prompts", "3"]
    report = report_of(prefix_prompts, *arguments, "--data", data)
    made_up = report["made_up"]
    longest = max(map(len, prompts))
    num_cached = (longest - 5) // 16 * 16
    assert made_up["cached_tokens"] == {"first": [0, 0, 0], "second": [num_cached] * 3}
    assert made_up["prompt_len"] == longest
    few_shot = report["few_shot"]
    shared = bytes(prompts[0]).rindex(b"Question: What is ") + len(b"Question: What is ")
    assert few_shot["num_tokens"] == sum(map(len, prompts))
    expected = 2 * (shared // 16 * 16) / few_shot["num_tokens"]
    assert few_shot["hit_rate_tokens"] == pytest.approx(expected)
    assert few_shot["bytes_kept"] < few_shot["bytes_of_all_prompts"]


def test_too_few_examples_are_refused(data):
    with pytest.raises(InputError, match="gsm8k_test.jsonl has 12 examples, expected 13: lower --prompts"):
        few_shot_prompts(data, 5)


@pytest.mark.slow
def test_without_data_few_shot_prompts_are_skipped(folder, lengths, capsys, monkeypatch):
    monkeypatch.delenv("KVCACHE_DATA_DIR", raising=False)
    arguments = ["--checkpoint", str(folder), *lengths, "--prompts", "2"]
    assert prefix_prompts.main(arguments) == 0
    assert "few-shot prompts: skipped" in capsys.readouterr().out
