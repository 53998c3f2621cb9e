"""The study of a text in fixed memory: what each side sees is right, and its verdicts can fail."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from experiments.common import byte_model
from experiments.streaming import __main__ as streaming
from experiments.streaming import report, sides
from experiments.streaming.sides import STEP_LEN, Reading, Side
from models import checkpoint
from models.decoder import Decoder, DecoderConfig, cache_config, forward
from tests.experiments import tiny
from tests.support.dense_reference import dense_attention

TINY = tiny.config()
KEPT = kv.compression.Streaming(window=16, num_sink_tokens=3)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(TINY, rngs=nnx.Rngs(0))


def test_the_text_is_held_out_files_one_behind_the_other():
    files = [*byte_model.corpus.held_out_files().values()]
    text = sides.read_text(len(files[0]) + 5)
    assert bytes(text.tolist()) == b"\0" + files[0] + b"\0" + files[1][:4]
    with pytest.raises(ValueError, match="bytes, expected more than 100000000"):
        sides.read_text(10**8)


@pytest.mark.slow
@pytest.mark.parametrize("first", [3, 20])
def test_a_run_of_queries_sees_sinks_and_window(first):
    rng = np.random.default_rng(0)
    positions = np.concatenate([np.arange(3), np.arange(first, first + 45)]).astype(np.int32)
    whole = [rng.standard_normal((first + 45, heads, 8), np.float32) for heads in (4, 2, 2)]
    found = sides.windowed_attention(*(x[positions] for x in whole), positions, KEPT)
    want = dense_attention(*whole, window=16, num_sink_tokens=3)[0]
    exact = positions < 3 if first == 20 else positions >= 0  # all keys are there
    exact |= positions >= first + 15
    np.testing.assert_allclose(found[exact], np.asarray(want)[positions][exact], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_mask_needs_no_more_of_the_text_before(decoder):
    """Nor does what comes first matter to what is asked for."""
    text = sides.read_text(130)
    whole = sides.masked_bits(decoder, text, KEPT, 0, 130)
    assert whole.shape == (130,) and 7 < whole.mean() < 9
    np.testing.assert_allclose(sides.masked_bits(decoder, text, KEPT, 80, 130), whole[80:], atol=2e-5)


@pytest.mark.slow
def test_sides_read_what_they_hold(decoder):
    """A row that streams reads as the mask says: a step's first token its own window, the others that too."""
    text = sides.read_text(5 * STEP_LEN + 7)
    length = len(text) - 1
    found = streaming.measure(decoder, text, KEPT, window=16, dense_len=70, masked_parts=(0, 9))
    stream, window, dense, moved = found["sides"]
    assert [side["num_read"] for side in found["sides"]] == [length, length, 2 * STEP_LEN, length]
    assert moved["most_blocks"] == stream["most_blocks"] + 1  # the original sinks
    assert found["most_blocks"] == -(-(3 + 16 + STEP_LEN) // 16) + 2 >= stream["most_blocks"]
    assert window["most_blocks"] <= stream["most_blocks"] and dense["most_blocks"] == 4
    assert len(stream["parts"]) == len(found["mask"]) == 10
    assert [i for i, bits in enumerate(found["mask"]) if bits is not None] == [0, 9]
    reading = sides.read(sides.streaming_side(KEPT), decoder, text)
    exact = sides.masked_bits(decoder, text, KEPT, 0, length)
    np.testing.assert_allclose(reading.bits[:16], exact[:16], atol=1e-5)
    # What a step's first token sees was computed with more in sight, unless there is one layer alone.
    one_layer = Decoder(DecoderConfig(**{**vars(TINY), "num_layers": 1}), rngs=nnx.Rngs(0))
    bits = sides.read(sides.streaming_side(KEPT), one_layer, text).bits
    exact = sides.masked_bits(one_layer, text, KEPT, 0, length)
    np.testing.assert_allclose(bits[::STEP_LEN], exact[::STEP_LEN], atol=2e-5)
    assert np.abs(bits - exact)[STEP_LEN:].max() > 1e-3


@pytest.mark.slow
def test_the_small_model_generates_as_the_mask_says():
    """In the memory of 4 + 60 tokens, of which a prompt alone has twice as many, and drawn at random."""
    decoder = checkpoint.load(byte_model.corpus.MODEL, dtype=jnp.float32)
    kept, prompt = kv.compression.Streaming(window=60, num_sink_tokens=4), sides.read_text(130)
    config = cache_config(decoder.config, max_seqs=1, max_seq_len=128, extras=[kv.compression.Dropping()])
    options = dict(
        max_new_tokens=80,
        prefill_len=32,
        sampling=kv.decoding.SamplingParams(temperature=0.8),
        retention=kept,
    )
    [generation] = kv.generate(forward, decoder, [prompt.tolist()], config, **options).generations
    text = np.concatenate([prompt, generation.tokens]).astype(np.int32)
    assert len(text) == 131 + 80
    bits = sides.masked_bits(decoder, text, kept, len(prompt) - 1, len(text) - 1)
    np.testing.assert_allclose(generation.logprobs, -np.log(2) * bits, atol=1e-3)


def test_parts_are_cut_at_what_was_read():
    reading = Reading(np.arange(100, dtype=np.float32), np.arange(4) / 1e3, np.array([1, 2, 3, 3]))
    parts = [(0, 50), (50, 100), (100, 150)]
    record = streaming.record_of(Side("some", 9), reading, parts)
    assert (record["num_read"], record["most_blocks"]) == (100, 3)
    assert [(p["end"], p["bits_per_byte"], p["num_calls"]) for p in record["parts"]] == [
        (50, 24.5, 2),
        (100, 74.5, 3),
    ]
    assert record["parts"][1]["median_us"] == pytest.approx(2000)
    early = streaming.record_of(Side("some", 9), reading, [(0, 200), (200, 400)])
    assert [part["end"] for part in early["parts"]] == [*range(10, 101, 10)]


def made_up(bits=1.0, last_us=1e3, blocks=36):
    def side(name, num_read, bits, last_us=1e3):
        times = dict(p10_us=900.0, p90_us=2e3, num_calls=3)
        parts = [
            dict(
                start=10 * i,
                end=10 * i + 10,
                bits_per_byte=bits,
                median_us=last_us if i == 9 else 1e3,
                **times,
            )
            for i in range(10)
        ]
        return dict(side=name, num_read=num_read, most_blocks=blocks, parts=parts)

    mask = [1.0, None, *[1.02] * 2, *[None] * 6]
    sides = [
        side("4 + 508", 100, bits, last_us),
        side("SlidingWindow(512)", 100, 1.005),
        side("all tokens", 80, 3.0),
        side("4 + 508, sinks move", 100, 1.01),
    ]
    return dict(sides=sides, mask=mask, parts=[(10 * i, 10 * i + 10) for i in range(10)], most_blocks=36)


def test_the_command_reports_what_it_measured(monkeypatch, capsys, tmp_path):
    class Model:
        config = TINY

    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: Model)
    monkeypatch.setattr(streaming, "measure", lambda decoder, text: made_up())
    assert streaming.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # A part of the mask is 2 % away, and the others hold.
    assert [bar["holds"] for bar in found["bars"]] == [False, True, True, True]
    assert [bar["holds"] for bar in streaming.bars_of(made_up(1.016, 1.3e3, 37))] == [
        False,
        False,
        False,
        False,
    ]
    assert streaming.main([]) == 0
    said = capsys.readouterr().out
    assert "1 of 4 bars do not hold" in said and "1.0 (0.9 - 2.0)" in said and "1.0200" in said
    pytest.importorskip("matplotlib")
    report.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
