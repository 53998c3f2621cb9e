"""The training of the small model: measured on each byte once, recorded as it is."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx

import kvcache_jax as kv
from experiments.common import corpus
from experiments.train import __main__ as train
from experiments.train.bits_per_byte import bits_of_files
from experiments.train.training import Recipe
from experiments.train.training import train as run
from models import checkpoint
from models.decoder import Decoder, cache_config, forward
from tests.experiments import tiny

pytestmark = pytest.mark.slow

TINY = tiny.config(**tiny.ONE_LAYER, max_seq_len=16)
RECIPE = Recipe(steps=8, tokens_per_step=64, short_length=8, long_length=16, long_share=0.25, warmup_steps=2)
DATA = np.frombuffer(b"def f(x):\n    return x\n" * 50, np.uint8)


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    """Muon of optax mixes int32 and float32."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_loss_falls():
    told = []
    decoder, bits = run(RECIPE, TINY, DATA, lambda num_done, bits: told.append((num_done, len(bits))))
    assert told == [(n, n) for n in range(1, RECIPE.steps + 1)] and bits.shape == (RECIPE.steps,)
    assert abs(bits[0] - 8) < 0.2  # bits, not nats: a new model predicts evenly
    assert bits[-1] < bits[0] - 0.5
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder)} == {np.dtype(np.float32)}


def test_training_refuses_too_little_text_and_a_loss_that_is_no_number(monkeypatch):
    with pytest.raises(ValueError, match="there are 16 bytes to train on, expected over 16"):
        run(RECIPE, TINY, DATA[:16])
    windows = corpus.windows

    def without_a_loss_at_step_1(data, seed, step, *sizes):
        return windows(data, seed, step, *sizes) + (TINY.vocab_size if step == 1 else 0)

    monkeypatch.setattr(corpus, "windows", without_a_loss_at_step_1)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1: lower the learning rates"):
        run(RECIPE, TINY, DATA)


# --- the text ---


def test_windows_are_a_function_of_seed_and_step():
    data = np.arange(100, dtype=np.uint8)
    found = corpus.windows(data, 3, 7, 50, 9)
    assert found.shape == (50, 10) and found.dtype == np.int32
    np.testing.assert_array_equal(found, found[:, :1] + np.arange(10))
    assert found.min() >= 0 and found.max() <= 99
    np.testing.assert_array_equal(found, corpus.windows(data, 3, 7, 50, 9))
    for other in (corpus.windows(data, 3, 8, 50, 9), corpus.windows(data, 4, 7, 50, 9)):
        assert (found != other).any()
    ends = {int(row[-1]) for step in range(40) for row in corpus.windows(data, 0, step, 50, 9)}
    assert ends == set(range(9, 100)), "some byte is never predicted"


def test_held_out_files_are_not_trained_on():
    names = corpus.training_files()
    assert len(names) > 300 and len(set(names)) == len(names)
    assert not set(names) & set(corpus.HELD_OUT)
    assert not [name for name in names if name.startswith(("test/", "site-packages/", "encodings/"))]
    held_out = corpus.held_out_files()
    assert set(held_out) <= set(corpus.HELD_OUT) and len(held_out) >= 15
    data = corpus.training_bytes()
    assert data[0] == corpus.END and len(data) == sum(
        1 + (corpus.folder() / name).stat().st_size for name in names
    )
    for name, file in held_out.items():
        middle = len(file) // 2
        assert file[middle : middle + 1000] not in data.tobytes(), name


def test_share_seen_counts_places():
    assert corpus.share_seen([b"abcabc", b"ab"], b"xxabc", length=3) == 2 / 4
    assert corpus.share_seen([b"abcd"], b"bcda", length=2) == 2 / 3


# --- bits per byte ---


@jax.jit
def last_bits(decoder, tokens, num_tokens):
    """Bits of each byte after `num_tokens` tokens of a row alone in its cache."""
    sizes = dict(max_seqs=1, max_seq_len=TINY.max_seq_len, block_size=4)
    cache, _ = kv.allocate(kv.init(cache_config(TINY, **sizes)), [0], [TINY.max_seq_len])
    cache, step = kv.extend(cache, num_tokens[None], max_new=len(tokens), tokens=tokens[None])
    logits, _ = forward(decoder, tokens[None], cache, step)
    return -jax.nn.log_softmax(logits[0, num_tokens - 1]) / math.log(2)


