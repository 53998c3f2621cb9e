"""The public names of the library, by the rooms of their files, as pages of the site."""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

import kvcache_jax as kv
from tests.support.sources import DOORS, ROOMS, ROOT


class Name(NamedTuple):
    """A public name: where callers find it ("chunks.store"), its room, its docstring's first line."""

    place: str
    room: str
    summary: str

    @property
    def anchor(self) -> str:
        """The id of its entry."""
        return f"kvcache_jax.{self.place}"

    @property
    def code(self) -> str:
        """What callers write; a door is imported by itself."""
        return self.place if self.room == "integrations" else f"kv.{self.place}"

    @property
    def page(self) -> str:
        """The page of its entry, from the folder of the documents."""
        return f"api/{self.room}.md"


def public_names() -> list[Name]:
    """Lists every flat name, every name of a namespace, and the classes of the doors."""
    found = [
        Name(place, value.__module__.split(".")[1], inspect.getdoc(value).split("\n")[0])
        for place, value in _values()
    ]
    return found + [name for door in DOORS for name in _of_door(door)]


def _of_door(door: str) -> Iterator[Name]:
    """Reads the classes of a door, whose package need not be here, without importing it."""
    source = (ROOT / "kvcache_jax" / "integrations" / f"{door}.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            summary = (ast.get_docstring(node) or "").split("\n")[0]
            yield Name(f"integrations.{door}.{node.name}", "integrations", summary)


def _values() -> Iterator[tuple[str, object]]:
    for name in kv.__all__:
        value = getattr(kv, name)
        if inspect.ismodule(value):
            for inner in value.__all__:
                yield f"{name}.{inner}", getattr(value, inner)
        else:
            yield name, value


def room_summaries() -> dict[str, str]:
    """Reads what the package says of each room."""
    found = re.findall(r"^\* `(\w+)`: (.*)$", kv.__doc__, re.MULTILINE)
    assert [room for room, _ in found] == list(ROOMS)
    return dict(found)


def room_page(room: str, names: list[Name]) -> str:
    """Writes a page with an entry for each name of a room."""
    lines = [f"# {room}", "", f"{_sentence(room_summaries()[room])}", ""]
    for name in names:
        lines += [f"::: {name.anchor}", "    options:", f"      heading: {name.code}"]
        lines += [f"      toc_label: {name.place}", ""]
    return "\n".join(lines)


def index_page(names: list[Name]) -> str:
    """Writes the page that lists every name."""
    lines = [
        "# API",
        "",
        "`import kvcache_jax as kv`. Every public name, by the room of the library that its file is in.",
    ]
    for room, summary in room_summaries().items():
        rows = [name for name in names if name.room == room]
        if rows:
            lines += [
                "",
                f"## [{room}]({room}.md)",
                "",
                _sentence(summary),
                "",
                "| name | what it is or does |",
                "| --- | --- |",
            ]
            lines += [f"| [`{name.code}`][{name.anchor}] | {_cell(name.summary)} |" for name in rows]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Writes all pages, by their paths from the folder of the documents."""
    names = public_names()
    rooms = dict.fromkeys(name.room for name in names)
    found = {
        name.page: room_page(name.room, [each for each in names if each.room == name.room]) for name in names
    }
    assert len(found) == len(rooms)
    return {"api/index.md": index_page(names)} | found


# Code that begins with a name, "kv.fork(cache, [0], [1])" or "fork".
NAMED = r"(?<![\[`\w])`{prefix}([a-zA-Z_][\w.]*)(?:\([^`]*\))?`(?![`\]])"
IN_PROSE, IN_TABLES = (re.compile(NAMED.format(prefix=prefix)) for prefix in (r"(?:kv\.)?", r"kv\."))


def link_names(markdown: str, names: dict[str, Name]) -> str:
    """Makes links of the code in a page that is a public name, with or without arguments.

    In prose `fork` is one; in tables, which name what other projects have too, `kv.fork` is.
    """

    def linked(match: re.Match[str]) -> str:
        name = names.get(match.group(1))
        return match.group() if name is None else f"[{match.group()}][{name.anchor}]"

    is_code, lines = False, []
    for line in markdown.split("\n"):
        if line.startswith("```"):
            is_code = not is_code
        pattern = IN_TABLES if line.startswith("|") else IN_PROSE
        lines.append(line if is_code or line.startswith(("#", "    ")) else pattern.sub(linked, line))
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
