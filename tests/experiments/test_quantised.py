"""The study of quantised caches: its bytes, losses and roundings are right, its verdicts can fail."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import quantised
from experiments.common import byte_model, corpus, quality
from experiments.decode_speed.sides import Case
from experiments.quantised import GROUP, ROTATED, STORAGES, Rounding
from tests.experiments import tiny

TINY = tiny.config()
LENGTH = 21


@pytest.fixture(scope="module")
def windows():
    return quality.held_out_windows(2, 1000, LENGTH + 1)


def test_the_windows_are_pieces_of_held_out_files(windows):
    files = [*corpus.held_out_files().values()]
    assert windows.shape == (2, LENGTH + 1) and windows.dtype == np.int32
    for window, file in zip(windows, files, strict=False):
        assert bytes(window.tolist()) == file[1000 : 1000 + LENGTH + 1]


def test_bytes_of_a_token_count_numbers_scales_and_offsets():
    per_vector = dict(float32=32, bfloat16=16, int8=8 + 6, fp8=8 + 4, int4=4 + 6) | {ROTATED: 10}
    vectors = 2 * TINY.num_kv_heads * TINY.num_layers
    found = {storage.name: quantised.token_bytes(TINY, storage) for storage in STORAGES}
    assert found == {name: num_bytes * vectors for name, num_bytes in per_vector.items()}


@pytest.mark.slow
def test_storages_and_roundings_are_compared_with_the_exact_model(decoder, windows):
    found = quantised.measure_quality(decoder, windows)
    exact, bfloat16, *few = found["storages"]
    assert exact["kl"] == exact["bits_added"] == 0 and exact["of_each"] == [0, 0]
    assert 0 < bfloat16["kl"] < few[0]["kl"] < min(record["kl"] for record in few[1:]) < 0.1
    assert [r["rows_in_bytes_of_bfloat16"] for r in found["storages"]][:3] == [0.5, 1, 16 / 14]
    assert all(record["kl"] > 0 for record in found["roundings"])
    assert 7.5 < found["bits_per_byte"] < 8.5  # it knows nothing
    # A layer's rounded keys and values give what the cache of that format does.
    int4 = few[2]["kl"]
    assert found["roundings"][0]["kl"] == pytest.approx(int4, rel=0.2)


@pytest.mark.slow
def test_without_rounding_dense_attention_is_the_cache(decoder, windows):
    exact = quantised.stored_log_p(decoder, windows, STORAGES[0])
    as_it_is = quantised.rounded_log_p(decoder, windows, Rounding(4, "as they are", "as they are"))
    np.testing.assert_allclose(as_it_is, exact, atol=2e-5)


@pytest.mark.parametrize("most", [15, 3])
def test_numbers_are_rounded_to_steps_of_their_own_vector_or_channel(most):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, GROUP * 2 + 3, 3, 8)), jnp.float32)
    by_token = np.asarray(quantised.per_token(x, jnp.int32(most)))
    by_channel = np.asarray(quantised.per_channel(x, jnp.int32(most)))
    low, high = np.asarray(x.min(-1, keepdims=True)), np.asarray(x.max(-1, keepdims=True))
    assert (np.abs(by_token - x) <= (high - low) / most * 0.501).all() and (by_token != x).any()
    assert max(len(np.unique(vector.round(5))) for vector in by_token.reshape(-1, 8)) <= min(8, most + 1)
    for start in (0, GROUP):
        group, found = (np.asarray(y[:, start : start + GROUP]) for y in (x, by_channel))
        step = (group.max(1, keepdims=True) - group.min(1, keepdims=True)) / most
        assert (np.abs(found - group) <= step * 0.501).all() and (found != group).any()
        np.testing.assert_allclose(found.min(1), group.min(1), atol=1e-6)
    np.testing.assert_array_equal(by_channel[:, 2 * GROUP :], x[:, 2 * GROUP :])  # fills no group


def test_losses_are_compared_in_bits_and_nats():
    windows = np.array([[0, 1, 0], [0, 0, 1]])
    exact = np.log(np.array([[[0.5, 0.5], [0.25, 0.75]]] * 2, np.float32))
    found = np.log(np.array([[[0.5, 0.5], [0.5, 0.5]]] * 2, np.float32))
    compared = quantised.compared(found, exact, windows)
    assert compared["of_each"] == pytest.approx([-0.5, math.log2(1.5) / 2])
    assert compared["bits_added"] == pytest.approx(np.mean(compared["of_each"]))
    divergence = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert compared["kl"] == pytest.approx(divergence / 2)
    assert quality.bits(found, windows[:, 1:]).mean() == pytest.approx(1.0)


@pytest.mark.slow
def test_steps_are_timed_with_every_storage(decoder):
    case = Case("2 rows of 16 tokens", 16, (16, 16))
    records = quantised.measure_steps(decoder, case, num_rounds=2)
    assert [record["side"] for record in records] == [storage.name for storage in STORAGES]
    assert records[0]["times_float32"] == [1, 1, 1]
    for record in records:
        low, median, high = record["times_float32"]
        assert 0 < low <= median <= high and record["num_calls"] == 2


def test_the_command_reports_what_it_measured(monkeypatch, report_of, recorded, decoder):
    record = recorded("quantised")
    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: decoder)
    monkeypatch.setattr(quantised, "measure_quality", lambda decoder, windows: record)
    monkeypatch.setattr(quantised, "measure_steps", lambda decoder: record["steps"])
    found = report_of(quantised)
    assert [bar["holds"] for bar in found["bars"]] == [True] * 8 and found["head_dim"] == TINY.head_dim
