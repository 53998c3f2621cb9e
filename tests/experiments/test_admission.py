"""The price of admissions: what is timed are steps that admit."""

import pytest

from experiments import admission


@pytest.mark.slow
def test_the_command_times_steps_that_admit(monkeypatch, capsys, report_of):
    monkeypatch.setattr(admission, "BARS", {("longest prefix", 64): 1e-3})
    arguments = ["--requests", "40", "--turns", "2"]
    report = report_of(admission, *arguments)
    [record], [bar] = report["records"], report["bars"]
    assert 1 < record["admitted"] < 4 and record["median_us"] == bar["measured"] > bar["at_most"]
    assert admission.main(arguments) == 0
    assert "1 of 1 bars do not hold" in capsys.readouterr().out
