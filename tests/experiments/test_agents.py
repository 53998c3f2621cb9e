"""Agents' turns through the cache: what is drawn, and what a policy computes of it."""

import numpy as np
import pytest

from experiments import agents


def test_turns_are_drawn_to_the_published_figures():
    turns, drawn = agents.draw(400, 6.0, 120.0, seed=1)
    assert 38 < drawn["median_turns"] < 48 and 115 < drawn["read_per_written"] < 150
    assert 0.35 < drawn["forking"] < 0.55
    assert (np.diff([turn.at for turn in turns]) >= 0).all()
    for turn in turns[:500]:
        assert len(turn.ids) == (turn.prompt_len + turn.written) // agents.BLOCK
        assert turn.num_prompt == turn.prompt_len // agents.BLOCK and turn.num_shared <= turn.num_prompt


@pytest.mark.slow
def test_the_command_counts_what_is_computed(capsys, report_of):
    arguments = ["--sessions", "8", "--retain", "60"]
    report = report_of(agents, *arguments)
    assert [record["policy"] for record in report["records"]] == ["lru", "tail lru", "retention"]
    assert all(record["computed"] > 0 and record["hit_rate"] < 1 for record in report["records"])
    assert agents.main(arguments) == 0
    assert "tokens read per token written" in capsys.readouterr().out
