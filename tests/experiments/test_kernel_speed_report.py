"""The report of the kernels' benchmark: ratios, losses and bars from samples made by hand."""

import pytest

from experiments.kernel_speed import report as kernel_speed_report
from experiments.kernel_speed.names import OURS
from experiments.kernel_speed.timing import FAILED, MEASURED


def entry(name, num_bytes, sides, block_size=16):
    """`sides`: medians in microseconds, or a reason."""
    records = [
        {"side": side, "is_ours": side.startswith("ours"), "status": MEASURED, "reason": "", "error": 0.0}
        | {"median_us": value, "p10_us": value, "p90_us": value, "first_call_s": 1.0}
        if not isinstance(value, str)
        else {"side": side, "is_ours": side.startswith("ours"), "status": FAILED, "reason": value}
        | {"median_us": None}
        for side, value in sides.items()
    ]
    return {"name": name, "num_bytes": num_bytes, "block_size": block_size, "sides": records}


@pytest.fixture
def report():
    entries = [
        entry("one tiny kernel", 0, {"JAX loop": 4.0, "CUDA graph": 2.0}),
        entry("read", 4_000_000, {"XLA": 1.25, "PyTorch": 1.0}),  # 4,000 GB/s
        entry("copy", 4_000_000, {"XLA": 1.0}),
    ]
    decodes = [
        # 1,000 us for 3.8 GB: 95% of reading; a peer takes 1.2 times as long, another three times.
        entry("won", 3_800_000_000, {OURS: 1000.0, "ours, plan included": 1010.0, "a": 3000.0, "b": 1200.0}),
        entry("lost", 400_000_000, {OURS: 125.0, "ours, plan included": 120.0, "a": 100.0, "b": "no room"}),
        entry("nearly", 4_000_000, {OURS: 10.0, "a": 9.5, "b": "no room"}),
        entry("ours failed", 4_000_000, {OURS: "it broke", "a": 9.5}),
        entry("alone", 4_000_000, {OURS: 10.0, "a": "no room"}),
    ]
    made = {
        "device": {"name": "fake"},
        "jax": "0",
        "date": "today",
        "revision": "abc",
        "is_interpreted": False,
        "seconds": 1.0,
        "entries": entries,
        "decodes": decodes,
        "moves": [entry("append", 1_000_000, {OURS: 2.0, "XLA": 4.0})],
        "steps": [],
        "skipped": [{"cell": "huge", "reason": "needs 200 GB, and 105 GB may be used"}],
        "left_out": ["128 x 1k, group 1, block 64"],
        "stopped": "",
    }
    kernel_speed_report.add_figures(made)
    return made


def test_ratios_losses_and_bars(report):
    assert report["ceilings"] == {"read": pytest.approx(4000), "copy": pytest.approx(4000)}
    assert report["moves"][0]["of_ceiling"] == {OURS: pytest.approx(0.125), "XLA": pytest.approx(0.0625)}
    won, lost, nearly, failed, alone = (decode["comparison"] for decode in report["decodes"])
    assert won["gb_per_s"] == pytest.approx(3800) and won["of_ceiling"] == pytest.approx(0.95)
    assert (won["best_peer"], won["ratio"]) == ("b", pytest.approx(1.2))
    assert (lost["best_peer"], lost["ratio"]) == ("a", pytest.approx(0.8))
    assert (failed["ratio"], failed["why_no_ratio"]) == (None, "ours: failed: it broke")
    assert (alone["ratio"], alone["why_no_ratio"]) == (None, "no peer was measured")

    summary = report["summary"]
    assert (summary["num_cells"], summary["num_compared"]) == (5, 3)
    assert summary["geometric_mean"] == pytest.approx((1.2 * 0.8 * 0.95) ** (1 / 3))
    assert [loss["cell"] for loss in summary["losses"]] == ["lost", "nearly"]
    assert summary["below_least_ratio"] == ["lost"]
    assert [missing["cell"] for missing in summary["not_compared"]] == ["ours failed", "alone"]
    share, mean, least = summary["bars"]
    assert share["measured"] == pytest.approx(0.8) and not share["holds"]  # 0.4 GB count, 0.004 do not
    assert mean["measured"] == summary["geometric_mean"] and not mean["holds"]
    assert least["measured"] == pytest.approx(0.8) and not least["holds"]
    assert kernel_speed_report.absences(report["decodes"]) == [
        {"side": "b", "reason": "failed: no room", "on": ["lost", "nearly"]},
        {"side": OURS, "reason": "failed: it broke", "on": ["ours failed"]},
        {"side": "a", "reason": "failed: no room", "on": ["alone"]},
    ]


def test_bars_hold_when_they_do():
    won = entry("won", 10**9, {OURS: 100.0, "a": 110.0})
    won["comparison"] = kernel_speed_report.comparison(won, 10_500)
    assert [bar["holds"] for bar in kernel_speed_report.summary([won])["bars"]] == [True, True, True]
    assert [bar["holds"] for bar in kernel_speed_report.summary([])["bars"]] == [None, None, None]


def test_the_tables_say_what_was_lost_and_what_is_missing(report, capsys):
    kernel_speed_report.show(report)
    shown = capsys.readouterr().out
    for words in (
        "3,800 GB/s  95%",
        "0.80x",
        "b: failed: no room (2 entries, lost and others)",
        "skipped huge: needs 200 GB",
        "left out, no time: 128 x 1k, group 1, block 64",
        "cells in which a peer is faster",
        "3 of 5 cells compared",
    ):
        assert " ".join(words.split()) in " ".join(shown.split()), words


def test_the_figure_is_drawn(report, tmp_path):
    pytest.importorskip("matplotlib")
    kernel_speed_report.draw(report, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
