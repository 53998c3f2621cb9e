"""Results in a file, a line each, so that a run that was killed goes on where it stopped."""

import json
import os
from pathlib import Path
from typing import Any

from experiments.common.command import InputError


class Results:
    """Results by the id of their request; all of them are in the file as soon as `add` returns.

    The first line says what the results depend on, and another run's file is refused. A line that a kill cut
    short is taken off, and its request is answered again: a line is a result if it ends.

    Args:
      path: Of the file, which is made where it is missing. None: results are kept in memory alone.
      settings: What they depend on, as JSON has it.

    Raises:
      InputError: the file is another run's, or no such file, or cannot be written.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self._path, self._by_id = path, {}
        self.num_found = 0
        if path is None:
            return
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):
                os.truncate(path, sum(map(len, lines[:-1])))
                lines.pop()
            entries = [json.loads(line) for line in lines]
            if not entries:
                self._append(settings)
        except (OSError, ValueError) as error:
            raise InputError(f"got --results {path}, which cannot be gone on with: {error}") from None
        if entries and entries[0] != settings:
            raise InputError(
                f"got --results {path}, whose {_difference(entries[0], settings)}: name another file"
            )
        self._by_id = {entry["id"]: entry for entry in entries[1:]}
        self.num_found = len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> dict[str, Any]:
        return self._by_id[request_id]

    def add(self, result: dict[str, Any]) -> None:
        """Keeps a result, whose `id` none has; behind this no kill loses it."""
        assert result["id"] not in self._by_id
        self._by_id[result["id"]] = result
        if self._path is not None:
            self._append(result)

    def _append(self, entry: dict[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _difference(found: Any, expected: dict[str, Any]) -> str:
    if not isinstance(found, dict):
        return "first line is no settings"
    names = [name for name in expected if found.get(name) != expected[name]] or ["settings"]
    return f"{names[0]} is {found.get(names[0])!r}, expected {expected.get(names[0])!r}"
