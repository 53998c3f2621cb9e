"""The mutations of `mutants/*.txt`; `mutants/README.md` says how they are written."""

import dataclasses
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LINES = {"=": "= its name", "@": "@ its file", "-": "- old text", "+": "+ new text", "!": "! its test"}
_GATE = "python "
# Which lines may follow a line; "" is the blank line before a mutation.
NEXT = {"": "=", "=": "@-", "@": "-", "-": "-+!", "+": "+!", "!": ""}
LAST = "-+!"  # lines that a mutation may end with


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One text of the library, replaced.

    Attributes:
      name: What the mutant does wrong.
      file: From the repository's root.
      old: Occurs exactly once in the file.
      new: Takes its place.
      test: Id, from the repository's root, of the test that must fail; with several parameters, one must.
        Or the command of a gate, `python -m ...`.
      where: File and line that say so.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    where: str

    @property
    def gate(self) -> list[str] | None:
        """The arguments of Python, where a gate is to fail and not a test."""
        return self.test.removeprefix(_GATE).split() if self.test.startswith(_GATE) else None


def parse(text: str, source: str) -> list[Mutation]:
    """Reads the mutations of a text; `source` names it in errors.

    Raises:
      ValueError: A line is not of the format, or old and new text are equal.
    """
    mutations, last, parts, start, kept = [], "", {}, "", {}
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        where, mark = f"{source}:{number}", line[:1]
        if mark == "#" or not (line or last):
            continue
        if not line and last in LAST:
            kept |= {mark: parts[mark] for mark in "@!" if mark in parts}
            if missing := [LINES[mark] for mark in "@!" if mark not in kept]:
                raise ValueError(f"{start}: got a first mutation without {missing[0]!r}, expected it")
            parts = kept | parts
            mutation = Mutation(*("\n".join(parts.get(mark, [""])) for mark in LINES), start)
            if mutation.old == mutation.new:
                raise ValueError(f"{start}: got the same old and new text, expected a change")
            mutations.append(mutation)
            last, parts = "", {}
            continue
        expected = " or ".join(repr(LINES[mark]) for mark in NEXT[last]) or "a blank line"
        if not line or mark not in NEXT[last] or line[1:2] not in ("", " "):
            got = repr(line) if line else "a blank line"
            raise ValueError(f"{where}: got {got}, expected {expected}")
        if line.endswith((" ", "\t")):
            raise ValueError(
                f"{where}: got {line!r}, which ends in a space, expected '\\' after it or no space"
            )
        if mark in "=@!" and not line[2:]:
            raise ValueError(f"{where}: got {line!r}, expected {LINES[mark]!r}")
        start = start if last else where
        parts.setdefault(mark, []).append(line[2:].removesuffix("\\"))
        last = mark
    return mutations


def read_all(folder: pathlib.Path = ROOT / "mutants") -> list[Mutation]:
    """Reads the mutations of all files, in the order of their names.

    Raises:
      ValueError: See `parse`.
    """
    return [
        mutation
        for path in sorted(folder.glob("*.txt"))
        for mutation in parse(path.read_text(), f"{folder.name}/{path.name}")
    ]
