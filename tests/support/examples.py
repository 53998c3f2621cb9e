"""The Python blocks of a document, run as they are, in order, in one namespace.

python -m tests.support.examples README.md
"""

import contextlib
import io
import pathlib
import re
import sys

EXAMPLE = re.compile(r"^```python\n(?P<source>.*?)^```$(?:\n\n```text\n(?P<printed>.*?)^```$)?", re.M | re.S)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Returns (number of the first line, source) of every fenced python block."""
    return [
        (text.count("\n", 0, block.start("source")) + 1, block["source"]) for block in EXAMPLE.finditer(text)
    ]


def run_block(first_line: int, source: str, filename: str, namespace: dict) -> None:
    """Runs a block; a traceback names the file's own line."""
    exec(compile("\n" * (first_line - 1) + source, filename, "exec"), namespace)


def run_blocks(text: str, filename: str) -> dict:
    """Runs all blocks; returns their namespace."""
    namespace = {"__name__": "examples"}
    for first_line, source in python_blocks(text):
        run_block(first_line, source, filename, namespace)
    return namespace


def run_examples(text: str, filename: str) -> list[tuple[str, str]]:
    """Runs all blocks; returns (what each printed, the text block below it).

    Spaces at the ends of lines do not count.
    """
    namespace = {"__name__": "examples"}
    found = []
    for (first_line, source), example in zip(python_blocks(text), EXAMPLE.finditer(text), strict=True):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            run_block(first_line, source, filename, namespace)
        printed = re.sub(r" +$", "", output.getvalue(), flags=re.M)
        found.append((printed, example["printed"] or ""))
    return found


if __name__ == "__main__":
    [document] = sys.argv[1:]
    text = pathlib.Path(document).read_text()
    run_blocks(text, document)
    print(f"{document}: {len(python_blocks(text))} examples ran")
