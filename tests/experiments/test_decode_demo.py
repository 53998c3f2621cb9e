"""`python -m experiments.decode`: what it prints is what was decoded, and what is wrong is one sentence."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

pytest.importorskip("flax")
pytest.importorskip("rich")

from flax import nnx
from safetensors.numpy import load_file, save_file

import kvcache_jax as kv
from experiments.decode import __main__ as decode
from experiments.decode import options as decode_options
from experiments.decode import view
from models import checkpoint
from models.decoder import Decoder, DecoderConfig, cache_config, forward
from models.tokenizer import ByteTokenizer, FileTokenizer
from tests.models import driver
from tests.support.trained_tokenizer import byte_level_bpe

SIZES = dict(
    vocab_size=256,
    hidden_size=16,
    mlp_size=16,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_seq_len=96,
    tie_embeddings=True,
)
PROMPTS = ["def naïve(x):\n    return", "for i in 日本:"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of random models, by name."""
    folder = tmp_path_factory.mktemp("models")
    options = {"plain": {}, "window": {"windows": (20,)}, "wide": {"vocab_size": 300}}
    for seed, (name, changed) in enumerate(options.items()):
        decoder = Decoder(DecoderConfig(**{**SIZES, **changed}), rngs=nnx.Rngs(seed))
        # Random logits are nearly flat: larger ones, so that a difference changes tokens.
        decoder.norm.scale[...] *= 20
        checkpoint.save(folder / name, decoder, ByteTokenizer((0,)))
    return folder


