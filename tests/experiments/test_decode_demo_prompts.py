"""Where `python -m experiments.decode` takes its prompts and its model from."""

import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

from safetensors.numpy import load_file, save_file
from test_decode_demo import folder, refusal  # noqa: F401, a fixture

from experiments.decode import __main__ as decode
from experiments.decode import options


def read_prompts(*arguments):
    return options.read_prompts(options.parse(options.make_parser(""), arguments))


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
def test_bad_files_of_prompts_are_refused(capsys, tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    assert message in refusal(capsys, "--prompts", tmp_path / name)
    assert f"cannot read {tmp_path}: Is a directory" in refusal(capsys, "--prompts", tmp_path)
    assert "cannot read nowhere: No such file" in refusal(capsys, "--prompts", "nowhere")


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
def half(folder, tmp_path):  # noqa: F811, the fixture that is imported
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
