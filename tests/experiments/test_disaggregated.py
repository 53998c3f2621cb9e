"""The study of two processes, one of which computes prompts: a short run of it."""

import pytest

from experiments import disaggregated


@pytest.mark.slow
def test_a_short_run_answers_as_one_process_does(report_of):
    report = report_of(disaggregated, "--prompts", "2")
    assert report["num_wrong"] == 0 and all(bar["holds"] for bar in report["bars"])
    assert [*report["times"]] == [disaggregated.HERE, disaggregated.COLD, disaggregated.WARM]
    assert report["num_bytes"][disaggregated.WARM] < 0.2 * report["num_bytes"][disaggregated.COLD]
    assert report["failures"]["stopped"]["reasons"] == {"TimeoutError": 1}
    assert [*report["failures"]["killed"]["reasons"]][0].startswith("Connection")
