"""The training of the small model: resumed bit for bit, measured on each byte once, recorded as it is."""

import dataclasses
import gc
import json
import math
import re
import shutil
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
from flax import nnx

import kvcache_jax as kv
from experiments.common import corpus
from experiments.train import __main__ as train
from experiments.train.bits_per_byte import bits_of_files
from experiments.train.checkpoints import TrainingError
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


def leaves_of(trained):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trained.decoder)]


def interrupt_at(step):
    return lambda num_done, bits: num_done == step


# --- the loop and its state ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(RECIPE, TINY, DATA, tmp_path_factory.mktemp("state"))


def test_the_loss_falls(whole):
    assert whole.bits.shape == (RECIPE.steps,) and whole.seconds > 0
    assert abs(whole.bits[0] - 8) < 0.2  # bits, not nats: a new model predicts evenly
    assert whole.bits[-1] < whole.bits[0] - 0.5
    assert {leaf.dtype for leaf in leaves_of(whole)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("step", [2, 7])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(tmp_path, whole, step):
    with pytest.raises(KeyboardInterrupt):
        run(RECIPE, TINY, DATA, tmp_path, on_step=interrupt_at(step))
    first = []
    resumed = run(
        RECIPE, TINY, DATA, tmp_path, is_resumed=True, on_step=lambda done, bits: first.append(done)
    )
    assert first[0] == step + 1
    np.testing.assert_array_equal(resumed.bits, whole.bits)
    for got, want in zip(leaves_of(resumed), leaves_of(whole), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_run_that_was_killed_continues_from_its_last_state(tmp_path, whole):
    def die(num_done, bits):
        if num_done == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(RECIPE, TINY, DATA, tmp_path, save_every=2, on_step=die)
    done = []
    resumed = run(RECIPE, TINY, DATA, tmp_path, is_resumed=True, on_step=lambda n, bits: done.append(n))
    assert done == [5, 6, 7, 8]
    np.testing.assert_array_equal(resumed.bits, whole.bits)
    again = run(RECIPE, TINY, DATA, tmp_path, is_resumed=True)  # all steps are done: nothing to do
    np.testing.assert_array_equal(leaves_of(again)[0], leaves_of(whole)[0])
    assert again.seconds == resumed.seconds


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Orbax's, of a state cut short
def test_only_the_same_run_is_resumed_and_none_is_mixed_up(tmp_path):
    with pytest.raises(TrainingError, match="has no state to resume from: start without --resume"):
        run(RECIPE, TINY, DATA, tmp_path, is_resumed=True)
    with pytest.raises(KeyboardInterrupt):
        run(RECIPE, TINY, DATA, tmp_path, on_step=interrupt_at(1))
    with pytest.raises(TrainingError, match="holds the state of a run at step 1, expected none: .* --resume"):
        run(RECIPE, TINY, DATA, tmp_path)
    others = {
        "seed = 0, got 5": (dataclasses.replace(RECIPE, seed=5), TINY, DATA),
        "matmul_dtype = None, got bfloat16": (
            RECIPE,
            dataclasses.replace(TINY, matmul_dtype=jnp.bfloat16),
            DATA,
        ),
        "corpus = .*, got ": (RECIPE, TINY, DATA[1:]),
    }
    for message, (recipe, config, data) in others.items():
        with pytest.raises(TrainingError, match=f"has {message}.*: resume with the settings"):
            run(recipe, config, data, tmp_path, is_resumed=True)
    damaged = tmp_path / "damaged"
    for item, pattern, damage in (
        ("state", "d/*", lambda data: b"x"),
        ("state", "d/*", lambda data: data[:-1000]),
        ("settings", "metadata", lambda data: b"{"),
        ("settings", "metadata", lambda data: b"[1]"),
    ):
        shutil.copytree(tmp_path / "1", damaged / "1")
        for path in damaged.rglob(f"{item}/{pattern}"):
            path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(TrainingError, match=f"the {item} in .*, step 1, cannot be read .*: delete the"):
            run(RECIPE, TINY, DATA, damaged, is_resumed=True)
        shutil.rmtree(damaged)
    torn = mock.patch.object(ocp.CheckpointManager, "restore", side_effect=Exception("torn\nin two"))
    with torn, pytest.raises(TrainingError, match=r"step 1, cannot be read \(torn\): delete the folder"):
        run(RECIPE, TINY, DATA, tmp_path, is_resumed=True)
    gc.collect()  # what Orbax left unfinished complains as it goes: here, and not within another test


def test_training_refuses_too_little_text_and_a_loss_that_is_no_number(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match="there are 16 bytes to train on, expected over 16"):
        run(RECIPE, TINY, DATA[:16], tmp_path / "a")
    windows = corpus.windows

    def without_a_loss_at_step_1(data, seed, step, *sizes):
        return windows(data, seed, step, *sizes) + (TINY.vocab_size if step == 1 else 0)

    monkeypatch.setattr(corpus, "windows", without_a_loss_at_step_1)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1: lower the learning rates"):
        run(RECIPE, TINY, DATA, tmp_path / "b")


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


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as error:
        train.main([str(argument) for argument in arguments])
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    assert captured.err.startswith("python -m experiments.train: ")
    return captured.err.removeprefix("python -m experiments.train: ").strip()


def test_the_command_trains_evaluates_and_records(small, tmp_path, capsys):
    out, state = tmp_path / "model", tmp_path / "state"
    arguments = ["--steps", "3", "--out", str(out), "--state", str(state), "--json"]
    assert train.main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "training.json").read_text())
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "training.json",
        "loss.png",
    }
    assert record["settings"]["steps"] == 3 and record["num_bytes"] == 3 * len(DATA)
    assert len(record["loss"]) == 1 and 7 < record["loss"][0] < 8.2
    assert train.main(arguments) == 0  # the state went with the run, nothing is in the way
    capsys.readouterr()
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


