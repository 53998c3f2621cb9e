"""The study of how soon an engine answers: a short run of it, whatever its verdicts on a machine at work."""

import json

import pytest

from experiments import first_token


@pytest.mark.slow
def test_a_short_run_times_every_moment_of_every_way(capsys, monkeypatch):
    monkeypatch.setattr(first_token, "GAP_S", (0.01, 0.02))
    monkeypatch.setattr(first_token, "NUM_TURNS", 1)
    assert first_token.main(["--trials", "1", "--requests", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [record["moment"] for record in report["records"]] == [*first_token.MOMENTS]
    for record in report["records"]:
        assert all(record[way]["median_us"] > 0 and record[way]["num_calls"] == 1 for way in first_token.WAYS)
    assert len(report["bars"]) == 4 and all(bar["measured"] > 0 for bar in report["bars"])
    assert all(len(rates) == 1 for rates in report["tokens_per_s"].values())
