"""What a dispatch costs in two processes, on few dispatches."""

import json

import pytest

from experiments import team


@pytest.mark.slow
def test_both_sides_run(capsys):
    assert team.main(["--dispatches", "4", "--rounds", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sides = [
        (record["a device has"], record["processes"], record["num_calls"]) for record in report["records"]
    ]
    assert sides == [("rows", 1, 2), ("rows", 2, 2), ("heads", 1, 2), ("heads", 2, 2)]
    assert all(record["median_us"] > 0 for record in report["records"]) and len(report["bars"]) == 1
