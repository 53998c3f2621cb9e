"""Bad input is one sentence on standard error and exit code 2, whatever the command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.common import command

TOO_LONG = "x" * 300  # for the name of a file
ROOT = Path(command.__file__).parent.parent.parent


def parse(*arguments):
    parser = command.Parser("experiments.nothing", "What it does.\n\nAnd how.")
    parser.add_argument("--count", type=command.integer(1))
    parser.add_argument("--rows", type=command.integer(0, 9))
    parser.add_argument("--share", type=command.number(0, 1))
    parser.add_argument("--mass", type=command.number(0, 1, is_above=True))
    parser.add_argument("--heat", type=command.number(0))
    parser.add_argument("--picture", type=command.picture)
    parser.add_argument("--top", type=command.integer(0, 2**31 - 1))
    parser.add_argument("--seconds", type=command.number(0, is_above=True))
    command.add_data_folder(parser, "nothing")
    return parser.parse_args(arguments)


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as error:
        parse(*arguments)
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    prefix = "python -m experiments.nothing: "
    assert captured.err.startswith(prefix)
    return captured.err.removeprefix(prefix)


def test_good_values_are_parsed(tmp_path):
    options = parse("--count", "3", "--rows", "0", "--share", "1", "--heat", "1e3")
    assert (options.count, options.rows, options.share, options.heat) == (3, 0, 1.0, 1000.0)
    path = tmp_path / "a.png"
    assert parse("--picture", str(path)).picture == path and not path.exists()
    path.write_text("an older one")
    assert parse("--picture", str(path)).picture == path and path.read_text() == "an older one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--colour"], "unrecognized arguments: --colour"),
        (["--cou", "3"], "unrecognized arguments: --cou 3"),
        (["--count"], "argument --count: expected one argument"),
        (["--count", "0"], "argument --count: got '0', expected an integer of at least 1"),
        (["--count", "2.5"], "argument --count: got '2.5', expected an integer of at least 1"),
        (["--rows", "10"], "argument --rows: got '10', expected an integer from 0 to 9"),
        (["--share", "2"], "argument --share: got '2', expected a number from 0 to 1"),
        (["--share", "nan"], "argument --share: got 'nan', expected a number from 0 to 1"),
        (["--mass", "0"], "argument --mass: got '0', expected a number above 0 and at most 1"),
        (["--top=-1"], "--top: got '-1', expected an integer from 0 to 2147483647\n"),
        (["--seconds", "nan"], "argument --seconds: got 'nan', expected a number above 0\n"),
        (["--data", TOO_LONG], f"argument --data: there is no folder {TOO_LONG}"),
        (["--picture", f"{TOO_LONG}.png"], "which cannot be written: File name too long"),
        (["--picture", f"{TOO_LONG}/steps.png"], f"there is no folder {TOO_LONG}: make it first"),
        (["--heat", "inf"], "argument --heat: got 'inf', expected a number of at least 0"),
        (["--heat=-1"], "argument --heat: got '-1', expected a number of at least 0"),
        (["--heat", "a\nb"], "argument --heat: got 'a\\nb', expected a number of at least 0"),
        (["--bad\noption"], "unrecognized arguments: --bad option"),
        (["--picture", "steps.xyz"], "expected a name that ends in .png, .pdf or .svg"),
        (["--picture", "steps.pgf"], "expected a name that ends in .png, .pdf or .svg"),
        (["--picture", "nowhere/steps.png"], "there is no folder nowhere: make it first"),
    ],
)
def test_bad_values_are_one_sentence(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_a_picture_is_a_file(capsys, tmp_path):
    (tmp_path / "a.png").mkdir()
    assert "a.png', which cannot be written: Is a directory" in refusal(
        capsys, "--picture", f"{tmp_path}/a.png"
    )


def test_a_folder_with_data_may_be_named_by_the_environment(capsys, monkeypatch, tmp_path):
    for value, expected in ((None, None), ("", None), (str(tmp_path), tmp_path)):
        monkeypatch.delenv("KVCACHE_DATA_DIR", raising=False)
        if value is not None:
            monkeypatch.setenv("KVCACHE_DATA_DIR", value)
        assert parse().data == expected
    assert parse("--data", str(tmp_path.parent)).data == tmp_path.parent
    monkeypatch.setenv("KVCACHE_DATA_DIR", TOO_LONG)
    assert f"there is no folder {TOO_LONG}" in refusal(capsys)


def test_the_extra_for_pictures_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    message = refusal(capsys, "--picture", f"{tmp_path}/steps.png")
    assert "a picture needs matplotlib: pip install 'kvcache_jax[pictures]'" in message


@pytest.mark.parametrize(
    ("environment", "no_color", "expected"),
    [
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, False, False),
    ],
)
def test_when_output_is_coloured(monkeypatch, environment, no_color, expected):
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert command.wants_color(no_color) == expected
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert command.wants_color(no_color) == (not no_color and not environment.get("NO_COLOR"))
    monkeypatch.setenv("TERM", "dumb")
    assert command.wants_color(no_color) == expected


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 1", 1),
        ("return None", 0),
        ("raise KeyboardInterrupt", 130),
        ("[print('x' * 1000) for _ in range(1000)]", 141),
    ],
)
def test_ends_quietly(body, code):
    """A pipe without a reader is closed at once."""
    program = f"from experiments.common import command\ndef main():\n    {body}\ncommand.run(main)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=30)) == (b"", code)
    process.stderr.close()


# In place of a module that takes long to load.
SLOW = "import time\nprint('loading', flush=True)\ntime.sleep(60)\n"


def interrupted(arguments, **options):
    """(exit code, standard error) of Python after Ctrl-C, which comes after its first line of output."""
    start = [sys.executable, *arguments]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here is so there
    try:
        process = subprocess.Popen(start, **pipes, **options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    return process.returncode, said


@pytest.mark.parametrize("module", ["argparse", "jax"])
def test_a_command_is_interrupted_while_its_modules_load(module, tmp_path):
    (tmp_path / f"{module}.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert interrupted(["-m", "experiments.decode"], env=environment, cwd=ROOT) == (130, "")


def test_a_command_is_interrupted_while_it_ends():
    lines = (
        "import atexit, time",
        "from experiments.common import command",
        "atexit.register(lambda: (print('loading', flush=True), time.sleep(60)))",
        "command.run(lambda: 0)",
    )
    assert interrupted(["-c", "; ".join(lines)]) == (130, "")


def test_who_imports_the_experiments_keeps_what_it_does_on_interrupts():
    program = "import signal, experiments; print(signal.getsignal(signal.SIGINT).__name__)"
    # As started from a terminal, also where the caller of the tests, in the background, ignores interrupts.
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, "
    start += repr([sys.executable, "-c", program]) + ")"
    shown = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=60)
    assert shown.stdout == "default_int_handler\n"
    ignoring = "trap '' INT; exec " + f'{sys.executable} -c "{program.replace(".__name__", "")}"'
    shown = subprocess.run(["sh", "-c", ignoring], capture_output=True, text=True, timeout=60)
    assert shown.stdout.endswith("1\n") or "SIG_IGN" in shown.stdout


DOUBLES = (
    "import jax\nfrom experiments.common import command\ndef main():\n"
    "    parser = command.Parser('experiments.nothing', 'Doubles.')\n    parser.parse_args()\n"
    "    print(jax.jit(lambda x: 2 * x)(21))\ncommand.run(main)\n"
)


@pytest.mark.quick_cases("kept")
@pytest.mark.parametrize("kind", ["kept", "no cache", "another folder", "switched off", "no folder"])
def test_compiled_programs_are_kept_in_the_users_cache_folder(tmp_path, kind):
    """The second start finds them and says nothing."""
    environment = {name: text for name, text in os.environ.items() if "COMPILATION_CACHE" not in name}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {
        "another folder": {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "other")},
        "switched off": {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        "no folder": {"XDG_CACHE_HOME": "/dev/null"},
    }.get(kind, {})
    options = ["--no-cache"] if kind == "no cache" else []

    def start():
        line = [sys.executable, "-c", DOUBLES, *options]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True)

    first, folder = start(), tmp_path / "kvcache_jax"
    assert first.stdout == "42\n"
    kept = list(folder.glob("*-cache"))
    if kind != "kept":
        assert not kept and not first.stderr
        return
    said = f"kept {len(kept)} compiled programs in {folder}; --no-cache keeps none\n"
    assert kept and first.stderr == said
    second = start()
    assert (second.stdout, second.stderr) == ("42\n", "") and list(folder.glob("*-cache")) == kept
