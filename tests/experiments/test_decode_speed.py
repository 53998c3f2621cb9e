"""The decode-speed tool: its sides compute the same thing, its counts are right, its verdicts can fail."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.common import byte_model, command, log_axes
from experiments.decode import memory as decode_memory
from experiments.decode_speed import __main__ as decode_speed
from experiments.decode_speed import dense_decoder, sides
from experiments.decode_speed import report as decode_speed_report
from experiments.decode_speed.sides import DENSE, LOOP, NUM_STEPS, PAGED, SIDES, Case, make_contexts
from models.decoder import Decoder, DecoderConfig

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
def decoder():
    return Decoder(TINY, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def contexts(decoder):
    return make_contexts(decoder, num_rows=3, length=48)


@pytest.fixture(scope="module")
def records(decoder, contexts):
    return decode_speed.measure(CASE, decoder, contexts, seconds=0.0, parts=decode_speed.PARTS)


@pytest.mark.slow
def test_every_side_is_timed_on_the_same_steps(records):
    assert [record["side"] for record in records] == [
        PAGED,
        *DENSE,
        "no attention",
        "extend alone",
        "no cache",
    ]
    for record in records:
        assert record["case"] == CASE._asdict()
        assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"]
        assert record["figure"] == ("separate call" if record["side"] == "no cache" else LOOP)
        assert record["first_call_s"] > 0
    assert {record["num_calls"] for record in records[:-1]} == {5}


@pytest.mark.slow
def test_a_round_leaves_the_rows_where_they_were(decoder, contexts):
    timed = decode_speed.Timing(SIDES[0], CASE, decoder, contexts.cut(CASE), (LOOP,))
    before = np.asarray(timed.logits)
    assert before.shape == (NUM_STEPS, 3, 13)
    timed.round()
    assert timed.state.context_len.tolist() == list(CASE.lens)
    np.testing.assert_array_equal(timed.logits, before)
    assert len(timed.seconds[LOOP]) == 1  # compiling is not among them


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


def make_report(paged_full=12.0, paged_short=1.0):
    """Every case, the dense side in 10 milliseconds in one layout and 20 in the other."""
    cases = [decode_speed.FULL, decode_speed.SHORT, *decode_speed.FILLS, *decode_speed.BATCHES]
    records = []
    for case in cases:
        paged = {decode_speed.FULL: paged_full, decode_speed.SHORT: paged_short}.get(case, 5.0)
        for side, ms in zip((PAGED, *DENSE, "no attention"), (paged, 20.0, 10.0, 0.5), strict=True):
            figures = {"median_us": 1e3 * ms, "p10_us": 900.0 * ms, "p90_us": 1100.0 * ms, "num_calls": 5}
            records.append(
                {"case": case._asdict(), "side": side, "figure": LOOP, **figures, "first_call_s": 1.0}
            )
    padding = [
        {"block_size": size, "median": share, "least": share / 2, "most": 2 * share}
        for size, share in ((None, 0.7), (1, 0.0), (16, 0.006), (128, 0.05))
    ]
    sharing = [
        {
            "prompt_blocks": p,
            "own_blocks": g,
            "num_samples": n,
            "blocks_used": p + n * g,
            "saved": p * (n - 1) / (n * (p + g)),
            "closed_form": p * (n - 1) / (n * (p + g)),
        }
        for p, g in decode_memory.PROMPTS
        for n in (2, 4)
    ]
    memory = {"padding": padding, "skipped": None, "sharing": sharing}
    return {
        "machine": {"cpu": "a", "num_cores": 2, "system": "b"},
        "jax": "0",
        "device": "cpu",
        "seconds": 1.0,
        "model": {"checkpoint": "tiny", "num_parameters": 10},
        "records": records,
        "memory": memory,
        "bars": decode_speed.bars_of(records, memory),
    }


@pytest.mark.parametrize(
    ("paged_full", "paged_short", "holds"),
    [(12.0, 2.0, [True, True]), (12.1, 2.0, [False, True]), (11.0, 2.1, [True, False])],
)
def test_the_bars_compare_with_both_layouts(paged_full, paged_short, holds):
    bars = make_report(paged_full, paged_short)["bars"]
    assert [bar["holds"] for bar in bars] == [True, True, *holds, True, True]
    for (full, short), dense in zip((bars[:2], bars[2:4]), (20, 10), strict=True):
        assert full["measured"] == pytest.approx(paged_full / dense)
        assert short["measured"] == pytest.approx(dense / paged_short)


def test_the_tables_say_what_was_measured(capsys):
    decode_speed_report.show(make_report(paged_full=13.0))
    shown = capsys.readouterr().out
    assert "1 of 6 bars do not hold" in shown and "1.30x" in shown
    assert "96%" in shown  # attention's share of 13 ms: all but 0.5
    assert "70.00%" in shown and "0.60%" in shown


def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    decode_speed_report.draw(make_report(), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    report = make_report()
    report["memory"] = {"padding": [], "skipped": "no trace", "sharing": report["memory"]["sharing"]}
    decode_speed_report.draw(json.loads(json.dumps(report)), tmp_path / "skipped.svg")


@pytest.mark.parametrize("slowest", [1.0, 1.3, 8.0, 5000.0])
def test_logarithmic_axes_have_several_plain_numbers(monkeypatch, tmp_path, slowest):
    """However far the fastest and the slowest are apart."""
    figures = pytest.importorskip("matplotlib.figure")
    saved, report = [], make_report()
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    for nth, record in enumerate(report["records"]):
        record["median_us"] = 2500.0 * slowest ** (nth / (len(report["records"]) - 1))
    decode_speed_report.draw(report, tmp_path / "speed.png")
    (figure,) = saved
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) if "log" in axis.get_scale()]
    assert len(axes) == 6
    for axis in axes:
        ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        labels = {place: label.get_text() for place, label in ticks}
        low, high = sorted(axis.get_view_interval())
        assert sum(low <= place <= high for place in labels) >= 3
        assert all(float(text.replace(",", "")) == pytest.approx(place) for place, text in labels.items())
        assert len(set(labels.values())) == len(labels)


@pytest.mark.parametrize("low", [1e-5, 0.3, 1.0, 9.5, 999.0])
@pytest.mark.parametrize("ratio", [1.001, 1.03, 1.5, 2.0, 7.0, 60.0, 1e4, 1e30])
def test_ticks_are_found_on_axes_of_any_length(low, ratio):
    ticks = log_axes.log_ticks(low, low * ratio)
    assert 2 <= len(ticks) <= log_axes.MOST and low <= ticks[0] and ticks[-1] <= low * ratio
    assert ticks == sorted(set(ticks))


def test_the_command_reports_what_it_measured(monkeypatch, capsys, tmp_path, decoder):
    """All cases, or with `--quick` those that have a bar."""
    pytest.importorskip("matplotlib")
    report, measured = make_report(), []

    def measure(case, *arguments):
        measured.append(case)
        return [record for record in report["records"] if record["case"] == case._asdict()]

    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: decoder)
    monkeypatch.setattr(decode_speed, "make_contexts", lambda decoder: None)
    monkeypatch.setattr(decode_speed, "memory_report", lambda folder: report["memory"])
    monkeypatch.setattr(decode_speed, "measure", measure)
    assert decode_speed.main(["--quick", "--json"]) == 0
    assert [case.name for case in measured] == [decode_speed.FULL.name, decode_speed.SHORT.name]
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in ("bars", "memory")} == {
        name: report[name] for name in ("bars", "memory")
    }
    assert set(report) < set(printed)
    assert decode_speed.main(["--picture", str(tmp_path / "speed.png")]) == 0
    cases = (*decode_speed.FILLS, decode_speed.UNEVEN, *decode_speed.BATCHES, *decode_speed.TABLES)
    assert measured[4:] == [*cases]
    assert "0 of 6 bars do not hold" in capsys.readouterr().out and (tmp_path / "speed.png").exists()