def test_control_c_leaves_a_state_to_resume_from(small, tmp_path, capsys, monkeypatch):
    arguments = ["--steps", "3", "--out", str(tmp_path / "model"), "--state", str(tmp_path / "state")]
    windows = corpus.windows

    def interrupt_second_step(data, seed, step, *sizes):
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return windows(data, seed, step, *sizes)

    monkeypatch.setattr(corpus, "windows", interrupt_second_step)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train.main(arguments)
    assert signal.getsignal(signal.SIGINT) is handler
    assert f"stopped: --resume continues from {tmp_path / 'state'}" in capsys.readouterr().err
    message = refusal(capsys, *arguments)
    assert "holds the state of a run at step 2, expected none" in message
    assert "has seed = 0, got 1: resume with" in refusal(capsys, *arguments, "--seed", 1, "--resume")
    assert train.main([*arguments, "--resume"]) == 0


def test_what_cannot_be_written_is_one_sentence(small, tmp_path, capsys, monkeypatch):
    """A full disk, which orbax and safetensors report each in its own way."""
    arguments = ["--steps", "3", "--out", str(tmp_path / "model"), "--state", str(tmp_path / "state")]

    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nand more")

    def failure():
        with pytest.raises(SystemExit) as stopped:
            train.main(arguments)
        shown = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 1 and all(line.startswith("training: ") for line in shown[:-1])
        return shown[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        assert "cannot be saved in" in (message := failure())
        assert "(RESOURCE_EXHAUSTED: No space left on device): make room" in message

    def no_space(*_, **__):
        raise safetensors.SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", no_space)
        assert "model.safetensors cannot be written: I/O error" in (message := failure())
        assert message.endswith(f"--resume tries again from {tmp_path / 'state'}")
    assert train.main([*arguments, "--resume"]) == 0


def test_bad_input_is_one_sentence(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert (
        refusal(capsys, "--steps", 0) == "argument --steps: got '0', expected an integer from 1 to 10000000"
    )
    assert "expected an integer from 0 to 9223372036854775807" in refusal(capsys, "--seed", 2**63)
    assert "invalid choice: 'int8'" in refusal(capsys, "--matmul-dtype", "int8")
    assert refusal(capsys, "--evaluate", "--seed", 0).startswith("got --evaluate and --seed, which is of")
    for option, folder in (("--out", file), ("--out", file / "model"), ("--state", file)):
        message = refusal(capsys, "--out", tmp_path / "model", option, folder)
        assert message.startswith(f"got {option} {folder}, expected a folder to write to: ")
    assert "has no state to resume from" in refusal(
        capsys, "--resume", "--state", tmp_path, "--out", tmp_path
    )
    missing = tmp_path / "a", tmp_path / "b"
    message = refusal(capsys, "--resume", "--out", missing[0], "--state", missing[1])
    assert message == f"{missing[1]} has no state to resume from: start without --resume"
    assert not any(folder.exists() for folder in missing)
    assert refusal(capsys, "--evaluate", "--out", tmp_path) == f"{tmp_path} has no config.json"