def run(capsys, *arguments):
    assert decode.main([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def run_json(capsys, *arguments):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    output = run(capsys, *arguments, "--json")
    assert output.endswith("\n") and output.count("\n") == 1
    return json.loads(output, parse_constant=refuse)


@jax.jit
def all_logprobs(decoder, tokens):
    """f32[T, vocab] after each token of a row alone in an empty cache, in one call."""
    width = len(tokens)
    sizes = dict(max_seqs=1, max_seq_len=width)
    cache, _ = kv.allocate(kv.init(cache_config(decoder.config, **sizes)), [0], [width])
    cache, step = kv.extend(cache, [width], max_new=width)
    logits, _ = forward(decoder, tokens[None], cache, step)
    return jax.nn.log_softmax(logits[0])


def check_sample(folder, prompt, sample, is_greedy=False, atol=1e-3):
    """A continuation has the log-probabilities of the model, which finds each token of a greedy one best."""
    known = list(prompt.encode())
    tokens = np.zeros(SIZES["max_seq_len"], np.int32)
    tokens[: len(known) + len(sample["tokens"])] = known + sample["tokens"]
    logprobs = np.asarray(all_logprobs(checkpoint.load(folder, dtype=jnp.float32), tokens))
    logprobs = logprobs[len(known) - 1 :][: len(sample["tokens"])]
    chosen = logprobs[np.arange(len(logprobs)), sample["tokens"]]
    np.testing.assert_allclose(sample["logprobs"], chosen, atol=atol)
    if is_greedy:
        np.testing.assert_array_equal(sample["tokens"], logprobs.argmax(axis=1))
    return logprobs


SAMPLING = (*PROMPTS, "--samples", 2, "--max-new", 12, "--seed", 3, "--block-size", 4, "--rows", 2)


@pytest.mark.slow
def test_json_holds_what_was_decoded(capsys, folder):
    arguments = (*SAMPLING, "--checkpoint", folder / "plain")
    result = run_json(capsys, *arguments)
    assert result["prompts"] == run_json(capsys, *arguments)["prompts"]
    for prompt, expected in zip(result["prompts"], PROMPTS, strict=True):
        tokens = list(expected.encode())
        assert (prompt["prompt"], prompt["num_prompt_tokens"]) == (expected, len(tokens))
        first, second = prompt["samples"]
        assert first["tokens"] != second["tokens"]
        for sample in prompt["samples"]:
            assert sample["finish_reason"] == "length" and len(sample["tokens"]) == 12
            assert sample["text"] == bytes(sample["tokens"]).decode(errors="replace")
            check_sample(folder / "plain", expected, sample)
    figures = result["figures"]
    assert figures["num_prompt_tokens"] == sum(len(prompt.encode()) for prompt in PROMPTS)
    assert (figures["num_new_tokens"], figures["num_decoded_tokens"]) == (48, 44)
    assert (figures["num_forks"], figures["num_steps"]) == (2, 22)  # one prompt after the other: two rows
    # 25 tokens in blocks of 4: six stay shared, and each sample has its own from the seventh to the ninth: of
    # 37 tokens the last is never stored. The other prompt's 16 tokens fill blocks: nothing to copy there.
    assert figures["peak_blocks_used"] == figures["num_blocks_total"] == 6 + 2 * 3
    assert (figures["peak_blocks_saved"], figures["num_copies"]) == (7, 1)
    assert figures["peak_cache_bytes"] == figures["cache_bytes"] == 12 * 4 * 2 * 8 * 4
    assert figures["prefill_tokens_per_second"] > 0 and figures["decode_tokens_per_second"] > 0
    assert result["settings"]["rows"] == 2 and result["settings"]["dtype"] == "float32"


@pytest.mark.slow
def test_draws_are_filtered_and_stopped(capsys, folder):
    """Each token is among those that the filters leave, and a stop text changes none before it."""
    options = *SAMPLING, "--checkpoint", folder / "plain", "--temperature", 1.5, "--top-k", 6, "--top-p", 0.8
    result, left = run_json(capsys, *options), []
    for prompt in result["prompts"]:
        for sample in prompt["samples"]:
            logprobs = check_sample(folder / "plain", prompt["prompt"], sample)
            scaled = np.exp(logprobs / 1.5)
            order = np.argsort(-scaled, axis=1)[:, :6]
            best = np.take_along_axis(scaled, order, axis=1)
            best /= best.sum(axis=1, keepdims=True)
            kept = np.cumsum(best, axis=1) - best < 0.8
            left += kept.sum(axis=1).tolist()
            for token, ids, is_kept in zip(sample["tokens"], order, kept, strict=True):
                assert token in ids[is_kept]
    assert min(left) < max(left) < 6  # each step leaves fewer than `--top-k`, and they differ
    stop = result["prompts"][0]["samples"][0]["text"][4:6]
    stopped = run_json(capsys, *options, "--stop", stop)
    for prompt, whole in zip(stopped["prompts"], result["prompts"], strict=True):
        for sample, longer in zip(prompt["samples"], whole["samples"], strict=True):
            assert longer["tokens"][: len(sample["tokens"])] == sample["tokens"]
            assert (sample["finish_reason"] == "stop") == (stop in longer["text"])
            assert stop not in sample["text"][: -len(stop)]
    assert stopped["prompts"][0]["samples"][0]["finish_reason"] == "stop"


@pytest.mark.slow
def test_a_tokenizer_half_precision_and_drafts_from_the_text(capsys, folder, tmp_path):
    shutil.copytree(folder / "wide", tmp_path, dirs_exist_ok=True)
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = FileTokenizer(tmp_path / "tokenizer.json"), "and so on and so on and so"
    options = "--dtype", "bfloat16", "--greedy", "--speculative", 3, "--max-new", 60
    options += ("--checkpoint", tmp_path)
    result = run_json(capsys, text, *options)
    (prompt,), settings = result["prompts"], result["settings"]
    assert settings["dtype"] == "bfloat16"
    assert result["figures"]["num_drafted"] > 0
    known = tokenizer.encode(text)
    assert prompt["num_prompt_tokens"] == len(known) < len(text)
    (sample,) = prompt["samples"]
    assert sample["text"] == tokenizer.decode(sample["tokens"])
    tokens = np.zeros(SIZES["max_seq_len"], np.int32)
    tokens[: len(known) + 60] = known + sample["tokens"]
    logprobs = np.asarray(all_logprobs(checkpoint.load(tmp_path, dtype=jnp.float32), tokens))
    logprobs = logprobs[len(known) - 1 :]
    np.testing.assert_allclose(sample["logprobs"], logprobs[np.arange(60), sample["tokens"]], atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3_experts"])
def test_a_checkpoint_of_another_family_says_what_transformers_says(capsys, copy_checkpoint, family):
    """Windows, and latent attention before experts; tests/models has them all.

    Its tokens are letters here, so that a text is the fixture's prompt.
    """
    prompt, greedy = (driver.expected(family)[name].tolist() for name in ("prompt", "greedy"))
    letters = {chr(0x4E00 + token): token for token in range(97)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    checkpoint_folder = copy_checkpoint(family)
    tokenizer.save(str(checkpoint_folder / "tokenizer.json"))
    text = "".join(chr(0x4E00 + token) for token in prompt)
    result = run_json(capsys, text, "--greedy", "--max-new", 32, "--checkpoint", checkpoint_folder)
    (sample,) = result["prompts"][0]["samples"]
    assert result["prompts"][0]["num_prompt_tokens"] == len(prompt)
    assert sample["tokens"] == greedy


@pytest.mark.slow
def test_text_figures_and_blocks_over_time_are_shown(capsys, folder):
    arguments = (*SAMPLING, "--checkpoint", folder / "plain")
    samples = [sample for prompt in run_json(capsys, *arguments)["prompts"] for sample in prompt["samples"]]
    output = run(capsys, *arguments)
    assert "\x1b" not in output
    bodies = re.findall(
        r"^prompt \d, sample \d, length after 12 tokens\n((?:  \|.*\n)+)", output, re.MULTILINE
    )
    shown = ["\n".join(line[4:] for line in body.rstrip("\n").split("\n")) for body in bodies]
    assert shown == [view.visible(sample["text"]).rstrip("\n") for sample in samples]
    assert "  | def naïve(x):\n  |     return\n" in output
    figures = dict(re.findall(r"^(\w[\w ]+\w)  +(\d.*)$", output, re.MULTILINE))
    assert figures["blocks used"] == "12 of 12 at the peak"
    assert figures["saved by sharing"] == "7 blocks at the peak, by 2 forks"
    assert figures["decode"].endswith("22 steps")
    maps = re.findall(r"^ +(\d+) +(\d+) ([#.01]{12})$", output, re.MULTILINE)
    assert [int(step) for step, _, _ in maps] == [0, 8, 11, 11, 19, 22]
    assert maps[0][2] == "#" * 7 + "." * 5
    assert maps[2][2].count("#") == 6 and maps[2][2].count("0") == maps[2][2].count("1") == 3
    for _, num_used, blocks in maps:
        assert int(num_used) == 12 - blocks.count(".")


@pytest.mark.slow
def test_drafts_give_the_same_tokens_through_a_window(capsys, folder):
    """And a lone continuation is streamed."""
    prompt = "the window is shorter than this prompt"
    arguments = (prompt, "--greedy", "--max-new", 30, "--block-size", 4, "--checkpoint", folder / "window")
    arguments += ("--speculative", 3)
    output, result = run(capsys, *arguments), run_json(capsys, *arguments)
    (sample,) = result["prompts"][0]["samples"]
    assert len(sample["tokens"]) == 30
    check_sample(folder / "window", prompt, sample, is_greedy=True)
    assert f"  | {prompt}\n\n{view.visible(sample['text'])}\n[length after 30 tokens]\n" in output
    figures = result["figures"]
    assert 0 <= figures["num_accepted"] <= figures["num_drafted"] and figures["num_drafted"] > 0
    assert re.search(r"SlidingWindow\(20, rollback 3\) x 1 layer: \d+ blocks of 4 tokens", output)


@pytest.mark.slow
def test_too_few_blocks_end_rows_with_what_they_have(capsys, folder):
    """The first prompt needs 13 of 12 blocks, alone; the other waits, and gets all that it asks for."""
    prompts = ["def f(x):", "for i"]
    arguments = (*prompts, "--greedy", "--max-new", 42, "--block-size", 4, "--rows", 2, "--num-blocks", 12)
    result = run_json(capsys, *arguments, "--checkpoint", folder / "plain")
    reasons = set()
    for prompt, text in zip(result["prompts"], prompts, strict=True):
        (sample,) = prompt["samples"]
        reasons.add(sample["finish_reason"])
        check_sample(folder / "plain", text, sample, is_greedy=True)
        if sample["finish_reason"] == "out_of_blocks":
            assert (prompt["num_prompt_tokens"] + len(sample["tokens"]) - 1) % 4 == 0
        else:
            assert len(sample["tokens"]) == 42
    assert reasons == {"length", "out_of_blocks"}
    assert result["figures"]["peak_blocks_used"] == result["figures"]["num_blocks_total"] == 12


@pytest.mark.slow
def test_nothing_of_the_model_compiles_behind_the_warm_up(capsys, folder, monkeypatch):
    """For prompts that share their first blocks: the second one has less left than a quarter of a chunk.

    They are as long as the longest of `PROMPTS`, so that other tests need the same programs.
    """
    seen, counts = [], []

    def counted(params, tokens, cache, step):  # while it is traced
        seen.append(tokens.shape)
        return forward(params, tokens, cache, step)

    warm_up = decode.warm_up
    monkeypatch.setattr(decode, "forward", counted)
    monkeypatch.setattr(decode, "warm_up", lambda job: (warm_up(job), counts.append(len(seen)))[0])
    prompts = "def f(number): # adds one", "def f(number): # adds two"
    run_json(capsys, *prompts, *SAMPLING[2:], "--checkpoint", folder / "plain")
    assert counts == [len(seen)] and counts[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_that_gives_no_numbers_ends_with_what_there_is(capsys, folder, tmp_path, as_json):
    decoder = checkpoint.load(folder / "plain")
    decoder.norm.scale[...] *= np.nan
    checkpoint.save(tmp_path, decoder)
    with pytest.raises(SystemExit) as error:
        run(capsys, *SAMPLING, "--checkpoint", tmp_path, *["--json"] * as_json)
    assert error.value.code == 1
    captured = capsys.readouterr()
    said = (
        "4 of 4 continuations ended at logits that are NaN or infinite: look for a weight that is not finite"
    )
    assert captured.err == f"python -m experiments.decode: {said} in {tmp_path}\n"
    if not as_json:
        assert captured.out.count("nan logits after 0 tokens") == 4
        return
    for prompt in json.loads(captured.out)["prompts"]:
        for sample in prompt["samples"]:
            assert (sample["tokens"], sample["logprobs"], sample["finish_reason"]) == ([], [], "nan_logits")


# --- what is wrong is one sentence ---


def test_a_prompt_is_empty_though_its_tokenizer_puts_a_token_in_front():
    tokenizer = types.SimpleNamespace(encode=lambda text: [1, *text.encode()])
    config = types.SimpleNamespace(max_seq_len=9)
    assert decode_options.encode(["a"], tokenizer, config) == [[1, 97]]
    with pytest.raises(decode_options.InputError, match="prompt 1 is empty"):
        decode_options.encode(["a", ""], tokenizer, config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt 0 is empty, expected some text"),
        (["a", ""], "prompt 1 is empty"),
        (["a\udc80"], "prompt 0 is no Unicode text"),
        (
            ["a", "x" * 96],
            "prompt 1 has 96 tokens, expected fewer than 96, the longest sequence of the model",
        ),
        (["x" * 40, "--num-blocks", 2], "prompt 0 needs 3 blocks of 16 tokens, got --num-blocks 2: raise it"),
        (["a", "--rows", 2], "got --rows 2 with --samples 3, expected at least 3"),
        (["a", "--rows", 10**30], "expected an integer from 1 to 1048576"),
        (["a", "--samples", "9" * 5000], "got 99999999999999999999... of 5000 digits, expected at most 4300"),
        (["a", "--dtype", "float64"], "invalid choice: 'float64'"),
        (["a", "--greedy", "--temperature", 1], "got --greedy with --temperature, expected only one of them"),
        (["a", "--stop", ""], "got an empty --stop"),
        (["a", "--samples", 0], "got '0', expected an integer from 1 to 1048576"),
        (["a", "--max-new", "many"], "got 'many', expected an integer from 1 to 1048576"),
        (["a", "--top-p", 2], "got '2', expected a number above 0 and at most 1"),
        (["a", "--temperature", "nan"], "got 'nan', expected a number from 0 to 1000"),
        (["a", "--speculative", 128], "got '128', expected an integer from 1 to 127"),
        (["a", "--top-k", -1], "got '-1', expected an integer from 0 to 2147483647"),
        (["--prompts", ""], "argument --prompts: got '', expected a name"),
        (["a", "--checkpoint", ""], "argument --checkpoint: got '', expected a name"),
        (["a", "--prompts", "file"], "got prompts as arguments and --prompts, expected only one of them"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_options_are_refused(refusal, folder, arguments, message):
    assert message in refusal(decode, *arguments, "--checkpoint", folder / "plain")


def test_bad_checkpoints_are_refused(refusal, folder, tmp_path):
    file, short = folder / "plain" / "config.json", tmp_path / "short"
    short.mkdir()
    for name in ("config.json", "model.safetensors"):
        data = (folder / "plain" / name).read_bytes()
        (short / name).write_bytes(data[: len(data) // 2] if "model" in name else data)
    for checkpoint_folder, message in [
        (tmp_path / "x", f"there is no checkpoint {tmp_path / 'x'}"),
        ("x" * 300, "there is no checkpoint xxx"),
        (tmp_path, "has no config.json"),
        (file, f"{file} is no folder, expected the folder that holds config.json"),
        (short, "is not a whole safetensors file"),
    ]:
        assert message in refusal(decode, "a", "--checkpoint", checkpoint_folder)


def test_a_model_that_is_not_trained_yet_is_named(refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(decode_options, "MODEL", tmp_path / "stdlib_bytes")
    assert "train it with python -m experiments.train" in refusal(decode, "a")


def test_a_cache_beyond_the_memory_is_refused(refusal, monkeypatch, folder):
    monkeypatch.setattr(decode, "_free_bytes", lambda: 3000)
    message = refusal(decode, "a", "--num-blocks", 100, "--checkpoint", folder / "plain")
    # 100 blocks of 16 tokens with a key and a value of 8 floats alone are 100 KiB.
    assert re.search(
        r"decoding needs \d{3}\.\d KiB, but 2.9 KiB of memory are free: lower --samples", message
    )


# --- where prompts come from ---


def read_prompts(*arguments):
    return decode_options.read_prompts(decode_options.parse(decode_options.make_parser(""), arguments))


def test_prompts_are_lines_of_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone \r\n\r\n  \ntwo\u2028three\x0b\nsame\nsame".encode())
    assert read_prompts("--prompts", str(path)) == ["one ", "two\u2028three\x0b", "same", "same"]
    assert read_prompts("a", "--samples", "2", "b") == ["a", "b"]
    assert len(read_prompts()) == 2
    assert read_prompts("a", "--greedy", "--", "--b", "--json", "--") == ["a", "--b", "--json", "--"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.txt", b"", "holds no prompt, expected one per line"),
        ("blank.txt", b"\n \r\n", "holds no prompt"),
        ("binary", bytes(range(256)), "is not UTF-8 text: invalid start byte at byte 128"),
    ],
)
def test_bad_files_of_prompts_are_refused(refusal, tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    assert message in refusal(decode, "--prompts", tmp_path / name)
    assert f"cannot read {tmp_path}: Is a directory" in refusal(decode, "--prompts", tmp_path)
    assert "cannot read nowhere: No such file" in refusal(decode, "--prompts", "nowhere")


def test_standard_input_is_read_when_asked_for(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("ein\nzwei ß\n".encode())))
    assert read_prompts("-") == ["ein", "zwei ß"]
    with pytest.raises(decode.InputError, match="standard input holds no prompt"):
        read_prompts("--prompts", "-")
    monkeypatch.setattr("sys.stdin", None)
    for arguments in (["-"], ["--prompts", "-"]):
        with pytest.raises(decode.InputError, match="got -, but standard input is closed"):
            read_prompts(*arguments)


def test_in_a_process_of_its_own():
    """Exit code, one sentence, no traceback; own prompts are tokens that the model can take."""
    command = [sys.executable, "-m", "experiments.decode", "--prompts", "nowhere.txt"]
    root = os.path.dirname(os.path.dirname(os.path.dirname(decode.__file__)))
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (2, "")
    assert (
        process.stderr == "python -m experiments.decode: cannot read nowhere.txt: No such file or directory\n"
    )


@pytest.fixture
def half(folder, tmp_path):
    """A checkpoint in float16."""
    shutil.copytree(folder / "plain", tmp_path / "half")
    path, weights = tmp_path / "half" / "config.json", tmp_path / "half" / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float16"}))
    save_file({name: value.astype(np.float16) for name, value in load_file(weights).items()}, weights)
    return tmp_path / "half"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_a_model_that_is_stored_in_float16_is_decoded(capsys, half, dtype):
    arguments = ["ab", "--greedy", "--max-new", "3", "--json", "--checkpoint", str(half)]
    assert decode.main([*arguments, *(["--dtype", dtype] if dtype else [])]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["dtype"] == (dtype or "float32")
    said = f"{half} is stored in float16, which models do not compute in: taking float32 "
    assert captured.err == ("" if dtype else f"{said}(--dtype bfloat16 takes half the memory)\n")
