"""The study of a text in fixed memory: what each side sees is right, and its verdicts can fail."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from experiments import streaming
from experiments.common import byte_model
from experiments.streaming import STEP_LEN, Reading, Side
from models import checkpoint
from models.decoder import Decoder, DecoderConfig, cache_config, forward
from tests.experiments import tiny
from tests.support.dense_reference import dense_attention

TINY = tiny.config()
KEPT = kv.compression.Streaming(window=16, num_sink_tokens=3)


def test_the_text_is_held_out_files_one_behind_the_other():
    files = [*byte_model.corpus.held_out_files().values()]
    text = streaming.read_text(len(files[0]) + 5)
    assert bytes(text.tolist()) == b"\0" + files[0] + b"\0" + files[1][:4]
    with pytest.raises(ValueError, match="bytes, expected more than 100000000"):
        streaming.read_text(10**8)


@pytest.mark.slow
@pytest.mark.parametrize("first", [3, 20])
def test_a_run_of_queries_sees_sinks_and_window(first):
    rng = np.random.default_rng(0)
    positions = np.concatenate([np.arange(3), np.arange(first, first + 45)]).astype(np.int32)
    whole = [rng.standard_normal((first + 45, heads, 8), np.float32) for heads in (4, 2, 2)]
    found = streaming.windowed_attention(*(x[positions] for x in whole), positions, KEPT)
    want = dense_attention(*whole, window=16, num_sink_tokens=3)[0]
    exact = positions < 3 if first == 20 else positions >= 0  # all keys are there
    exact |= positions >= first + 15
    np.testing.assert_allclose(found[exact], np.asarray(want)[positions][exact], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_mask_needs_no_more_of_the_text_before(decoder):
    """Nor does what comes first matter to what is asked for."""
    text = streaming.read_text(130)
    whole = streaming.masked_bits(decoder, text, KEPT, 0, 130)
    assert whole.shape == (130,) and 7 < whole.mean() < 9
    np.testing.assert_allclose(streaming.masked_bits(decoder, text, KEPT, 80, 130), whole[80:], atol=2e-5)


@pytest.mark.slow
def test_sides_read_what_they_hold(decoder):
    """A row that streams reads as the mask says: a step's first token its own window, the others that too."""
    text = streaming.read_text(5 * STEP_LEN + 7)
    length = len(text) - 1
    found = streaming.measure(decoder, text, KEPT, window=16, dense_len=70, masked_parts=(0, 9))
    stream, window, dense, moved = found["sides"]
    assert [side["num_read"] for side in found["sides"]] == [length, length, 2 * STEP_LEN, length]
    assert moved["most_blocks"] == stream["most_blocks"] + 1  # the original sinks
    assert found["most_blocks"] == -(-(3 + 16 + STEP_LEN) // 16) + 2 >= stream["most_blocks"]
    assert window["most_blocks"] <= stream["most_blocks"] and dense["most_blocks"] == 4
    assert len(stream["parts"]) == len(found["mask"]) == 10
    assert [i for i, bits in enumerate(found["mask"]) if bits is not None] == [0, 9]
    reading = streaming.read(streaming.streaming_side(KEPT), decoder, text)
    exact = streaming.masked_bits(decoder, text, KEPT, 0, length)
    np.testing.assert_allclose(reading.bits[:16], exact[:16], atol=1e-5)
    # What a step's first token sees was computed with more in sight, unless there is one layer alone.
    one_layer = Decoder(DecoderConfig(**{**vars(TINY), "num_layers": 1}), rngs=nnx.Rngs(0))
    bits = streaming.read(streaming.streaming_side(KEPT), one_layer, text).bits
    exact = streaming.masked_bits(one_layer, text, KEPT, 0, length)
    np.testing.assert_allclose(bits[::STEP_LEN], exact[::STEP_LEN], atol=2e-5)
    assert np.abs(bits - exact)[STEP_LEN:].max() > 1e-3


@pytest.mark.slow
def test_the_small_model_generates_as_the_mask_says():
    """In the memory of 4 + 60 tokens, of which a prompt alone has twice as many, and drawn at random."""
    decoder = checkpoint.load(byte_model.corpus.MODEL, dtype=jnp.float32)
    kept, prompt = kv.compression.Streaming(window=60, num_sink_tokens=4), streaming.read_text(130)
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
    bits = streaming.masked_bits(decoder, text, kept, len(prompt) - 1, len(text) - 1)
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


def test_the_command_reports_what_it_measured(monkeypatch, report_of, recorded, decoder):
    record = recorded("streaming")
    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: decoder)
    monkeypatch.setattr(streaming, "measure", lambda decoder, text: record)
    assert report_of(streaming)["bars"] == record["bars"]
