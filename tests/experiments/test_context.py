"""A context over several devices, on few tokens."""

import pytest

from experiments import context


@pytest.mark.slow
def test_the_same_tokens_on_any_number_of_devices(report_of):
    report = report_of(context, "--steps", "3", "--tokens", "512")
    assert [record["devices"] for record in report["records"]] == [1, 2, 4]
    assert len(report["bars"]) == 6 and all(bar["holds"] for bar in report["bars"])
