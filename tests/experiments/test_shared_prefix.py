"""What rows that share a prompt save: the sides agree before they are timed."""

import pytest

from experiments import shared_prefix


@pytest.mark.slow
def test_the_command_times_both_sides(monkeypatch, report_of):
    samples = shared_prefix.Case("samples", 8, 130, 5, 1, 2)
    full = shared_prefix.Case("full", 2, 0, 140, 1, 2)
    monkeypatch.setattr(shared_prefix, "CASES", (samples, full))
    monkeypatch.setattr(shared_prefix, "SAMPLES", samples)
    monkeypatch.setattr(shared_prefix, "FULL", full)
    monkeypatch.setattr(shared_prefix, "LEAST_GAIN", 1e9)
    report = report_of(shared_prefix, "--turns", "2")
    assert [record["case"] for record in report["records"]] == ["samples", "full"]
    assert report["bars"][0]["measured"] == report["records"][0]["times"]["median"]
    monkeypatch.setattr(shared_prefix, "MOST_DIFFERENCE", -1)
    with pytest.raises(RuntimeError, match="samples: results differ"):
        shared_prefix.main(["--turns", "1"])
