"""How many files of the library a call of an operation reaches (`tests.reached_files`)."""

import dataclasses
import re
import runpy
import subprocess
import sys

import pytest

from tests import reached_files
from tests.reached_files import FOLDER, Reached, reached_by


def test_an_operation_is_read_in_few_files():
    """In a process of its own, for whatever jax has traced before is not reached again."""
    command = [sys.executable, "-m", "tests.reached_files", "fork", "extend"]
    result = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=300)
    of_fork, of_extend = re.findall(r"^\w+: .*\n(?:    .*\n)+", result.stdout, re.MULTILINE)
    assert "    operations/fork.py\n" in of_fork and "    operations/extend.py\n" in of_extend
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_called_is_reached_and_some_of_it_set_apart(monkeypatch):
    def make() -> object:
        return dataclasses.replace(reached_files.CONFIG, num_blocks=9)

    reached = reached_by(make)
    assert "core/config.py" in reached.apart and "core/config.py" not in reached.files
    monkeypatch.setattr(reached_files, "APART", ())
    again = reached_by(make)
    assert again.apart == () and {*again.files} == {*reached.files, *reached.apart}


def test_what_an_import_runs_is_no_call():
    assert reached_by(lambda: runpy.run_path(str(FOLDER / "core" / "counter.py"))) == Reached((), ())


def test_more_files_than_allowed_fail_the_command(monkeypatch, capsys):
    monkeypatch.setattr(reached_files, "calls", lambda: dict.fromkeys(("fork", "free"), lambda: None))
    monkeypatch.setattr(reached_files, "stories", lambda: {"a chunk": lambda: None})
    reached = Reached(("operations/fork.py", *"abc"), ("core/state.py",))
    monkeypatch.setattr(reached_files, "reached_by", lambda _: reached)
    monkeypatch.setattr(reached_files.jax, "clear_caches", lambda: None)  # other tests have use for them
    assert reached_files.main(["free"]) == reached_files.main(["a chunk"]) == 0
    assert reached_files.main(["--markdown"]) == 1
    assert "| fork | 4 | 3 | 5 | operations/fork.py, a, b, c |" in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit):
        reached_files.main(["other"])
