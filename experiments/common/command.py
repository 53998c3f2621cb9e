"""What the commands of this folder do alike: bad input is one sentence on standard error and exit code 2.

parser = Parser("experiments.decode", __doc__)
parser.add_argument("--samples", type=integer(1), default=1)
options = parser.parse_args(arguments)
if not fits(options):
    parser.error("got this, expected that: do so")
with parser.refusing():
    read(options.file)
"""

import argparse
import contextlib
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from experiments import end_at_once, on_interrupt
from experiments.common import compiled_programs

_DATA = "KVCACHE_DATA_DIR"


class InputError(ValueError):
    """What a user gave does not fit; the message is for `Parser.error`."""


class Parser(argparse.ArgumentParser):
    """Options of `python -m MODULE`; `error` prints one line and ends the process."""

    def __init__(self, module: str, doc: str | None):
        super().__init__(
            prog=f"python -m {module}",
            description=(doc or "").split("\n", 1)[0],
            allow_abbrev=False,  # an option that is added later must not change what a short name means
        )
        text = "do not keep compiled programs in the user's cache folder"
        self.add_argument("--no-cache", action=compiled_programs.NoCache, help=text)

    def count(
        self,
        name: str,
        default: int | None = None,
        text: str = "",
        *,
        least: int = 1,
        most: int | None = None,
    ) -> None:
        """Adds an option with an integer; its help tells the default."""
        said = [text] * bool(text) + [f"default: {default}"] * (default is not None)
        kind = integer(least, most)
        self.add_argument(name, type=kind, default=default, metavar="N", help="; ".join(said))

    def error(self, message: str) -> NoReturn:
        self._end(2, message)

    @contextlib.contextmanager
    def refusing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Makes an `error` of an InputError within the `with`, and of an exception of these kinds."""
        try:
            yield
        except (InputError, *kinds) as error:
            self.error(str(error))

    def fail(self, message: str) -> NoReturn:
        """The input was right, and what came of it is no result."""
        self._end(1, message)

    def _end(self, code: int, message: str) -> NoReturn:
        self.exit(code, f"{self.prog}: {' '.join(message.splitlines())}\n")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse `type`: an integer of at least `least` and at most `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
            most_digits = sys.get_int_max_str_digits()
            if text.strip("+-").isdecimal() and len(text) > most_digits > 0:
                raise argparse.ArgumentTypeError(
                    f"got {text[:20]}... of {len(text)} digits, expected at most {most_digits}"
                ) from None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer {_range(least, most)}")
        return value

    return parse


def number(least: float, most: float = math.inf, *, is_above: bool = False) -> Callable[[str], float]:
    """An argparse `type`: a finite number of at least (`is_above`: more than) `least` and at most `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or math.isinf(value) or (is_above and value == least):
            limit = None if math.isinf(most) else most
            expected = _range(least, limit, is_above)
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a number {expected}")
        return value

    return parse


def name(text: str) -> Path:
    """An argparse `type`: a file or a folder, which may be missing; nothing would be the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("got '', expected a name")
    return Path(text)


def folder(text: str) -> Path:
    """An argparse `type`: a folder that is there."""
    if not os.path.isdir(text):  # `Path.is_dir` raises where the name is too long
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def add_data_folder(parser: argparse.ArgumentParser, what: str) -> None:
    """The option --data, a folder with other people's data; None where none is named."""
    named = os.environ.get(_DATA) or None  # a default that is a text goes through `type` too
    text = f"folder with {what}; default: {_DATA}"
    parser.add_argument("--data", type=folder, default=named, metavar="DIR", help=text)


def picture(text: str) -> Path:
    """An argparse `type`: a file that matplotlib can write, and that can be written."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise argparse.ArgumentTypeError(
            "a picture needs matplotlib: pip install 'kvcache_jax[pictures]'"
        ) from None
    path = Path(text)
    if path.suffix[1:] not in FigureCanvasBase.filetypes.keys() - {"pgf"}:  # which takes LaTeX
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a name that ends in .png, .pdf or .svg")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"got {text!r}, but there is no folder {path.parent}: make it first")
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, which cannot be written: {error.strerror}") from None
    return path


def wants_color(no_color: bool) -> bool:
    """On in a terminal; NO_COLOR and FORCE_COLOR (any text) decide before it, --no-color before them."""
    if no_color or os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with `main`'s exit code.

    Ctrl-C ends it quietly with 130, a pipe that has no reader with 141. Compiled programs are kept for the
    next start; standard error says so when there are new ones.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    try:
        on_interrupt(signal.default_int_handler)
        folder = compiled_programs.keep()
        num_kept = compiled_programs.num_kept(folder)
        code = _code(main)
        num_new = compiled_programs.num_kept(folder) - num_kept
        if num_new > 0 and not code:
            print(f"kept {num_new} compiled programs in {folder}; --no-cache keeps none", file=sys.stderr)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes once more
        code = 141
    on_interrupt(end_at_once)
    sys.exit(code)


def _code(main: Callable[[], int | None]) -> int | str | None:
    try:
        return main()
    except SystemExit as end:  # of `--help` too, whose text is to be flushed
        return end.code


def _range(least: float, most: float | None, is_above: bool = False) -> str:
    first, last = (int(x) if x is not None and x == int(x) else x for x in (least, most))
    if is_above:
        return f"above {first}" if last is None else f"above {first} and at most {last}"
    return f"of at least {first}" if last is None else f"from {first} to {last}"
