"""The model in the repository is what its record says: trained as `experiments.train` trains, and as good."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

from experiments.common import corpus
from experiments.train import __main__ as train
from experiments.train import report
from experiments.train.bits_per_byte import bits_of_files
from experiments.train.training import Recipe
from models import checkpoint


@pytest.mark.slow
def test_the_stored_model_is_what_its_record_says():
    folder = corpus.MODEL
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 10e6
    record = json.loads((folder / report.RECORD).read_text())
    decoder = checkpoint.load(folder, dtype=jnp.float32)
    stored = dataclasses.replace(decoder.config, matmul_dtype=train.CONFIG.matmul_dtype)
    assert stored == train.CONFIG
    assert {leaf.dtype for leaf in jax.tree.leaves(checkpoint.load(folder))} == {jnp.dtype(jnp.bfloat16)}
    assert checkpoint.load_tokenizer(folder).stop_tokens == (corpus.END,)
    settings = dataclasses.asdict(Recipe()) | {"corpus": record["settings"]["corpus"]}
    assert settings.items() <= record["settings"].items()
    assert record["minutes"] <= 60
    assert len(record["loss"]) == math.ceil(Recipe().steps / record["loss_every"])
    held_out = record["held_out"]
    assert [row["name"] for row in held_out["files"]] == list(corpus.HELD_OUT)
    assert held_out["bits_per_byte"]["model"] <= report.BAR
    mean = sum(row["bits_per_byte"]["model"] * row["num_bytes"] for row in held_out["files"])
    assert mean / held_out["num_bytes"] == pytest.approx(held_out["bits_per_byte"]["model"], abs=1e-3)

    [row] = [row for row in held_out["files"] if row["name"] == "dbm/__init__.py"]
    file = corpus.held_out_files()[row["name"]]
    bits = float(bits_of_files(decoder, [file])[0].mean())
    assert bits < row["bits_per_byte"]["lzma 9"]
    if len(file) == row["num_bytes"]:  # another Python may have another version of the file
        assert bits == pytest.approx(row["bits_per_byte"]["model"], abs=0.01)
