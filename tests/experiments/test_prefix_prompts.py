"""The prefix-prompts experiment on a tiny model: what is found, what is said, what is refused."""

import json

import pytest
from flax import nnx

from experiments import prefix_prompts
from models import checkpoint
from models.decoder import Decoder, DecoderConfig
from models.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = DecoderConfig(
        vocab_size=256, hidden_size=8, mlp_size=8, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=4
    )
    folder = tmp_path_factory.mktemp("model")
    checkpoint.save(folder, Decoder(config, rngs=nnx.Rngs(0)), ByteTokenizer())
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
    return prefix_prompts.few_shot_prompts(data, 3)


@pytest.fixture(scope="module")
def lengths(prompts):
    """The made-up prompts are as long as the longest of the others: their programs are the same."""
    return ["--shared", str(max(map(len, prompts)) - 5), "--own", "5"]


@pytest.mark.slow
def test_second_prompts_and_later_questions_find_what_is_shared(folder, data, prompts, lengths, capsys):
    arguments = ["--checkpoint", str(folder), *lengths, "--prompts", "3"]
    assert prefix_prompts.main([*arguments, "--data", str(data), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shared", "10000000"], "got --shared 10000000, expected fewer than the text has: "),
        (["--own", "10000000"], "got --own 10000000, expected fewer than the text has: "),
        (["--data", "nowhere"], "argument --data: there is no folder nowhere"),
        (["--prompts", "1"], "expected an integer from 2 to 10000"),
        (["--prompts", "5"], "gsm8k_test.jsonl has 12 examples, expected 13: lower --prompts"),
        (["--data", "."], "got text/gsm8k_test.jsonl, expected openai's gsm8k test.jsonl: FileNotFoundError"),
    ],
)
def test_bad_input_is_refused_before_anything_is_timed(folder, data, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(prefix_prompts, "time_pairs", lambda *_: pytest.fail("timed"))
    with pytest.raises(SystemExit) as stop:
        prefix_prompts.main(["--checkpoint", str(folder), "--data", str(data), *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_missing_files(folder, lengths, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVCACHE_DATA_DIR", raising=False)
    arguments = ["--checkpoint", str(folder), *lengths, "--prompts", "2"]
    assert prefix_prompts.main(arguments) == 0
    assert "few-shot prompts: skipped" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        prefix_prompts.main([*arguments, "--data", str(tmp_path)])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        prefix_prompts.main(["--checkpoint", str(tmp_path / "nothing")])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