def test_each_byte_counts_once_with_the_context_of_its_window():
    decoder = jax.tree.map(lambda leaf: 3 * leaf, Decoder(TINY, rngs=nnx.Rngs(1)))
    rng = np.random.default_rng(0)
    files = [rng.integers(1, 256, size).astype(np.uint8).tobytes() for size in (16, 1, 17, 24, 25, 0, 47)]
    found = bits_of_files(decoder, files)
    assert [len(bits) for bits in found] == [len(file) for file in files]
    for file, bits in zip(files, found, strict=True):
        text = bytes([corpus.END]) + file
        for i, got in enumerate(bits):
            # The first of the windows, 8 apart, that reaches the byte; NaN, a byte that was left out, fails.
            start = next(start for start in range(0, 1000, 8) if i < start + 16)
            context = np.frombuffer(text[start : i + 1], np.uint8).astype(np.int32)
            assert i < 16 or len(context) > 8
            padded = jnp.asarray(np.pad(context, (0, 16 - len(context))))
            want = last_bits(decoder, padded, jnp.int32(len(context)))[file[i]]
            assert abs(got - want) < 1e-3, (len(file), i)
    spread = np.concatenate(found)
    assert spread.std() > 0.5, "a model that predicts evenly hides mistakes"


# --- the command ---


@pytest.fixture
def small(monkeypatch):
    """The command on a tiny model and a short text."""
    monkeypatch.setattr(train, "CONFIG", TINY)
    monkeypatch.setattr(corpus, "training_bytes", lambda: np.tile(DATA, 3))
    files = {"hmac.py": b"def g(y):\n    return y\n" * 3, "timeit.py": b"import x\n"}
    monkeypatch.setattr(corpus, "held_out_files", lambda: files)
    return files


def test_the_command_trains_evaluates_and_records(small, tmp_path, capsys):
    out = tmp_path / "model"
    arguments = ["--steps", "3", "--out", str(out), "--json"]
    assert train.main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert json.loads((out / "training.json").read_text()).items() <= record.items()
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "training.json"}
    assert record["settings"]["steps"] == 3 and record["num_bytes"] == 3 * len(DATA)
    assert len(record["loss"]) == 1 and 7 < record["loss"][0] < 8.2
    assert train.main(["--evaluate", "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    assert re.search(r"^evaluating: 1 of (\d+)\n(.*\n)*evaluating: \1 of \1\n$", captured.err)
    held_out = json.loads(captured.out)
    assert held_out["bits_per_byte"] == record["held_out"]["bits_per_byte"]
    decoder = checkpoint.load(out, dtype=jnp.float32)
    bits = bits_of_files(decoder, list(small.values()))
    assert held_out["bits_per_byte"]["model"] == round(float(np.concatenate(bits).mean()), 4)
    assert [row["num_bytes"] for row in held_out["files"]] == [len(file) for file in small.values()]
    assert held_out["missing_files"] == sorted(set(corpus.HELD_OUT) - set(small))
    stream = b"".join(small.values())
    assert held_out["bits_per_byte"] | corpus.compressed_bits(stream) == pytest.approx(
        held_out["bits_per_byte"], abs=1e-4
    )
    assert train.main(["--evaluate", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "hmac.py" in shown and "does not hold" in shown


def test_what_cannot_be_written_is_one_sentence(small, tmp_path, capsys, monkeypatch):
    def no_space(*_, **__):
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", no_space)
    with pytest.raises(SystemExit) as stopped:
        train.main(["--steps", "1", "--out", str(tmp_path / "model")])
    *shown, said = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and all(line.startswith("training: ") for line in shown)
    assert "model.safetensors cannot be written: I/O error" in said


def test_bad_input_is_one_sentence(tmp_path, refusal):
    file = tmp_path / "file"
    file.touch()
    for arguments, said in [
        (["--steps", 0], "argument --steps: got '0', expected an integer from 1 to 10000000\n"),
        (["--seed", 2**63], "expected an integer from 0 to 9223372036854775807"),
        (["--matmul-dtype", "int8"], "invalid choice: 'int8'"),
        (["--evaluate", "--seed", 0], "train: got --evaluate and --seed, which is of"),
        (["--out", file], f"train: got --out {file}, expected a folder to write to: "),
        (["--out", file / "model"], f"train: got --out {file / 'model'}, expected a folder to write to: "),
        (["--evaluate", "--out", tmp_path], f"train: {tmp_path} has no config.json\n"),
    ]:
        assert said in refusal(train, *arguments)
