"""What a dispatch costs in two processes, on few dispatches."""

import pytest

from experiments import team


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--attached"]])
def test_all_sides_run(options, report_of):
    report = report_of(team, "--dispatches", "4", "--rounds", "1", *options)
    records = [record for record in report["records"] if record["what"] == "dispatch"]
    sides = [(record["side"], record["processes"], record["num_calls"]) for record in records]
    names = sorted(team.ATTACHED if options else team.DEVICES)
    assert sides == [(name, num, 2) for name in names for num in (1, 2)]
    assert all(record["median_us"] > 0 for record in report["records"])
    assert ("bars" in report, len(report["records"])) == ((False, 8) if options else (True, 4))
