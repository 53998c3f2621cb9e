"""The study of compression: what it scores, what its bars say, and a run of a tiny model."""

import types

import numpy as np
import pytest
from flax import nnx

from experiments import compression
from experiments.common import byte_model
from models.decoder import Decoder
from tests.experiments import tiny

TINY = tiny.config(use_qk_norm=False)


def report(snapkv, chance, blocks):
    records = [
        {"scorer": name, "share": 0.125, "bits_added": bits, "blocks": blocks}
        for name, bits in (("snapkv", snapkv), ("random", chance))
    ]
    return {"num_rows": 2, "continuation": {"records": records}}


def test_bars_can_fail():
    found = [
        [bar["holds"] for bar in compression.bars_of(report(*figures))]
        for figures in ((0.02, 0.07, [12, 12]), (0.031, 0.07, [12, 13]), (-0.01, 0.003, [12]))
    ]
    assert found == [[True, True, True], [False, False, False], [True, True, True]]


@pytest.mark.slow
def test_a_study_of_a_tiny_model(monkeypatch, tmp_path, capsys, report_of):
    """Everything kept adds nothing; blocks are those of the tokens kept; tables and picture are drawn."""
    for name, value in (("NUM_FILES", 2), ("PROMPT", 96), ("REST", 16), ("COPIED", 16), ("WINDOW", 8)):
        monkeypatch.setattr(compression, name, value)
    decoder = Decoder(TINY, rngs=nnx.Rngs(0))
    monkeypatch.setattr(byte_model.checkpoint, "load", lambda *_, **__: decoder)
    # Examples in docstrings may have registered others.
    own = tuple(name for name in compression.token_scorers.names if name != "longest values")
    monkeypatch.setattr(compression, "token_scorers", types.SimpleNamespace(names=own))
    picture = tmp_path / "figure.png"
    found = report_of(compression, "--picture", picture)
    compression.show(found)
    assert "96 bytes read, 16 scored" in capsys.readouterr().out and picture.stat().st_size > 10_000
    records = found["continuation"]["records"]
    assert {record["scorer"] for record in records} == {*compression.names()}
    for record in records:
        if record["scorer"] != compression.PYRAMID:
            assert record["blocks"] == [2 * -(-round(96 * record["share"]) // 16)] * 2
    windows = compression.quality.held_out_windows(2, 2000, 96 + 16 + 1)
    study = compression.Study(decoder, windows[:, :96], windows[:, 96:-1], windows[:, 97:])
    same = study.bits(study.compressed("snapkv", 1.0), "all")
    np.testing.assert_array_equal(same, study.bits(study.cache, "all"))
