"""The decode-speed tool: its sides compute the same thing, its counts are right, its verdicts can fail."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import byte_model, command
from experiments.decode_speed import __main__ as decode_speed
from experiments.decode_speed import dense_decoder, sides
from experiments.decode_speed import memory as decode_memory
from experiments.decode_speed import report as decode_speed_report
from experiments.decode_speed.sides import DENSE, NUM_STEPS, PAGED, SIDES, Case, make_contexts
from models.decoder import DecoderConfig

TINY = DecoderConfig(
    vocab_size=13,
    hidden_size=12,
    mlp_size=10,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=6,
    use_qk_norm=True,
    use_qkv_bias=True,
    tie_embeddings=True,
)
CASE = Case(
    "uneven", 48, (9, 48, 21)
)  # the first steps of row 0 at position 1, the last of row 1 at the table's end


@pytest.fixture(scope="module")
def contexts(decoder):
    return make_contexts(decoder, num_rows=3, length=48)


@pytest.fixture(scope="module")
def records(decoder, contexts):
    return decode_speed.measure(CASE, decoder, contexts, seconds=0.0, with_others=True)


@pytest.mark.slow
def test_every_side_is_timed_on_the_same_steps(records):
    assert [record["side"] for record in records] == [PAGED, *DENSE, "no attention", "no cache"]
    for record in records:
        assert record["case"] == CASE._asdict()
        assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"]
        assert record["first_call_s"] > 0
    assert {record["num_calls"] for record in records[:-1]} == {5}


@pytest.mark.slow
def test_a_round_leaves_the_rows_where_they_were(decoder, contexts):
    timed = decode_speed.Timing(SIDES[0], CASE, decoder, contexts.cut(CASE))
    before = np.asarray(timed.logits)
    assert before.shape == (NUM_STEPS, 3, 13)
    timed.round()
    assert timed.state.context_len.tolist() == list(CASE.lens)
    np.testing.assert_array_equal(timed.logits, before)
    assert len(timed.seconds) == 1  # compiling is not among them


@pytest.mark.slow
def test_the_paged_rows_lie_scattered(decoder, contexts):
    cache = SIDES[0].start(TINY, CASE, contexts.cut(CASE))
    blocks = np.asarray(cache.control.block_pools[0].block_table)[1, :3]
    assert not np.array_equal(blocks, np.arange(blocks[0], blocks[0] + 3))


@pytest.mark.slow
def test_a_side_that_computes_something_else_is_not_timed(decoder, contexts, monkeypatch):
    def no_mask(decoder, tokens, cache):
        logits, cache = dense_decoder.dense_step(decoder, tokens, cache, dense_decoder.LAYOUTS[1])
        return logits.at[2, 3].add(2e-4), cache

    wrong = sides.Side(DENSE[1], SIDES[2].start, no_mask, SIDES[2].rewind)
    monkeypatch.setattr(decode_speed, "SIDES", (SIDES[0], wrong))
    with pytest.raises(RuntimeError, match=r"uneven: dense \[B, H, S, D\]: logits differ by 0\.0002"):
        decode_speed.measure(CASE, decoder, contexts, seconds=0.0)
    with pytest.raises(RuntimeError, match="nan"):
        decode_speed.check_equal(jnp.full(3, jnp.nan), jnp.zeros(3), "row")


# --- memory ---


def test_padding_is_what_rounding_up_leaves(monkeypatch):
    monkeypatch.setattr(decode_memory, "NUM_ROWS", 4)
    monkeypatch.setattr(decode_memory, "NUM_DRAWS", 1)
    monkeypatch.setattr(decode_memory, "BLOCK_SIZES", (1, 8))
    lens = np.random.default_rng(0).choice([5, 20], 4)
    assert 0 < (lens == 20).sum() < 4
    dense, ones, eights = decode_memory.padding(np.array([5, 20], np.int32))
    assert dense["median"] == pytest.approx(1 - lens.sum() / (4 * 20))
    assert ones == {"block_size": 1, "median": 0, "least": 0, "most": 0}
    assert eights["median"] == pytest.approx(1 - lens.sum() / np.where(lens == 20, 24, 8).sum())


def test_a_row_that_found_no_room_is_noticed(monkeypatch):
    monkeypatch.setattr(decode_memory, "BLOCK_SIZES", (8,))
    control = decode_memory._control
    monkeypatch.setattr(
        decode_memory, "_control", lambda s, n, length, blocks: control(s, n, length, blocks - 1)
    )
    with pytest.raises(RuntimeError, match="expected each row rounded up"):
        decode_memory.padding(np.array([20], np.int32))


def test_samples_save_what_the_closed_form_says(monkeypatch):
    monkeypatch.setattr(decode_memory, "PROMPTS", ((3, 2),))
    monkeypatch.setattr(decode_memory, "NUM_SAMPLES", (4,))
    (record,) = decode_memory.sharing()
    assert record["blocks_used"] == 3 + 4 * 2
    assert record["saved"] == pytest.approx(record["closed_form"]) == pytest.approx(3 * 3 / (4 * 5))


def test_without_the_trace_padding_is_skipped_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_memory, "sharing", list)
    assert decode_memory.memory_report(None)["padding"] == []
    skipped = decode_memory.memory_report(None)["skipped"]
    assert "--data" in skipped and "github.com/Azure/AzurePublicDataset" in skipped
    with pytest.raises(command.InputError, match=rf"got --data {tmp_path}, expected \S+ in it: .*github.com"):
        decode_memory.memory_report(tmp_path)
    trace = tmp_path / "traces" / decode_memory.TRACE
    trace.parent.mkdir()
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    assert decode_memory.conversation_lens(trace).tolist() == [418]
    monkeypatch.setattr(decode_memory, "padding", lambda lens: lens.tolist())
    report = decode_memory.memory_report(tmp_path)
    assert report["padding"] == [418] and report["skipped"] is None
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for text in ("", header, header + "now,0,0\n", header + "now,x,1\n", header + "now,1\n", "\udcff"):
        trace.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(command.InputError, match=f"{decode_memory.TRACE} .*github.com/Azure"):
            decode_memory.memory_report(tmp_path)


# --- the report ---


def recorded():
    """The record, whose steps were also timed as separate calls."""
    path = Path(decode_speed.__file__).parents[1] / "results" / "decode_speed.json"
    report = json.loads(path.read_text())
    return report | {"records": [each for each in report["records"] if each["figure"] == "in a loop"]}


def test_the_bars_compare_with_both_layouts():
    report = recorded()
    bars = decode_speed.bars_of(report["records"], report["memory"])
    assert bars == report["bars"] and [bar["holds"] for bar in bars] == [True, True, False, False, True, True]
    for record in report["records"]:
        if record["side"] == PAGED:
            record["median_us"] *= 3
    bars = decode_speed.bars_of(report["records"], report["memory"])
    assert [bar["holds"] for bar in bars] == [False, False, False, False, True, True]


def test_the_tables_say_what_was_measured(capsys, tmp_path):
    decode_speed_report.show(recorded())
    shown = capsys.readouterr().out
    assert "24.5" in shown and "90%" in shown  # attention's share of a full step
    pytest.importorskip("matplotlib")
    report = recorded()
    report["memory"] |= {"padding": [], "skipped": "no trace"}
    decode_speed_report.draw(report, tmp_path / "skipped.svg")


@pytest.mark.parametrize("slowest", [1.0, 1.3, 8.0, 5000.0])
def test_logarithmic_axes_have_several_plain_numbers(monkeypatch, tmp_path, slowest):
    """However far the fastest and the slowest are apart."""
    figures = pytest.importorskip("matplotlib.figure")
    saved, report = [], recorded()
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    for nth, record in enumerate(report["records"]):
        record["median_us"] = 2500.0 * slowest ** (nth / (len(report["records"]) - 1))
    decode_speed_report.draw(report, tmp_path / "speed.png")
    (figure,) = saved
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) if "log" in axis.get_scale()]
    assert len(axes) == 6
    for axis in axes:
        ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        low, high = sorted(axis.get_view_interval())
        labels = {place: label.get_text() for place, label in ticks if low <= place <= high}
        assert 3 <= len(labels) <= 12
        assert all(float(text.replace(",", "")) == pytest.approx(place) for place, text in labels.items())
        assert len(set(labels.values())) == len(labels)


def test_the_command_reports_what_it_measured(monkeypatch, capsys, report_of, tmp_path, decoder):
    pytest.importorskip("matplotlib")
    report, measured = recorded(), []

    def measure(case, *_, **__):
        measured.append(case)
        return [record for record in report["records"] if record["case"]["name"] == case.name]

    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: decoder)
    monkeypatch.setattr(decode_speed, "make_contexts", lambda decoder: None)
    monkeypatch.setattr(decode_speed, "memory_report", lambda folder: report["memory"])
    monkeypatch.setattr(decode_speed, "measure", measure)
    printed = report_of(decode_speed)
    assert set(report) <= set(printed)
    assert all(printed[name] == report[name] for name in ("bars", "memory"))
    assert measured == [decode_speed.FULL, decode_speed.SHORT, *decode_speed.FILLS, *decode_speed.BATCHES]
    assert decode_speed.main(["--picture", str(tmp_path / "speed.png")]) == 0
    assert "2 of 6 bars do not hold" in capsys.readouterr().out and (tmp_path / "speed.png").exists()
