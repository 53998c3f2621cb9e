"""The study of tiers on a tiny model: what is computed again, what is dropped, and what the tables say."""

import json

import pytest

from experiments.tiers import __main__ as tiers
from experiments.tiers.report import draw
from models import checkpoint
from models.tokenizer import ByteTokenizer
from tests.experiments import tiny
from tests.experiments.trace_maker import make_requests


@pytest.mark.slow
def test_a_restart_and_the_tables(tmp_path, capsys, monkeypatch):
    model, data = tmp_path / "model", tmp_path / "data"
    checkpoint.save(model, tiny.decoder(**tiny.ONE_LAYER), ByteTokenizer())
    (data / "text").mkdir(parents=True)
    (data / "traces").mkdir()
    examples = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(12)]
    lines = [json.dumps(example) + "\n" for example in examples]
    (data / "text" / "gsm8k_test.jsonl").write_text("".join(lines))
    requests = [json.dumps(request) + "\n" for request in make_requests(0, 60)]
    (data / "traces" / "conversation_trace.jsonl").write_text("".join(requests))
    monkeypatch.setattr(tiers, "SIZES", (20,))
    picture = tmp_path / "picture.png"
    arguments = ["--checkpoint", str(model), "--data", str(data), "--prompts", "3", "--picture", str(picture)]
    assert tiers.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["restart"]["computed_again"] == 0 and report["restart"]["same_answers"]
    assert report["restart"]["dropped"] == {"wrong checksum": 1} and report["restart"]["num_loaded"] > 5
    assert {*report["first_token"]} == {"computed", "device", "host", "disk"}
    [record] = report["hits"]["records"]
    assert 0 < record["device"] < record["host"] == record["both"] < record["store"]
    assert picture.stat().st_size > 1000
    tiers.show(report)
    text = capsys.readouterr().out
    assert "computed again: 0 tokens that were cached" in text and "1 block dropped (wrong checksum)" in text
    draw(report | {"hits": tiers.NO_TRACE}, picture)


def test_prompts_without_data_begin_alike():
    prompts = tiers.make_prompts(None, 3)
    assert len({tuple(prompt[:960]) for prompt in prompts}) == 1 and len({*map(tuple, prompts)}) == 3
