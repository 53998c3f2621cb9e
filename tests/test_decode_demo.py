"""`python -m experiments.decode`: what it prints is what was decoded, and what is wrong is one sentence."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

from flax import nnx

import kvcache_jax as kv
from experiments import decode, decode_options, decode_timeline, decode_view
from kvcache_jax import testing
from kvcache_jax.block_view import row_rgb
from models import checkpoint
from models.decoder import Decoder, DecoderConfig, forward
from models.tokenizer import ByteTokenizer

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
    options["kernel"] = {"head_dim": 64}
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


SAMPLING = (*PROMPTS, "--samples", 2, "--max-new", 12, "--seed", 3, "--block-size", 4, "--rows", 2)


def test_json_holds_what_was_decoded(capsys, folder):
    arguments = (*SAMPLING, "--checkpoint", folder / "plain")
    result = run_json(capsys, *arguments)
    assert result["prompts"] == run_json(capsys, *arguments)["prompts"]
    decoder = checkpoint.load(folder / "plain")
    for prompt, expected in zip(result["prompts"], PROMPTS, strict=True):
        tokens = list(expected.encode())
        assert (prompt["prompt"], prompt["num_prompt_tokens"]) == (expected, len(tokens))
        first, second = prompt["samples"]
        assert first["tokens"] != second["tokens"]
        for sample in prompt["samples"]:
            assert sample["finish_reason"] == "length" and len(sample["tokens"]) == 12
            assert sample["text"] == bytes(sample["tokens"]).decode(errors="replace")
        continuations = [sample["tokens"] for sample in prompt["samples"]]
        config = kv.CacheConfig(
            [kv.FullAttention(1, 8)], num_blocks=40, block_size=8, max_seqs=2, max_seq_len=96
        )
        scores = kv.score(forward, decoder, tokens, continuations, config).logprobs
        for sample, logprobs in zip(prompt["samples"], scores, strict=True):
            np.testing.assert_allclose(sample["logprobs"], logprobs, atol=1e-3)
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


def test_text_figures_and_blocks_over_time_are_shown(capsys, folder, tmp_path):
    arguments = (*SAMPLING, "--checkpoint", folder / "plain")
    samples = [sample for prompt in run_json(capsys, *arguments)["prompts"] for sample in prompt["samples"]]
    path = tmp_path / "out.png"
    output = run(capsys, *arguments, "--picture", path)
    assert "\x1b" not in output
    bodies = re.findall(
        r"^prompt \d, sample \d, length after 12 tokens\n((?:  \|.*\n)+)", output, re.MULTILINE
    )
    shown = ["\n".join(line[4:] for line in body.rstrip("\n").split("\n")) for body in bodies]
    assert shown == [decode_view.visible(sample["text"]).rstrip("\n") for sample in samples]
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
    assert path.read_bytes().startswith(b"\x89PNG") and f"wrote {path}" in output


def test_a_draft_model_gives_the_same_tokens_through_a_window(capsys, folder):
    """And a lone continuation is streamed."""
    prompt = "the window is shorter than this prompt"
    arguments = (prompt, "--greedy", "--max-new", 30, "--block-size", 4, "--checkpoint", folder / "window")
    output = run(capsys, *arguments)
    drafting = ("--speculative", 3, "--draft", folder / "plain")
    result = run_json(capsys, *arguments, *drafting)
    (sample,) = result["prompts"][0]["samples"]
    assert len(sample["tokens"]) == 30
    assert f"  | {prompt}\n\n{decode_view.visible(sample['text'])}\n[length after 30 tokens]\n" in output
    figures = result["figures"]
    assert 0 <= figures["num_accepted"] <= figures["num_drafted"] and figures["num_drafted"] > 0
    assert re.search(r"SlidingWindow\(20\) x 1 layer: \d+ blocks of 4 tokens", output)


def test_too_few_blocks_end_rows_with_what_they_have(capsys, folder):
    arguments = (*PROMPTS, "--greedy", "--max-new", 20, "--checkpoint", folder / "plain")
    whole = run_json(capsys, *arguments)
    short = run_json(capsys, *arguments, "--num-blocks", 4)
    reasons = set()
    for prompt, expected in zip(short["prompts"], whole["prompts"], strict=True):
        (sample,), (full,) = prompt["samples"], expected["samples"]
        reasons.add(sample["finish_reason"])
        num_tokens = len(sample["tokens"])
        assert full["finish_reason"] == "length" and sample["tokens"] == full["tokens"][:num_tokens]
        np.testing.assert_allclose(sample["logprobs"], full["logprobs"][:num_tokens], atol=1e-4)
        if sample["finish_reason"] == "out_of_blocks":
            assert (prompt["num_prompt_tokens"] + num_tokens - 1) % 16 == 0
    assert "out_of_blocks" in reasons
    assert short["figures"]["peak_blocks_used"] == short["figures"]["num_blocks_total"] == 4


def test_beams_are_ranked_and_share_their_prompt(capsys, folder):
    arguments = (*PROMPTS, "--beams", 2, "--max-new", 6, "--block-size", 4, "--checkpoint", folder / "plain")
    result = run_json(capsys, *arguments)
    for prompt in result["prompts"]:
        scores = [sample["score"] for sample in prompt["samples"]]
        assert len(scores) == 2 and scores == sorted(scores, reverse=True)
        for sample in prompt["samples"]:
            np.testing.assert_allclose(np.mean(sample["logprobs"]), sample["score"], atol=1e-4)
    assert result["figures"]["peak_blocks_saved"] >= 6 + 4
    output = run(capsys, *arguments)
    best = result["prompts"][1]["samples"][0]
    assert f"prompt 1, hypothesis 0, score {best['score']:.3f}, length after 6 tokens\n" in output
    assert "\x1b" not in output and re.search(r"^ +0 +\d+ #+\.+$", output, re.MULTILINE)


# --- what is wrong is one sentence ---


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as error:
        decode.main([str(argument) for argument in arguments])
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.removeprefix("python -m experiments.decode: ")


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
        (["x" * 20, "y" * 20, "--beams", 2, "--num-blocks", 3], "the prompts together need 4 blocks"),
        (["a", "--rows", 2], "got --rows 2 with --samples 3, expected at least 3 rows"),
        (
            ["a", "b", "--beams", 2, "--rows", 3],
            "got --rows 3 with --beams 2 for 2 prompts, expected at least 4",
        ),
        (["a", "--num-blocks", 10**9], "expected below 2**31"),
        (["a", "--block-size", 10**12], "block_size is 1000000000000, expected below 2**31"),
        (["a", "--samples", 10**6], "of memory are free: lower --num-blocks, --rows or --max-new"),
        (["a", "--implementation", "fast"], "invalid choice: 'fast'"),
        (["a", "--dtype", "float64"], "invalid choice: 'float64'"),
        (["a", "--greedy", "--temperature", 1], "got --greedy with --temperature, expected only one of them"),
        (
            ["a", "--beams", 2, "--samples", 2, "--seed", 0],
            "got --beams with --samples, --seed, expected only",
        ),
        (["a", "--beams", 2, "--stop", "x"], "got --beams with --stop, expected only one of them"),
        (["a", "--draft", "folder"], "got --draft without --speculative, expected both"),
        (["a", "--stop", ""], "got an empty --stop"),
        (["a", "--samples", 0], "got '0', expected an integer of at least 1"),
        (["a", "--max-new", "many"], "got 'many', expected an integer of at least 1"),
        (["a", "--top-p", 2], "got '2', expected a number above 0 and at most 1"),
        (["a", "--temperature", "nan"], "got 'nan', expected a number from 0 to 1000"),
        (["a", "--speculative", 128], "got '128', expected an integer from 1 to 127"),
        (["a", "--picture", "nowhere/out.png"], "there is no folder nowhere"),
        (["a", "--prompts", "file"], "got prompts as arguments and --prompts, expected only one of them"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_options_are_refused(capsys, folder, arguments, message):
    assert message in refusal(capsys, *arguments, "--checkpoint", folder / "plain")


@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_tpu"])
def test_an_implementation_that_is_not_there_is_refused(capsys, folder, name):
    message = refusal(capsys, "a", "--implementation", name, "--checkpoint", folder / "plain")
    assert name in message


def test_a_kernel_decodes_what_xla_does(capsys, folder):
    """The kernel for GPUs, interpreted, from a cache in bfloat16 as it takes it."""
    arguments = ("ab", "--greedy", "--max-new", 3, "--block-size", 8, "--checkpoint", folder / "kernel")
    with testing.interpreted():
        found = run_json(capsys, *arguments, "--implementation", "mosaic_gpu")
    assert found["settings"]["implementation"] == "mosaic_gpu"
    assert found["settings"]["cache_dtype"] == "bfloat16"
    wanted = run_json(capsys, *arguments, "--implementation", "xla", "--cache-dtype", "bfloat16")
    (found,), (wanted,) = (result["prompts"][0]["samples"] for result in (found, wanted))
    assert found["tokens"] == wanted["tokens"]
    np.testing.assert_allclose(found["logprobs"], wanted["logprobs"], atol=0.05)


def test_bad_checkpoints_are_refused(capsys, folder, tmp_path):
    assert f"there is no checkpoint {tmp_path / 'x'}" in refusal(capsys, "a", "--checkpoint", tmp_path / "x")
    assert "has no config.json" in refusal(capsys, "a", "--checkpoint", tmp_path)
    for name in ("config.json", "model.safetensors"):
        data = (folder / "plain" / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2] if "model" in name else data)
    assert "is not a whole safetensors file" in refusal(capsys, "a", "--checkpoint", tmp_path)
    message = refusal(
        capsys, "a", "--speculative", 2, "--draft", folder / "wide", "--checkpoint", folder / "plain"
    )
    assert f"--draft {folder / 'wide'} has 300 tokens, expected the model's 256" in message


def test_a_model_that_is_not_trained_yet_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(decode_options, "MODEL", tmp_path / "stdlib_bytes")
    assert "train it with python -m experiments.train" in refusal(capsys, "a")


def test_a_cache_beyond_the_memory_is_refused(capsys, monkeypatch, folder):
    monkeypatch.setattr(decode, "_free_bytes", lambda: 3000)
    message = refusal(capsys, "a", "--num-blocks", 100, "--checkpoint", folder / "plain")
    # 100 blocks of 16 tokens with a key and a value of 8 floats alone are 100 KiB.
    assert re.match(r"decoding needs \d{3}\.\d KiB, but 2.9 KiB of memory are free: lower", message)


# --- prompts ---


def read_prompts(*arguments):
    return decode_options.read_prompts(decode_options.make_parser("").parse_intermixed_args(arguments))


def test_prompts_are_lines_of_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone \r\n\r\n  \ntwo\u2028three\x0b\nsame\nsame".encode())
    assert read_prompts("--prompts", str(path)) == ["one ", "two\u2028three\x0b", "same", "same"]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\nb", "id": 1}\n\n{"prompt": " "}\n')
    assert read_prompts("--prompts", str(path)) == ["a\nb", " "]
    assert read_prompts("a", "--samples", "2", "b") == ["a", "b"]
    assert len(read_prompts()) == 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.txt", b"", "holds no prompt, expected one per line"),
        ("blank.txt", b"\n \r\n", "holds no prompt"),
        ("binary", bytes(range(256)), "is not UTF-8 text: invalid start byte at byte 128"),
        ("list.jsonl", b'{"prompt": "a"}\n["a"]\n', 'line 2 is ["a"], expected an object with a text under'),
        ("number.jsonl", b'{"prompt": 1}', "line 1 is"),
        ("text.jsonl", b"text", "line 1 is no JSON: Expecting value"),
    ],
)
def test_bad_files_of_prompts_are_refused(capsys, tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    assert message in refusal(capsys, "--prompts", tmp_path / name)
    assert "is no file" in refusal(capsys, "--prompts", tmp_path)
    assert "cannot read nowhere: No such file" in refusal(capsys, "--prompts", "nowhere")


@contextlib.contextmanager
def piped(data):
    """Standard input is a pipe with these bytes, closed behind them unless they are None."""
    reader, writer = os.pipe()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(reader, encoding="utf-8") as stdin:
        patch.setattr("sys.stdin", stdin)
        patch.setattr(decode_options, "PIPE_SECONDS", 0.1)
        with os.fdopen(writer, "wb") as sender:
            if data is None:
                yield
                return
            sender.write(data)
        yield


def test_a_pipe_is_read_when_something_comes(capsys):
    own = list(decode_options.OWN_PROMPTS)
    with piped("ein\nzwei ß\n".encode()):
        assert read_prompts() == ["ein", "zwei ß"]
    with piped(b"ein\n"):
        assert read_prompts("argument") == ["argument"]
        assert read_prompts("-") == ["ein"]
    with piped(b""):
        assert read_prompts() == own
        assert "standard input is empty: taking our own prompts" in capsys.readouterr().err
        with pytest.raises(decode.InputError, match="standard input holds no prompt"):
            read_prompts("-")
    with piped(None):
        assert read_prompts() == own
        assert "a pipe in which nothing comes" in capsys.readouterr().err


def test_in_a_process_of_its_own():
    """Exit code, one sentence, no traceback; own prompts are tokens that the model can take."""
    command = [sys.executable, "-m", "experiments.decode", "--prompts", "nowhere.txt"]
    root = os.path.dirname(os.path.dirname(decode.__file__))
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (2, "")
    assert (
        process.stderr == "python -m experiments.decode: cannot read nowhere.txt: No such file or directory\n"
    )


# --- views ---


def look(table, step=8, running=None, ended=()):
    table = np.asarray(table, np.int32)
    held = table[table < 12]
    return kv.Look(
        num_steps=step,
        seconds=0.5,
        num_blocks_used=len(set(held.tolist())),
        num_refs=len(held),
        num_active_seqs=len(table),
        running=running or {},
        ended=list(ended),
        block_tables=[table],
    )


TABLE = [[0, 1, 3, 12], [0, 1, 2, 4], [6, 12, 12, 12]]
CONFIG = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=12, block_size=4, max_seqs=3, max_seq_len=16)


def test_a_line_of_the_map_names_owners():
    assert decode_timeline.map_line(np.array(TABLE), 12, 100, color=False) == "##101.2....."
    assert decode_timeline.map_line(np.array(TABLE), 12, 4, color=False) == "##10"
    colored = decode_timeline.map_line(np.array(TABLE), 12, 100, color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == "##101.2....." and colored.count("\x1b[0m") == 7


def test_long_timelines_and_wide_pools_are_cut():
    config = kv.CacheConfig([kv.FullAttention(1, 8)] * 2, num_blocks=140, block_size=4, max_seqs=3)
    wide = [look(np.where(np.array(TABLE) == 12, 140, TABLE), step) for step in range(50)]
    lines = decode_timeline.timeline_text(wide, config, color=False).splitlines()
    assert lines[1] == "Blocks over time, FullAttention x 2 layers: 140 blocks of 4 tokens"
    maps = [line.split() for line in lines if "#" * 2 in line]
    assert len(maps) == 20 and [maps[0][0], maps[-1][0]] == ["0", "49"]
    assert {tuple(line[1:]) for line in maps} == {("6", "##101.2" + "." * 93)}
    assert "... and 40 blocks more" in lines[-3] and lines[-2] == "20 of 50 looks are shown."


def test_the_picture_has_the_owners_colours(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = tmp_path / "out.png"
    decode_timeline.draw_timeline([look(TABLE, step) for step in (0, 8, 16)], CONFIG, path)
    image = pyplot.imread(path)[:, :, :3]
    num_pixels = image.shape[0] * image.shape[1]
    shares = {}
    for name, color in {0: row_rgb(0), 1: row_rgb(1), 2: row_rgb(2), "shared": (0.25,) * 3}.items():
        shares[name] = (np.abs(image - color).max(axis=2) < 0.01).sum() / num_pixels
    # Two blocks are shared, two are row 1's, and one each is row 0's and row 2's.
    assert 0.02 < shares[0] < shares[1] and shares[2] < shares["shared"]
    assert 1.6 < shares[1] / shares[0] < 2.1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def make_view(monkeypatch):
    """Views of prompts "first" and "second" with two samples each, and what they wrote."""

    def make(is_terminal, num_samples=2, prompts=(("first", 5), ("second", 6)), **environment):
        output = Terminal() if is_terminal else io.StringIO()
        monkeypatch.setattr("sys.stdout", output)
        for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "20", **environment}.items():
            monkeypatch.setenv(name, value)
        tokenizer = ByteTokenizer((0,))
        view = decode_view.make_view("heading", prompts, num_samples, tokenizer, False, num_blocks=12)
        return view, output

    return make


def generation(prompt_id, sample_id, text):
    tokens = list(text.encode()) if isinstance(text, str) else text
    return kv.Generation(prompt_id, sample_id, tokens, [-1.0] * len(tokens), "stop")


def test_plain_text_is_shown_when_a_continuation_ends(make_view):
    view, output = make_view(False)
    with view:
        view.on_tokens(0, 1, [0xE6, 0x97])
        view.on_tokens(0, 0, list(b"dis\x1b[31mplay\n"))
        view.on_look(look(TABLE, running={0: (0, 0), 1: (0, 1)}))
        assert "dis" not in output.getvalue()
        view.on_tokens(0, 1, [0xA5, *b"\tx", 0])
        view.on_look(look(TABLE, running={0: (0, 0), 1: (0, 1)}, ended=[generation(0, 1, "日\tx\0")]))
        assert output.getvalue().endswith("prompt 0, sample 1, stop after 6 tokens\n  | 日    x\n")
        view.on_look(look(TABLE, running={0: (0, 0)}, ended=[generation(0, 0, "dis\x1b[31mplay\n")]))
    assert output.getvalue().startswith("heading\n\nprompt 0, 5 tokens\n  | first\nprompt 1, 6 tokens\n")
    assert output.getvalue().endswith("\n  | dis\u241b[31mplay\n")


def test_a_lone_continuation_is_streamed_without_half_characters(make_view):
    view, output = make_view(False, num_samples=1, prompts=[("first", 5)])
    with view:
        start = len(output.getvalue())
        seen = []
        for tokens in ([0x61, 0xE6], [0x97], [0xA5, 0x62], [0xE6, 0]):
            view.on_tokens(0, 0, tokens)
            seen.append(output.getvalue()[start:])
        assert seen == ["a", "a", "a日b", "a日b"]
        view.on_look(look(TABLE, running={0: (0, 0)}, ended=[generation(0, 0, [0x61] * 7)]))
    assert output.getvalue()[start:] == "a日b\ufffd\n[stop after 7 tokens]\n"


def frames(output):
    """What stood on the screen after each refresh."""
    clear = re.compile(r"(?:\r?\x1b\[2K(?:\x1b\[1A)?)+")
    return [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", part) for part in clear.split(output)]


def test_a_terminal_shows_what_is_decoded_and_in_the_end_everything(make_view):
    view, output = make_view(True, num_samples=6)
    texts = {(p, s): "".join(f"line {i} of {p}.{s}\n" for i in range(9)) for p in range(2) for s in range(6)}
    rows = {row: key for row, key in enumerate(texts)}
    with view:
        for start, end in ((0, 28), (28, 56), (56, 126)):
            for (p, s), text in texts.items():
                view.on_tokens(p, s, list(text[start:end].encode()))
            ended = [generation(*key, text) for key, text in texts.items() if end == 126]
            view.on_look(look(TABLE, running=rows, ended=ended))
    *live, last = frames(output.getvalue().removeprefix("heading\n\n"))
    assert len(live) >= 3 and all(screen.count("\n") < 20 for screen in live)
    assert "line 1 of 0.0" in live[0] and "line 3 of 1.0" in live[1]
    assert "step 8, 0.5 s" in live[0] and "6 of 12 blocks used, 8 without sharing" in live[0].replace(
        "\n", " "
    )
    assert "##101.2....." in live[0]
    for key, text in texts.items():
        for line in text.splitlines():
            assert line in last, key
    assert last.count("[stop after 126 tokens]") == 12


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_text(make_view):
    view, _ = make_view(True, TERM="dumb")
    assert type(view) is decode_view.TextView
